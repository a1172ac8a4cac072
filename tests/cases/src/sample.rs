//! Cases of `sample`.

use super::batch::{Batch, Tables, cut};
use super::host::{Bound, Dtypes, Host, Rng, Want, Wants};
use super::{Size, Spec, Table};
use selkie_core::backend::Handle;
use selkie_core::ops::{LANE_WORDS, Op, Sample};
use selkie_core::step::NONE;
use selkie_core::tensor::DType;

/// Relative distance to another outcome below which rounding may decide.
const MARGIN: f64 = 3e-5;

#[derive(Clone, Copy)]
struct Params {
    temperature: f32,
    top_p: f32,
    min_p: f32,
    penalty: f32,
    top_k: u32,
    seed: u64,
}

const GREEDY: Params = Params { temperature: 0.0, top_p: 1.0, min_p: 0.0, penalty: 1.0, top_k: 0, seed: 0 };
const WARM: Params = Params { temperature: 0.8, seed: 0x1234_5678_9abc_def0, ..GREEDY };

#[derive(Clone)]
pub(super) struct Draw {
    /// Lane of each output.
    lanes: Vec<u32>,
    padded: bool,
    vocab: usize,
    /// Parameters of lane `l` are entry `l % len`.
    params: Vec<Params>,
    /// Logits are multiples of this, so that many are equal; 0 = all different.
    step: f32,
    rms: f32,
    /// Byte `o % len` says how the logits of output `o` are damaged: `n` all NaN, `-` all minus infinity, `m` one or
    /// the other, `+` one is plus infinity, `s` only every seventh is a number; anything else: not at all.
    damage: &'static [u8],
}

impl Draw {
    fn batch(&self) -> Batch {
        let mut rows = vec![];
        for (i, &lane) in self.lanes.iter().enumerate() {
            if i > 0 && self.lanes[i - 1] == lane {
                // Verification: several outputs of one row.
                let r: &mut selkie_core::step::Row = rows.last_mut().expect("an earlier row");
                r.outputs.push(r.outputs.len() as u32);
                let n = r.outputs.len() as u32;
                let outputs = std::mem::take(&mut r.outputs);
                *r = selkie_core::step::Row { lane, outputs, ..cut(r.first_position, n, 0, &[]) };
            } else {
                let mut r = cut(10 + 37 * i as u32, 1, 0, &[]);
                (r.lane, r.outputs) = (lane, vec![0]);
                rows.push(r);
            }
        }
        let batch = Batch::new(rows);
        if self.padded { batch.padded() } else { batch }
    }

    fn lane_count(&self) -> usize {
        *self.lanes.iter().max().expect("a lane") as usize + 2
    }
}

/// The random number of a position, in `[0, 1)`, by the definition in the documentation of the sampling rule.
fn uniform(seed: u64, position: u32) -> f64 {
    let finish = |mut h: u32| {
        h ^= h >> 16;
        h = h.wrapping_mul(0x85eb_ca6b);
        h ^= h >> 13;
        h = h.wrapping_mul(0xc2b2_ae35);
        h ^ (h >> 16)
    };
    let mut h = finish((seed & 0xffff_ffff) as u32 ^ 0x9e37_79b9);
    h = finish(h ^ (seed >> 32) as u32).wrapping_add(0x7f4a_7c15);
    h = finish(h ^ position).wrapping_add(0x1656_67b1);
    f64::from(finish(h) >> 8) / f64::from(1 << 24)
}

/// Damages the logits of an output, see [`Draw`].
pub(super) fn spoil(logits: &mut [f32], damage: u8) {
    let half = logits.len() / 2;
    for (id, x) in logits.iter_mut().enumerate() {
        *x = match damage {
            b'n' => f32::NAN,
            b'-' => f32::NEG_INFINITY,
            b'm' => [f32::NAN, f32::NEG_INFINITY][id % 2],
            b'+' if id == half => f32::INFINITY,
            b's' if id % 7 != 3 => f32::NAN,
            _ => *x,
        };
    }
}

