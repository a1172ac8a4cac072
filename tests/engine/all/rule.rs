//! A grammar for random requests.

use selkie_core::controls::Constraint;
use selkie_core::error::Result;

use crate::random::Random;

/// A constraint whose masks depend on every token so far.
#[derive(Clone, Debug)]
pub(super) struct Rule {
    /// One of this many tokens is forbidden.
    modulus: u32,
    vocab: u32,
    /// It is over, or allows nothing, after this many tokens.
    over: Option<u32>,
    stuck: Option<u32>,
    taken: u32,
    state: u32,
}

impl Rule {
    pub fn random(random: &mut Random, vocab: usize) -> Self {
        Self {
            modulus: random.pick(&[2, 3, 7]),
            vocab: vocab as u32,
            over: random.pick(&[None, None, Some(3), Some(20)]),
            stuck: random.pick(&[None, None, None, Some(1), Some(11)]),
            taken: 0,
            state: random.below(1 << 20) as u32,
        }
    }

    /// The only token that may come next, if there is one: at about half of the places.
    fn only(&self) -> Option<u32> {
        (self.state % 31 < 16).then_some(self.state % self.vocab)
    }

    fn allows(&self, token: u32) -> bool {
        self.only().map_or(!(token + self.state).is_multiple_of(self.modulus), |only| only == token)
    }

    fn is_stuck(&self) -> bool {
        self.stuck == Some(self.taken)
    }

    fn take(&mut self, token: u32) {
        self.taken += 1;
        self.state = self.state.wrapping_mul(31).wrapping_add(token) % (1 << 20);
    }
}

impl Constraint for Rule {
    fn mask(&mut self, out: &mut [u32]) -> Result<()> {
        assert!(out.iter().all(|word| *word == 0), "a mask that was not cleared");
        let allowed = (0..self.vocab).filter(|_| !self.is_stuck()).filter(|token| self.allows(*token));
        allowed.for_each(|token| out[token as usize / 32] |= 1 << (token % 32));
        Ok(())
    }
    fn commit(&mut self, token: u32) -> Result<()> {
        assert!(self.allows(token) && !self.is_stuck(), "a token that the mask forbids");
        self.take(token);
        Ok(())
    }
    fn is_over(&self) -> bool {
        self.over == Some(self.taken)
    }
    fn boxed_clone(&self) -> Box<dyn Constraint + Send> {
        Box::new(self.clone())
    }
    /// Goes on after its end and where it is stuck.
    fn forced(&mut self, most: usize) -> Vec<u32> {
        let mut ahead = self.clone();
        let next = || ahead.only().inspect(|only| ahead.take(*only));
        std::iter::from_fn(next).take(most).collect()
    }
    /// Allows a wrong token now and then.
    fn allowed(&mut self, tokens: &[u32]) -> usize {
        let mut ahead = self.clone();
        let may = |token: &&u32| {
            let may = ahead.allows(**token) || ahead.state.is_multiple_of(5);
            ahead.take(**token);
            may
        };
        tokens.iter().take_while(may).count()
    }
}
