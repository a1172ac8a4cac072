//! What a request asks of its logits besides [`Sampling`](crate::sample::Sampling): penalties, biases, forbidden tokens, a
//! constraint, and which log probabilities are reported.
//!
//! The order is vLLM's: allowed tokens and the constraint's mask, `min_tokens`, biases, repetition penalty, frequency and presence
//! penalties; then temperature, top-k, top-p and min-p. The formulas are at [`Adjust`](crate::ops::Adjust). Log probabilities
//! are those of the model itself, before all of that: log-softmax of the raw logits, as vLLM reports by default.

use std::{collections::BTreeMap, fmt};

pub use crate::ops::{MOST_ENTRIES, MOST_TOP};
use crate::{
    Error, Result,
    ops::{ENTRY_WORDS, REPORT_WORDS, RuleWords},
    sample,
};

/// Rules over the logits of one request. The default is none, and such a request costs nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Controls {
    /// Report the log probability of every sampled token, and of this number of most likely tokens, at most [`MOST_TOP`].
    pub logprobs: Option<u8>,
    /// Taken once from the logit of every token that the answer contains, -2 to 2; 0 = off.
    pub presence_penalty: f32,
    /// Taken from the logit of a token for each time that the answer contains it, -2 to 2; 0 = off.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens, -100 to 100; each id once.
    pub logit_bias: Vec<(u32, f32)>,
    /// The ids that end the text cannot be sampled before there are this many tokens.
    pub min_tokens: usize,
    /// No other token can be sampled; `None` = all can.
    pub allowed_tokens: Option<Vec<u32>>,
}

/// A grammar or another rule that says before each token which ones may come.
///
/// It lives on the engine's thread with its request, and follows it through pre-emption.
pub trait Constraint {
    /// Sets the bits of the tokens that may come next: token v is bit `v % 32` of `out[v / 32]`, `[ceil(V / 32)]`, zero at
    /// the call. Ids that end the text are tokens like others: their bits are set where it may end. Called at most once a
    /// token, after the [`commit`](Self::commit) of the one before; for drafts, on [a copy](Self::ahead). If no bit is set, the
    /// request fails.
    ///
    /// # Errors
    /// Any; the request ends with it.
    fn mask(&mut self, out: &mut [u32]) -> Result<()>;
    /// Takes the token that was sampled. The id that ends the text is not committed.
    ///
    /// # Errors
    /// Any; the request ends with it.
    fn commit(&mut self, token: u32) -> Result<()>;
    /// Whether the text is complete after the last commit, so that the request ends with that token.
    fn is_over(&self) -> bool;
    /// A copy at the same point of the text.
    fn boxed_clone(&self) -> Box<dyn Constraint + Send>;
    /// The same for the thread of this one, with which it may share what makes it faster.
    fn ahead(&self) -> Box<dyn Constraint + Send> {
        self.boxed_clone()
    }
    /// Guesses of the tokens that come next, at most `most`, where the rule leaves one text only. Nothing is taken, and masks stay as
    /// they are: that text may be several sequences of tokens, of which this is one.
    fn forced(&mut self, most: usize) -> Vec<u32> {
        let _ = most;
        Vec::new()
    }
    /// How many of these tokens may come one after the other, as far as that is known without masks. Nothing is taken.
    fn allowed(&mut self, tokens: &[u32]) -> usize {
        tokens.len()
    }
}

impl Clone for Box<dyn Constraint + Send> {
    fn clone(&self) -> Self {
        (**self).boxed_clone()
    }
}

impl fmt::Debug for dyn Constraint + Send {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_over() { "Constraint (over)" } else { "Constraint" })
    }
}

/// Log probabilities at the position of a sampled token: natural logarithms of the model's own distribution.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// Of the sampled token; finite, unless a logit of the model was plus infinity.
    pub chosen: f32,
    /// The most likely tokens, the lowest id first among equals; fewer than asked for where fewer have a probability. The sampled
    /// token may not be one of them.
    pub top: Vec<(u32, f32)>,
}

