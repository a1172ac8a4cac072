//! Cases of `embed` and `gather`.

use super::batch::{Batch, Tables, cut, row};
use super::host::{Bound, Dtypes, Host, Rng, Want, Wants};
use super::{Size, Spec, Table};
use selkie_core::backend::Handle;
use selkie_core::format::Format;
use selkie_core::ops::{Embed, Gather, Op, Weight};
use selkie_core::step::{FROM_DEVICE, NONE, TokenRef};
use selkie_core::tensor::DType;

#[derive(Clone)]
pub(super) struct Lookup {
    tokens: usize,
    padded: bool,
    vocab: usize,
    d: usize,
    dtype: DType,
    /// Of the table; other than plain, whatever the dtype.
    format: Format,
    /// First ids of the row blocks, in the order of the list.
    blocks: Vec<usize>,
    /// Every other token takes the token that a lane sampled.
    from_device: bool,
    /// Every other lane sampled no token.
    no_token: bool,
    scale: f32,
    views: bool,
}

const LANES: usize = 5;

impl Lookup {
    fn batch(&self) -> Batch {
        let mut r = cut(3, self.tokens as u32, 0, &[]);
        for (i, id) in r.tokens.iter_mut().enumerate() {
            *id = if self.from_device && i % 2 == 0 {
                TokenRef::FromDevice((i * 3 % LANES) as u32)
            } else {
                TokenRef::Known(((i * 7919 + 13) % self.vocab) as u32)
            };
        }
        // The ends of the vocabulary and of each block.
        let edges = self.blocks.iter().flat_map(|&b| [b, b.wrapping_sub(1)]).filter(|&b| b < self.vocab);
        for (id, edge) in r.tokens.iter_mut().skip(1).zip(edges.chain([self.vocab - 1])) {
            *id = TokenRef::Known(edge as u32);
        }
        let batch = Batch::new(vec![r]);
        if self.padded { batch.padded() } else { batch }
    }

    /// `(first id, ids)` of each block, in the order of the list.
    fn ranges(&self) -> Vec<(usize, usize)> {
        let end = |b: usize| self.blocks.iter().copied().filter(|&c| c > b).min().unwrap_or(self.vocab);
        self.blocks.iter().map(|&b| (b, end(b) - b)).collect()
    }
}

impl Spec for Lookup {
    fn host(&self, d: &Dtypes, rng: &mut Rng) -> Host {
        let (mut h, batch) = (Host::default(), self.batch());
        h.step(&batch);
        let last = |lane| if self.no_token && lane % 2 == 1 { NONE } else { rng.below(self.vocab) as u32 };
        h.int("last", &[LANES], (0..LANES).map(last).collect());
        for (i, (_, n)) in self.ranges().into_iter().enumerate() {
            h.weight(&format!("w{i}"), (self.dtype, self.format), &[n, self.d], 1.0, rng);
        }
        h.out("out", d.act, &[batch.bucket.tokens, self.d]);
        if self.views {
            h.spread("out", 8, 4);
        }
        h
    }

    fn want(&self, h: &Host) -> Wants {
        let batch = self.batch();
        let tables = Tables::new(h.ints("ints"), batch.bucket);
        let mut out = vec![];
        for t in 0..batch.bucket.tokens {
            if tables.row(t).is_none() {
                out.extend(vec![Want::Keep; self.d]);
                continue;
            }
            let id = tables.id(t);
            let id = if id & FROM_DEVICE != 0 { h.ints("last")[(id & !FROM_DEVICE) as usize] } else { id };
            if id == NONE {
                out.extend(vec![Want::Keep; self.d]);
                continue;
            }
            let id = id as usize;
            let ranges = self.ranges();
            let i = ranges.iter().position(|&(b, n)| (b..b + n).contains(&id)).expect("a block per id");
            let row = &h.get(&format!("w{i}"))[(id - ranges[i].0) * self.d..][..self.d];
            out.extend(row.iter().map(|&x| Want::Near(f64::from(self.scale) * f64::from(x))));
        }
        vec![("out", out)]
    }

    fn format(&self) -> Format {
        self.format
    }

    fn op<Buf: Handle>(&self, b: &Bound<Buf>) -> Op<Buf> {
        let block = |(i, &col)| b.block(&format!("w{i}"), col);
        let blocks = self.blocks.iter().enumerate().map(block).collect();
        Embed {
            step: b.step(),
            last: b.t("last"),
            table: Weight { blocks, n: self.vocab, k: self.d },
            out: b.t("out"),
            scale: self.scale,
        }
        .into()
    }
}

#[derive(Clone)]
pub(super) struct Pick {
    batch: Batch,
    d: usize,
    views: bool,
}

