//! The mixers that layers are made of: what each keeps, which tensors it loads, and its sequence of ops.
//!
//! A mixer reads the normed stream `u` and adds its output, times a factor, to the residual stream `x`. Its plan is plain
//! data that a family fills from the configuration; loading turns the plan into device tensors.

pub mod attention;
pub mod gated_delta;
pub mod mamba2;
pub mod mlp;
pub mod moe;

use crate::{
    Result,
    backend::{Backend, Handle, Ops},
    layer::{LayerPools, LayerState},
    ops::{Matmul, Op},
    step::Step,
    tensor::{DType, Tensor},
    weights::{Linear, Loader},
};

/// Activation buffers that all layers share. A step's ops run in order, so a buffer is free again when its mixer is done;
/// they differ only so that no op reads and writes one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scratch {
    /// The normed stream.
    Norm,
    /// The input projection of a mixer.
    Proj,
    /// What the second op of a mixer makes: convolved, rotated or activated values.
    Mid,
    /// The result of attention or of a scan.
    Out,
    /// That result after its gate or norm.
    Gated,
    /// Router logits, f32.
    Router,
    /// Chosen experts, u32.
    Experts,
    /// Their weights, f32.
    Weights,
}

const SCRATCH: [(Scratch, &str); 8] = [
    (Scratch::Norm, "normed activations"),
    (Scratch::Proj, "projected activations"),
    (Scratch::Mid, "intermediate activations"),
    (Scratch::Out, "mixer outputs"),
    (Scratch::Gated, "gated outputs"),
    (Scratch::Router, "router logits"),
    (Scratch::Experts, "chosen experts"),
    (Scratch::Weights, "expert weights"),
];

/// The widest use of every scratch buffer, in elements per token.
#[derive(Clone, Debug, Default)]
pub struct Widths([usize; SCRATCH.len()]);

impl Widths {
    /// Asks for `width` elements per token.
    pub fn want(&mut self, which: Scratch, width: usize) {
        let w = &mut self.0[which as usize];
        *w = width.max(*w);
    }
}

/// The scratch buffers of a model.
#[derive(Clone, Debug)]
pub struct Workspace<Buf>(Vec<Tensor<Buf>>);

impl<Buf: Handle> Workspace<Buf> {
    /// Buffers for `tokens` tokens; activations have the backend's activation dtype.
    ///
    /// # Errors
    /// Those of [`Backend::alloc`].
    pub fn alloc<B: Backend<Buf = Buf>>(backend: &B, widths: &Widths, tokens: usize) -> Result<Self> {
        let one = |&(which, label): &(Scratch, &str)| {
            let dtype = match which {
                Scratch::Router | Scratch::Weights => DType::F32,
                Scratch::Experts => DType::U32,
                _ => backend.caps().act,
            };
            let elements = tokens * widths.0[which as usize].max(1);
            // Device buffers are written in words.
            let bytes = (elements * dtype.bytes()).next_multiple_of(4) as u64;
            Ok(Tensor::new(backend.alloc(label, bytes)?, dtype, &[elements]))
        };
        SCRATCH.iter().map(one).collect::<Result<_>>().map(Self)
    }

    /// `[rows, width]` at the start of a buffer.
    pub fn view(&self, which: Scratch, rows: usize, width: usize) -> Tensor<Buf> {
        let t = &self.0[which as usize];
        assert!(rows * width <= t.len(), "{which:?}: [{rows}, {width}] of {} elements", t.len());
        Tensor::new(t.buf.clone(), t.dtype, &[rows, width])
    }
}

/// The step being recorded, and where its ops go.
pub struct Pass<'a, Buf> {
    /// Receives the ops.
    pub ops: &'a mut dyn Ops<Buf>,
    /// The step's integers.
    pub step: &'a Step<Buf>,
    /// Activation buffers.
    pub work: &'a Workspace<Buf>,
}

