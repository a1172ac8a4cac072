//! Cases of `adjust` and `logprobs`.

use super::batch::{Batch, Tables, cut};
use super::host::{Bound, Dtypes, Host, Rng, Want, Wants};
use super::sample::spoil;
use super::{Size, Spec, Table};
use selkie_core::backend::Handle;
use selkie_core::ops::{Adjust, ENTRY_WORDS, Logprobs, MOST_ENTRIES, MOST_TOP, Op, REPORT_WORDS, RuleWords};
use selkie_core::step::NONE;
use selkie_core::tensor::DType;

/// Not an index, a count or a penalty: stands in every word that the op must not read.
const POISON: u32 = 0xffa5_ffa5;

/// The rules of a lane.
#[derive(Clone, Copy)]
struct Kind {
    /// Of every 8 tokens, how many the mask allows; 8: all, but there is a mask.
    allowed: Option<usize>,
    counted: bool,
    /// Entries, spread over the vocabulary: a bias, a bias that is not in force yet but not denied, or denied.
    entries: usize,
    /// Repetition penalty.
    penalty: f32,
    /// The word [`RuleWords::TOP`].
    top: u32,
}

const PLAIN: Kind = Kind { allowed: None, counted: false, entries: 0, penalty: 1.0, top: 0 };

impl Kind {
    fn ruled(self) -> bool {
        self.allowed.is_some() || self.counted || self.entries > 0 || self.penalty != 1.0
    }

    /// A lane's words for the token at `position`.
    fn words(self, rng: &mut Rng, vocab: usize, position: u32) -> Vec<u32> {
        let at = RuleWords { vocab };
        let mut w = vec![POISON; at.words()];
        w[..RuleWords::HEADER].fill(0);
        let flag = |on: bool, flag: u32| if on { flag } else { 0 };
        w[RuleWords::FLAGS] = flag(self.ruled(), RuleWords::RULED)
            | flag(self.allowed.is_some(), RuleWords::MASKED)
            | flag(self.counted, RuleWords::COUNTED);
        w[RuleWords::TOP] = self.top;
        w[RuleWords::REPETITION] = self.penalty.to_bits();
        if self.counted {
            w[RuleWords::FREQUENCY] = rng.range(-2.0, 2.0).to_bits();
            w[RuleWords::PRESENCE] = rng.range(-2.0, 2.0).to_bits();
            let count = |_| if rng.below(4) == 0 { rng.below(5) as u32 } else { 0 };
            w[at.counts()..].copy_from_slice(&(0..vocab).map(count).collect::<Vec<_>>());
        }
        if let Some(allowed) = self.allowed {
            for word in &mut w[at.mask()..at.counts()] {
                *word = (0..32).map(|bit| u32::from(rng.below(8) < allowed) << bit).sum();
            }
        }
        let entries = self.entries.min(vocab);
        w[RuleWords::ENTRIES] = entries as u32;
        for e in 0..entries {
            let bias = rng.range(-9.0, 9.0).to_bits();
            let from = [0, position, position + 1][rng.below(3)];
            let entry = &mut w[at.entries() + ENTRY_WORDS * e..][..ENTRY_WORDS];
            entry.copy_from_slice(&[(e * vocab / entries) as u32, bias, from]);
        }
        w
    }
}

/// What the cases of both ops have in common.
#[derive(Clone)]
struct Lanes {
    /// Lane of each output, each once.
    lanes: Vec<u32>,
    padded: bool,
    vocab: usize,
    /// The rules of lane `l` are entry `l % len`.
    kinds: Vec<Kind>,
    /// Logits are multiples of this, so that many are equal; 0 = all different.
    step: f32,
    /// See `sample`.
    damage: &'static [u8],
}

impl Lanes {
    fn batch(&self) -> Batch {
        let row = |(i, &lane): (usize, &u32)| {
            let mut row = cut(10 + 37 * i as u32, 1, 0, &[]);
            (row.lane, row.outputs) = (lane, vec![0]);
            row
        };
        let batch = Batch::new(self.lanes.iter().enumerate().map(row).collect());
        if self.padded { batch.padded() } else { batch }
    }

    fn count(&self) -> usize {
        *self.lanes.iter().max().expect("a lane") as usize + 2
    }

    fn kind(&self, lane: usize) -> Kind {
        self.kinds[lane % self.kinds.len()]
    }

