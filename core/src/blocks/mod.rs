//! The mixers of layers: the state of each, its tensors, and its sequence of ops.
//!
//! A mixer reads its input `u` and adds its output, times a factor, to the residual stream, or writes it elsewhere ([`Out`]). Its
//! plan is plain data that a family fills from the configuration; loading turns the plan into device tensors.

pub mod adapter;
pub mod attention;
mod conv;
pub mod delta_attention;
pub mod gated_delta;
pub mod latent_attention;
pub mod linear;
pub mod mamba1;
pub mod mamba2;
pub mod mlp;
pub mod moe;
pub mod shift;
pub mod short_conv;

use crate::{
    Error, Result,
    backend::{Backend, Handle, Ops},
    layer::{LayerPools, LayerState, StateShare},
    ops::{Feature, Matmul, Op, Round},
    step::Step,
    tensor::{DType, Tensor},
    weights::{Linear, LinearPart, Loader, Rank},
};

/// An activation buffer that all layers share, by its name. A step's ops run in order, so a buffer is free again after
/// its mixer; there are several, so that no op reads and writes one buffer. A mixer may name buffers of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scratch {
    name: &'static str,
    /// `None`: the dtype of activations.
    dtype: Option<DType>,
}

impl Scratch {
    /// The normed stream.
    pub const NORM: Self = Self::activations("normed activations");
    /// The input projection of a mixer.
    pub const PROJ: Self = Self::activations("projected activations");
    /// Output of the second op of a mixer: convolved, rotated or activated values.
    pub const MID: Self = Self::activations("intermediate activations");
    /// The result of attention or of a scan.
    pub const OUT: Self = Self::activations("mixer outputs");
    /// That result after its gate or norm.
    pub const GATED: Self = Self::activations("gated outputs");
    /// The input of a linear layer that is rounded.
    pub const ROUNDED: Self = Self::activations("rounded activations");

    /// A buffer of the backend's activation dtype.
    pub const fn activations(name: &'static str) -> Self {
        Self { name, dtype: None }
    }

    /// A buffer of another dtype.
    pub const fn of(name: &'static str, dtype: DType) -> Self {
        Self { name, dtype: Some(dtype) }
    }
}

/// Elements that the rows of a projection of any width are padded to, for products that write aligned rows only.
const ALIGN: usize = 8;

/// The widest use of every scratch buffer, in elements per token.
#[derive(Clone, Debug, Default)]
pub struct Widths(Vec<(Scratch, usize)>);

impl Widths {
    /// Asks for `width` elements per token.
    pub fn want(&mut self, which: Scratch, width: usize) {
        match self.0.iter_mut().find(|(s, _)| *s == which) {
            Some((_, w)) => *w = width.max(*w),
            None => self.0.push((which, width)),
        }
    }
}

/// The scratch buffers of a model.
#[derive(Clone, Debug)]
pub struct Workspace<Buf>(Vec<(Scratch, Tensor<Buf>)>);

impl<Buf: Handle> Workspace<Buf> {
    /// Buffers for `tokens` tokens.
    ///
    /// # Errors
    /// Those of [`Backend::alloc`].
    pub fn alloc<B: Backend<Buf = Buf>>(backend: &B, widths: &Widths, tokens: usize) -> Result<Self> {
        let one = |&(which, width): &(Scratch, usize)| {
            let dtype = which.dtype.unwrap_or(backend.caps().act);
            let elements = tokens * width;
            // Device buffers are written in words.
            let bytes = (elements * dtype.bytes()).next_multiple_of(4) as u64;
            Ok((which, Tensor::new(backend.alloc(which.name, bytes)?, dtype, &[elements])))
        };
        widths.0.iter().map(one).collect::<Result<_>>().map(Self)
    }

