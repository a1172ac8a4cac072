//! Guesses of the tokens that come next, which one step verifies together.

use std::{collections::HashMap, fmt};

use crate::{Result, checkpoint::Checkpoint, models::Architecture, state::TokenCosts};

/// Most drafts of a row. The tokens of a row with drafts are 2, 4 or 8.
pub const MOST_DRAFTS: usize = 7;

/// Whether requests draft.
///
/// A request with a constraint (a grammar) that drafts also guesses the tokens that its constraint forces, and none that it forbids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Speculate {
    /// None does.
    #[default]
    Off,
    /// All do that can, where it should pay: as far as their drafts were right so far, and never in large batches. Of a model with
    /// a head of its own that is loaded, and guesses where the text does not go on as it did before.
    Auto,
    /// All do that can, whenever their drafter has a guess.
    Ngram,
    /// All do that can, with the model's own head, which is loaded for that.
    Mtp,
}

impl Speculate {
    /// The model that is loaded for that: with its head or without.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) for [`Speculate::Mtp`] where `checkpoint` has no head.
    pub fn architecture(self, model: &Architecture, checkpoint: &Checkpoint) -> Result<Architecture> {
        match self {
            Self::Mtp => model.with_head(checkpoint),
            Self::Auto if model.head_parameters(checkpoint).is_some() => model.with_head(checkpoint),
            Self::Auto | Self::Ngram | Self::Off => Ok(model.clone()),
        }
    }

    /// A drafter for a request that brings none; `head`: the model has one.
    pub(super) fn drafter(self, head: bool) -> Box<dyn Drafter> {
        match self {
            Self::Mtp => Box::new(Mtp::default()),
            Self::Auto if head => Box::new(TextOrHead::default()),
            Self::Auto | Self::Ngram | Self::Off => Box::new(Ngram::default()),
        }
    }

    /// What more tokens of a step cost on a backend, as long as nobody measures it ([`super::Engine::measure_costs`]): near what large
    /// models were measured to cost (BENCHMARKS.md).
    pub(super) fn costs(self, backend: &str) -> TokenCosts {
        match (self, backend) {
            (Self::Off | Self::Ngram | Self::Mtp, _) => TokenCosts::NONE,
            (Self::Auto, "cuda") => TokenCosts::each(0.05),
            (Self::Auto, "wgpu") => TokenCosts::each(0.2),
            (Self::Auto, _) => TokenCosts::each(0.3),
        }
    }
}

/// Guesses how the text of one request goes on.
///
/// Guesses change no answer: a draft counts only if the model itself samples that token. They follow their request through
/// pre-emption.
pub trait Drafter: Send {
    /// Guesses of the tokens after `known`, in order, at most `most`; none where it knows nothing better than chance. They must
    /// be ids of the vocabulary. `known`, prompt and answer, begins with what it was at the call before.
    fn draft(&mut self, known: &[u32], most: usize) -> Vec<u32>;
    /// Where the engine leaves what the model's own head guesses after `known`, before each call of [`Drafter::draft`]; `None`: it
    /// is not asked.
    fn head(&mut self, known: &[u32]) -> Option<&mut Vec<u32>> {
        let _ = known;
        None
    }
    /// A copy at the same point of the text.
    fn boxed_clone(&self) -> Box<dyn Drafter>;
}

impl Clone for Box<dyn Drafter> {
    fn clone(&self) -> Self {
        (**self).boxed_clone()
    }
}

impl fmt::Debug for dyn Drafter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Drafter")
    }
}

/// Hands on what the model's own head guesses.
#[derive(Clone, Debug, Default)]
pub struct Mtp(Vec<u32>);

impl Drafter for Mtp {
    fn draft(&mut self, _: &[u32], most: usize) -> Vec<u32> {
        let mut guess = std::mem::take(&mut self.0);
        guess.truncate(most);
        guess
    }

    fn head(&mut self, _: &[u32]) -> Option<&mut Vec<u32>> {
        Some(&mut self.0)
    }

    fn boxed_clone(&self) -> Box<dyn Drafter> {
        Box::new(self.clone())
    }
}

/// Tokens that must have occurred before.
const KEY: usize = 3;
/// Earlier places that are compared, the newest ones.
const PLACES: usize = 32;
/// Longest match that is told from a longer one.
const LONGEST: usize = 32;

/// Guesses that the text goes on as it did where its last tokens occurred before, at least three: the longest match wins, the newest
/// among equals. Memory is linear in the text, a token costs a bounded time.
#[derive(Clone, Debug, Default)]
pub struct Ngram {
    /// The newest place after each key.
    newest: HashMap<[u32; KEY], u32>,
    /// From place [`KEY`] on: the place before it with the same key, 0 for none.
    older: Vec<u32>,
}

impl Ngram {
    /// Notes all places but the end of `known`.
    fn learn(&mut self, known: &[u32]) {
        for at in KEY + self.older.len()..known.len() {
            let older = self.newest.insert(key(known, at), at as u32);
            self.older.push(older.unwrap_or(0));
        }
    }