    fn host(&self, rng: &mut Rng) -> Host {
        let (mut h, batch) = (Host::default(), self.batch());
        let (o, v) = (batch.bucket.outputs, self.vocab);
        h.step(&batch);
        let mut logits = rng.vec(o * v, 4.0);
        if self.step > 0.0 {
            logits.iter_mut().for_each(|x| *x = (*x / self.step).round() * self.step);
        }
        logits[self.lanes.len() * v..].fill(f32::NAN);
        for (row, &damage) in logits.chunks_mut(v).take(self.lanes.len()).zip(self.damage.iter().cycle()) {
            spoil(row, damage);
        }
        h.float("logits", DType::F32, &[o, v], logits);
        let words = RuleWords { vocab: v }.words();
        let mut rules = vec![POISON; self.count() * words];
        for (i, &lane) in self.lanes.iter().enumerate() {
            let lane = lane as usize;
            let own = self.kind(lane).words(rng, v, 11 + 37 * i as u32);
            rules[lane * words..][..words].copy_from_slice(&own);
        }
        h.int("rules", &[self.count(), words], rules);
        h
    }
}

#[derive(Clone)]
pub(super) struct Rule(Lanes);

impl Rule {
    /// The adjusted logits of an output.
    fn adjusted(&self, h: &Host, o: usize, lane: usize, position: u32) -> Vec<Want> {
        let (v, at) = (self.0.vocab, RuleWords { vocab: self.0.vocab });
        let rules = &h.ints("rules")[lane * at.words()..][..at.words()];
        let seen = &h.ints("seen")[lane * v.div_ceil(32)..][..v.div_ceil(32)];
        let logits = &h.get("logits")[o * v..][..v];
        let kind = self.0.kind(lane);
        let float = |i: usize| f64::from(f32::from_bits(rules[i]));
        let mut entries = vec![(0.0, false); v];
        let (listed, _) = rules[at.entries()..at.mask()].as_chunks::<ENTRY_WORDS>();
        for [id, bias, from] in &listed[..rules[RuleWords::ENTRIES] as usize] {
            entries[*id as usize] = (f64::from(f32::from_bits(*bias)), position < *from);
        }
        let bit = |words: &[u32], id: usize| words[id / 32] >> (id % 32) & 1 == 1;
        let want = |id: usize| {
            let mut x = f64::from(logits[id]);
            if !kind.ruled() {
                // The bits of a NaN are not compared.
                return if x.is_nan() { Want::Any } else { Want::Exact(x) };
            }
            let masked = kind.allowed.is_some() && !bit(&rules[at.mask()..], id);
            if x.is_nan() || masked || entries[id].1 {
                return Want::Exact(f64::NEG_INFINITY);
            }
            x += entries[id].0;
            if bit(seen, id) {
                let r = float(RuleWords::REPETITION);
                x = if x > 0.0 { x / r } else { x * r };
            }
            if kind.counted && rules[at.counts() + id] > 0 {
                let n = f64::from(rules[at.counts() + id]);
                x -= float(RuleWords::FREQUENCY) * n + float(RuleWords::PRESENCE);
            }
            if x.is_finite() { Want::Near(x) } else { Want::Exact(x) }
        };
        (0..v).map(want).collect()
    }
}

impl Spec for Rule {
    fn host(&self, _: &Dtypes, rng: &mut Rng) -> Host {
        let mut h = self.0.host(rng);
        let n = self.0.vocab.div_ceil(32);
        let seen = (0..self.0.count() * n).map(|_| rng.bits() as u32 & rng.bits() as u32).collect();
        h.int("seen", &[self.0.count(), n], seen);
        h.out("out", DType::F32, &[self.0.batch().bucket.outputs, self.0.vocab]);
        h
    }

    fn want(&self, h: &Host) -> Wants {
        let batch = self.0.batch();
        let tables = Tables::new(h.ints("ints"), batch.bucket);
        let rows = tables.outputs().into_iter().enumerate().map(|(o, output)| match output {
            Some((t, lane)) => self.adjusted(h, o, lane, tables.position(t) as u32 + 1),
            None => vec![Want::Keep; self.0.vocab],
        });
        vec![("out", rows.flatten().collect())]
    }

    fn op<Buf: Handle>(&self, b: &Bound<Buf>) -> Op<Buf> {
        Adjust { step: b.step(), logits: b.t("logits"), rules: b.t("rules"), seen: b.t("seen"), out: b.t("out") }.into()
    }
}