/// The token, [`NONE`] if the largest logit is not finite, or `None` where rounding may decide between two.
fn choose(logits: &[f32], seen: &[u32], p: Params, position: u32) -> Option<u32> {
    let penalised = |(i, &x): (usize, &f32)| match seen[i / 32] >> (i % 32) & 1 {
        _ if x.is_nan() => f32::NEG_INFINITY,
        1 if p.penalty != 1.0 => {
            if x > 0.0 {
                x / p.penalty
            } else {
                x * p.penalty
            }
        }
        _ => x,
    };
    let x: Vec<f64> = logits.iter().enumerate().map(|e| f64::from(penalised(e))).collect();
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if !max.is_finite() {
        return Some(NONE);
    }
    if p.temperature == 0.0 {
        let near = |v: &f64| *v < max && max - v < MARGIN * max.abs() && p.penalty != 1.0;
        let first = x.iter().position(|&v| v == max).expect("a largest") as u32;
        return (!x.iter().any(near)).then_some(first);
    }
    let mut w: Vec<f64> = x.iter().map(|v| ((v - max) / f64::from(p.temperature)).exp()).collect();
    let sorted = |w: &[f64]| {
        let mut s: Vec<f64> = w.iter().copied().filter(|&w| w > 0.0).collect();
        s.sort_by(|a, b| b.total_cmp(a));
        s
    };
    let mut sure = true;
    let keep = |w: &mut [f64], least: f64| w.iter_mut().filter(|w| **w < least).for_each(|w| *w = 0.0);
    if p.top_k > 0 && (p.top_k as usize) < w.len() {
        let s = sorted(&w);
        let (last, next) = (s[p.top_k as usize - 1], s[p.top_k as usize]);
        // A penalised logit may be rounded differently.
        sure &= last == next || p.penalty == 1.0 || next < last * (1.0 - MARGIN);
        keep(&mut w, last);
    }
    if p.top_p < 1.0 {
        let total: f64 = w.iter().sum();
        let target = f64::from(p.top_p) * total;
        let (mut sum, mut least) = (0.0, 0.0);
        for v in sorted(&w) {
            least = v;
            sum += v;
            sure &= (sum - target).abs() > MARGIN * total;
            if sum >= target {
                break;
            }
        }
        keep(&mut w, least);
    }
    if p.min_p > 0.0 {
        let least = f64::from(p.min_p);
        sure &= w.iter().all(|w| *w == 1.0 || (w - least).abs() > MARGIN * least);
        keep(&mut w, least);
    }
    let total: f64 = w.iter().sum();
    let target = uniform(p.seed, position) * total;
    let mut sum = 0.0;
    for (id, w) in w.iter().enumerate().filter(|(_, w)| **w > 0.0) {
        let before = sum;
        sum += w;
        if sum > target {
            // At the ends no rounding can change the choice.
            sure &= target - before > MARGIN * total || before == 0.0;
            sure &= sum - target > MARGIN * total;
            return sure.then_some(id as u32);
        }
    }
    None
}

impl Spec for Draw {
    fn host(&self, _: &Dtypes, rng: &mut Rng) -> Host {
        let (mut h, batch) = (Host::default(), self.batch());
        let (o, v, lanes) = (batch.bucket.outputs, self.vocab, self.lane_count());
        h.step(&batch);
        let mut logits = rng.vec(o * v, self.rms);
        if self.step > 0.0 {
            logits.iter_mut().for_each(|x| *x = (*x / self.step).round() * self.step);
        }
        logits[self.lanes.len() * v..].fill(f32::NAN);
        for (row, &damage) in logits.chunks_mut(v).take(self.lanes.len()).zip(self.damage.iter().cycle()) {
            spoil(row, damage);
        }
        h.float("logits", DType::F32, &[o, v], logits);
        let words = |l: usize| -> [u32; LANE_WORDS] {
            let p = self.params[l % self.params.len()];
            let [t, top_p, min_p, penalty] = [p.temperature, p.top_p, p.min_p, p.penalty].map(f32::to_bits);
            // Lanes differ in their seed.
            let seed = p.seed.wrapping_add(l as u64);
            [t, top_p, min_p, penalty, p.top_k, seed as u32, (seed >> 32) as u32, 0]
        };
        h.int("lanes", &[lanes, LANE_WORDS], (0..lanes).flat_map(words).collect());
        let n = v.div_ceil(32);
        h.int("seen", &[lanes, n], (0..lanes * n).map(|_| rng.bits() as u32 & rng.bits() as u32).collect());
        h.int("last", &[lanes], (0..lanes).map(|_| rng.below(v) as u32).collect());
        h.out("ids", DType::U32, &[o]);
        h
    }

