//! Chooses the tokens of the next step from the times of the last ones, so that steps are short and a stop takes effect immediately.

/// Target time of a step in milliseconds. Two steps may be in flight, one may be twice as slow as the previous one, and a stop
/// must take effect within 200 ms.
const TARGET_MS: f64 = 50.0;
/// Minimum tokens of a step; fewer cost a device almost as much.
const LEAST: usize = 8;

/// The controller of the step size.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    tokens: usize,
    most: usize,
}

impl Pace {
    /// Starts with `first` tokens per step; never exceeds `most`.
    pub fn new(first: usize, most: usize) -> Self {
        Self { tokens: first.min(most), most }
    }

    /// Tokens of the next step.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Records that a step of `tokens` tokens took `ms`. Small steps are ignored, because they do not predict large ones.
    pub fn took(&mut self, tokens: usize, ms: f64) {
        if tokens < LEAST.min(self.tokens) {
            return;
        }
        let fits = (TARGET_MS / ms.max(0.01) * tokens as f64) as usize;
        // Multiples of the grid waste no padding. Growth is slow, because a first step may be slower than the next.
        let fits = if fits >= 64 { fits / 64 * 64 } else { fits / LEAST * LEAST };
        self.tokens = fits.clamp(LEAST, (2 * self.tokens).max(64)).min(self.most);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_follow_the_device() {
        let mut pace = Pace::new(64, 512);
        for (tokens, ms, next) in
            [(64, 2.0, 128), (1, 50.0, 128), (128, 4.0, 256), (256, 100.0, 128), (128, 900.0, 8), (8, 1.0, 64)]
        {
            pace.took(tokens, ms);
            assert_eq!(pace.tokens(), next, "{tokens} in {ms} ms");
        }
        pace.took(64, 0.0);
        pace.took(128, 0.0);
        pace.took(256, 0.0);
        pace.took(512, 0.0);
        assert_eq!(pace.tokens(), 512);
        assert_eq!(Pace::new(64, 8).tokens(), 8);
    }
}
