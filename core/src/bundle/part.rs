//! The tensors of a bundle that hold state: their names, shapes and dtypes.

use std::{borrow::Cow, collections::VecDeque, ops::Range};

use crate::{
    backend::Caps,
    kv8,
    layer::{LayerState, StateShare},
    state::GRID,
    tensor::DType,
};

/// A kind of state of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Keys `[pages, KH, 64, hd]`, as stored in pages, i.e. rotated; of pages in 8 bits ([`kv8`]) `[pages, KH, 64, hd + 4]`.
    Key,
    /// Values, in the same way.
    Value,
    /// The last raw inputs of a convolution `[C, K - 1]`.
    Conv,
    /// A recurrent state `[H, P, N]`.
    Recurrent,
}

impl Kind {
    const ALL: [Self; 4] = [Self::Key, Self::Value, Self::Conv, Self::Recurrent];

    /// Its name in tensor names.
    pub fn name(self) -> &'static str {
        match self {
            Self::Key => "key",
            Self::Value => "value",
            Self::Conv => "conv",
            Self::Recurrent => "recurrent",
        }
    }

    /// Whether there is one tensor for all pages, not one per position.
    pub fn is_paged(self) -> bool {
        matches!(self, Self::Key | Self::Value)
    }

    fn rank(self) -> usize {
        match self {
            Self::Key | Self::Value => 4,
            Self::Conv => 2,
            Self::Recurrent => 3,
        }
    }
}

/// One tensor: all pages of a layer's keys or values, or one state of a layer at one position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Which state.
    pub kind: Kind,
    /// Index of the layer.
    pub layer: u32,
    /// Tokens before the state; 0 for a kind with pages.
    pub position: u32,
    /// Dtype of the values.
    pub dtype: DType,
    /// Sizes, see [`Kind`].
    pub shape: Vec<usize>,
}

impl Part {
    /// `layers.LAYER.KIND`, and `.POSITION` for a state at a position.
    pub fn name(&self) -> String {
        let (layer, kind) = (self.layer, self.kind.name());
        match self.kind.is_paged() {
            true => format!("layers.{layer}.{kind}"),
            false => format!("layers.{layer}.{kind}.{}", self.position),
        }
    }

    /// Layer, kind and position out of a name. The error says what is wrong with it.
    pub(super) fn parse(name: &str) -> Result<(u32, Kind, u32), String> {
        let unknown = || format!("tensor `{name}` is not part of this version of bundles");
        let mut pieces = name.split('.');
        let (Some("layers"), Some(layer), Some(kind)) = (pieces.next(), pieces.next(), pieces.next()) else {
            return Err(unknown());
        };
        let position = pieces.next();
        let kind = Kind::ALL.into_iter().find(|k| k.name() == kind);
        let kind =
            kind.ok_or_else(|| format!("tensor `{name}`: this version of selkie knows no such kind of state"))?;
        let number = |text: &str| text.parse::<u32>().ok().filter(|n| n.to_string() == text);
        let position = match (position, kind.is_paged()) {
            (None, true) => Some(0),
            (Some(position), false) => number(position),
            _ => None,
        };
        match (number(layer), position, pieces.next()) {
            (Some(layer), Some(position), None) => Ok((layer, kind, position)),
            _ => Err(unknown()),
        }
    }

    /// Its place in a file: pages before states, by layer and kind; states by position, layer and kind.
    pub(super) fn order(&self) -> (bool, u32, u32, Kind) {
        (!self.kind.is_paged(), self.position, self.layer, self.kind)
    }

    /// Bytes of all of it; `None` if a u64 cannot count them.
    pub fn bytes(&self) -> Option<u64> {
        let size = self.dtype.bytes() as u64;
        self.shape.iter().try_fold(size, |n, d| n.checked_mul(*d as u64))
    }

    /// Rows that are read and written as one piece: pages, or the whole state.
    pub fn rows(&self) -> usize {
        if self.kind.is_paged() { self.shape[0] } else { 1 }
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        let skip = usize::from(self.kind.is_paged());
        self.shape[skip..].iter().product::<usize>() * self.dtype.bytes()
    }

    /// Bytes that a head, or a channel, takes in a row.
    pub fn unit_bytes(&self) -> usize {
        self.row_bytes() / self.shape[usize::from(self.kind.is_paged())]
    }

    /// Elements of a row of the last dim.
    pub fn width(&self) -> usize {
        self.shape.last().map_or(0, |width| kv8::elements(self.dtype, *width))
    }