    fn want(&self, h: &Host) -> Wants {
        let batch = self.batch();
        let tables = Tables::new(h.ints("ints"), batch.bucket);
        let (v, n) = (self.vocab, self.vocab.div_ceil(32));
        let mut ids = vec![Want::Keep; batch.bucket.outputs];
        let mut seen = vec![Want::Keep; self.lane_count() * n];
        let mut last = vec![Want::Keep; self.lane_count()];
        for (o, (t, lane)) in tables.outputs().into_iter().enumerate().filter_map(|(o, x)| Some((o, x?))) {
            let mut p = self.params[lane % self.params.len()];
            p.seed = p.seed.wrapping_add(lane as u64);
            let bits = &h.ints("seen")[lane * n..(lane + 1) * n];
            let position = tables.position(t) as u32 + 1;
            let id = choose(&h.get("logits")[o * v..(o + 1) * v], bits, p, position);
            ids[o] = id.map_or(Want::Any, |id| Want::Exact(id.into()));
            // If a lane has several outputs, the caller decides which one is the last and whether the bits of all are
            // wanted.
            let alone = self.lanes.iter().filter(|&&l| l as usize == lane).count() == 1;
            match id.filter(|_| alone) {
                Some(id) => {
                    last[lane] = Want::Exact(id.into());
                    if id != NONE {
                        let word = id as usize / 32;
                        seen[lane * n + word] = Want::Exact((bits[word] | 1 << (id % 32)).into());
                    }
                }
                None => {
                    last[lane] = Want::Any;
                    seen[lane * n..(lane + 1) * n].fill(Want::Any);
                }
            }
        }
        vec![("ids", ids), ("seen", seen), ("last", last)]
    }

    fn op<Buf: Handle>(&self, b: &Bound<Buf>) -> Op<Buf> {
        Sample {
            step: b.step(),
            logits: b.t("logits"),
            lanes: b.t("lanes"),
            seen: b.t("seen"),
            last: b.t("last"),
            ids: b.t("ids"),
        }
        .into()
    }
}