impl<Buf: Handle> Pass<'_, Buf> {
    /// Packed tokens T of the step, padding included.
    pub fn tokens(&self) -> usize {
        self.step.bucket.tokens
    }

    /// `[T, width]` of a scratch buffer.
    pub fn scratch(&self, which: Scratch, width: usize) -> Tensor<Buf> {
        self.work.view(which, self.tokens(), width)
    }

    /// Records an op.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn op(&mut self, op: impl Into<Op<Buf>>) -> Result<()> {
        self.ops.op(op.into())
    }

    /// `out = scale * x Wᵀ + bias`, or with `accumulate` `out += …`.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn linear(&mut self, l: &Linear<Buf>, x: &Tensor<Buf>, out: &Tensor<Buf>, accumulate: bool) -> Result<()> {
        self.op(Matmul {
            x: x.clone(),
            w: l.w.clone(),
            bias: l.bias.clone(),
            out: out.clone(),
            scale: l.scale,
            accumulate,
        })
    }
}

macro_rules! mixers {
    ($($name:ident $module:ident $letter:literal),* $(,)?) => {
        /// What a mixer is, as data.
        #[derive(Clone, Debug)]
        pub enum Plan {
            $(#[doc = concat!("See [`", stringify!($module), "`].")] $name($module::Plan),)*
        }

        /// A mixer on a device.
        #[derive(Clone, Debug)]
        pub enum Mixer<Buf> {
            $(#[doc = concat!("See [`", stringify!($module), "`].")] $name($module::$name<Buf>),)*
        }

        $(impl From<$module::Plan> for Plan {
            fn from(plan: $module::Plan) -> Self {
                Self::$name(plan)
            }
        })*

        impl Plan {
            /// Its letter in a model's layer map.
            pub fn letter(&self) -> char {
                match self { $(Self::$name(_) => $letter,)* }
            }

            /// What it keeps per sequence.
            pub fn state(&self) -> LayerState {
                match self { $(Self::$name(p) => p.state(),)* }
            }

            /// Number of its weights.
            pub fn parameters(&self) -> u64 {
                match self { $(Self::$name(p) => p.parameters(),)* }
            }

            /// The scratch it needs.
            pub fn want(&self, widths: &mut Widths) {
                match self { $(Self::$name(p) => p.want(widths),)* }
            }

            /// Loads its tensors, named below `prefix`; its output is scaled by `scale`.
            ///
            /// # Errors
            /// Those of [`Loader`].
            pub async fn load<B: Backend>(
                &self,
                l: &mut Loader<'_, B>,
                prefix: &str,
                scale: f32,
            ) -> Result<Mixer<B::Buf>> {
                Ok(match self { $(Self::$name(p) => Mixer::$name(p.load(l, prefix, scale).await?),)* })
            }
        }

        impl<Buf: Handle> Mixer<Buf> {
            /// Adds its output for `u` `[T, D]` to `x` `[T, D]`.
            ///
            /// # Errors
            /// Those of the backend.
            pub fn forward(
                &self,
                pass: &mut Pass<'_, Buf>,
                pools: &LayerPools<Buf>,
                u: &Tensor<Buf>,
                x: &Tensor<Buf>,
            ) -> Result<()> {
                match self { $(Self::$name(m) => m.forward(pass, pools, u, x),)* }
            }
        }
    };
}

mixers! {
    Attention attention '*',
    Mamba2 mamba2 'M',
    GatedDelta gated_delta 'G',
    Mlp mlp '-',
    Moe moe 'E',
}

impl<Buf: Handle> Mixer<Buf> {
    /// The ops that the other mixers beside it may come behind: routing. Before [`Mixer::forward`].
    ///
    /// # Errors
    /// Those of the backend.
    pub fn begin(&self, pass: &mut Pass<'_, Buf>, u: &Tensor<Buf>) -> Result<()> {
        match self {
            Self::Moe(m) => m.begin(pass, u),
            _ => Ok(()),
        }
    }
}
