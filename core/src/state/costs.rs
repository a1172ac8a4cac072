//! What more tokens of a step cost.

/// The time of a step by the number of its tokens, in steps of one token. It never falls.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenCosts([f32; 3]);

impl TokenCosts {
    /// More tokens cost nothing.
    pub const NONE: Self = Self([1.0; 3]);
    /// The tokens of the steps whose times it is made of, see [`TokenCosts::measured`].
    pub const TOKENS: [usize; 4] = [1, 2, 4, 8];

    /// Each token after the first one costs `cost`.
    pub fn each(cost: f32) -> Self {
        let [_, later @ ..] = Self::TOKENS;
        Self(later.map(|tokens| 1.0 + cost * (tokens - 1) as f32))
    }

    /// From the times of steps of [`TokenCosts::TOKENS`], in any unit; `None` where they are not positive numbers.
    pub fn measured(times: [f32; 4]) -> Option<Self> {
        let [one, later @ ..] = times;
        if !times.iter().all(|time| *time > 0.0 && (time / one).is_finite()) {
            return None;
        }
        let mut least = 1.0f32;
        Some(Self(later.map(|time| {
            least = least.max(time / one);
            least
        })))
    }

    /// The times that it is made of, the first of which is 1.
    pub fn times(&self) -> [f32; 4] {
        let [two, four, eight] = self.0;
        [1.0, two, four, eight]
    }

    /// Time of a step of `tokens` tokens, at least one. Beyond the steps it is made of each token costs what it cost in these or in
    /// the largest of them, whichever is more.
    pub fn time(&self, tokens: usize) -> f32 {
        let [two, four, eight] = self.0;
        let between = |from: f32, to: f32, share: usize, of: usize| from + (to - from) * share as f32 / of as f32;
        match tokens {
            0..=2 => between(1.0, two, tokens.saturating_sub(1), 1),
            3..=4 => between(two, four, tokens - 2, 2),
            5..=8 => between(four, eight, tokens - 4, 4),
            _ => eight + ((eight - four) / 4.0).max((eight - 1.0) / 7.0) * (tokens - 8) as f32,
        }
    }

    /// Time of `more` tokens in a step that has `tokens` without them.
    pub fn of_more(&self, tokens: usize, more: usize) -> f32 {
        self.time(tokens + more) - self.time(tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_lie_between_those_measured_and_never_fall() {
        let costs = TokenCosts::measured([2.0, 2.4, 2.2, 4.0]).unwrap();
        assert_eq!(costs.times(), [1.0, 1.2, 1.2, 2.0]);
        let times: Vec<f32> = [1, 2, 3, 4, 6, 8, 16].map(|tokens| costs.time(tokens)).into();
        assert_eq!(times, [1.0, 1.2, 1.2, 1.2, 1.6, 2.0, 3.6]);
        assert!((costs.of_more(4, 4) - 0.8).abs() < 1e-6);
        for times in [[0.0, 1.0, 1.0, 1.0], [1.0, f32::NAN, 1.0, 1.0], [1.0, 1.0, f32::INFINITY, 1.0], [-1.0; 4]] {
            assert_eq!(TokenCosts::measured(times), None, "{times:?}");
        }
    }

    #[test]
    fn even_costs_are_a_line() {
        for tokens in 1..100 {
            let time = TokenCosts::each(0.25).time(tokens);
            assert!((time - (1.0 + 0.25 * (tokens - 1) as f32)).abs() < 1e-5, "{tokens}: {time}");
            assert_eq!(TokenCosts::NONE.time(tokens), 1.0);
        }
    }
}
