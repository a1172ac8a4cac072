//! Guesses for a request with a constraint: what it forces, and nothing that it forbids.

use super::draft::Drafter;
use crate::controls::Constraint;

/// Guesses what a constraint forces, and elsewhere what another drafter does, as far as the constraint allows that.
///
/// Where the other one's guess goes as far as the forced text or further, it is taken: it leads through that text too, perhaps in the
/// tokens that the model wrote before.
#[derive(Clone)]
pub struct Constrained {
    /// A copy of the request's own.
    constraint: Box<dyn Constraint + Send>,
    /// Tokens of prompt and answer that it has taken.
    taken: usize,
    /// It did not take one.
    failed: bool,
    other: Box<dyn Drafter>,
}

impl Constrained {
    /// `constraint` is at the beginning of an answer after `prompt` tokens.
    pub fn new(constraint: Box<dyn Constraint + Send>, prompt: usize, other: Box<dyn Drafter>) -> Self {
        Self { constraint, taken: prompt, failed: false, other }
    }

    /// Brings the constraint to the end of `known`. False if that is no text of it: then the request ends, or ignores it.
    fn follow(&mut self, known: &[u32]) -> bool {
        let new = &known[self.taken.min(known.len())..];
        self.failed |= new.iter().any(|token| self.constraint.commit(*token).is_err());
        self.taken = known.len();
        !self.failed
    }

    /// The part of a guess that may come.
    fn cut(&mut self, mut guess: Vec<u32>) -> Vec<u32> {
        if !guess.is_empty() {
            guess.truncate(self.constraint.allowed(&guess));
        }
        guess
    }
}

impl Drafter for Constrained {
    fn draft(&mut self, known: &[u32], most: usize) -> Vec<u32> {
        // Asked in any case: a guess of the model's head is for this step only.
        let guess = self.other.draft(known, most);
        if !self.follow(known) || self.constraint.is_over() {
            return Vec::new();
        }
        let guess = self.cut(guess);
        let forced = self.constraint.forced(most);
        let forced = self.cut(forced);
        if forced.len() > guess.len() { forced } else { guess }
    }

    fn head(&mut self, known: &[u32]) -> Option<&mut Vec<u32>> {
        self.other.head(known)
    }

    fn boxed_clone(&self) -> Box<dyn Drafter> {
        Box::new(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Result;

    /// Allows anything below 200 at every fourth place, and one token at the others: ten times the place. Over after twelve.
    #[derive(Clone, Default)]
    struct Tens(u32);

    impl Tens {
        fn allows(place: u32, token: u32) -> bool {
            if place.is_multiple_of(4) { token < 200 } else { token == 10 * place }
        }
    }

    impl Constraint for Tens {
        fn mask(&mut self, _: &mut [u32]) -> Result<()> {
            unreachable!("a drafter needs no masks")
        }
        fn commit(&mut self, token: u32) -> Result<()> {
            let allowed = Self::allows(self.0, token);
            self.0 += 1;
            if allowed { Ok(()) } else { Err(crate::Error::BadRequest("forbidden".into())) }
        }
        fn is_over(&self) -> bool {
            self.0 == 12
        }
        fn boxed_clone(&self) -> Box<dyn Constraint + Send> {
            Box::new(self.clone())
        }
        fn forced(&mut self, most: usize) -> Vec<u32> {
            (self.0..).take_while(|place| place % 4 != 0).map(|place| 10 * place).take(most).collect()
        }
        fn allowed(&mut self, tokens: &[u32]) -> usize {
            (self.0..).zip(tokens).take_while(|(place, token)| Self::allows(*place, **token)).count()
        }
    }

    /// Always guesses the same.
    #[derive(Clone)]
    struct Same(Vec<u32>);

    impl Drafter for Same {
        fn draft(&mut self, _: &[u32], most: usize) -> Vec<u32> {
            self.0[..most.min(self.0.len())].to_vec()
        }
        fn boxed_clone(&self) -> Box<dyn Drafter> {
            Box::new(self.clone())
        }
    }

    fn drafter(other: &[u32]) -> Constrained {
        Constrained::new(Box::new(Tens::default()), 2, Box::new(Same(other.to_vec())))
    }

    #[test]
    fn what_is_forced_comes_before_another_guess_that_is_forbidden_or_shorter() {
        let mut with = drafter(&[50, 51, 52]);
        assert_eq!(with.draft(&[8, 8], 7), [50]);
        assert_eq!(with.draft(&[8, 8, 7], 7), [10, 20, 30]);
        assert_eq!(with.draft(&[8, 8, 7, 10], 1), [20]);
        assert_eq!(drafter(&[10, 20]).draft(&[8, 8, 7], 7), [10, 20, 30]);
        assert_eq!(drafter(&[]).draft(&[8, 8], 7), [0; 0]);
    }

    #[test]
    fn a_guess_through_forced_text_goes_on_after_it_as_far_as_it_is_allowed() {
        assert_eq!(drafter(&[10, 20, 30, 9, 50, 6]).draft(&[8, 8, 7], 7), [10, 20, 30, 9, 50]);
        assert_eq!(drafter(&[10, 20, 30, 200]).draft(&[8, 8, 7], 7), [10, 20, 30]);
    }

    #[test]
    fn nothing_is_guessed_after_the_end_and_after_a_text_that_is_forbidden() {
        let mut with = drafter(&[1]);
        let text: Vec<u32> = [8, 8].into_iter().chain((0..12).map(|place| 10 * place)).collect();
        assert_eq!(with.draft(&text[..13], 7), [110]);
        assert!(with.draft(&text, 7).is_empty());
        let mut with = drafter(&[1]);
        assert!(with.draft(&[8, 8, 7, 9], 7).is_empty());
        assert!(with.draft(&[8, 8, 7, 9, 20], 7).is_empty());
    }
}
