//! The op cases: for every op a base case and rows that change one thing each, with an f64 reference written from the
//! formulas. One table serves the tests of every backend, `bench ops` and a run in the browser.
//!
//! [`all`] is the table, [`run`] runs a case on a backend and compares everything that the contract fixes: outputs,
//! final and captured states, and that nothing else changed.

mod activation;
mod attention;
mod batch;
mod chain;
mod codes;
mod conv1d;
mod embed;
mod expert_chain;
mod expert_matmul;
mod gated_delta;
mod host;
mod latent;
mod matmul;
mod ranks;
mod rms_norm;
mod rope_kv;
mod round;
mod rounded;
mod route;
mod rules;
mod run;
mod sample;
mod selective_scan;
#[cfg(not(target_arch = "wasm32"))]
pub mod timed;

pub use chain::{Chain, chains};
pub use expert_chain::{ExpertChain, expert_chains};
pub use host::Dtypes;
pub use rounded::{Rounded, rounded};
pub use run::{CaseReport, Check, Loaded, run};
#[cfg(not(target_arch = "wasm32"))]
pub use run::{OpReport, run_all};

use host::{Bound, Host, Rng, Wants};
use selkie_core::backend::{Handle, Int8};
use selkie_core::format::Format;
use selkie_core::ops::{Act, Feature, Op};

/// How much work a case is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Size {
    /// For any device, software GPUs included.
    Small,
    /// Some seconds on a software GPU.
    Large,
    /// A shape of a published model, for benches and real GPUs.
    Bench,
}

/// One op with arguments that depend on the case's name and the device's dtypes only.
pub struct Case {
    /// Stem of the op.
    pub op: &'static str,
    /// The property that the case is for.
    pub name: String,
    /// How much work it is.
    pub size: Size,
    /// Of the weight, if there is one.
    pub format: Format,
    spec: AnySpec,
}

impl Case {
    /// `op/name`, unique in the table.
    pub fn id(&self) -> String {
        format!("{}/{}", self.op, self.name)
    }

    /// What a backend needs to run it, if not every backend has that.
    pub fn feature(&self) -> Option<Feature> {
        self.plain_op().feature()
    }

    /// The op over handles without memory: for everything that depends on shapes only, with f32 activations and states.
    pub fn plain_op(&self) -> Op<Plain> {
        let d = selkie_core::tensor::DType::F32;
        let dtypes = Dtypes { act: d, products: d, int8: Int8::Never, kv: d, conv: d, state: d, ranks: 1 };
        let host = self.spec.host(&dtypes, &mut Rng::blank(&self.id()));
        let handle = |(id, bytes): (usize, usize)| Some(Plain { id, bytes: bytes as u64 });
        let bufs = host.sizes().into_iter().enumerate().map(handle).collect();
        self.spec.op(&Bound { host: &host, bufs })
    }
}

/// A buffer of which only the size matters.
#[derive(Clone, Debug)]
pub struct Plain {
    id: usize,
    bytes: u64,
}

