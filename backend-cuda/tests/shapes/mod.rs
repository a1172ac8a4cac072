//! Ops over handles that are only numbers, in the shapes of the supported models.

use std::collections::BTreeSet;

use selkie_core::{
    format::Format,
    ops::*,
    step::Bucket,
    tensor::{DType, Tensor},
};
use selkie_cuda::{
    launch::Work,
    plan::{Arena, Device, Hazards, Planned, Sequencer, fused, plan, scratch},
    spec::{File, Spec},
};

mod make;
mod sequences;

use make::*;
pub use sequences::*;

/// The shapes of a model's layers.
struct Shape {
    width: usize,
    /// q heads, kv heads, head dim.
    attention: Option<[usize; 3]>,
    /// Heads, P, N, groups.
    mamba2: Option<[usize; 4]>,
    /// Channels, N.
    mamba1: Option<[usize; 2]>,
    /// Key heads, value heads, dk, dv.
    delta: Option<[usize; 4]>,
    /// Heads, and columns of keys and values, of a delta rule with a decay per channel.
    channels: Option<[usize; 2]>,
    /// Heads, latent, shared key, own key.
    latent: Option<[usize; 4]>,
    /// Experts, top-k, inner width.
    moe: Option<[usize; 3]>,
    mlp: usize,
    vocab: usize,
}

impl Shape {
    /// Whether its kernels are compiled with every dtype: the base shape, Qwen3-Next with its other kernels, and the odd one.
    fn every_dtype(&self) -> bool {
        [BASE.width, 2048, 52].contains(&self.width)
    }

    fn weights(&self) -> &'static [DType] {
        if self.every_dtype() { &[DType::Bf16, DType::F16] } else { &[DType::Bf16] }
    }
}

const BASE: Shape = Shape {
    width: 4096,
    attention: Some([32, 8, 128]),
    mamba2: Some([128, 64, 128, 8]),
    mamba1: None,
    delta: None,
    channels: None,
    latent: None,
    moe: None,
    mlp: 21504,
    vocab: 131_072,
};

const OTHERS: &[Shape] = &[
    Shape {
        width: 2048,
        attention: Some([16, 2, 256]),
        mamba1: Some([8192, 16]),
        delta: Some([16, 32, 128, 128]),
        // Kimi-Linear's.
        channels: Some([32, 128]),
        latent: Some([32, 512, 64, 128]),
        moe: Some([512, 10, 512]),
        mamba2: None,
        mlp: 512,
        vocab: 151_936,
    },
    Shape {
        width: 2688,
        attention: Some([32, 2, 128]),
        mamba2: Some([64, 64, 128, 8]),
        moe: Some([128, 6, 1856]),
        mlp: 3712,
        ..BASE
    },
    Shape {
        width: 1536,
        attention: Some([12, 4, 128]),
        mamba2: Some([48, 64, 128, 1]),
        // So many choices of so few experts that their tiles are the largest.
        moe: Some([72, 10, 768]),
        mlp: 4096,
        vocab: 100_352,
        ..BASE
    },
    Shape {
        width: 768,
        attention: Some([12, 4, 64]),
        mamba2: Some([24, 32, 128, 1]),
        mlp: 2048,
        vocab: 100_352,
        ..BASE
    },
    Shape {
        width: 1024,
        attention: Some([8, 2, 80]),
        mamba2: Some([24, 64, 256, 1]),
        mlp: 2048,
        vocab: 32_784,
        ..BASE
    },
    // Falcon-H1-7B; Olmo-Hybrid-7B with a narrow Mamba-1; Bamba-9B's attention.
    Shape { width: 3072, attention: Some([12, 2, 128]), mamba2: Some([24, 128, 256, 1]), mlp: 12288, ..BASE },
    Shape {
        width: 3840,
        attention: Some([30, 30, 128]),
        mamba2: None,
        mamba1: Some([4096, 16]),
        delta: Some([30, 30, 96, 192]),
        mlp: 11008,
        vocab: 100_352,
        ..BASE
    },
    // Small and odd: every dimension only divisible by 4.
    Shape {
        width: 52,
        attention: Some([4, 2, 20]),
        mamba2: Some([4, 12, 20, 2]),
        mamba1: Some([100, 16]),
        delta: Some([2, 4, 12, 20]),
        channels: Some([3, 20]),
        latent: Some([5, 36, 12, 8]),
        moe: Some([12, 3, 36]),
        mlp: 68,
        vocab: 1000,
    },
];