impl Logprobs {
    /// Those at a position with these logits `[V]`: of token `id`, and of the `n` most likely ones.
    pub(crate) fn of_logits(logits: &[f32], id: u32, n: u8) -> Self {
        let mut report = [0.0; REPORT_WORDS];
        sample::report(logits, id, n.into(), &mut report);
        Self::of_report(&report, n)
    }

    /// Takes `n` entries of an output's report, see [`crate::ops::Logprobs`].
    pub fn of_report(report: &[f32], n: u8) -> Self {
        let (pairs, _) = report[1..].as_chunks::<2>();
        let found = pairs[..n.into()].iter().filter(|[id, _]| *id >= 0.0);
        Self { chosen: report[0], top: found.map(|&[id, lp]| (id as u32, lp)).collect() }
    }
}

impl Controls {
    /// Checks every value, and the ids against a vocabulary of `vocab` tokens.
    ///
    /// # Errors
    /// [`Error::BadRequest`] naming the value and its range.
    pub fn check(&self, vocab: usize) -> Result<()> {
        let demand = |ok: bool, why: String| if ok { Ok(()) } else { Err(Error::BadRequest(why)) };
        if let Some(n) = self.logprobs {
            demand(usize::from(n) <= MOST_TOP, format!("logprobs is {n}; it must be from 0 to {MOST_TOP}"))?;
        }
        for (name, x) in [("presence penalty", self.presence_penalty), ("frequency penalty", self.frequency_penalty)] {
            demand((-2.0..=2.0).contains(&x), format!("{name} is {x}; it must be from -2 to 2"))?;
        }
        let known = |what: &str, id: u32| {
            demand((id as usize) < vocab, format!("{what}: token id {id} is outside the vocabulary of {vocab}"))
        };
        let mut biased: Vec<u32> = self.logit_bias.iter().map(|(id, _)| *id).collect();
        for &(id, bias) in &self.logit_bias {
            known("logit bias", id)?;
            demand(
                (-100.0..=100.0).contains(&bias),
                format!("the logit bias of token {id} is {bias}; it must be from -100 to 100"),
            )?;
        }
        biased.sort_unstable();
        if let Some(pair) = biased.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::BadRequest(format!("logit bias: token {} is there twice", pair[0])));
        }
        let allowed = self.allowed_tokens.iter().flatten();
        allowed.into_iter().try_for_each(|&id| known("allowed tokens", id))?;
        demand(
            self.allowed_tokens.as_ref().is_none_or(|ids| !ids.is_empty()),
            "allowed tokens: the list is empty".into(),
        )
    }

    /// Whether sampled tokens are counted.
    pub fn counts(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}

/// The rules of a request with its stop ids, in the form that lanes hold.
#[derive(Clone, Debug, PartialEq)]
pub struct LaneRules {
    /// [`RuleWords::HEADER`] words.
    header: [u32; RuleWords::HEADER],
    /// Entries of the contract, by id.
    entries: Vec<[u32; ENTRY_WORDS]>,
    /// The static mask `[ceil(V / 32)]`, if tokens are masked.
    mask: Option<Vec<u32>>,
}