impl Handle for Plain {
    fn id(&self) -> usize {
        self.id
    }
    fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// The whole table.
pub fn all() -> Vec<Case> {
    let mut t = Table { op: "", cases: vec![] };
    type Fill = fn(&mut Table);
    let ops: [(&'static str, Fill); 22] = [
        ("embed", embed::cases),
        ("gather", embed::gather),
        ("rms_norm", rms_norm::cases),
        ("matmul", matmul::cases),
        ("activation", activation::cases),
        ("rope_kv", rope_kv::cases),
        ("attention", attention::cases),
        ("conv1d", conv1d::cases),
        ("selective_scan", selective_scan::cases),
        ("gated_delta", gated_delta::cases),
        ("head_matmul", latent::head_matmul),
        ("latent_kv", latent::latent_kv),
        ("latent_attention", latent::latent_attention),
        ("route", route::cases),
        ("expert_matmul", expert_matmul::cases),
        ("sample", sample::cases),
        ("adjust", rules::adjust),
        ("logprobs", rules::logprobs),
        ("all_reduce", ranks::all_reduce),
        ("all_gather", ranks::all_gather),
        ("rank_norm", ranks::rank_norm),
        ("round", round::cases),
    ];
    for (op, cases) in ops {
        t.op = op;
        cases(&mut t);
    }
    t.cases
}

/// A case's arguments, its reference and its op.
trait Spec {
    /// The arguments.
    fn host(&self, d: &Dtypes, rng: &mut Rng) -> Host;
    /// The result by the formulas, in f64.
    fn want(&self, h: &Host) -> Wants;
    /// The op over a device's buffers.
    fn op<Buf: Handle>(&self, b: &Bound<Buf>) -> Op<Buf>;
    /// Format of the weight, if there is one.
    fn format(&self) -> Format {
        Format::Plain
    }
}

macro_rules! specs {
    ($($name:ident $path:path),* $(,)?) => {
        enum AnySpec {
            $($name($path),)*
        }

        $(impl From<$path> for AnySpec {
            fn from(s: $path) -> Self {
                Self::$name(s)
            }
        })*

        impl Spec for AnySpec {
            fn host(&self, d: &Dtypes, rng: &mut Rng) -> Host {
                match self { $(Self::$name(s) => s.host(d, rng),)* }
            }
            fn want(&self, h: &Host) -> Wants {
                match self { $(Self::$name(s) => s.want(h),)* }
            }
            fn op<Buf: Handle>(&self, b: &Bound<Buf>) -> Op<Buf> {
                match self { $(Self::$name(s) => s.op(b),)* }
            }
            fn format(&self) -> Format {
                match self { $(Self::$name(s) => s.format(),)* }
            }
        }
    };
}

specs! {
    Embed embed::Lookup,
    Gather embed::Pick,
    RmsNorm rms_norm::Norm,
    Matmul matmul::Product,
    Activation activation::Glu,
    RopeKv rope_kv::Rope,
    Attention attention::Attn,
    Conv1d conv1d::Conv,
    SelectiveScan selective_scan::Scan,
    GatedDelta gated_delta::Delta,
    HeadMatmul latent::PerHead,
    LatentKv latent::Store,
    LatentAttention latent::Latent,
    Route route::Routing,
    ExpertMatmul expert_matmul::Experts,
    Sample sample::Draw,
    Adjust rules::Rule,
    Logprobs rules::Report,
    AllReduce ranks::Sum,
    AllGather ranks::Columns,
    RankNorm ranks::Norm,
    Round round::Eight,
}

/// The table while it is being filled.
struct Table {
    op: &'static str,
    cases: Vec<Case>,
}

impl Table {
    fn add(&mut self, name: &str, spec: impl Into<AnySpec>) {
        self.sized(Size::Small, name, spec);
    }

    fn sized(&mut self, size: Size, name: &str, spec: impl Into<AnySpec>) {
        let spec = spec.into();
        self.cases.push(Case { op: self.op, name: name.into(), size, format: spec.format(), spec });
    }
}

/// How fast a recurrence forgets.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Decay {
    Usual,
    /// A few tokens.
    Strong,
    /// Thousands of tokens.
    Weak,
    /// exp(dt A) is 0 in f32.
    Underflow,
    /// exp(dt A) is 1 in f32.
    One,
    /// Some heads of each.
    Any,
    /// Weak, except for an occasional token that clears the state.
    Resets,
}

impl Decay {
    const ALL: [(&'static str, Self); 6] = [
        ("strong decay", Self::Strong),
        ("weak decay", Self::Weak),
        ("decay to zero at once", Self::Underflow),
        ("no decay", Self::One),
        ("every decay", Self::Any),
        ("resets", Self::Resets),
    ];

    /// Ranges of A and of dt's bias.
    fn ranges(self) -> ((f32, f32), (f32, f32)) {
        match self {
            Self::Usual => ((-2.0, -0.2), (-3.0, 0.0)),
            Self::Strong => ((-16.0, -4.0), (0.0, 2.0)),
            Self::Weak => ((-0.02, -0.001), (-6.0, -4.0)),
            Self::Underflow => ((-80.0, -40.0), (4.0, 25.0)),
            Self::One => ((-2.0, -0.2), (-40.0, -30.0)),
            Self::Any => ((-20.0, -0.001), (-6.0, 6.0)),
            Self::Resets => ((-80.0, -40.0), (-8.0, -6.0)),
        }
    }

    /// Raw time steps `[T, H]` with those of resets.
    fn steps(self, mut raw: Vec<f32>, heads: usize) -> Vec<f32> {
        if self == Self::Resets {
            raw.chunks_mut(heads).skip(5).step_by(13).flatten().for_each(|dt| *dt += 30.0);
        }
        raw
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// The error function by its series of positive terms.
fn erf(x: f64) -> f64 {
    if x.abs() > 6.0 {
        return x.signum();
    }
    let (mut term, mut sum, mut n) = (x, x, 1.0);
    while term.abs() > sum.abs() * 1e-17 {
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
        n += 1.0;
    }
    2.0 / std::f64::consts::PI.sqrt() * (-x * x).exp() * sum
}

fn act(f: Act, x: f64) -> f64 {
    match f {
        Act::Identity => x,
        Act::Silu => silu(x),
        Act::Sigmoid => sigmoid(x),
        Act::Relu2 => x.max(0.0).powi(2),
        Act::Gelu => x * 0.5 * (1.0 + erf(x / 2f64.sqrt())),
    }
}

/// Σ a b in f64; several partial sums, since one would be limited by latency.
fn dot(a: &[f32], b: &[f32]) -> f64 {
    let mut sums = [0.0; 8];
    let (mut ca, mut cb) = (a.chunks_exact(8), b.chunks_exact(8));
    for (a, b) in (&mut ca).zip(&mut cb) {
        for i in 0..8 {
            sums[i] += f64::from(a[i]) * f64::from(b[i]);
        }
    }
    let tail: f64 = ca.remainder().iter().zip(cb.remainder()).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
    sums.iter().sum::<f64>() + tail
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::host::Want;
    use super::*;
    use selkie_core::tensor::DType;

    pub(super) const F32: Dtypes = Dtypes {
        act: DType::F32,
        products: DType::F32,
        int8: Int8::Never,
        kv: DType::F32,
        conv: DType::F32,
        state: DType::F32,
        ranks: 1,
    };

    pub(super) fn near(w: &Want) -> f64 {
        match w {
            Want::Near(v) => *v,
            _ => panic!("{w:?} is no number"),
        }
    }

    #[track_caller]
    pub(super) fn assert_close(a: f64, b: f64) {
        assert!((a - b).abs() <= 1e-9 * (1.0 + a.abs()), "{a} is not {b}");
    }

    #[test]
    fn functions_at_known_points() {
        assert_close(erf(0.5), 0.520_499_877_813_046_5);
        assert_close(erf(-2.5), -0.999_593_047_982_555);
        assert_close(act(Act::Gelu, 1.0), 0.841_344_746_068_542_9);
        assert_close(act(Act::Relu2, -3.0) + act(Act::Relu2, 3.0), 9.0);
        assert_close(softplus(0.0), 2f64.ln());
        assert_close(softplus(-40.0), 0.0);
        assert_close(softplus(30.0), 30.0);
        assert_close(silu(2.0), 2.0 / (1.0 + (-2f64).exp()));
        assert_close(dot(&[1.0; 19], &[2.0; 19]), 38.0);
    }

    #[test]
    fn every_op_of_the_table_passes_its_check() {
        let mut ids = HashSet::new();
        for case in all().into_iter().filter(|c| c.size != Size::Bench) {
            let op = case.plain_op();
            assert_eq!(op.name(), case.op);
            op.check();
            assert!(ids.insert(case.id()), "{} is there twice", case.id());
        }
    }
}