/// Whether the planner takes attention of 4 heads of `hd`, 2 of them for keys.
pub fn takes_heads_of(hd: usize) -> bool {
    let mut maker = Maker::new(DType::Bf16, DType::F32, Bucket::holding(4, 4, 4, 4, 16), true);
    let mut found = Vec::new();
    attention(&mut maker, &mut found, [4, 2, hd], DType::Bf16);
    attention(&mut maker, &mut found, [4, 2, hd], DType::I8);
    let device = device("sm_80", 163 << 10, true);
    found.iter().all(|op| plan(op, &device, &ARENA, &FREE).is_ok())
}

/// A device with the multiprocessors of an H200.
fn device(arch: &str, shared: usize, tuned: bool) -> Device {
    let bulk_copies = !arch.starts_with("sm_8");
    let hopper = arch == "sm_90a";
    Device { sms: 132, shared, bulk_copies, wgmma: hopper, blas: true, eight: hopper, tuned, rank: 1, ranks: 2 }
}

const ARENA: Arena = Arena { scratch: 1 << 60, tickets: 1 << 50, areas: 1 << 40 };
const FREE: Hazards = Hazards { state_unwritten: true, inputs_complete: true };

/// The variants of all ops of these shapes for `arch`, on a device with `shared` bytes of shared memory a block. Unless `all`,
/// those of the base shape, and of Qwen3-Next (with a Mamba-1 of Jamba's size) the kernels that the base shape does not take: experts,
/// routing, delta rule, scan of channels.
pub fn specs(arch: &str, all: bool, shared: usize) -> BTreeSet<Spec> {
    let random = [DType::Bf16, DType::F32].map(|t| Spec::new(File::Fill).ty("out_t", t));
    let mut found = BTreeSet::from([Spec::new(File::Empty)]);
    found.extend(random);
    found.extend([0, 1].map(|save| Spec::new(File::CopyRows).int("SAVE", save)));
    // The numbers of all formats.
    found.extend((1..=15).map(|format| Spec::new(File::CodesArrange).int("FORMAT", format).int("UNITS", 16)));
    found.extend(specs_of(&BASE, arch, shared, all));
    let rest = if all { OTHERS } else { &OTHERS[..1] };
    for shape in rest {
        let taken: BTreeSet<File> = found.iter().map(Spec::file).collect();
        found.extend(specs_of(shape, arch, shared, all).into_iter().filter(|s| all || !taken.contains(&s.file())));
    }
    found
}

fn specs_of(shape: &Shape, arch: &str, shared: usize, every_format: bool) -> Vec<Spec> {
    let buckets = [
        Bucket::holding(1, 1, 1, 1, 64),
        Bucket::holding(4, 4, 4, 4, 16),
        Bucket::holding(64, 64, 64, 64, 64),
        Bucket::holding(256, 4, 8, 4, 4),
        Bucket::holding(2048, 1, 32, 1, 32),
    ];
    let mut found = Vec::new();
    // Other shapes differ in numbers of rounds from one of these, which has each kernel with every dtype.
    let dtypes = [(DType::Bf16, DType::F32), (DType::F32, DType::F32), (DType::Bf16, DType::Bf16)];
    let dtypes = if shape.every_dtype() { &dtypes[..] } else { &dtypes[..1] };
    for &(act, state) in dtypes {
        for (bucket, tuned) in buckets.iter().flat_map(|b| [(*b, true), (*b, false)]) {
            let mut maker = Maker::new(act, state, bucket, every_format);
            let device = device(arch, shared, tuned);
            for op in ops(shape, &mut maker) {
                op.check();
                let _ = scratch(&op, &device);
                for work in plan(&op, &device, &ARENA, &FREE).expect("a shape of a supported model") {
                    if let Work::Kernel(l) = work {
                        found.push(l.spec);
                    }
                }
            }
            for chain in chains(shape, &mut maker) {
                for work in fused(&chain, &device, &ARENA, &FREE).into_iter().flatten() {
                    if let Work::Kernel(l) = work {
                        found.push(l.spec);
                    }
                }
            }
        }
    }
    found
}