    /// `[rows, width]` at the start of a buffer that a plan has requested.
    pub fn view(&self, which: Scratch, rows: usize, width: usize) -> Tensor<Buf> {
        let found = self.0.iter().find(|(s, _)| *s == which);
        let (_, t) = found.unwrap_or_else(|| panic!("no plan has requested the buffer of {}", which.name));
        assert!(rows * width <= t.len(), "{}: [{rows}, {width}] of {} elements", which.name, t.len());
        Tensor::new(t.buf.clone(), t.dtype, &[rows, width])
    }
}

/// Where a mixer's output goes.
#[derive(Clone, Debug)]
pub struct Out<Buf> {
    /// `[T, D]`.
    pub to: Tensor<Buf>,
    /// Added to the content, as to the residual stream, instead of overwriting it.
    pub add: bool,
}

/// The step being recorded, and the receiver of its ops.
pub struct Pass<'a, Buf> {
    /// Receives the ops.
    pub ops: &'a mut dyn Ops<Buf>,
    /// The step's integers.
    pub step: &'a Step<Buf>,
    /// Activation buffers.
    pub work: &'a Workspace<Buf>,
    /// Products are [precise](Matmul::precise).
    pub precise: bool,
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

    /// The linear layer that ends a mixer.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn output(&mut self, l: &Linear<Buf>, x: &Tensor<Buf>, out: &Out<Buf>) -> Result<()> {
        self.product(l, x, &out.to, out.add)
    }

    /// `out = scale * x Wᵀ + bias`.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn linear(&mut self, l: &Linear<Buf>, x: &Tensor<Buf>, out: &Tensor<Buf>) -> Result<()> {
        self.product(l, x, out, false)
    }

    /// `out += scale * x Wᵀ + bias`.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn add_linear(&mut self, l: &Linear<Buf>, x: &Tensor<Buf>, out: &Tensor<Buf>) -> Result<()> {
        self.product(l, x, out, true)
    }

    /// The input of a product: `x`, or its rounded values if the recipe of the weights asks for them.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn input(&mut self, x: &Tensor<Buf>, rounds: bool) -> Result<Tensor<Buf>> {
        if !rounds {
            return Ok(x.clone());
        }
        let out = self.work.view(Scratch::ROUNDED, x.rows(), x.row_len());
        self.op(Round { x: x.clone(), out: out.clone() })?;
        Ok(out)
    }

    fn product(&mut self, l: &Linear<Buf>, x: &Tensor<Buf>, out: &Tensor<Buf>, accumulate: bool) -> Result<()> {
        for LinearPart { w, col, rounds } in &l.parts {
            let of_part = |t: &Option<Tensor<Buf>>| t.as_ref().map(|t| t.slice_rows(*col, w.n));
            let x = self.input(x, *rounds)?;
            self.op(Matmul {
                x,
                w: w.clone(),
                columns: of_part(&l.columns),
                bias: of_part(&l.bias),
                out: out.cols(*col, w.n),
                scale: l.scale,
                accumulate,
                precise: self.precise,
            })?;
        }
        Ok(())
    }
}

