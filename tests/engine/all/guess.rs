//! Drafters that know the right answer.

use selkie_core::engine::Drafter;

use crate::random::Random;

/// What a drafter makes of the right answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Habit {
    /// It says it.
    Right,
    /// It never says it.
    Wrong,
    /// It says as much of it as it likes.
    Short,
    /// Any of its guesses is wrong now and then, those after a wrong one too.
    Mixed,
}

impl Habit {
    pub const ALL: [Self; 4] = [Self::Right, Self::Wrong, Self::Short, Self::Mixed];
}

/// Guesses the continuation of `text`, or not.
#[derive(Clone, Debug)]
pub struct Guesser {
    pub habit: Habit,
    /// The prompt and the right answer.
    pub text: Vec<u32>,
    /// Whether another text is an error. An answer from a converted state may be another one.
    pub exact: bool,
    /// Ids are less.
    pub vocab: u32,
    pub random: Random,
}

impl Drafter for Guesser {
    fn draft(&mut self, known: &[u32], most: usize) -> Vec<u32> {
        assert!(!self.exact || self.text.starts_with(known), "a text that the model did not write");
        let right = self.text.iter().skip(known.len()).copied().chain(std::iter::repeat(0));
        let count = if matches!(self.habit, Habit::Right | Habit::Wrong) { most } else { self.random.below(most + 1) };
        let mut guess: Vec<u32> = right.take(count).collect();
        for id in &mut guess {
            let errs = self.habit == Habit::Wrong || self.habit == Habit::Mixed && self.random.one_in(4);
            *id = if errs { (*id + 1) % self.vocab } else { *id };
        }
        guess
    }

    fn boxed_clone(&self) -> Box<dyn Drafter> {
        Box::new(self.clone())
    }
}
