//! Coded weights on the device: the sizes of the layout of `codes.cuh`, and how stored rows are brought into it.

use cudarc::driver::result;
use selkie_core::{Result, backend::Handle, format::Format, ops::RowBlock};

use crate::{
    arguments::{At, CodesArrange},
    backend::Cuda,
    driver::named,
    launch::{Address, Launch, address},
    memory::Buf,
    spec::{File, Spec},
};

/// Rows of a tile.
pub const TILE: usize = 16;
/// Elements of a row that a warp multiplies at a time, whole units.
pub const SPAN: usize = 256;
/// Warps of a block that arranges or decodes, each of which takes a unit.
pub const UNIT_WARPS: usize = 8;
/// Bytes of stored rows that are held while they are arranged.
const HELD_BYTES: usize = 64 << 20;

/// The layout of the rows of a coded matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Number of the format in `codes.cuh`.
    pub format: usize,
    /// Elements of a unit of a row.
    pub unit: usize,
    /// Bytes of a unit of a tile.
    pub unit_bytes: usize,
    /// Units of a row.
    pub units: usize,
}

impl Layout {
    /// Of rows of `k` elements; `None` for plain ones.
    pub fn of(format: Format, k: usize) -> Option<Self> {
        let (block, bytes) = format.block()?;
        let unit = block.max(64);
        Some(Self { format: number(format), unit, unit_bytes: TILE * unit / block * bytes, units: k.div_ceil(unit) })
    }

    /// Bytes of 16 rows.
    pub fn tile_bytes(&self) -> usize {
        self.units * self.unit_bytes
    }

    /// Spans of a row, the last one maybe not whole.
    pub fn spans(&self) -> usize {
        self.units.div_ceil(SPAN / self.unit)
    }

    /// Bytes of a span of a tile.
    pub fn span_bytes(&self) -> usize {
        SPAN / self.unit * self.unit_bytes
    }

    /// Bytes of `n` rows.
    pub fn bytes(&self, n: usize) -> usize {
        n.div_ceil(TILE) * self.tile_bytes()
    }
}

/// The number of a format in `codes.cuh`.
fn number(format: Format) -> usize {
    match format {
        Format::Plain => 0,
        Format::Q4_0 => 1,
        Format::Q4_1 => 2,
        Format::Q5_0 => 3,
        Format::Q5_1 => 4,
        Format::Q8_0 => 5,
        Format::Q4K => 6,
        Format::Q5K => 7,
        Format::Q6K => 8,
        Format::Iq4Nl => 9,
        Format::Mxfp4 => 10,
        Format::Nvfp4 => 11,
        Format::F4 => 12,
        Format::F8 => 13,
        Format::I4 => 14,
        Format::I8 => 15,
    }
}

/// The matrices of a block: their number, rows and bytes of a stored row. Experts of whole tiles are one matrix.
fn matrices(dims: &[usize]) -> (usize, usize, usize) {
    match *dims {
        [experts, n, bytes] if n % TILE != 0 => (experts, n, bytes),
        [experts, n, bytes] => (1, experts * n, bytes),
        [n, bytes] => (1, n, bytes),
        _ => panic!("coded rows of {dims:?}"),
    }
}

/// Bytes of a buffer for the rows of `dims`, see [`selkie_core::backend::Backend::coded_bytes`].
pub fn bytes(format: Format, dims: &[usize]) -> u64 {
    let (count, n, row_bytes) = matrices(dims);
    let (block, block_bytes) = format.block().expect("a coded format");
    let layout = Layout::of(format, row_bytes / block_bytes * block).expect("a coded format");
    (count * layout.bytes(n)) as u64
}

impl Cuda {
    /// Arranges the rows of a block in place. They are copied aside in parts, the last one first, since no part becomes smaller.
    pub(crate) fn arrange_rows(&self, block: &RowBlock<Buf>) -> Result<()> {
        let k = block.k().expect("rows of whole blocks");
        let Some(layout) = Layout::of(block.format, k) else { return Ok(()) };
        let (count, n, row_bytes) = matrices(block.w.dims());
        let needed = (count * layout.bytes(n)) as u64;
        assert!(
            block.w.offset == 0 && block.w.is_contiguous() && needed <= block.w.buf.bytes(),
            "coded rows of {} bytes in a buffer of {needed}",
            block.w.buf.bytes()
        );
        let part = (HELD_BYTES / (TILE * row_bytes)).max(1) * TILE;
        let held = Buf::alloc(&self.context, &self.stream, "arranging weights", (part.min(n) * row_bytes) as u64)?;
        for matrix in (0..count).rev() {
            for first in (0..n).step_by(part).rev() {
                let rows = part.min(n - first);
                let from = address(&block.w) + ((matrix * n + first) * row_bytes) as u64;
                let to = address(&block.w) + (matrix * layout.bytes(n) + first / TILE * layout.tile_bytes()) as u64;
                // SAFETY: both ranges lie within their buffers.
                let copied =
                    unsafe { result::memcpy_dtod_async(held.address(), from, rows * row_bytes, self.stream.raw) };
                named("arranging weights", copied)?;
                let spec = Spec::new(File::CodesArrange).int("FORMAT", layout.format).int("UNITS", layout.units);
                let stored = At(held.address());
                let args = CodesArrange { stored, row_bytes: row_bytes as u64, n: rows as u64, out: At(to) };
                let blocks = (rows.div_ceil(TILE) * layout.units).div_ceil(UNIT_WARPS);
                self.run_alone("arrange", Launch::new(spec, [blocks, 1, 1], 32 * UNIT_WARPS, &args))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coded_rows_take_what_they_take_in_a_file() {
        for format in Format::CODED.into_iter().chain(Format::SCALED) {
            let stored = format.bytes(4096, 1);
            assert_eq!(bytes(format, &[64, stored]), 64 * stored as u64, "{}", format.name());
            assert_eq!(bytes(format, &[8, 48, stored]), 8 * 48 * stored as u64);
            // A last tile that is not full, for each expert.
            assert_eq!(bytes(format, &[65, stored]), 80 * stored as u64);
            assert_eq!(bytes(format, &[2, 20, stored]), 64 * stored as u64);
        }
        // A row whose last unit is half empty.
        assert_eq!(bytes(Format::Q4_0, &[16, 3 * 18]), 16 * 4 * 18);
        assert_eq!(Layout::of(Format::Q4K, 4096), Some(Layout { format: 6, unit: 256, unit_bytes: 2304, units: 16 }));
        assert_eq!(Layout::of(Format::Plain, 4096), None);
    }
}