fn table() -> Vec<(String, Size, Draw)> {
    let mut to = vec![];
    let base = Draw {
        lanes: vec![2, 0, 5],
        padded: false,
        vocab: 1003,
        params: vec![GREEDY],
        step: 0.0,
        rms: 2.0,
        damage: b".",
    };
    let mut add = |name: &str, spec: Draw| to.push((name.to_string(), Size::Small, spec));
    add("greedy", base.clone());
    add("greedy, ties", Draw { step: 1.0, ..base.clone() });
    add("greedy, all equal", Draw { step: 100.0, ..base.clone() });
    add("greedy, padding", Draw { padded: true, ..base.clone() });
    add("greedy, one output", Draw { lanes: vec![0], ..base.clone() });
    add("greedy, 33 outputs", Draw { lanes: (0..33).rev().collect(), ..base.clone() });
    add("greedy, verification", Draw { lanes: vec![1, 1, 1, 3, 3, 0], ..base.clone() });
    add("greedy, vocabulary of 4", Draw { vocab: 4, ..base.clone() });
    add("greedy, vocabulary of 1025", Draw { vocab: 1025, ..base.clone() });
    add("greedy, penalty", Draw { params: vec![Params { penalty: 1.3, ..GREEDY }], ..base.clone() });
    let warm = Draw { lanes: (0..8).collect(), params: vec![WARM], vocab: 203, ..base.clone() };
    add("temperature", warm.clone());
    add("temperature, padding", Draw { padded: true, ..warm.clone() });
    for (name, p) in [
        ("cold", Params { temperature: 0.1, ..WARM }),
        ("hot", Params { temperature: 2.0, ..WARM }),
        ("top-k", Params { top_k: 20, ..WARM }),
        ("top-k of 1", Params { top_k: 1, ..WARM }),
        ("top-k beyond the vocabulary", Params { top_k: 5000, ..WARM }),
        ("top-p", Params { top_p: 0.7, ..WARM }),
        ("small top-p", Params { top_p: 0.01, ..WARM }),
        ("min-p", Params { min_p: 0.1, ..WARM }),
        ("min-p of 1", Params { min_p: 1.0, ..WARM }),
        ("penalty", Params { penalty: 1.5, ..WARM }),
        ("penalty below 1", Params { penalty: 0.8, ..WARM }),
        ("all of it", Params { top_k: 40, top_p: 0.9, min_p: 0.02, penalty: 1.2, ..WARM }),
    ] {
        add(name, Draw { params: vec![p], ..warm.clone() });
    }
    add("top-k, ties", Draw { params: vec![Params { top_k: 20, ..WARM }], step: 0.5, ..warm.clone() });
    add("top-p, ties", Draw { params: vec![Params { top_p: 0.71, ..WARM }], step: 0.5, ..warm.clone() });
    let top_k = Params { top_k: 5, ..WARM };
    let damaged = Draw { lanes: (0..6).collect(), damage: b"n-m+s.", ..base.clone() };
    for (name, p) in [("greedy", GREEDY), ("penalty", Params { penalty: 1.3, ..GREEDY }), ("temperature", WARM)] {
        add(&format!("damaged logits, {name}"), Draw { params: vec![p], ..damaged.clone() });
        // Vectors of four, and where the largest is looked for in parts.
        let vocab = if p.temperature == 0.0 { 20_000 } else { 204 };
        add(&format!("damaged logits of {vocab}, {name}"), Draw { params: vec![p], vocab, ..damaged.clone() });
    }
    let narrow = Params { top_k: 20, top_p: 0.9, min_p: 0.02, ..WARM };
    add("damaged logits, all of it", Draw { params: vec![narrow], damage: b"n-m+", ..damaged });
    add("a rule per lane", Draw { params: vec![GREEDY, WARM, top_k, Params { top_p: 0.5, ..WARM }], ..warm.clone() });
    // More than one id per thread of a workgroup, and more ids than one workgroup searches alone.
    for (vocab, rms) in [(1003, 2.0), (9001, 3.0)] {
        let spec = Draw { vocab, rms, ..warm.clone() };
        add(&format!("vocabulary of {vocab}, temperature"), spec.clone());
        for (name, p) in [("top-k", Params { top_k: 50, ..WARM }), ("top-p", Params { top_p: 0.9, ..WARM })] {
            add(&format!("vocabulary of {vocab}, {name}"), Draw { params: vec![p], ..spec.clone() });
        }
    }
    add("vocabulary of 9001, greedy", Draw { lanes: (0..8).collect(), vocab: 9001, ..base.clone() });
    let large = Draw { vocab: 151_936, rms: 3.0, ..base };
    to.push(("vocabulary of 151936, greedy".into(), Size::Bench, Draw { lanes: vec![0], ..large.clone() }));
    for (name, p) in
        [("top-k 50", Params { top_k: 50, ..WARM }), ("top-p 0.9", Params { temperature: 0.3, top_p: 0.9, ..WARM })]
    {
        let spec = Draw { lanes: (0..8).collect(), params: vec![p], ..large.clone() };
        to.push((format!("vocabulary of 151936, {name}"), Size::Bench, spec));
    }
    to
}

pub(super) fn cases(to: &mut Table) {
    for (name, size, spec) in table() {
        to.sized(size, &name, spec);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::F32;

    #[test]
    fn rounding_decides_seldom() {
        let (mut any, mut all) = (0, 0);
        for (name, _, spec) in table().into_iter().filter(|(_, size, _)| *size == Size::Small) {
            let want = spec.want(&spec.host(&F32, &mut Rng::new(&name)));
            let unsure = want[0].1.iter().filter(|w| **w == Want::Any).count();
            assert!(2 * unsure <= spec.lanes.len(), "{name}: {unsure} of {}", spec.lanes.len());
            any += unsure;
            all += spec.lanes.len();
        }
        assert!(20 * any < all, "{any} of {all}");
    }

    #[test]
    fn thresholds_leave_one_token() {
        let logits = [0.0, 2.0, 1.0, 3.0];
        let only = |p: Params| choose(&logits, &[0], p, 7);
        for p in [Params { top_k: 1, ..WARM }, Params { top_p: 0.2, ..WARM }, Params { min_p: 0.9, ..WARM }] {
            assert_eq!(only(p), Some(3));
        }
        // 3 / 2 and 1: seen tokens 3 and 1 are below 2 only for a penalty above 3.
        assert_eq!(choose(&logits, &[0b1010], Params { penalty: 4.0, ..GREEDY }, 7), Some(2));
    }
}
