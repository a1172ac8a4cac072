//! The header of a GGUF file that is to be written.

use super::{
    Meta, MetaValue,
    container::{MAGIC, TYPES, format_of},
};
use crate::format::Format;

/// Tensors begin at multiples of this in the data.
const ALIGNMENT: u64 = 32;

/// A type of a file's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind(u32);

impl Kind {
    /// IEEE single precision.
    pub const F32: Self = Self(0);
    /// IEEE half precision.
    pub const F16: Self = Self(1);
    /// The upper half of an f32.
    pub const BF16: Self = Self(30);

    /// The type of a coded format; `None` for formats that GGUF files do not have.
    pub fn of(format: Format) -> Option<Self> {
        let coded = |kind: &u32| format_of(*kind, 0).is_some_and(|(f, _)| f == format);
        (0..TYPES.len() as u32).filter(|_| format != Format::Plain).find(coded).map(Self)
    }

    /// The format of its elements; plain for types without codes.
    pub fn format(self) -> Format {
        format_of(self.0, 0).map_or(Format::Plain, |(format, _)| format)
    }

    /// The name by which people know it.
    pub fn name(self) -> &'static str {
        TYPES[self.0 as usize].0
    }

    /// Elements of a block, of which rows are a multiple.
    pub fn block(self) -> usize {
        TYPES[self.0 as usize].1 as usize
    }

    /// Bytes of so many elements, which are whole blocks.
    pub fn bytes(self, elements: u64) -> u64 {
        let (_, n, bytes) = TYPES[self.0 as usize];
        elements / n * bytes
    }
}

/// Everything before the tensors, and where they begin.
#[derive(Clone, Debug)]
pub struct Header {
    /// The first bytes of the file, up to the first tensor.
    pub bytes: Vec<u8>,
    /// Bytes of zeros after each tensor.
    pub padding: Vec<usize>,
    /// Bytes of the whole file.
    pub size: u64,
}

impl Header {
    /// The header of a file with these keys, and with tensors of these names, shapes (outermost first) and types in that order.
    pub fn new<'a>(meta: &Meta, tensors: impl ExactSizeIterator<Item = (&'a str, &'a [usize], Kind)>) -> Self {
        let mut out = MAGIC.to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((tensors.len() as u64).to_le_bytes());
        out.extend((meta.iter().len() as u64).to_le_bytes());
        for (key, value) in meta.iter() {
            text(&mut out, key);
            write_value(&mut out, value);
        }
        let (mut at, mut padding) = (0, Vec::new());
        for (name, shape, kind) in tensors {
            text(&mut out, name);
            out.extend((shape.len() as u32).to_le_bytes());
            shape.iter().rev().for_each(|n| out.extend((*n as u64).to_le_bytes()));
            out.extend(kind.0.to_le_bytes());
            out.extend(u64::to_le_bytes(at));
            let bytes = kind.bytes(shape.iter().map(|n| *n as u64).product());
            let end = bytes.next_multiple_of(ALIGNMENT);
            padding.push((end - bytes) as usize);
            at += end;
        }
        out.resize(out.len().next_multiple_of(ALIGNMENT as usize), 0);
        Self { size: out.len() as u64 + at, bytes: out, padding }
    }
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn write_value(out: &mut Vec<u8>, value: &MetaValue) {
    let list = |out: &mut Vec<u8>, kind: u32, n: usize| {
        out.extend(9u32.to_le_bytes());
        out.extend(kind.to_le_bytes());
        out.extend((n as u64).to_le_bytes());
    };
    match value {
        MetaValue::Text(one) => {
            out.extend(8u32.to_le_bytes());
            text(out, one);
        }
        MetaValue::Texts(texts) => {
            list(out, 8, texts.len());
            texts.iter().for_each(|one| text(out, one));
        }
        MetaValue::Numbers { kind, one: true, bytes } => {
            out.extend(kind.to_le_bytes());
            out.extend(bytes);
        }
        MetaValue::Numbers { kind, one: false, bytes } => {
            list(out, *kind, bytes.len() / super::meta::number_size(*kind).unwrap_or(1));
            out.extend(bytes);
        }
    }
}