macro_rules! mixers {
    ($($name:ident $module:ident $letter:literal $text:literal),* $(,)?) => {
        /// A mixer as data.
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

            /// Its name in texts.
            pub fn name(&self) -> &'static str {
                match self { $(Self::$name(_) => $text,)* }
            }

            /// Its sizes in words.
            pub fn sizes(&self) -> String {
                match self { $(Self::$name(p) => p.sizes(),)* }
            }

            /// What each of `ranks` ranks has of it: a mixer with sizes of its own, the same on all of them.
            ///
            /// # Errors
            /// What cannot be divided, in words.
            pub fn share(&self, ranks: usize) -> Result<Self, String> {
                match self {
                    _ if ranks == 1 => Ok(self.clone()),
                    $(Self::$name(p) => p.share(ranks).map(Self::$name),)*
                }
            }

            /// Its state per sequence.
            pub fn state(&self) -> LayerState {
                match self { $(Self::$name(p) => p.state(),)* }
            }

            /// What a rank has of its state.
            pub fn state_share(&self, rank: Rank) -> StateShare {
                match self {
                    _ if rank.of == 1 => StateShare::whole(self.state()),
                    $(Self::$name(p) => p.state_share(rank),)*
                }
            }

            /// Number of its weights.
            pub fn parameters(&self) -> u64 {
                match self { $(Self::$name(p) => p.parameters(),)* }
            }

            /// The scratch it needs.
            pub fn want(&self, widths: &mut Widths) {
                match self { $(Self::$name(p) => p.want(widths),)* }
            }

            /// Loads its tensors, named below `prefix`, each rank its share; its output is scaled by `scale`.
            ///
            /// # Errors
            /// Those of [`Loader`], and of [`Plan::share`].
            pub async fn load<B: Backend>(
                &self,
                l: &mut Loader<'_, B>,
                prefix: &str,
                scale: f32,
            ) -> Result<Mixer<B::Buf>> {
                let ranks = l.ranks().len();
                let unsplit = |why| Error::Unsupported { what: format!("`{prefix}` on {ranks} ranks"), why };
                match self {
                    $(Self::$name(p) => {
                        let mine = if ranks == 1 { p.clone() } else { p.share(ranks).map_err(unsplit)? };
                        p.load(mine, l, prefix, scale).await.map(Mixer::$name)
                    })*
                }
            }
        }

        impl<Buf: Handle> Mixer<Buf> {
            /// Adds or writes its output for `u` `[T, D]`.
            ///
            /// # Errors
            /// Those of the backend.
            pub fn forward(
                &self,
                pass: &mut Pass<'_, Buf>,
                pools: &LayerPools<Buf>,
                u: &Tensor<Buf>,
                out: &Out<Buf>,
            ) -> Result<()> {
                match self { $(Self::$name(m) => m.forward(pass, pools, u, out),)* }
            }
        }
    };
}

mixers! {
    Attention attention '*' "attention",
    Mamba2 mamba2 'M' "Mamba-2",
    Mamba1 mamba1 'S' "Mamba-1",
    LatentAttention latent_attention '*' "attention over latents",
    GatedDelta gated_delta 'G' "Gated DeltaNet",
    DeltaAttention delta_attention 'K' "Kimi Delta Attention",
    ShortConv short_conv 'C' "short convolution",
    Mlp mlp '-' "MLP",
    Single linear 'L' "linear",
    Moe moe 'E' "mixture of experts",
}

impl Plan {
    /// Number of the weights that are added to those of its prefix for this use only.
    pub fn adapter_parameters(&self) -> u64 {
        match self {
            Self::Attention(p) => p.adapter_parameters(),
            Self::Mlp(p) => p.adapter_parameters(),
            _ => 0,
        }
    }

    /// Whether each of several ranks has all of it: then it has all of its output too, not a part of a sum.
    pub fn repeated(&self) -> bool {
        matches!(self, Self::Single(_))
    }

    /// What a backend needs to run it, if not every backend has that.
    pub fn feature(&self) -> Option<Feature> {
        match self {
            Self::LatentAttention(_) => Some(Feature::LatentAttention),
            Self::DeltaAttention(_) => Some(Feature::ChannelDecay),
            _ => None,
        }
    }
}

/// `units` by rank.
fn divided(what: &str, units: usize, ranks: usize) -> Result<usize, String> {
    match units % ranks {
        0 => Ok(units / ranks),
        _ => Err(format!("{units} {what} do not divide over {ranks} ranks")),
    }
}

/// `units` by rank, or one unit for several ranks each.
fn divided_or_repeated(what: &str, units: usize, ranks: usize) -> Result<usize, String> {
    if ranks.is_multiple_of(units) { Ok(1) } else { divided(what, units, ranks) }
}

/// A mixer that is not split yet.
fn undivided<T>(what: &str) -> Result<T, String> {
    Err(format!("{what} is not split over ranks yet"))
}

impl<Buf: Handle> Mixer<Buf> {
    /// Records ops whose latency the sibling mixers can hide: the router, and the choice of experts but for one token
    /// without a latent space. Called before [`Mixer::forward`].
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