impl Spec for Pick {
    fn host(&self, d: &Dtypes, rng: &mut Rng) -> Host {
        let mut h = Host::default();
        h.step(&self.batch);
        h.float("x", d.act, &[self.batch.bucket.tokens, self.d], rng.tokens(&self.batch, self.d, 1.0));
        h.out("out", d.act, &[self.batch.bucket.outputs, self.d]);
        if self.views {
            h.spread("x", 4, 8);
            h.spread("out", 8, 4);
        }
        h
    }

    fn want(&self, h: &Host) -> Wants {
        let outputs = Tables::new(h.ints("ints"), self.batch.bucket).outputs();
        let row = |o: Option<(usize, usize)>| match o {
            Some((t, _)) => h.get("x")[t * self.d..][..self.d].iter().map(|&x| Want::Exact(x.into())).collect(),
            None => vec![Want::Exact(0.0); self.d],
        };
        vec![("out", outputs.into_iter().flat_map(row).collect())]
    }

    fn op<Buf: Handle>(&self, b: &Bound<Buf>) -> Op<Buf> {
        Gather { step: b.step(), x: b.t("x"), out: b.t("out") }.into()
    }
}

pub(super) fn cases(to: &mut Table) {
    let base = Lookup {
        tokens: 9,
        padded: false,
        vocab: 131,
        d: 64,
        dtype: DType::Bf16,
        format: Format::Plain,
        blocks: vec![0],
        from_device: false,
        no_token: false,
        scale: 1.0,
        views: false,
    };
    to.add("base", base.clone());
    to.add("one token", Lookup { tokens: 1, ..base.clone() });
    to.add("300 tokens", Lookup { tokens: 300, ..base.clone() });
    to.add("padding", Lookup { padded: true, ..base.clone() });
    to.add("f32 table", Lookup { dtype: DType::F32, ..base.clone() });
    to.add("f16 table", Lookup { dtype: DType::F16, ..base.clone() });
    for format in Format::CODED.into_iter().chain(Format::SCALED) {
        let coded = Lookup { format, d: 256, scale: 3.0, blocks: vec![70, 0], ..base.clone() };
        to.add(&format!("{} table", format.name()), coded);
    }
    to.add("width 4", Lookup { d: 4, ..base.clone() });
    to.add("width 1028", Lookup { d: 1028, ..base.clone() });
    to.add("row blocks", Lookup { blocks: vec![0, 50, 100], ..base.clone() });
    to.add("row blocks out of order", Lookup { blocks: vec![70, 0], ..base.clone() });
    to.add("ids from the device", Lookup { from_device: true, tokens: 33, ..base.clone() });
    to.add("ids from the device, padding", Lookup { from_device: true, padded: true, ..base.clone() });
    let no_token = Lookup { from_device: true, no_token: true, tokens: 33, ..base.clone() };
    to.add("lanes without a token", no_token.clone());
    to.add("lanes without a token, row blocks", Lookup { blocks: vec![0, 50, 100], ..no_token });
    to.add("scale", Lookup { scale: 5.656_854, ..base.clone() });
    to.add("columns of a wider matrix", Lookup { views: true, ..base.clone() });
    to.sized(Size::Bench, "512 x 4096", Lookup { tokens: 512, vocab: 4099, d: 4096, ..base });
}

pub(super) fn gather(to: &mut Table) {
    let wanted = |mut r: selkie_core::step::Row, outputs: &[u32], lane: u32| {
        r.outputs = outputs.to_vec();
        r.lane = lane;
        r
    };
    let rows = vec![
        wanted(row(5, &[(1, 1, 1)]), &[0], 4),
        wanted(cut(61, 5, 0, &[]), &[0, 1, 2, 3, 4], 0),
        cut(0, 70, 0, &[]),
        wanted(cut(0, 30, 0, &[]), &[29], 2),
    ];
    let base = Pick { batch: Batch::new(rows.clone()), d: 64, views: false };
    to.add("base", base.clone());
    to.add("padding", Pick { batch: Batch::new(rows).padded(), ..base.clone() });
    to.add("no output", Pick { batch: Batch::new(vec![cut(0, 30, 0, &[])]), ..base.clone() });
    let all: Vec<u32> = (0..100).collect();
    to.add("every token", Pick { batch: Batch::new(vec![wanted(cut(0, 100, 0, &[]), &all, 0)]), ..base.clone() });
    to.add("width 4", Pick { d: 4, ..base.clone() });
    to.add("width 2052", Pick { d: 2052, ..base.clone() });
    to.add("columns of wider matrices", Pick { views: true, ..base });
}
