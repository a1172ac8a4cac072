//! Choosing the next token: the parameters, and the rule that every backend follows.
//!
//! The rule, in this order (that of transformers):
//! 1. repetition penalty `r`: the logit x of every token the sequence knows becomes `x / r` if positive, else `x * r`;
//! 2. temperature 0: the largest logit wins, the lowest id among equals. Otherwise `w = exp((x - max) / temperature)`;
//! 3. top-k: keep `x >= t`, t being the k-th largest;
//! 4. top-p: keep `x >= t`, t being the largest value for which the kept `w` sum to at least `top_p` of what step 3 left;
//! 5. min-p: keep `w >= min_p` (the largest w is 1);
//! 6. the token is the first id at which the running sum of the kept `w`, in order of ids, exceeds `u` times the whole sum,
//!    with `u = uniform(seed, position)`.
//!
//! Tokens equal to the last one kept are kept too, so each step is a threshold and needs no order among equals. A logit that
//! is not a number counts as minus infinity. If after step 1 the largest logit is not finite (all are minus infinity, or one is
//! plus infinity), there is no token: the result is [`NONE`].

use crate::{
    Error, Result,
    ops::{LANE_WORDS, MOST_TOP},
    step::NONE,
};

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 always takes the most likely token; 1 samples from the model's distribution.
    pub temperature: f32,
    /// Only the k most likely tokens; 0 = all.
    pub top_k: u32,
    /// Only the most likely tokens that together have this probability; 1 = all.
    pub top_p: f32,
    /// Only tokens at least this many times as likely as the most likely one; 0 = all.
    pub min_p: f32,
    /// Greater than 1 makes tokens that occurred before less likely; 1 = off.
    pub repetition_penalty: f32,
    /// The same seed gives the same text.
    pub seed: u64,
}

impl Default for Sampling {
    /// Greedy.
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, seed: 0 }
    }
}

impl Sampling {
    /// Checks that every value is in its range.
    ///
    /// # Errors
    /// [`Error::BadRequest`] naming the value and its range.
    pub fn check(&self) -> Result<()> {
        // Written so that NaN fails.
        let demand = |ok: bool, name: &str, value: f32, range: &str| {
            if ok { Ok(()) } else { Err(Error::BadRequest(format!("{name} is {value}; it must be {range}"))) }
        };
        let t = self.temperature;
        demand((0.0..=100.0).contains(&t), "temperature", t, "from 0 (greedy) to 100")?;
        demand(self.top_p > 0.0 && self.top_p <= 1.0, "top-p", self.top_p, "greater than 0 and at most 1")?;
        demand((0.0..=1.0).contains(&self.min_p), "min-p", self.min_p, "from 0 to 1")?;
        let r = self.repetition_penalty;
        demand(r > 0.0 && r <= 100.0, "repetition penalty", r, "greater than 0 and at most 100")
    }

    /// Whether the most likely token is always taken.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// The words of a lane of the `sample` op.
    pub fn lane_words(&self) -> [u32; LANE_WORDS] {
        let [t, p, m, r] = [self.temperature, self.top_p, self.min_p, self.repetition_penalty].map(f32::to_bits);
        [t, p, m, r, self.top_k, self.seed as u32, (self.seed >> 32) as u32, 0]
    }

    /// The inverse of [`Sampling::lane_words`].
    pub fn from_lane_words(words: &[u32; LANE_WORDS]) -> Self {
        let [temperature, top_p, min_p, repetition_penalty] = [0, 1, 2, 3].map(|i| f32::from_bits(words[i]));
        let seed = u64::from(words[5]) | u64::from(words[6]) << 32;
        Self { temperature, top_k: words[4], top_p, min_p, repetition_penalty, seed }
    }
}

/// The random number of a position, in `[0, 1)`, a multiple of 2^-24; u32 arithmetic only, so that every backend has the
/// same bits: `mix` is the finaliser of MurmurHash3, chained over seed low, seed high and position.
pub fn uniform(seed: u64, position: u32) -> f32 {
    let mix = |mut h: u32| {
        h = (h ^ (h >> 16)).wrapping_mul(0x85eb_ca6b);
        h = (h ^ (h >> 13)).wrapping_mul(0xc2b2_ae35);
        h ^ (h >> 16)
    };
    let h = mix(seed as u32 ^ 0x9e37_79b9);
    let h = mix(h ^ (seed >> 32) as u32).wrapping_add(0x7f4a_7c15);
    let h = mix(h ^ position).wrapping_add(0x1656_67b1);
    (mix(h) >> 8) as f32 / 16_777_216.0
}

