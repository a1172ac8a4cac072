//! The kinds of parameters, and their values on the host.

use selkie_core::{step::Step, tensor::Tensor};

use crate::launch::{Address, Args, address};

/// A parameter as it is declared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Its name in the kernel.
    pub name: &'static str,
    /// Its value on the host.
    pub kind: Kind,
    /// C++ type of the elements that an address points to; empty for values.
    pub element: &'static str,
}

/// The kind of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Address and row stride of a tensor: two parameters, `T *name, i64 name_stride`.
    Rows,
    /// Address of a tensor without gaps, or null: `T *name`.
    At,
    /// `int name`
    Int,
    /// `u32 name`
    U32,
    /// `u64 name`
    U64,
    /// `float name`
    Float,
    /// The integers of a step and its bucket: `Step name`, a structure of `common.cuh`.
    Step,
}

impl Parameter {
    /// The declaration in the kernel's signature.
    pub fn declaration(&self) -> String {
        let Self { name, element, .. } = self;
        match self.kind {
            Kind::Rows => format!("{element} *{name}, i64 {name}_stride"),
            Kind::At => format!("{element} *{name}"),
            Kind::Int => format!("int {name}"),
            Kind::U32 => format!("u32 {name}"),
            Kind::U64 => format!("u64 {name}"),
            Kind::Float => format!("float {name}"),
            Kind::Step => format!("Step {name}"),
        }
    }

    /// Bytes of each parameter that it declares, as the host writes them.
    pub fn bytes(&self) -> &'static [usize] {
        match self.kind {
            Kind::Rows => &[8, 8],
            Kind::At | Kind::U64 => &[8],
            Kind::Int | Kind::U32 | Kind::Float => &[4],
            Kind::Step => &[32],
        }
    }
}

/// A value of some [`Kind`].
pub(super) trait Value {
    const KIND: Kind;
    fn add_to(&self, args: Args) -> Args;
}

/// Address and row stride of a tensor, in elements.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rows {
    /// Address of the first element, or null.
    pub at: u64,
    /// Elements between rows.
    pub stride: u64,
}

impl<B: Address> From<&Tensor<B>> for Rows {
    fn from(t: &Tensor<B>) -> Self {
        Self { at: address(t), stride: t.row_stride as u64 }
    }
}

impl<B: Address> From<Option<&Tensor<B>>> for Rows {
    fn from(t: Option<&Tensor<B>>) -> Self {
        t.map_or(Self::default(), Self::from)
    }
}

/// Address of a tensor without gaps, or null.
#[derive(Clone, Copy, Debug, Default)]
pub struct At(pub u64);

impl<B: Address> From<&Tensor<B>> for At {
    fn from(t: &Tensor<B>) -> Self {
        Self(address(t))
    }
}

impl<B: Address> From<Option<&Tensor<B>>> for At {
    fn from(t: Option<&Tensor<B>>) -> Self {
        t.map_or(Self::default(), Self::from)
    }
}

/// The `Step` structure of `common.cuh`: the address of the integers, then the sizes of the bucket.
#[derive(Clone, Copy, Debug)]
pub struct StepWords([u64; 4]);

impl<B: Address> From<&Step<B>> for StepWords {
    fn from(s: &Step<B>) -> Self {
        let b = &s.bucket;
        let pair = |lo: usize, hi: usize| lo as u64 | (hi as u64) << 32;
        Self([address(&s.ints), pair(b.tokens, b.rows), pair(b.chunks, b.outputs), pair(b.pages, 0)])
    }
}

impl Value for Rows {
    const KIND: Kind = Kind::Rows;
    fn add_to(&self, args: Args) -> Args {
        args.with(&[self.at]).with(&[self.stride])
    }
}

impl Value for StepWords {
    const KIND: Kind = Kind::Step;
    fn add_to(&self, args: Args) -> Args {
        args.with(&self.0)
    }
}

/// Values of one word; kernels read its first 4 bytes where their parameter has 4.
macro_rules! one_word {
    ($($ty:ty, $kind:ident, $v:ident => $word:expr;)*) => {
        $(impl Value for $ty {
            const KIND: Kind = Kind::$kind;
            fn add_to(&self, args: Args) -> Args {
                let $v = *self;
                args.with(&[$word])
            }
        })*
    };
}

one_word! {
    At, At, v => v.0;
    i32, Int, v => u64::from(v.cast_unsigned());
    u32, U32, v => u64::from(v);
    u64, U64, v => v;
    f32, Float, v => u64::from(v.to_bits());
}