fn ops(s: &Shape, m: &mut Maker) -> Vec<Op<Fake>> {
    let step = m.step.clone();
    let Bucket { tokens: t, outputs: o, .. } = step.bucket;
    let d = s.width;
    let mut ops: Vec<Op<Fake>> = Vec::new();
    for &dtype in s.weights() {
        let table = m.weight(dtype, s.vocab, d);
        let last = m.of(DType::U32, &[64]);
        ops.push(Embed { step: step.clone(), last, table, out: m.act(&[t, d]), scale: 1.0 }.into());
        let w = m.weight(dtype, s.mlp, d);
        ops.push(matmul(m, t, w, false, false));
        let w = m.weight(dtype, d, s.mlp);
        ops.push(matmul(m, t, w, true, true));
        // The library's product takes columns and bias only if it does not accumulate.
        let w = m.weight(dtype, d, d);
        ops.push(matmul(m, t, w, false, true));
    }
    let (x, out) = (m.act(&[t, d]), m.act(&[o, d]));
    ops.push(Gather { step: step.clone(), x, out }.into());
    // Of two ranks.
    for accumulate in [true, false] {
        let (x, out) = (m.act(&[t, d]), m.act(&[t, d]));
        ops.push(AllReduce { x, out, accumulate }.into());
    }
    let (x, out) = (m.f32(&[o, s.vocab / 2]), m.f32(&[o, s.vocab / 2 * 2]));
    ops.push(AllGather { x, out }.into());
    for before in [None, Some(true), Some(false)] {
        let (x, out, weight) = (m.act(&[t, d]), m.act(&[t, d]), m.f32(&[d]));
        let gate = before.map(|before| Gate { z: m.act(&[t, d]), act: Act::Silu, before });
        let norm = RmsNorm { x, add: None, weight, gate, out, accumulate: false, eps: 1e-5, groups: 1 };
        ops.push(RankNorm { norm, ranks: 2 }.into());
    }
    let logits = Matmul {
        x: m.act(&[o, d]),
        w: m.weight(DType::Bf16, s.vocab, d),
        columns: None,
        bias: None,
        out: m.f32(&[o, s.vocab]),
        scale: 1.0,
        accumulate: false,
        precise: false,
    };
    ops.push(logits.into());
    let (logits, lanes) = (m.f32(&[o, s.vocab]), m.of(DType::U32, &[64, LANE_WORDS]));
    let (seen, last, ids) =
        (m.of(DType::U32, &[64, s.vocab.div_ceil(32)]), m.of(DType::U32, &[64]), m.of(DType::U32, &[o]));
    let (rules, out) = (m.of(DType::U32, &[64, RuleWords { vocab: s.vocab }.words()]), m.f32(&[o, s.vocab]));
    let adjust = Adjust { step: step.clone(), logits: logits.clone(), rules, seen: seen.clone(), out };
    let (rules, report) = (adjust.rules.clone(), m.f32(&[o, REPORT_WORDS]));
    ops.push(adjust.into());
    ops.push(Logprobs { step: step.clone(), logits: logits.clone(), ids: ids.clone(), rules, report }.into());
    ops.push(Sample { step: step.clone(), logits, lanes, seen, last, ids }.into());
    let add = Some((m.act(&[t, d]), 1.0));
    for add in [None, add] {
        let (x, weight, out) = (m.act(&[t, d]), m.f32(&[d]), m.act(&[t, d]));
        let accumulate = add.is_none();
        ops.push(RmsNorm { x, add, weight, gate: None, out, accumulate, eps: 1e-5, groups: 1 }.into());
    }
    for (act, gated) in [(Act::Silu, true), (Act::Relu2, false), (Act::Gelu, true)] {
        let both = m.act(&[t, 2 * s.mlp]);
        let up = gated.then(|| both.cols(s.mlp, s.mlp));
        let out = m.act(&[t, s.mlp]);
        ops.push(Activation { gate: both.cols(0, s.mlp), up, row_gate: None, out, act }.into());
    }
    let pages = m.act;
    if let Some(heads) = s.attention {
        attention(m, &mut ops, heads, pages);
    }
    if s.width == BASE.width {
        // Rows of an even and of an odd number of pieces, and without tensor cores.
        for heads in [[32, 8, 128], [8, 2, 80], [4, 2, 12]] {
            attention(m, &mut ops, heads, DType::I8);
        }
    }
    if let Some([h, p, n, g]) = s.mamba2 {
        let (di, c) = (h * p, h * p + 2 * g * n);
        let x = m.act(&[t, c]);
        conv(m, &mut ops, c);
        let (dt, par, pool, y) = (m.act(&[t, h]), m.f32(&[3, h]), m.state(&[9, h, p, n]), m.act(&[t, di]));
        ops.push(
            SelectiveScan {
                step: step.clone(),
                x: x.cols(0, di),
                b: x.cols(di, g * n),
                c: x.cols(di + g * n, g * n),
                dt,
                par,
                pool,
                y,
                form: ScanForm::PerHead,
                heads_per_group: h / g,
                first_head: 0,
                dt_limit: (0.0, f32::INFINITY),
            }
            .into(),
        );
        let (x, z, weight, out) = (m.act(&[t, di]), m.act(&[t, di]), m.f32(&[di]), m.act(&[t, di]));
        let gate = Some(Gate { z, act: Act::Silu, before: true });
        ops.push(RmsNorm { x, add: None, weight, gate, out, accumulate: false, eps: 1e-5, groups: g }.into());
    }
    if let Some([c, n]) = s.mamba1 {
        let (x, both, dt) = (m.act(&[t, c]), m.act(&[t, 2 * n]), m.act(&[t, c]));
        let (b, cc) = (both.cols(0, n), both.cols(n, n));
        let (par, pool, y) = (m.f32(&[n + 2, c]), m.state(&[9, c, 1, n]), m.act(&[t, c]));
        ops.push(
            SelectiveScan {
                step: step.clone(),
                x,
                b,
                c: cc,
                dt,
                par,
                pool,
                y,
                form: ScanForm::PerChannel,
                heads_per_group: c,
                first_head: 0,
                dt_limit: (0.0, f32::INFINITY),
            }
            .into(),
        );
    }
    if let Some([h, d]) = s.channels {
        let x = m.act(&[t, 3 * h * d]);
        let (q, k, v) = (x.cols(0, h * d), x.cols(h * d, h * d), x.cols(2 * h * d, h * d));
        let (a, b, par) = (m.act(&[t, h * d]), m.act(&[t, h]), m.f32(&[2, h * d]));
        let (pool, out) = (m.state(&[9, h, d, d]), m.act(&[t, h * d]));
        let step = step.clone();
        let (heads_per_key, first_head, beta_scale) = (1, 0, 1.0);
        ops.push(GatedDelta { step, q, k, v, a, b, par, pool, out, heads_per_key, first_head, beta_scale }.into());
    }
    if let Some(sizes) = s.latent {
        [pages, DType::I8].into_iter().for_each(|pages| latent(m, &mut ops, sizes, pages));
    }
    if let Some([hk, hv, dk, dv]) = s.delta {
        let c = 2 * hk * dk + hv * dv;
        conv(m, &mut ops, c);
        let x = m.act(&[t, c]);
        let (a, b, par) = (m.act(&[t, hv]), m.act(&[t, hv]), m.f32(&[2, hv]));
        let (pool, out) = (m.state(&[9, hv, dk, dv]), m.act(&[t, hv * dv]));
        ops.push(
            GatedDelta {
                step: step.clone(),
                q: x.cols(0, hk * dk),
                k: x.cols(hk * dk, hk * dk),
                v: x.cols(2 * hk * dk, hv * dv),
                a,
                b,
                par,
                pool,
                out,
                heads_per_key: hv / hk,
                first_head: 0,
                beta_scale: 1.0,
            }
            .into(),
        );
        let (x, z, weight, out) = (m.act(&[t, hv * dv]), m.act(&[t, hv * dv]), m.f32(&[dv]), m.act(&[t, hv * dv]));
        let gate = Some(Gate { z, act: Act::Silu, before: false });
        ops.push(RmsNorm { x, add: None, weight, gate, out, accumulate: false, eps: 1e-6, groups: hv }.into());
    }
    if let Some([e, k, inner]) = s.moe {
        moe(m, &mut ops, e, k, inner, d);
    }
    coded(s, m, &mut ops);
    ops
}