/// Whether bit `id` of a `seen` bitset is set; an empty bitset has none.
fn is_seen(seen: &[u32], id: usize) -> bool {
    seen.get(id / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
}

/// The token at `position` given `logits` `[V]` and the bitset `seen` `[ceil(V / 32)]` of the tokens that the sequence knows
/// (may be empty), or [`NONE`]. `scratch` only saves an allocation. See the module for the rule.
pub fn sample(logits: &[f32], seen: &[u32], params: &Sampling, position: u32, scratch: &mut Vec<f32>) -> u32 {
    let penalty = params.repetition_penalty;
    let score = |(id, &x): (usize, &f32)| {
        let x = match x {
            x if x.is_nan() => f32::NEG_INFINITY,
            x if penalty != 1.0 && is_seen(seen, id) => {
                if x > 0.0 {
                    x / penalty
                } else {
                    x * penalty
                }
            }
            x => x,
        };
        (id, x)
    };
    let larger = |best: (usize, f32), (id, x): (usize, f32)| if x > best.1 { (id, x) } else { best };
    let (best, max) = logits.iter().enumerate().map(score).fold((0, f32::NEG_INFINITY), larger);
    if !max.is_finite() {
        return NONE;
    }
    if params.is_greedy() {
        return best as u32;
    }
    scratch.clear();
    scratch.extend(logits.iter().enumerate().map(|entry| score(entry).1));
    // Thresholds are found in a copy, since finding them reorders it.
    let threshold = threshold(scratch, max, params);
    let weight = |x: f32| if x >= threshold { weight(x, max, params.temperature) } else { 0.0 };
    let score = |id: usize| score((id, &logits[id])).1;
    let total: f64 = (0..logits.len()).map(|id| weight(score(id))).sum();
    let target = f64::from(uniform(params.seed, position)) * total;
    let mut sum = 0.0;
    for id in 0..logits.len() {
        sum += weight(score(id));
        if sum > target {
            return id as u32;
        }
    }
    best as u32
}

fn weight(x: f32, max: f32, temperature: f32) -> f64 {
    (f64::from(x - max) / f64::from(temperature)).exp()
}

/// The smallest score that top-k, top-p and min-p keep; `scores` is reordered.
fn threshold(scores: &mut [f32], max: f32, params: &Sampling) -> f32 {
    let descending = |a: &f32, b: &f32| b.total_cmp(a);
    let mut least = f32::NEG_INFINITY;
    let k = params.top_k as usize;
    if k > 0 && k < scores.len() {
        least = *scores.select_nth_unstable_by(k - 1, descending).1;
    }
    if params.top_p < 1.0 {
        let w = |x: f32| weight(x, max, params.temperature);
        let kept = scores.iter().filter(|x| **x >= least);
        let (count, total) = kept.fold((0u32, 0.0), |(n, sum), x| (n + 1, sum + w(*x)));
        // All tokens below this weight together have less than 1 - top_p, so the threshold lies above it: few are sorted.
        let floor = (1.0 - f64::from(params.top_p)) * total / f64::from(count);
        let mut likely: Vec<f32> = scores.iter().copied().filter(|x| *x >= least && w(*x) >= floor).collect();
        likely.sort_unstable_by(descending);
        let target = f64::from(params.top_p) * total;
        let mut sum = 0.0;
        let last = likely.iter().find(|x| {
            sum += w(**x);
            sum >= target
        });
        least = last.or(likely.last()).copied().unwrap_or(max);
    }
    if params.min_p > 0.0 {
        // In f64 down to the comparison: the most likely token must survive min_p = 1.
        let floor = f64::from(max) + f64::from(params.min_p).ln() * f64::from(params.temperature);
        least = least.max(if params.min_p < 1.0 { floor as f32 } else { max });
    }
    least
}

/// Writes the log probabilities of token `id` and of the `n` most likely ones at a position with logits `x`, in the form of
/// [`Logprobs`](crate::ops::Logprobs). The normaliser is a sum in f64 in the order of ids.
pub(crate) fn report(x: &[f32], id: u32, n: usize, report: &mut [f32]) {
    let value = |x: f32| if x.is_nan() { f32::NEG_INFINITY } else { x };
    let max = x.iter().copied().map(value).fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = x.iter().map(|&x| f64::from(value(x) - max).exp()).sum();
    let log = sum.ln();
    let lp = |x: f32| (f64::from(value(x)) - f64::from(max) - log) as f32;
    let finite = max.is_finite();
    report[0] = if finite { lp(x[id as usize]) } else { f32::NEG_INFINITY };
    let mut best: [(f32, usize); MOST_TOP] = [(f32::NEG_INFINITY, 0); MOST_TOP];
    let mut found = 0;
    for (v, x) in x.iter().copied().map(value).enumerate().filter(|_| finite) {
        if x == f32::NEG_INFINITY || n == 0 || (found == n && x <= best[n - 1].0) {
            continue;
        }
        // After all that are at least as large: the lowest id comes first among equals.
        let place = best[..found].iter().take_while(|(other, _)| *other >= x).count();
        found = (found + 1).min(n);
        best[place..found].rotate_right(1);
        best[place] = (x, v);
    }
    let (pairs, _) = report[1..].as_chunks_mut::<2>();
    for (i, pair) in pairs[..n].iter_mut().enumerate() {
        *pair = if i < found { [best[i].1 as f32, lp(best[i].0)] } else { [-1.0, 0.0] };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn one(logits: &[f32], seen: &[u32], params: &Sampling, position: u32) -> u32 {
        sample(logits, seen, params, position, &mut Vec::new())
    }

    /// The rule again, by sorting, in f64: the probability of every token.
    fn distribution(logits: &[f32], seen: &[u32], p: &Sampling) -> Vec<f64> {
        // The penalised logit is an f32 by definition: two of them may be equal.
        let penalised = |(i, &x): (usize, &f32)| match !seen.is_empty() && seen[i / 32] & (1 << (i % 32)) != 0 {
            true if x > 0.0 => x / p.repetition_penalty,
            true => x * p.repetition_penalty,
            false => x,
        };
        let x: Vec<f64> = logits.iter().enumerate().map(|entry| f64::from(penalised(entry))).collect();
        let max = x.iter().cloned().fold(f64::MIN, f64::max);
        let mut w: Vec<f64> = x.iter().map(|x| ((x - max) / f64::from(p.temperature)).exp()).collect();
        let sorted = |w: &[f64]| {
            let mut s = w.to_vec();
            s.sort_by(|a, b| b.total_cmp(a));
            s
        };
        if p.top_k > 0 && (p.top_k as usize) < w.len() {
            let least = sorted(&w)[p.top_k as usize - 1];
            w.iter_mut().filter(|w| **w < least).for_each(|w| *w = 0.0);
        }
        let total: f64 = w.iter().sum();
        let mut sum = 0.0;
        let mut least = 0.0;
        for s in sorted(&w) {
            least = s;
            sum += s;
            if sum >= f64::from(p.top_p) * total {
                break;
            }
        }
        w.iter_mut().filter(|w| **w < least || **w < f64::from(p.min_p)).for_each(|w| *w = 0.0);
        let total: f64 = w.iter().sum();
        w.iter().map(|w| w / total).collect()
    }

    #[test]
    fn greedy_takes_the_largest_and_of_equals_the_first() {
        let greedy = Sampling::default();
        assert_eq!(one(&[1.0, 3.0, 2.0, 3.0], &[], &greedy, 9), 1);
        assert_eq!(one(&[f32::NAN, -1.0, f32::NAN], &[], &greedy, 9), 1);
        let penalty = Sampling { repetition_penalty: 2.0, ..greedy };
        assert_eq!(one(&[1.0, 3.0, 2.0], &[0b010], &penalty, 9), 2);
        assert_eq!(one(&[-3.0, -2.0], &[0b10], &penalty, 9), 0);
        // A bitset may end before the vocabulary does.
        assert_eq!(one(&[0.0; 40], &[u32::MAX], &penalty, 9), 0);
    }

    #[test]
    fn without_a_finite_largest_logit_there_is_no_token() {
        let warm = Sampling { temperature: 0.7, top_k: 2, top_p: 0.9, min_p: 0.1, ..Sampling::default() };
        for params in [Sampling::default(), warm] {
            for logits in [[f32::NEG_INFINITY; 3], [f32::NAN; 3], [1.0, f32::INFINITY, 2.0]] {
                assert_eq!(one(&logits, &[], &params, 9), NONE, "{logits:?}");
            }
        }
    }

    #[test]
    fn the_random_number_is_fixed_and_even() {
        // Reference values for the other backends; they follow from the definition and must never change.
        let reference =
            [(0, 0), (0, 1), (1, 0), (0x1234_5678_9abc_def0, 77)].map(|(s, p)| (uniform(s, p) * 16_777_216.0) as u32);
        assert_eq!(reference, [15_647_671, 8_346_168, 9_113_502, 6_284_789]);
        let n = 1 << 16;
        let mut bins = [0u32; 64];
        let mut product = 0.0;
        for i in 0..n {
            let u = uniform(42, i);
            assert!((0.0..1.0).contains(&u));
            bins[(u * 64.0) as usize] += 1;
            product += f64::from(u - 0.5) * f64::from(uniform(42, i + 1) - 0.5);
        }
        let chi2: f64 = bins.iter().map(|&b| (f64::from(b) - 1024.0).powi(2) / 1024.0).sum();
        assert!(chi2 < 110.0, "chi-squared with 63 degrees of freedom: {chi2}");
        assert!((product / f64::from(n) * 12.0).abs() < 0.02);
    }

    #[test]
    fn drawn_frequencies_follow_the_rule() {
        let logits: Vec<f32> = (0..50).map(|i| ((i * 37 % 50) as f32 / 9.0) - 2.0).collect();
        let base = Sampling { temperature: 0.8, seed: 3, ..Sampling::default() };
        let seen = [0xf0f0_f0f0, 0x0f0f];
        for p in [
            base,
            Sampling { top_k: 7, ..base },
            Sampling { top_p: 0.6, ..base },
            Sampling { min_p: 0.2, ..base },
            Sampling { top_k: 20, top_p: 0.9, min_p: 0.05, repetition_penalty: 1.3, ..base },
        ] {
            let want = distribution(&logits, &seen, &p);
            let n = 40_000;
            let mut count = [0u32; 50];
            let mut scratch = Vec::new();
            (0..n).for_each(|i| count[sample(&logits, &seen, &p, i, &mut scratch) as usize] += 1);
            for (id, (&c, &w)) in count.iter().zip(&want).enumerate() {
                let (c, n) = (f64::from(c), f64::from(n));
                assert!(w > 0.0 || c == 0.0, "{p:?}: token {id} should never come");
                assert!(
                    (c / n - w).abs() < 5.0 * (w * (1.0 - w) / n).sqrt() + 1e-9,
                    "{p:?}: token {id}: {} for {w}",
                    c / n
                );
            }
        }
    }

    #[test]
    fn impossible_values_are_named() {
        let base = Sampling::default();
        assert!(base.check().is_ok());
        for (p, expected) in [
            (Sampling { temperature: -1.0, ..base }, "temperature is -1; it must be from 0 (greedy) to 100"),
            (Sampling { temperature: f32::NAN, ..base }, "temperature is NaN"),
            (Sampling { temperature: f32::INFINITY, ..base }, "temperature is inf"),
            (Sampling { top_p: 0.0, ..base }, "top-p is 0"),
            (Sampling { top_p: 1.5, ..base }, "top-p is 1.5"),
            (Sampling { min_p: -0.1, ..base }, "min-p is -0.1"),
            (Sampling { repetition_penalty: 0.0, ..base }, "repetition penalty is 0"),
            (Sampling { repetition_penalty: f32::NAN, ..base }, "repetition penalty is NaN"),
        ] {
            let message = p.check().unwrap_err().to_string();
            assert!(message.starts_with(expected), "{message}");
        }
        let p = Sampling {
            temperature: 0.7,
            top_k: 3,
            top_p: 0.9,
            min_p: 0.1,
            repetition_penalty: 1.1,
            seed: u64::MAX - 5,
        };
        assert_eq!(Sampling::from_lane_words(&p.lane_words()), p);
    }

    proptest! {
        #[test]
        fn what_is_drawn_has_probability(
            logits in prop::collection::vec(-20f32..20.0, 1..80),
            temperature in 0.01f32..3.0,
            top_k in 0u32..100,
            top_p in 0.01f32..=1.0,
            min_p in 0f32..=1.0,
            position in any::<u32>(),
        ) {
            let p = Sampling { temperature, top_k, top_p, min_p, repetition_penalty: 1.0, seed: 1 };
            let id = one(&logits, &[], &p, position) as usize;
            // A token within rounding of the min-p threshold may fall on either side.
            let wider = Sampling { min_p: min_p * 0.9999, ..p };
            let chance = distribution(&logits, &[], &wider)[id];
            prop_assert!(chance > 0.0);
        }
    }
}