#[derive(Clone)]
pub(super) struct Report {
    lanes: Lanes,
    /// Every third output has no token.
    no_token: bool,
}

impl Report {
    /// The report of an output.
    fn report(&self, logits: &[f32], token: usize, top: u32) -> Vec<Want> {
        let mut wants = vec![Want::Keep; REPORT_WORDS];
        let Some(n) = top.checked_sub(1) else { return wants };
        let value = |x: &f32| if x.is_nan() { f64::NEG_INFINITY } else { f64::from(*x) };
        let x: Vec<f64> = logits.iter().map(value).collect();
        let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = x.iter().map(|x| (x - max).exp()).sum();
        let lp = |id: usize| x[id] - max - sum.ln();
        let mut best: Vec<usize> = (0..x.len()).filter(|&id| max.is_finite() && x[id].is_finite()).collect();
        // A stable sort: the lowest id first among equals.
        best.sort_by(|&a, &b| x[b].partial_cmp(&x[a]).expect("numbers"));
        wants[0] = match max.is_finite() && x[token].is_finite() {
            true => Want::Near(lp(token)),
            false => Want::Exact(f64::NEG_INFINITY),
        };
        for i in 0..n as usize {
            let pair = match best.get(i) {
                Some(&id) => [Want::Exact(id as f64), Want::Near(lp(id))],
                None => [Want::Exact(-1.0), Want::Exact(0.0)],
            };
            wants[1 + 2 * i..][..2].copy_from_slice(&pair);
        }
        wants
    }
}

impl Spec for Report {
    fn host(&self, _: &Dtypes, rng: &mut Rng) -> Host {
        let mut h = self.lanes.host(rng);
        let o = self.lanes.batch().bucket.outputs;
        let id = |i| match self.no_token && i % 3 == 1 {
            true => NONE,
            false => rng.below(self.lanes.vocab) as u32,
        };
        let ids: Vec<u32> = (0..self.lanes.lanes.len()).map(id).chain(std::iter::repeat(POISON)).take(o).collect();
        h.int("ids", &[o], ids);
        h.out("report", DType::F32, &[o, REPORT_WORDS]);
        h
    }

    fn want(&self, h: &Host) -> Wants {
        let (batch, v) = (self.lanes.batch(), self.lanes.vocab);
        let at = RuleWords { vocab: v };
        let mut rules = vec![Want::Keep; self.lanes.count() * at.words()];
        let mut report = Vec::new();
        for (o, output) in Tables::new(h.ints("ints"), batch.bucket).outputs().into_iter().enumerate() {
            let Some((_, lane)) = output.filter(|_| h.ints("ids")[o] != NONE) else {
                report.extend(vec![Want::Keep; REPORT_WORDS]);
                continue;
            };
            let (token, kind) = (h.ints("ids")[o] as usize, self.lanes.kind(lane));
            if kind.counted {
                let word = lane * at.words() + at.counts() + token;
                rules[word] = Want::Exact(f64::from(h.ints("rules")[word]) + 1.0);
            }
            report.extend(self.report(&h.get("logits")[o * v..][..v], token, kind.top));
        }
        vec![("rules", rules), ("report", report)]
    }

    fn op<Buf: Handle>(&self, b: &Bound<Buf>) -> Op<Buf> {
        let (rules, report) = (b.t("rules"), b.t("report"));
        Logprobs { step: b.step(), logits: b.t("logits"), ids: b.t("ids"), rules, report }.into()
    }
}

/// Vocabularies that are no multiple of anything, or larger than one workgroup's part.
const VOCABULARIES: [usize; 6] = [1, 33, 256, 1025, 8193, 100_352];

fn base() -> Lanes {
    Lanes { lanes: vec![2, 0, 5], padded: false, vocab: 1003, kinds: vec![PLAIN], step: 0.0, damage: b"." }
}

fn everything() -> Kind {
    Kind { allowed: Some(4), counted: true, entries: 40, penalty: 1.3, top: 1 + MOST_TOP as u32 }
}

