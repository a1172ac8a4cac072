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
    /// Words of a mask.
    words: usize,
}

impl Guide {
    /// Takes the rules out of a request; `None` if it has none.
    ///
    /// # Errors
    /// [`Error::BadRequest`] for impossible rules.
    pub fn new(request: &mut Request, vocab: usize) -> Result<Option<Self>> {
        let Some(rules) = request.rules(vocab)? else { return Ok(None) };
        let (controls, constraint) = (std::mem::take(&mut request.controls), request.constraint.take());
        Ok(Some(Self { rules, top: controls.logprobs, constraint, words: vocab.div_ceil(32) }))
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

    /// A copy of its constraint for a drafter, if its request may draft: what the rules say at a place follows from the tokens before
    /// it, and nothing is counted or reported.
    pub fn to_draft(&self) -> Option<Box<dyn Constraint + Send>> {
        self.constraint.as_ref().filter(|_| !self.needs().follow).map(|constraint| constraint.ahead())
    }

    /// The masks `[ceil(V / 32)]` for the token at `position` and for those after each of `drafts`, up to the first draft after which
    /// the text does not go on; none if masks do not depend on the tokens.
    ///
    /// # Errors
    /// Those of the constraint at `position`; [`Error::BadRequest`] if no token is allowed there.
    pub fn masks(&mut self, position: usize, drafts: &[u32], stop_ids: &[u32]) -> Result<Vec<Vec<u32>>> {
        let Some(constraint) = &mut self.constraint else { return Ok(Vec::new()) };
        let mut masks = vec![mask(&self.rules, constraint.as_mut(), self.words, position)?];
        if drafts.is_empty() {
            return Ok(masks);
        }
        let mut ahead = constraint.ahead();
        for (position, &draft) in (position + 1..).zip(drafts) {
            // What does not go on here fails or ends where the draft is a token, as without drafts.
            let allowed = masks.last().is_some_and(|mask| mask[draft as usize / 32] >> (draft % 32) & 1 == 1);
            if !allowed || stop_ids.contains(&draft) || ahead.commit(draft).is_err() || ahead.is_over() {
                break;
            }
            let Ok(mask) = mask(&self.rules, ahead.as_mut(), self.words, position) else { break };
            masks.push(mask);
        }
        Ok(masks)
    }

    /// Takes sampled tokens that do not end the text; whether the text is complete with the last of them.
    ///
    /// # Errors
    /// Those of the constraint.
    pub fn commit(&mut self, tokens: &[u32]) -> Result<bool> {
        let Some(constraint) = &mut self.constraint else { return Ok(false) };
        tokens.iter().try_for_each(|token| constraint.commit(*token))?;
        Ok(constraint.is_over())
    }

    /// The log probabilities that the request asked for, from its output's report.
    pub fn logprobs(&self, report: &[f32]) -> Option<Box<Logprobs>> {
        self.top.map(|n| Box::new(Logprobs::of_report(report, n)))
    }
}

/// What constraint and rules allow at `position`, as a mask of so many words.
fn mask(rules: &LaneRules, constraint: &mut dyn Constraint, words: usize, position: usize) -> Result<Vec<u32>> {
    let mut mask = vec![0; words];
    constraint.mask(&mut mask)?;
    let allowed = rules.mask().into_iter().flatten();
    mask.iter_mut().zip(allowed).for_each(|(word, allowed)| *word &= allowed);
    if rules.allows_some(&mask, position) {
        return Ok(mask);
    }
    let why = match mask.iter().any(|word| *word != 0) {
        true => "only the end of the text, which min_tokens forbids; lower min_tokens",
        false => "no token; change the constraint, or the list of allowed tokens in the request",
    };
    Err(Error::BadRequest(format!("the constraint allows {why}")))
}