    /// The place where the longest suffix of `known` ended before, and how long that is, at most [`LONGEST`].
    fn find(&self, known: &[u32]) -> Option<(usize, usize)> {
        let first = *self.newest.get(&key(known, known.len()))? as usize;
        let older = |at: &usize| Some(self.older[at - KEY] as usize).filter(|at| *at != 0);
        let places = std::iter::successors(Some(first), older).take(PLACES);
        let common = |at: usize| {
            let pairs = known[..at].iter().rev().zip(known.iter().rev());
            pairs.take(LONGEST).take_while(|(a, b)| a == b).count()
        };
        // The newest comes first, and only a longer one replaces it.
        places.map(|at| (common(at), at)).reduce(|best, next| if next.0 > best.0 { next } else { best })
    }

    /// Guesses after a suffix of at least `least` tokens that occurred before.
    fn after(&mut self, least: usize, known: &[u32], most: usize) -> Vec<u32> {
        if known.len() < KEY {
            return Vec::new();
        }
        self.learn(known);
        let Some((_, at)) = self.find(known).filter(|(common, _)| *common >= least) else { return Vec::new() };
        let mut guess: Vec<u32> = known[at..].iter().copied().take(most).collect();
        // A text that repeats itself goes on with the guess.
        for i in 0..most - guess.len() {
            guess.push(guess[i]);
        }
        guess
    }
}

/// The tokens before `at`, of which there are enough.
fn key(known: &[u32], at: usize) -> [u32; KEY] {
    std::array::from_fn(|i| known[at - KEY + i])
}

impl Drafter for Ngram {
    fn draft(&mut self, known: &[u32], most: usize) -> Vec<u32> {
        self.after(KEY, known, most)
    }

    fn boxed_clone(&self) -> Box<dyn Drafter> {
        Box::new(self.clone())
    }
}

/// Tokens that must have occurred before for a guess that comes before that of a head.
const SURE: usize = 12;

/// Guesses with the text where much of it occurred before, which costs nothing, else with the model's own head.
#[derive(Clone, Debug, Default)]
struct TextOrHead {
    text: Ngram,
    head: Vec<u32>,
}

impl Drafter for TextOrHead {
    fn draft(&mut self, known: &[u32], most: usize) -> Vec<u32> {
        let mut head = std::mem::take(&mut self.head);
        head.truncate(most);
        let text = self.text.after(SURE, known, most);
        if text.is_empty() { head } else { text }
    }

    fn head(&mut self, known: &[u32]) -> Option<&mut Vec<u32>> {
        self.text.after(SURE, known, 1).is_empty().then_some(&mut self.head)
    }

    fn boxed_clone(&self) -> Box<dyn Drafter> {
        Box::new(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_match_wins_and_the_newest_among_equals() {
        let mut ngram = Ngram::default();
        assert!(ngram.draft(&[9, 1], 3).is_empty());
        assert!(ngram.draft(&[9, 1, 2, 3, 4, 8], 3).is_empty());
        let known = [9, 1, 2, 3, 4, 8, 1, 2, 3, 5, 7, 1, 2, 3];
        assert_eq!(ngram.draft(&known, 3), [5, 7, 1]);
        let known = [&known[..], &[6, 9, 1, 2, 3]].concat();
        assert_eq!(ngram.draft(&known, 2), [4, 8]);
        assert_eq!(ngram.draft(&known, 0), [0; 0]);
    }

    #[test]
    fn a_period_is_continued() {
        let known: Vec<u32> = (0..7).map(|i| i % 2).collect();
        assert_eq!(Ngram::default().draft(&known, 7), [1, 0, 1, 0, 1, 0, 1]);
        assert_eq!(Ngram::default().draft(&[4; 9], 7), [4; 7]);
    }

    #[test]
    fn the_head_is_asked_until_much_of_the_text_came_before() {
        let mut drafter = TextOrHead::default();
        let line: Vec<u32> = (0..SURE as u32 + 3).collect();
        drafter.head(&line).expect("nothing occurred before").extend([70, 71]);
        assert_eq!(drafter.draft(&line, 1), [70]);
        assert!(drafter.draft(&line, 7).is_empty(), "a guess is for one step");
        let known = [&line[..], &[90], &line[..SURE - 1]].concat();
        assert!(drafter.head(&known).is_some(), "{} tokens occurred before", SURE - 1);
        let known = [&line[..], &[90], &line[..SURE]].concat();
        assert!(drafter.head(&known).is_none());
        assert_eq!(drafter.draft(&known, 3), line[SURE..]);
    }

    #[test]
    fn what_was_learnt_in_parts_is_what_is_learnt_at_once() {
        let known: Vec<u32> = (0..600u32).map(|i| i * i % 41 % 7).collect();
        let mut grown = Ngram::default();
        for end in 0..known.len() {
            assert_eq!(grown.draft(&known[..end], 7), Ngram::default().draft(&known[..end], 7), "at {end}");
        }
    }
}