    /// Where the values that a rank has of a row lie in the whole row, in the order in which it has them.
    pub fn places(&self, share: &StateShare) -> Places {
        let units = match self.kind {
            Kind::Key | Kind::Value => &share.kv,
            Kind::Conv => &share.conv,
            Kind::Recurrent => &share.recurrent,
        };
        let each = self.unit_bytes();
        Places(units.iter().map(|own| own.start * each..own.end * each).collect())
    }

    pub(super) fn check(&self) -> Result<(), String> {
        let Self { kind, dtype, shape, .. } = self;
        let coded = *dtype == DType::I8;
        let float = matches!(dtype, DType::F32 | DType::Bf16 | DType::F16);
        if !(float || coded && kind.is_paged()) {
            let pages = if kind.is_paged() { ", and of pages I8" } else { "" };
            let name = self.name();
            return Err(format!("tensor `{name}` is {dtype:?}; values of states are F32, BF16 or F16{pages}"));
        }
        let paged = kind.is_paged() && shape.get(2) != Some(&GRID);
        let narrow = coded && shape.last().is_none_or(|width| *width <= kv8::stored(DType::I8, 0));
        if shape.len() != kind.rank() || paged || narrow || shape.contains(&0) {
            return Err(format!("tensor `{}` cannot have the shape {shape:?}", self.name()));
        }
        Ok(())
    }
}

/// Ranges of bytes of a row, which are taken one after the other.
#[derive(Clone, Debug)]
pub struct Places(VecDeque<Range<usize>>);

impl Places {
    /// The next `bytes` bytes.
    pub fn take(&mut self, mut bytes: usize) -> Vec<Range<usize>> {
        let mut taken = Vec::new();
        while bytes > 0
            && let Some(mut first) = self.0.pop_front()
        {
            if first.len() > bytes {
                self.0.push_front(first.start + bytes..first.end);
                first.end = first.start + bytes;
            }
            bytes -= first.len();
            taken.push(first);
        }
        taken
    }
}

/// Dtypes of the state on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dtypes {
    /// Of KV pages.
    pub kv: DType,
    /// Of convolution states.
    pub conv: DType,
    /// Of recurrent states.
    pub state: DType,
}

impl Dtypes {
    /// Those of a device.
    pub fn of(caps: &Caps) -> Self {
        Self { kv: caps.kv, conv: caps.conv, state: caps.state }
    }
}

impl Default for Dtypes {
    fn default() -> Self {
        Self { kv: DType::F32, conv: DType::F32, state: DType::F32 }
    }
}

/// The parts of a model with `layers`, for whole `pages` and states at `positions`, in the order of a file.
pub fn parts(layers: &[LayerState], dtypes: Dtypes, pages: usize, positions: &[usize]) -> Vec<Part> {
    let mut all = Vec::new();
    for (layer, state) in (0..).zip(layers) {
        let Some(kv) = state.kv else { continue };
        for (kind, width) in [Kind::Key, Kind::Value].into_iter().zip(kv.stored(dtypes.kv)) {
            let shape = vec![pages, kv.heads, GRID, width];
            all.push(Part { kind, layer, position: 0, dtype: dtypes.kv, shape });
        }
    }
    for &position in positions {
        let position = position as u32;
        for (layer, state) in (0..).zip(layers) {
            if let Some(shape) = state.conv {
                all.push(Part { kind: Kind::Conv, layer, position, dtype: dtypes.conv, shape: shape.into() });
            }
            if let Some(shape) = state.recurrent {
                all.push(Part { kind: Kind::Recurrent, layer, position, dtype: dtypes.state, shape: shape.into() });
            }
        }
    }
    all
}

/// Values of one dtype as another, rounded to nearest, in rows of `width`; equal dtypes change no byte. `None` if a finite value
/// is too large.
pub fn convert(bytes: &[u8], from: DType, to: DType, width: usize) -> Option<Cow<'_, [u8]>> {
    if from == to {
        return Some(bytes.into());
    }
    let values = kv8::to_f32(from, bytes, width);
    let halves = |round: fn(f32) -> (u16, bool)| {
        let mut out = Vec::with_capacity(2 * values.len());
        for &value in &values {
            let (bits, finite) = round(value);
            if value.is_finite() && !finite {
                return None;
            }
            out.extend(bits.to_le_bytes());
        }
        Some(out)
    };
    let out = match to {
        DType::F32 => bytemuck::cast_slice(&values).to_vec(),
        DType::Bf16 => halves(|x| (half::bf16::from_f32(x).to_bits(), half::bf16::from_f32(x).is_finite()))?,
        DType::F16 => halves(|x| (half::f16::from_f32(x).to_bits(), half::f16::from_f32(x).is_finite()))?,
        DType::I8 => kv8::bytes(&values, width),
        DType::U32 | DType::U8 => unreachable!("states are floating-point values"),
    };
    Some(out.into())
}