pub(super) fn adjust(to: &mut Table) {
    let kinds = [
        ("no rules", PLAIN),
        ("a mask", Kind { allowed: Some(3), ..PLAIN }),
        ("a mask of all", Kind { allowed: Some(8), ..PLAIN }),
        ("a mask of nothing", Kind { allowed: Some(0), ..PLAIN }),
        ("one entry", Kind { entries: 1, ..PLAIN }),
        ("entries", Kind { entries: 300, ..PLAIN }),
        ("all entries", Kind { entries: MOST_ENTRIES, ..PLAIN }),
        ("counts", Kind { counted: true, ..PLAIN }),
        ("repetition penalty", Kind { penalty: 1.4, ..PLAIN }),
        ("repetition penalty below 1", Kind { penalty: 0.7, ..PLAIN }),
        ("everything", everything()),
    ];
    for (name, kind) in kinds {
        to.add(name, Rule(Lanes { kinds: vec![kind], ..base() }));
    }
    let each = Lanes { lanes: (0..kinds.len() as u32).rev().collect(), kinds: kinds.map(|k| k.1).to_vec(), ..base() };
    to.add("a rule per lane", Rule(each.clone()));
    to.add("a rule per lane, padding", Rule(Lanes { padded: true, ..each.clone() }));
    to.add("damaged logits", Rule(Lanes { damage: b"n-m+s", ..each.clone() }));
    let wide = Lanes { kinds: vec![everything(), PLAIN], ..base() };
    to.add("one output", Rule(Lanes { lanes: vec![0], ..wide.clone() }));
    to.add("33 outputs", Rule(Lanes { lanes: (0..33).collect(), ..wide.clone() }));
    for vocab in VOCABULARIES {
        to.add(&format!("vocabulary of {vocab}"), Rule(Lanes { vocab, ..wide.clone() }));
    }
    let large = Lanes { vocab: 151_936, lanes: (0..8).collect(), ..wide };
    to.sized(Size::Bench, "vocabulary of 151936, 8 outputs", Rule(large));
}

pub(super) fn logprobs(to: &mut Table) {
    let mut add = |name: &str, lanes: Lanes| to.add(name, Report { lanes, no_token: false });
    for n in [0, 1, 5, MOST_TOP as u32] {
        add(&format!("top {n}"), Lanes { kinds: vec![Kind { top: 1 + n, ..PLAIN }], ..base() });
    }
    let counts = Kind { counted: true, ..PLAIN };
    add("counts", Lanes { kinds: vec![counts], ..base() });
    let mixed = Lanes {
        lanes: (0..7).rev().collect(),
        kinds: vec![PLAIN, Kind { top: 6, ..PLAIN }, everything(), counts],
        ..base()
    };
    add("something else per lane", mixed.clone());
    add("padding", Lanes { padded: true, ..mixed.clone() });
    add("ties", Lanes { step: 2.0, ..mixed.clone() });
    add("all equal", Lanes { step: 100.0, ..mixed.clone() });
    add("damaged logits", Lanes { damage: b"ms+.", kinds: vec![everything()], ..mixed.clone() });
    for vocab in VOCABULARIES {
        let wide = Lanes { kinds: vec![everything(), Kind { top: 3, ..PLAIN }], ..base() };
        add(&format!("vocabulary of {vocab}"), Lanes { vocab, ..wide.clone() });
        add(&format!("vocabulary of {vocab}, ties"), Lanes { vocab, step: 1.0, ..wide });
    }
    to.add("outputs without a token", Report { lanes: mixed.clone(), no_token: true });
    let large = Lanes { vocab: 151_936, kinds: vec![Kind { top: 6, ..PLAIN }], lanes: (0..8).collect(), ..mixed };
    to.sized(Size::Bench, "vocabulary of 151936, 8 outputs", Report { lanes: large, no_token: false });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::near;

    #[test]
    fn a_report_at_known_points() {
        let report = Report { lanes: base(), no_token: false };
        let wants = report.report(&[0.0, 3f32.ln(), f32::NAN, 0.0], 0, 4);
        assert!((near(&wants[0]) - 0.2f64.ln()).abs() < 1e-7);
        assert_eq!([wants[1], wants[3], wants[5]], [1.0, 0.0, 3.0].map(Want::Exact));
        assert!((near(&wants[2]) - 0.6f64.ln()).abs() < 1e-7);
        assert_eq!(wants[7], Want::Keep);
        assert_eq!(report.report(&[0.0, 1.0], 0, 0), vec![Want::Keep; REPORT_WORDS]);
    }
}
