//! Guesses of the tokens that come next, which one step verifies together.

use std::{collections::HashMap, fmt};

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
    /// All do that can, where it should pay: as far as their drafts were right so far, and never in large batches.
    Auto,
    /// All do that can, whenever their drafter has a guess.
    Ngram,
    /// All do that can, with the model's own head, which is loaded for that.
    Mtp,
}

impl Speculate {
    /// Time of one more token in a step of a backend, in steps of one token. That of the CPU follows from BENCHMARKS.md; those of
    /// GPUs are guesses, not measured.
    pub(super) fn cost(self, backend: &str) -> f32 {
        match (self, backend) {
            (Self::Off | Self::Ngram | Self::Mtp, _) => 0.0,
            (Self::Auto, "cuda") => 0.05,
            (Self::Auto, "wgpu") => 0.2,
            (Self::Auto, _) => 0.3,
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
    /// Where the engine leaves what the model's own head guesses, before each call of [`Drafter::draft`]; `None`: it is not asked.
    fn head(&mut self) -> Option<&mut Vec<u32>> {
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

    fn head(&mut self) -> Option<&mut Vec<u32>> {
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

    /// The place where the longest suffix of `known` ended before.
    fn find(&self, known: &[u32]) -> Option<usize> {
        let first = *self.newest.get(&key(known, known.len()))? as usize;
        let older = |at: &usize| Some(self.older[at - KEY] as usize).filter(|at| *at != 0);
        let places = std::iter::successors(Some(first), older).take(PLACES);
        let common = |at: usize| {
            let pairs = known[..at].iter().rev().zip(known.iter().rev());
            pairs.take(LONGEST).take_while(|(a, b)| a == b).count()
        };
        // The newest comes first, and only a longer one replaces it.
        places
            .map(|at| (common(at), at))
            .reduce(|best, next| if next.0 > best.0 { next } else { best })
            .map(|(_, at)| at)
    }
}

/// The tokens before `at`, of which there are enough.
fn key(known: &[u32], at: usize) -> [u32; KEY] {
    std::array::from_fn(|i| known[at - KEY + i])
}

impl Drafter for Ngram {
    fn draft(&mut self, known: &[u32], most: usize) -> Vec<u32> {
        if known.len() < KEY {
            return Vec::new();
        }
        self.learn(known);
        let Some(at) = self.find(known) else { return Vec::new() };
        let mut guess: Vec<u32> = known[at..].iter().copied().take(most).collect();
        // A text that repeats itself goes on with the guess.
        for i in 0..most - guess.len() {
            guess.push(guess[i]);
        }
        guess
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
    fn what_was_learnt_in_parts_is_what_is_learnt_at_once() {
        let known: Vec<u32> = (0..600u32).map(|i| i * i % 41 % 7).collect();
        let mut grown = Ngram::default();
        for end in 0..known.len() {
            assert_eq!(grown.draft(&known[..end], 7), Ngram::default().draft(&known[..end], 7), "at {end}");
        }
    }
}