/// Formats of the weights of a shape whose rows are whole blocks: all where the base shape is computed in bf16 by the kernels for one
/// row, a few, tens of them and many, else one.
fn formats(s: &Shape, m: &Maker) -> Vec<Format> {
    let all = s.width == BASE.width && m.act == DType::Bf16 && m.state == DType::F32;
    let all = all && m.every_format && [1, 4, 64, 256].contains(&m.step.bucket.tokens);
    let whole = |f: &Format| f.block().is_some_and(|(n, _)| [s.width, s.mlp].iter().all(|k| k.is_multiple_of(n)));
    let formats = Format::CODED.into_iter().chain(Format::SCALED);
    formats.filter(|f| all || [Format::Q5_0, Format::Q4K].contains(f)).filter(whole).collect()
}

/// Products, embeddings and experts with coded weights.
fn coded(s: &Shape, m: &mut Maker, ops: &mut Vec<Op<Fake>>) {
    let (step, t, d) = (m.step.clone(), m.step.bucket.tokens, s.width);
    if d.is_multiple_of(128) {
        ops.push(Round { x: m.act(&[t, d]), out: m.act(&[t, d]) }.into());
    }
    for format in formats(s, m) {
        let (table, last) = (m.codes(format, s.vocab, d), m.of(DType::U32, &[64]));
        ops.push(Embed { step: step.clone(), last, table, out: m.act(&[t, d]), scale: 1.0 }.into());
        let w = m.codes(format, s.mlp, d);
        ops.push(matmul(m, t, w, false, false));
        let w = m.codes(format, d, s.mlp);
        ops.push(matmul(m, t, w, true, true));
        // Of the base shape, which has none, experts as wide as it is.
        let [e, k, inner] = s.moe.unwrap_or([16, 4, 1024]);
        let ids = m.of(DType::U32, &[t, k]);
        let mut up = experts(m, e, inner, d, &ids);
        up.experts[0].blocks[0] =
            RowBlock { w: m.of(DType::U8, &[e, inner, format.bytes(d, 1)]), format, col: 0, squares: false };
        ops.push(up.into());
    }
}