impl LaneRules {
    /// The rules of a request with this prompt length and these stop ids. `constrained`: a constraint will write masks.
    ///
    /// # Errors
    /// [`Error::BadRequest`] as of [`Controls::check`], if there are too many entries, or if the first token could not be any.
    pub fn new(
        controls: &Controls,
        constrained: bool,
        repetition: f32,
        stop_ids: &[u32],
        prompt: usize,
        vocab: usize,
    ) -> Result<Self> {
        controls.check(vocab)?;
        let entries = entries(controls, stop_ids, prompt, vocab);
        if entries.len() > MOST_ENTRIES {
            let (n, bias) = (entries.len(), controls.logit_bias.len());
            return Err(Error::BadRequest(format!(
                "{bias} logit biases and the stop ids that min_tokens forbids are {n} tokens; at most {MOST_ENTRIES} are \
                 supported"
            )));
        }
        let mask = controls.allowed_tokens.as_ref().map(|ids| bits(ids.iter().copied(), vocab));
        let mask = mask.or_else(|| constrained.then(|| bits(0..vocab as u32, vocab)));
        let ruled = mask.is_some() || !entries.is_empty() || controls.counts();
        let mut header = [0; RuleWords::HEADER];
        let flags =
            [(ruled, RuleWords::RULED), (mask.is_some(), RuleWords::MASKED), (controls.counts(), RuleWords::COUNTED)];
        header[RuleWords::FLAGS] = flags.iter().filter(|(on, _)| *on).map(|(_, flag)| flag).sum();
        header[RuleWords::REPETITION] = repetition.to_bits();
        header[RuleWords::FREQUENCY] = controls.frequency_penalty.to_bits();
        header[RuleWords::PRESENCE] = controls.presence_penalty.to_bits();
        header[RuleWords::ENTRIES] = entries.len() as u32;
        header[RuleWords::TOP] = controls.logprobs.map_or(0, |n| 1 + u32::from(n));
        let rules = Self { header, entries, mask };
        if let Some(mask) = &rules.mask
            && !rules.allows_some(mask, prompt)
        {
            return Err(Error::BadRequest(
                "allowed tokens: all of them end the text, which min_tokens forbids at first; allow others or lower \
                 min_tokens"
                    .into(),
            ));
        }
        Ok(rules)
    }

    /// Whether the lane's logits change, so that its repetition penalty is among these rules.
    pub fn adjusts(&self) -> bool {
        self.header[RuleWords::FLAGS] & RuleWords::RULED != 0
    }

    /// Whether sampled tokens are reported.
    pub fn reports(&self) -> bool {
        self.header[RuleWords::TOP] > 0
    }

    /// Whether sampled tokens are counted.
    pub fn counts(&self) -> bool {
        self.header[RuleWords::FLAGS] & RuleWords::COUNTED != 0
    }

    /// Header and entries: the first words of a lane.
    pub fn head(&self) -> Vec<u32> {
        self.header.iter().copied().chain(self.entries.iter().flatten().copied()).collect()
    }

    /// The static mask `[ceil(V / 32)]`, if tokens are masked.
    pub fn mask(&self) -> Option<&[u32]> {
        self.mask.as_deref()
    }

    /// Whether `mask` and the entries leave a token for `position`.
    pub fn allows_some(&self, mask: &[u32], position: usize) -> bool {
        let mut mask = mask.to_vec();
        let denied = self.entries.iter().filter(|[.., from]| position < *from as usize);
        denied.for_each(|[id, ..]| mask[*id as usize / 32] &= !(1 << (id % 32)));
        mask.iter().any(|word| *word != 0)
    }
}

/// Biases and ids that may not come yet, by id.
fn entries(controls: &Controls, stop_ids: &[u32], prompt: usize, vocab: usize) -> Vec<[u32; ENTRY_WORDS]> {
    let from = u32::try_from(prompt.saturating_add(controls.min_tokens)).unwrap_or(u32::MAX);
    let held = stop_ids.iter().filter(|id| controls.min_tokens > 0 && (**id as usize) < vocab);
    let mut entries: BTreeMap<u32, (f32, u32)> = held.map(|&id| (id, (0.0, from))).collect();
    controls.logit_bias.iter().for_each(|&(id, bias)| entries.entry(id).or_default().0 = bias);
    entries.into_iter().map(|(id, (bias, from))| [id, bias.to_bits(), from]).collect()
}

/// A mask of `ids`.
fn bits(ids: impl IntoIterator<Item = u32>, vocab: usize) -> Vec<u32> {
    let mut mask = vec![0; vocab.div_ceil(32)];
    ids.into_iter().for_each(|id| mask[id as usize / 32] |= 1 << (id % 32));
    mask
}
