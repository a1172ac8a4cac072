//! What ranks exchange: sums, columns and norms over several devices.

use selkie_core::{
    Error, Result,
    ops::{AllGather, AllReduce, RankNorm},
    tensor::{DType, Tensor},
};

use super::{Arena, Device, act, vector};
use crate::{
    arguments::{self, At},
    launch::{Address, Launch, Work},
    spec::{File, Spec},
};

// As in `ranks.cuh`.
const WORD_BLOCKS: usize = 512;
const WORD_THREADS: usize = 128;
const PIECE_BLOCKS: usize = 512;
const PIECE_THREADS: usize = 256;
const PIECES_EACH: usize = 4;

/// Longest message that goes in words, in bytes of one rank. Words arrive sooner, pieces take half the room on the links.
const WORDS_LIMIT: usize = 512 << 10;

/// Most ranks of a kernel.
pub(crate) const MOST: usize = 8;

/// Bytes of the memory that the others write to, see `ranks.cuh`.
pub(crate) fn area_bytes(ranks: usize) -> u64 {
    let flags = 4 * (WORD_BLOCKS + PIECE_BLOCKS) + 4 * 2 * ranks * PIECE_BLOCKS;
    let words = 2 * ranks * WORD_BLOCKS * WORD_THREADS * 32;
    (flags + words + 2 * ranks * PIECE_BLOCKS * PIECE_THREADS * PIECES_EACH * 16) as u64
}

/// An error where there is one rank only.
fn shared(op: &str, device: &Device) -> Result<()> {
    if device.ranks > 1 {
        return Ok(());
    }
    let (what, why) = (format!("{op} on one CUDA device"), "it is for several ranks: use --gpus".to_owned());
    Err(Error::Unsupported { what, why })
}

fn spec(file: File, device: &Device) -> Spec {
    Spec::new(file).int("RANK", device.rank).int("RANKS", device.ranks)
}

/// An exchange of the rows of `x`, from which each rank makes its `out`; in words or in pieces by its length.
fn exchange<B: Address>(spec: Spec, x: &Tensor<B>, out: &Tensor<B>, arena: &Arena) -> Vec<Work> {
    let (rows, dim) = (x.rows(), x.row_len());
    // At most 16 bytes of the wider type.
    let vec = vector(dim, &[x, out]).min(16 / x.dtype.bytes().max(out.dtype.bytes()));
    let long = rows * dim * x.dtype.bytes() > WORDS_LIMIT;
    let (each, most, threads) = match long {
        false => (WORD_THREADS, WORD_BLOCKS, WORD_THREADS),
        true => (PIECE_THREADS * PIECES_EACH, PIECE_BLOCKS, PIECE_THREADS),
    };
    let blocks = (rows * dim / vec).div_ceil(each).min(most);
    let spec = spec.flag("LONG", long).int("VEC", vec).int("DIM", dim).ty("x_t", x.dtype).ty("out_t", out.dtype);
    let args = arguments::Exchange { areas: At(arena.areas), x: x.into(), out: out.into(), rows: rows as u32 };
    vec![Work::Kernel(Launch::new(spec, [blocks, 1, 1], threads, &args))]
}

pub(super) fn all_reduce<B: Address>(a: &AllReduce<B>, device: &Device, arena: &Arena) -> Result<Vec<Work>> {
    shared("all_reduce", device)?;
    Ok(exchange(spec(File::AllReduce, device).flag("ACCUMULATE", a.accumulate), &a.x, &a.out, arena))
}

pub(super) fn all_gather<B: Address>(a: &AllGather<B>, device: &Device, arena: &Arena) -> Result<Vec<Work>> {
    shared("all_gather", device)?;
    assert_eq!(a.out.row_len(), device.ranks * a.x.row_len(), "all_gather: columns of `out`");
    Ok(exchange(spec(File::AllGather, device), &a.x, &a.out, arena))
}

pub(super) fn rank_norm<B: Address>(a: &RankNorm<B>, device: &Device, arena: &Arena) -> Result<Vec<Work>> {
    shared("rank_norm", device)?;
    assert!(device.ranks.is_multiple_of(a.ranks), "rank_norm: {} of {} ranks together", a.ranks, device.ranks);
    let norm = &a.norm;
    if a.ranks == 1 {
        return super::pointwise::rms_norm(norm);
    }
    let (rows, dim) = (norm.x.rows(), norm.x.row_len());
    let (vec, threads) = super::pointwise::norm_access(norm);
    let gate = norm.gate.as_ref();
    let spec = spec(File::RankNorm, device)
        .int("VEC", vec)
        .int("DIM", dim)
        .int("THREADS", threads)
        .int("TOGETHER", a.ranks)
        .int("GATE", gate.map_or(0, |g| if g.before { 1 } else { 2 }))
        .int("GATE_ACT", gate.map_or(0, |g| act(g.act)))
        .ty("x_t", norm.x.dtype)
        .ty("gate_t", gate.map_or(DType::F32, |g| g.z.dtype))
        .ty("out_t", norm.out.dtype);
    let args = arguments::RankNorm {
        areas: At(arena.areas),
        x: (&norm.x).into(),
        weight: (&norm.weight).into(),
        gate: gate.map(|g| &g.z).into(),
        out: (&norm.out).into(),
        eps: norm.eps,
        rows: rows as u32,
    };
    Ok(vec![Work::Kernel(Launch::new(spec, [rows.min(WORD_BLOCKS), 1, 1], threads, &args))])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_area_is_as_the_kernels_divide_it() {
        let (_, source) = selkie_kernels::FILES.iter().find(|(name, _)| *name == "ranks.cuh").unwrap();
        let constants = format!(
            "constexpr int WORD_BLOCKS = {WORD_BLOCKS}, WORD_THREADS = {WORD_THREADS}, PIECE_BLOCKS = {PIECE_BLOCKS}, \
             PIECE_THREADS = {PIECE_THREADS}, PIECES_EACH = {PIECES_EACH};"
        );
        assert!(source.contains(&constants), "{constants}");
        // Two ranks: counts, flags, words, pieces.
        assert_eq!(area_bytes(2), 4096 + 8192 + (4 * 512 * 128 * 32) + (4 * 512 * 256 * 64));
    }
}