/// Ops that follow one another in a layer and may become one kernel.
fn chains(s: &Shape, m: &mut Maker) -> Vec<Vec<Op<Fake>>> {
    let (step, t, d) = (m.step.clone(), m.step.bucket.tokens, s.width);
    let product = |m: &mut Maker, x: &Tensor<Fake>, n: usize, accumulate: bool| {
        let (w, out) = (m.weight(DType::Bf16, n, x.row_len()), m.act(&[t, n]));
        Matmul { x: x.clone(), w, columns: None, bias: None, out, scale: 1.0, accumulate, precise: false }
    };
    let norm = |m: &mut Maker, width: usize, groups: usize, gated: bool| {
        let (x, out, weight) = (m.act(&[t, width]), m.act(&[t, width]), m.f32(&[width]));
        let gate = gated.then(|| Gate { z: m.act(&[t, width]), act: Act::Silu, before: true });
        RmsNorm { x, add: None, weight, gate, out, accumulate: false, eps: 1e-5, groups }
    };
    let mut chains: Vec<Vec<Op<Fake>>> = Vec::new();
    for (act, gated) in [(Act::Silu, true), (Act::Relu2, false)] {
        let (gate, out) = (m.act(&[t, s.mlp]), m.act(&[t, s.mlp]));
        let up = gated.then(|| m.act(&[t, s.mlp]));
        let down = product(m, &out, d, true);
        chains.push(vec![Activation { gate, up, row_gate: None, out, act }.into(), down.into()]);
        let (both, out) = (m.act(&[t, 2 * s.mlp + 8]), m.act(&[t, s.mlp]));
        let (gate, up) = (both.cols(0, s.mlp), Some(both.cols(s.mlp, s.mlp)));
        let down = product(m, &out, d, true);
        let row_gate = Some(both.cols(2 * s.mlp, 1));
        chains.push(vec![Activation { gate, up, row_gate, out, act }.into(), down.into()]);
    }
    // A router and a shared expert; two projections of narrow inputs.
    let first = norm(m, d, 1, false);
    let (mut router, up) = (product(m, &first.out, 64, false), product(m, &first.out, 512, false));
    router.out = m.f32(&[t, 64]);
    chains.push(vec![first.into(), router.into(), up.into()]);
    let narrow = m.act(&[t, 256]);
    let [f, g] = [0, 128].map(|col| product(m, &narrow.cols(col, 128), d, false));
    chains.push(vec![f.into(), g.into()]);
    if let Some([h, p, n, g]) = s.mamba2 {
        let (di, c) = (h * p, h * p + 2 * g * n);
        let first = norm(m, d, 1, false);
        let input = product(m, &first.out, di + c + h, false);
        let (weight, pool, out) = (m.f32(&[c, 5]), m.act(&[9, c, 3]), m.act(&[t, c]));
        let conv = Conv1d { step: step.clone(), x: input.out.cols(di, c), weight, pool, out, act: Act::Silu };
        chains.push(vec![first.into(), input.into(), conv.into()]);
        let gated = norm(m, di, g, true);
        let output = product(m, &gated.out, d, true);
        chains.push(vec![gated.into(), output.into()]);
    }
    if formats(s, m).contains(&Format::Q4K) {
        for accumulate in [false, true] {
            let first = norm(m, d, 1, false);
            let (w, out) = (m.codes(Format::Q4K, s.mlp, d), m.act(&[t, s.mlp]));
            let x = first.out.clone();
            let product = Matmul { x, w, columns: None, bias: None, out, scale: 1.0, accumulate, precise: false };
            chains.push(vec![first.into(), product.into()]);
        }
        let (gate, out) = (m.act(&[t, s.mlp]), m.act(&[t, s.mlp]));
        let (w, to) = (m.codes(Format::Q4K, d, s.mlp), m.act(&[t, d]));
        let product = Matmul {
            x: out.clone(),
            w,
            columns: None,
            bias: None,
            out: to,
            scale: 1.0,
            accumulate: true,
            precise: false,
        };
        chains.push(vec![Activation { gate, up: None, row_gate: None, out, act: Act::Relu2 }.into(), product.into()]);
    }
    if formats(s, m).contains(&Format::Q4K) {
        let eight = |m: &mut Maker, x: &Tensor<Fake>, n: usize, accumulate: bool| {
            let (mut w, rounded, out) = (m.codes(Format::F8, n, x.row_len()), m.act(x.dims()), m.act(&[t, n]));
            w.blocks[0].squares = true;
            let round = Round { x: x.clone(), out: rounded.clone() };
            let product =
                Matmul { x: rounded, w, columns: None, bias: None, out, scale: 1.0, accumulate, precise: false };
            [round.into(), product.into()]
        };
        let first = norm(m, d, 1, false);
        let [round, product] = eight(m, &first.out, s.mlp, false);
        chains.push(vec![first.into(), round, product]);
        let (gate, out) = (m.act(&[t, s.mlp]), m.act(&[t, s.mlp]));
        let [round, product] = eight(m, &out, d, true);
        chains.push(vec![Activation { gate, up: None, row_gate: None, out, act: Act::Relu2 }.into(), round, product]);
        let x = m.act(&[t, d]);
        chains.push(eight(m, &x, s.mlp, false).into());
    }
    if let Some([e, k, inner]) = s.moe {
        let (rows, ids) = (t * k, m.of(DType::U32, &[t, k]));
        for (act, gated) in [(Act::Silu, true), (Act::Relu2, false)] {
            let first = experts(m, e, if gated { 2 * inner } else { inner }, d, &ids);
            let (gate, out) = (first.out.cols(0, inner), m.act(&[rows, inner]));
            let up = gated.then(|| first.out.cols(inner, inner));
            let then = Activation { gate, up, row_gate: None, out, act };
            chains.push(vec![first.clone().into(), then.clone().into()]);
            let weights = m.f32(&[t, k]);
            let w = RowBlock::plain(m.of(DType::Bf16, &[e, d, inner]), 0);
            let (x, range) = (then.out.clone(), vec![ExpertRange { first: 0, experts: e, blocks: vec![w] }]);
            let (combine, out) = (Some(weights.clone()), m.act(&[t, d]));
            let down = ExpertMatmul { x, experts: range, ids: ids.clone(), combine, out, scale: 1.0, accumulate: true };
            if d.is_multiple_of(128) && inner.is_multiple_of(128) {
                // The same in codes, with rounded inputs.
                let (mut up, mut down) = (first.clone(), down.clone());
                up.experts[0].blocks[0] = eights(m, e, up.out.row_len(), d);
                down.experts[0].blocks[0] = eights(m, e, d, inner);
                let before = [up.x.clone(), down.x.clone()];
                up.x = m.act(before[0].dims());
                down.x = m.act(before[1].dims());
                let [first, second] = [(&before[0], &up.x), (&before[1], &down.x)]
                    .map(|(x, out)| Op::from(Round { x: x.clone(), out: out.clone() }));
                let logits = m.f32(&[t, e]);
                let route = Route {
                    step: step.clone(),
                    logits,
                    bias: None,
                    ids: ids.clone(),
                    weights: weights.clone(),
                    router: Router::SoftmaxTopK { renorm: true },
                };
                chains.push(vec![
                    route.into(),
                    first.clone(),
                    up.clone().into(),
                    then.clone().into(),
                    second,
                    down.into(),
                ]);
                chains.push(vec![first, up.into()]);
            }
            for router in [
                Router::SoftmaxTopK { renorm: true },
                Router::Sigmoid { groups: 1, topk_group: 1, renorm: true, sum_eps: 1e-6, scale: 1.0 },
            ] {
                let bias = matches!(router, Router::Sigmoid { .. }).then(|| m.f32(&[e]));
                let (step, ids, weights, logits) = (step.clone(), ids.clone(), weights.clone(), m.f32(&[t, e]));
                let route = Route { step, logits, bias, ids, weights, router };
                let (first, then, down) = (first.clone(), then.clone(), down.clone());
                chains.push(vec![route.into(), first.into(), then.into(), down.into()]);
            }
        }
    }
    if s.mamba2.is_some() {
        // LFM2's gated convolution.
        let (both, mid, out) = (m.act(&[t, 2 * d]), m.act(&[t, d]), m.act(&[t, d]));
        let (gate, up, weight, pool) = (both.cols(0, d), Some(both.cols(d, d)), m.f32(&[d, 4]), m.act(&[9, d, 2]));
        let product = Activation { gate, up, row_gate: None, out: mid.clone(), act: Act::Identity };
        let conv = Conv1d { step, x: mid, weight, pool, out, act: Act::Identity };
        chains.push(vec![product.into(), conv.into()]);
    }
    chains
}
