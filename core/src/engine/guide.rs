//! The host side of a request's rules: what its lane holds, and its constraint.

use super::{sequence::Request, tail::Needs};
use crate::{
    Error, Result,
    controls::{Constraint, Controls, LaneRules, Logprobs},
};

impl Request {
    /// Its rules over the logits of a vocabulary of `vocab` tokens; `None` if it has none.
    ///
    /// # Errors
    /// [`Error::BadRequest`] for impossible rules.
    pub fn rules(&self, vocab: usize) -> Result<Option<LaneRules>> {
        let (controls, constrained) = (&self.controls, self.constraint.is_some());
        if *controls == Controls::default() && !constrained {
            return Ok(None);
        }
        if controls.min_tokens > self.max_tokens {
            let (least, most) = (controls.min_tokens, self.max_tokens);
            return Err(Error::BadRequest(format!("min_tokens is {least}, more than the {most} tokens of max_tokens")));
        }
        let repetition = self.sampling.repetition_penalty;
        LaneRules::new(controls, constrained, repetition, &self.stop_ids, self.prompt.len(), vocab).map(Some)
    }
}

/// The rules of a live request.
pub(super) struct Guide {
    rules: LaneRules,
    /// Most likely tokens to report.
    top: Option<u8>,
    constraint: Option<Box<dyn Constraint + Send>>,
    /// `[ceil(V / 32)]` of the next token, with a constraint.
    mask: Vec<u32>,
}

impl Guide {
    /// Takes the rules out of a request; `None` if it has none.
    ///
    /// # Errors
    /// [`Error::BadRequest`] for impossible rules.
    pub fn new(request: &mut Request, vocab: usize) -> Result<Option<Self>> {
        let Some(rules) = request.rules(vocab)? else { return Ok(None) };
        let (controls, constraint) = (std::mem::take(&mut request.controls), request.constraint.take());
        let mask = vec![0; if constraint.is_some() { vocab.div_ceil(32) } else { 0 }];
        Ok(Some(Self { rules, top: controls.logprobs, constraint, mask }))
    }

    /// What its lane holds.
    pub fn rules(&self) -> &LaneRules {
        &self.rules
    }

    /// What its steps need.
    pub fn needs(&self) -> Needs {
        Needs::of(&self.rules)
    }

    /// Whether masks depend on the tokens.
    pub fn constrains(&self) -> bool {
        self.constraint.is_some()
    }

    /// The mask for the token at `position`, if it depends on the tokens.
    ///
    /// # Errors
    /// Those of the constraint; [`Error::BadRequest`] if no token is allowed.
    pub fn mask(&mut self, position: usize) -> Result<Option<&[u32]>> {
        let Some(constraint) = &mut self.constraint else { return Ok(None) };
        self.mask.fill(0);
        constraint.mask(&mut self.mask)?;
        let allowed = self.rules.mask().into_iter().flatten();
        self.mask.iter_mut().zip(allowed).for_each(|(word, allowed)| *word &= allowed);
        if self.rules.allows_some(&self.mask, position) {
            return Ok(Some(&self.mask));
        }
        let why = match self.mask.iter().any(|word| *word != 0) {
            true => "only the end of the text, which min_tokens forbids; lower min_tokens",
            false => "no token; change the constraint, or the list of allowed tokens in the request",
        };
        Err(Error::BadRequest(format!("the constraint allows {why}")))
    }

    /// Takes a sampled token that does not end the text; whether the text is complete with it.
    ///
    /// # Errors
    /// Those of the constraint.
    pub fn commit(&mut self, token: u32) -> Result<bool> {
        let Some(constraint) = &mut self.constraint else { return Ok(false) };
        constraint.commit(token)?;
        Ok(constraint.is_over())
    }

    /// The log probabilities that the request asked for, from its output's report.
    pub fn logprobs(&self, report: &[f32]) -> Option<Box<Logprobs>> {
        self.top.map(|n| Box::new(Logprobs::of_report(report, n)))
    }
}
