//! Ops driven by the chunk table: convolution and the recurrences.

use selkie_core::{
    Result,
    ops::{Activation, Conv1d, GatedDelta, ScanForm, SelectiveScan},
    step::{Bucket, PAGE},
    tensor::{DType, Tensor},
};

use super::{Arena, Device, Hazards, act, aligned, fours, same_view, vector, wide};
use crate::{
    arguments::{self, At},
    launch::{Address, Launch, Work},
    spec::{File, Spec},
};

/// How a convolution block is cut: channels of a thread, threads along the channels, tokens in flight.
fn conv_shape(tokens: usize, chunks: usize, widest: usize) -> (usize, usize, usize) {
    // Decode has one token a chunk and wants many blocks; prefill wants long runs and few loads of weights.
    if tokens <= 2 * chunks { (widest.min(2), 128, 1) } else { (widest.min(4), 128, 8) }
}

pub(super) fn conv1d<B: Address>(a: &Conv1d<B>, hazards: &Hazards) -> Result<Vec<Work>> {
    Ok(vec![convolution(a, None, hazards)])
}

/// The convolution of one token and the product of two inputs before it, as one kernel.
pub(super) fn gated_conv1d<B: Address>(gate: &Activation<B>, a: &Conv1d<B>, hazards: &Hazards) -> Option<Work> {
    let (b, up) = (&a.step.bucket, gate.up.as_ref()?);
    let one = b.tokens == 1 && b.chunks == 1 && gate.row_gate.is_none() && same_view(&a.x, &gate.out);
    let dtypes = [gate.gate.dtype, up.dtype].iter().all(|dtype| *dtype == a.x.dtype);
    // A thread reads its channels of the inputs while others write theirs.
    let apart = [&gate.gate, up].iter().all(|t| [&a.x, &a.out].iter().all(|w| w.buf.id() != t.buf.id()));
    (one && dtypes && apart).then(|| convolution(a, Some((gate, up)), hazards))
}

/// `gate`: what makes the input, and the second factor of it.
fn convolution<B: Address>(a: &Conv1d<B>, gate: Option<(&Activation<B>, &Tensor<B>)>, hazards: &Hazards) -> Work {
    let (tokens, chunks) = (a.step.bucket.tokens, a.step.bucket.chunks);
    let (channels, taps) = (a.x.row_len(), a.weight.row_len() - 1);
    let mut views = vec![&a.x, &a.out];
    views.extend(gate.iter().flat_map(|(gate, up)| [&gate.gate, up]));
    let (vec, cols, loads) = conv_shape(tokens, chunks, vector(channels, &views));
    let packed = a.weight.row_stride == taps + 1 && a.weight.offset.is_multiple_of(4);
    let spec = Spec::new(File::Conv1d)
        .int("VEC", vec)
        .int("CHANNELS", channels)
        .int("TAPS", taps)
        .int("COLS", cols)
        .int("LOADS", loads)
        .flag("PACKED_WEIGHT", packed)
        .flag("HAS_FACTOR", gate.is_some())
        .int("GATE_ACT", gate.map_or(0, |(gate, _)| act(gate.act)))
        .int("ACT", act(a.act))
        .ty("x_t", a.x.dtype)
        .ty("pool_t", a.pool.dtype)
        .ty("out_t", a.out.dtype);
    let args = arguments::Conv1d {
        st: (&a.step).into(),
        x: gate.map_or(&a.x, |(gate, _)| &gate.gate).into(),
        factor: gate.map(|(_, up)| up).into(),
        mid: gate.map(|_| &a.x).into(),
        weight: (&a.weight).into(),
        pool: (&a.pool).into(),
        out: (&a.out).into(),
        state_unwritten: u32::from(hazards.state_unwritten),
    };
    let grid = [chunks * channels.div_ceil(cols * vec) + padding_blocks(tokens, channels), 1, 1];
    Work::Kernel(Launch::new(spec, grid, cols, &args).with_early(hazards.state_unwritten))
}

/// Tokens that a padding block looks through, and columns that it zeroes, as in `common.cuh`.
const PADDING_SPAN: usize = 1024;
const PADDING_COLS: usize = 1024;

/// Blocks that zero the outputs of padding tokens, after the blocks of the chunks. A step has a token at least, so the only one
/// of a bucket is not padding.
fn padding_blocks(tokens: usize, columns: usize) -> usize {
    if tokens == 1 { 0 } else { tokens.div_ceil(PADDING_SPAN) * columns.div_ceil(PADDING_COLS) }
}

/// How a scan block holds its part of the state.
#[derive(Debug, PartialEq, Eq)]
struct ScanShape {
    /// Threads that share a (head, p) row.
    lanes: usize,
    /// Neighbouring elements of a thread.
    vec: usize,
    /// Rows of a thread, and how many of them it computes at a time.
    rows: usize,
    sub: usize,
    threads: usize,
    /// Blocks of a multiprocessor, at least.
    blocks: usize,
}

/// `units` sequences share the device with `sms` multiprocessors; `pairs`: states are kept in 16 bits and can be read eight at a
/// time.
fn scan_shape(n: usize, all_rows: usize, per_channel: bool, pairs: bool, units: usize, sms: usize) -> ScanShape {
    let vec = if pairs && n.is_multiple_of(8) { 8 } else { 4 };
    let lanes = [32, 16, 8, 4, 2].into_iter().find(|l| n.is_multiple_of(vec * l)).unwrap_or(1);
    // Blocks of one warp of f32 states, with 8 loads of 16 bytes a thread in flight; those in 16 bits take half of the room.
    let (values, threads, sub, blocks) = match (per_channel, vec) {
        (true, _) => (0, 128, 1, 1),
        (_, 4) => (32, 32, 8, 1),
        _ => (64, 64, 8, 8),
    };
    let mut rows = (values / (n / lanes)).clamp(1, 16);
    if !rows.is_power_of_two() {
        rows = rows.next_power_of_two() / 2;
    }
    while rows > 2 && 2 * units * all_rows.div_ceil(threads / lanes * rows) <= sms {
        rows /= 2;
    }
    ScanShape { lanes, vec, rows, sub: rows.min(sub), threads, blocks }
}

/// Rows of at most this many tokens are cheaper token by token.
const SHORT: usize = 16;

/// Whether a step may hold a row that is worth a chunked kernel: not where every row has one token.
fn may_be_long(b: &Bucket) -> bool {
    b.tokens > PAGE && b.tokens > b.rows
}

/// Most rows of a step that are not short.
fn long_rows(b: &Bucket) -> usize {
    b.rows.min(b.tokens / (SHORT + 1))
}

/// How a chunked kernel is cut: columns that a block owns, stages of copies in flight, shared memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ChunkedShape {
    columns: usize,
    stages: usize,
    shared: usize,
}

/// Sets of four warps that take turns to compute the outputs of chunks; a large state leaves registers for one set.
fn scan_sets(n: usize) -> usize {
    if n <= 128 { 2 } else { 1 }
}

/// Static shared memory of a chunked kernel, in bytes: barriers and sums.
const CHUNKED_STATIC: usize = 4096;

/// Cut of the chunked scan over P x N states, if it takes this shape; `blocks` of 64 columns would be there.
fn scan_block(p: usize, n: usize, blocks: usize, device: &Device) -> Option<ChunkedShape> {
    if !(n.is_multiple_of(64) && n <= 256 || n == 32) {
        return None;
    }
    // Half as wide where that leaves half of the device empty.
    let widest = if 2 * blocks <= device.sms { 32 } else { 64 };
    let shape = |columns: usize, stages| {
        let stage = 2 * PAGE * (2 * n + columns);
        // A copy of the state more than there are sets, and a tile of outputs for each of their warps.
        let states = (scan_sets(n) + 1) * 2 * columns * n;
        ChunkedShape { columns, stages, shared: stages * stage + states + scan_sets(n) * 2 * PAGE * columns }
    };
    [(64, 3), (64, 2), (32, 3), (32, 2)]
        .into_iter()
        .filter(|&(columns, _)| columns <= widest && p.is_multiple_of(columns) && n * columns <= 8192)
        .map(|(columns, stages)| shape(columns, stages))
        .find(|s| s.shared + CHUNKED_STATIC <= device.shared)
}

/// State size that the scan of long rows with parameters per channel takes.
const CHANNEL_STATES: usize = 16;

/// Cut of that scan over `channels` channels, if it takes them: those of a block, and its shared memory in bytes.
fn channel_block(channels: usize, n: usize, rows: usize, device: &Device) -> Option<(usize, usize)> {
    // Two stages of f32 inputs and two of halves of the outputs.
    let shared = |columns: usize| 2 * PAGE * 4 * (3 * columns + 2 * n) + 2 * 2 * PAGE * 4 * columns;
    [64, 32]
        .into_iter()
        .filter(|columns| n == CHANNEL_STATES && channels.is_multiple_of(*columns))
        // Narrow where wide blocks leave half of the device empty.
        .filter(|&columns| columns == 32 || 2 * rows * channels / columns > device.sms)
        .map(|columns| (columns, shared(columns)))
        .find(|&(_, shared)| shared + CHUNKED_STATIC <= device.shared)
}

pub(super) fn selective_scan<B: Address>(
    a: &SelectiveScan<B>,
    device: &Device,
    hazards: &Hazards,
) -> Result<Vec<Work>> {
    let &[_, heads, p, n] = a.pool.dims() else { unreachable!("checked") };
    aligned("selective_scan", 4, &[&a.b, &a.c, &a.pool])?;
    fours("selective_scan", "state size", n)?;
    let per_channel = a.form == ScanForm::PerChannel;
    let bucket = &a.step.bucket;
    let long = device.tuned && may_be_long(bucket) && a.dt.dtype == DType::Bf16 && wide(&[&a.x, &a.b, &a.c, &a.y]);
    let blocks = long_rows(bucket) * (heads * p).div_ceil(64);
    let chunked = scan_block(p, n, blocks, device).filter(|_| long && !per_channel);
    // All channels are of one group.
    let one_group = a.first_head / a.heads_per_group == (a.first_head + heads - 1) / a.heads_per_group;
    let channels = channel_block(heads, n, long_rows(bucket), device)
        .filter(|_| long && per_channel && one_group && wide(&[&a.dt]));
    let splits_rows = chunked.is_some() || channels.is_some();
    let pairs = a.pool.dtype != DType::F32 && !per_channel && wide(&[&a.b, &a.c, &a.pool]);
    let shape = scan_shape(n, heads * p, per_channel, pairs, bucket.chunks, device.sms);
    let tile = shape.threads / shape.lanes * shape.rows;
    let spec = Spec::new(File::SelectiveScan)
        .int("HEADS", heads)
        .int("P", p)
        .int("N", n)
        .int("LANES", shape.lanes)
        .int("VEC", shape.vec)
        .int("RPT", shape.rows)
        .int("SUB", shape.sub)
        .int("THREADS", shape.threads)
        .int("BLOCKS", shape.blocks)
        .int("HEADS_PER_GROUP", a.heads_per_group)
        .int("FIRST_HEAD", a.first_head)
        .flag("PER_CHANNEL", per_channel)
        // A thread's rows are consecutive and start at a multiple of their number.
        .flag(
            "SHARED_BC",
            (a.first_head * p).is_multiple_of(shape.rows) && (a.heads_per_group * p).is_multiple_of(shape.rows),
        )
        .flag("SHARED_HEAD", p % shape.rows == 0)
        .int("MAX_TOKENS", if splits_rows { SHORT } else { 0 })
        .ty("x_t", a.x.dtype)
        .ty("b_t", a.b.dtype)
        .ty("c_t", a.c.dtype)
        .ty("dt_t", a.dt.dtype)
        .ty("pool_t", a.pool.dtype)
        .ty("y_t", a.y.dtype);
    let (st, x, b, cc, dt) = ((&a.step).into(), (&a.x).into(), (&a.b).into(), (&a.c).into(), (&a.dt).into());
    let (par, pool, y, (dt_min, dt_max)) = ((&a.par).into(), (&a.pool).into(), (&a.y).into(), a.dt_limit);
    let state_unwritten = u32::from(hazards.state_unwritten);
    let args = arguments::SelectiveScan { st, x, b, cc, dt, par, pool, y, dt_min, dt_max, state_unwritten };
    let units = if splits_rows { bucket.rows } else { bucket.chunks };
    let grid = [(heads * p).div_ceil(tile) * units + padding_blocks(bucket.tokens, heads * p), 1, 1];
    let launch = Launch::new(spec, grid, shape.threads, &args);
    let mut work = vec![Work::Kernel(launch)];
    if let Some(ChunkedShape { columns, stages, shared }) = chunked {
        let spec = Spec::new(File::SelectiveScanChunk)
            .int("HEADS", heads)
            .int("P", p)
            .int("N", n)
            .int("PB", columns)
            .int("STAGES", stages)
            .int("SETS", scan_sets(n))
            .int("HEADS_PER_GROUP", a.heads_per_group)
            .int("FIRST_HEAD", a.first_head)
            .int("MIN_TOKENS", SHORT)
            .ty("pool_t", a.pool.dtype);
        let grid = [long_rows(bucket), heads * p / columns, 1];
        // A warp per 16 columns, those of the outputs, and four that copy.
        let threads = 32 * (columns / 16 + 4 * scan_sets(n) + 4);
        let args = arguments::SelectiveScanChunk { st, x, b, cc, dt, par, pool, y, dt_min, dt_max };
        work.push(Work::Kernel(Launch::new(spec, grid, threads, &args).with_shared(shared)));
    }
    if let Some((columns, shared)) = channels {
        let spec = Spec::new(File::SelectiveScanChannel)
            .int("HEADS", heads)
            .int("N", n)
            .int("CB", columns)
            .int("HEADS_PER_GROUP", a.heads_per_group)
            .int("FIRST_HEAD", a.first_head)
            .int("MIN_TOKENS", SHORT)
            .ty("pool_t", a.pool.dtype);
        let grid = [long_rows(bucket), heads / columns, 1];
        // Two warps per 32 channels, four that bring inputs, four that write outputs.
        let threads = 32 * (columns / 32 * 2 + 8);
        let args = arguments::SelectiveScanChunk { st, x, b, cc, dt, par, pool, y, dt_min, dt_max };
        work.push(Work::Kernel(Launch::new(spec, grid, threads, &args).with_shared(shared)));
    }
    Ok(work)
}

/// Columns of the state that a block of the delta rule owns: few when there are few sequences.
fn delta_columns(dv: usize, blocks_at_32: usize, sms: usize) -> usize {
    if !dv.is_multiple_of(32) || 2 * blocks_at_32 <= sms { 16 } else { 32 }
}

/// Threads of a block of the delta rule's step.
const DELTA_THREADS: usize = 128;

/// Its blocks of a multiprocessor, at least: registers are given up for more of them where there are many.
fn delta_blocks<B: Address>(a: &GatedDelta<B>, columns: usize, sms: usize) -> usize {
    let &[_, heads, dk, dv] = a.pool.dims() else { unreachable!("checked") };
    let rows_of_a_thread = dk.div_ceil(DELTA_THREADS / (columns / 4));
    match rows_of_a_thread > 8 || a.step.bucket.chunks * heads * dv.div_ceil(columns) <= 4 * sms {
        true => 1,
        false => 7,
    }
}

/// Whether the chunked delta rule takes keys of this dim, with a decay per head or, if `each`, per channel.
fn delta_keys(dk: usize, each: bool) -> bool {
    [96, 128].contains(&dk) || each && dk == 64
}

/// Bytes that its first half leaves for the second, per chunk and head, as in `gated_delta_unit.cuh`.
fn delta_unit(dk: usize, each: bool) -> usize {
    2 * PAGE * dk + 2 * PAGE * PAGE + if each { 4 * dk + 2 * 2 * PAGE * dk } else { 3 * 4 * PAGE }
}

/// Shared memory of the first half.
fn delta_prepare(dk: usize, each: bool) -> usize {
    let inverse = 2 * PAGE * (PAGE + 8) + 4 * PAGE * (PAGE + 4);
    match each {
        false => 2 * PAGE * (dk + 8) + 2 * PAGE * (PAGE + 8) + inverse,
        // Keys and queries or the inverse; sums of decays; four blocks of 16 x 16.
        true => inverse.max(2 * 2 * PAGE * (dk + 8)) + 4 * PAGE * (dk + 8) + 4 * 4 * 16 * 16,
    }
}

/// Cut of the second half of the chunked delta rule, if it takes this shape; `blocks` of 64 columns would be there. `each`: every
/// channel of the keys has a decay of its own.
fn delta_block(dk: usize, dv: usize, each: bool, blocks: usize, device: &Device) -> Option<ChunkedShape> {
    let shape = |columns: usize, stages| {
        let inputs = if each { 0 } else { 2 * 2 * PAGE * dk };
        let stage = delta_unit(dk, each) + inputs + 2 * PAGE * columns;
        ChunkedShape { columns, stages, shared: stages * stage + columns / 16 * (dk + PAGE) / 16 * 512 }
    };
    // Half as wide where that leaves half of the device empty, and three quarters where all blocks still run at once.
    let widest = if 2 * blocks <= device.sms { 32 } else { 64 };
    let three_quarters = 4 * blocks <= 3 * device.sms;
    [(64, 3), (64, 2), (48, 3), (48, 2), (32, 3), (32, 2)]
        .into_iter()
        .filter(|&(columns, _)| delta_keys(dk, each) && columns <= widest && dv.is_multiple_of(columns))
        .filter(|&(columns, _)| columns == 32 || (columns == 48) == (three_quarters && dv.is_multiple_of(48)))
        .map(|(columns, stages)| shape(columns, stages))
        .find(|s| s.shared.max(delta_prepare(dk, each)) + CHUNKED_STATIC <= device.shared)
}

/// Whether the inputs are such as the chunked delta rule reads.
fn delta_inputs<B: Address>(a: &GatedDelta<B>, device: &Device) -> bool {
    // Decays per channel are read two at a time.
    let decays = if a.decays_per_channel() { wide(&[&a.a]) } else { a.a.dtype == DType::Bf16 };
    device.tuned && decays && a.b.dtype == DType::Bf16 && wide(&[&a.q, &a.k, &a.v, &a.out])
}

fn delta_chunked<B: Address>(a: &GatedDelta<B>, device: &Device) -> Option<ChunkedShape> {
    let &[_, heads, dk, dv] = a.pool.dims() else { unreachable!("checked") };
    let long = may_be_long(&a.step.bucket) && delta_inputs(a, device);
    let blocks = long_rows(&a.step.bucket) * (heads * dv).div_ceil(64);
    delta_block(dk, dv, a.decays_per_channel(), blocks, device).filter(|_| long)
}

/// Cut of the delta rule over long rows token by token with a decay per channel, if it takes this shape; `blocks` of 32 columns would be there.
fn delta_channel_block(dk: usize, dv: usize, blocks: usize, device: &Device) -> Option<ChunkedShape> {
    /// Tokens of a tile, of which there are two.
    const TILE: usize = 16;
    let shape = |columns: usize| ChunkedShape { columns, stages: 2, shared: 2 * 4 * TILE * (3 * dk + columns + 2) };
    // Half as wide where that leaves half of the device empty.
    let widest = if 2 * blocks <= device.sms { 16 } else { 32 };
    [32, 16]
        .into_iter()
        .filter(|&columns| columns <= widest && dv.is_multiple_of(columns))
        .filter(|_| dk.is_multiple_of(32) && dk <= 256)
        .map(shape)
        .find(|s| s.shared <= device.shared)
}

fn delta_channel<B: Address>(a: &GatedDelta<B>, device: &Device) -> Option<ChunkedShape> {
    let &[_, heads, dk, dv] = a.pool.dims() else { unreachable!("checked") };
    let long = device.tuned && a.decays_per_channel() && may_be_long(&a.step.bucket);
    let fours = aligned("gated_delta", 4, &[&a.q, &a.k, &a.a, &a.par]).is_ok();
    let blocks = long_rows(&a.step.bucket) * heads * dv.div_ceil(32);
    delta_channel_block(dk, dv, blocks, device).filter(|_| long && fours)
}

/// Scratch bytes of any step with this many tokens or fewer: an upper bound, since a step of more rows may have no long row.
pub(super) fn delta_scratch<B: Address>(a: &GatedDelta<B>, device: &Device) -> u64 {
    let &[_, heads, dk, dv] = a.pool.dims() else { unreachable!("checked") };
    let b = &a.step.bucket;
    // A shape that fits with any number of blocks fits with the fewest, whose columns are half as wide.
    let takes =
        b.tokens > PAGE && delta_inputs(a, device) && delta_block(dk, dv, a.decays_per_channel(), 0, device).is_some();
    if takes { (b.chunks * heads * delta_unit(dk, a.decays_per_channel())) as u64 } else { 0 }
}

pub(super) fn gated_delta<B: Address>(
    a: &GatedDelta<B>,
    device: &Device,
    arena: &Arena,
    hazards: &Hazards,
) -> Result<Vec<Work>> {
    let &[_, heads, dk, dv] = a.pool.dims() else { unreachable!("checked") };
    aligned("gated_delta", 4, &[&a.v, &a.pool, &a.out])?;
    fours("gated_delta", "value head dim", dv)?;
    let bucket = &a.step.bucket;
    let (chunked, each) = (delta_chunked(a, device), a.decays_per_channel());
    let channel = if chunked.is_none() { delta_channel(a, device) } else { None };
    let splits_rows = chunked.is_some() || channel.is_some();
    let columns = delta_columns(dv, bucket.chunks * heads * dv.div_ceil(32), device.sms);
    let blocks = delta_blocks(a, columns, device.sms);
    let spec = Spec::new(File::GatedDelta)
        .int("HEADS", heads)
        .int("DK", dk)
        .int("DV", dv)
        .int("COLS", columns)
        .int("THREADS", DELTA_THREADS)
        .int("BLOCKS", blocks)
        .int("HEADS_PER_KEY", a.heads_per_key)
        .int("FIRST_HEAD", a.first_head)
        .flag("EACH", each)
        .int("MAX_TOKENS", if splits_rows { SHORT } else { 0 });
    let types = |spec: Spec| {
        let inputs = spec.ty("q_t", a.q.dtype).ty("k_t", a.k.dtype).ty("v_t", a.v.dtype).ty("a_t", a.a.dtype);
        inputs.ty("b_t", a.b.dtype).ty("pool_t", a.pool.dtype).ty("out_t", a.out.dtype)
    };
    let (st, q, k, v, beta_scale) = ((&a.step).into(), (&a.q).into(), (&a.k).into(), (&a.v).into(), a.beta_scale);
    let (gates, par, pool, out) = (((&a.a).into(), (&a.b).into()), (&a.par).into(), (&a.pool).into(), (&a.out).into());
    let state_unwritten = u32::from(hazards.state_unwritten);
    let args =
        arguments::GatedDelta { st, q, k, v, a: gates.0, b: gates.1, par, pool, out, beta_scale, state_unwritten };
    let units = if splits_rows { bucket.rows } else { bucket.chunks };
    let grid = [heads * dv.div_ceil(columns) * units + padding_blocks(bucket.tokens, heads * dv), 1, 1];
    let mut work = vec![Work::Kernel(Launch::new(types(spec), grid, DELTA_THREADS, &args))];
    if let Some(ChunkedShape { columns, shared, .. }) = channel {
        let spec = Spec::new(File::GatedDeltaChannel)
            .int("HEADS", heads)
            .int("DK", dk)
            .int("DV", dv)
            .int("CB", columns)
            .int("HEADS_PER_KEY", a.heads_per_key)
            .int("FIRST_HEAD", a.first_head)
            .int("MIN_TOKENS", SHORT);
        let args = arguments::GatedDeltaChannel { st, q, k, v, a: gates.0, b: gates.1, par, pool, out, beta_scale };
        let grid = [long_rows(bucket), heads * dv / columns, 1];
        // A warp per 8 columns, and four that bring tokens.
        let threads = 32 * (columns / 8 + 4);
        work.push(Work::Kernel(Launch::new(types(spec), grid, threads, &args).with_shared(shared)));
    }
    if let Some(ChunkedShape { columns, stages, shared }) = chunked {
        let constants = |file| {
            Spec::new(file)
                .int("HEADS", heads)
                .int("DK", dk)
                .int("HEADS_PER_KEY", a.heads_per_key)
                .int("FIRST_HEAD", a.first_head)
                .int("MIN_TOKENS", SHORT)
        };
        let scratch = At(arena.scratch);
        let prepare = arguments::GatedDeltaPrepare { st, q, k, a: gates.0, b: gates.1, par, scratch, beta_scale };
        let (first_key, last_key) = (a.first_head / a.heads_per_key, (a.first_head + heads - 1) / a.heads_per_key);
        let (file, blocks) = match each {
            false => (File::GatedDeltaPrepare, last_key - first_key + 1),
            true => (File::GatedDeltaPrepareChannel, heads),
        };
        let launch = Launch::new(constants(file), [bucket.chunks, blocks, 1], 128, &prepare);
        work.push(Work::Kernel(launch.with_shared(delta_prepare(dk, each))));
        let spec = constants(File::GatedDeltaChunk)
            .int("DV", dv)
            .int("DB", columns)
            .int("STAGES", stages)
            .flag("EACH", each)
            .ty("pool_t", a.pool.dtype);
        let args = arguments::GatedDeltaChunk { st, q, k, v, scratch, pool, out };
        let grid = [long_rows(bucket), heads * dv / columns, 1];
        // Two warps per 16 columns, and four that copy.
        let threads = 64 * (columns / 16) + 128;
        work.push(Work::Kernel(Launch::new(spec, grid, threads, &args).with_shared(shared)));
    }
    Ok(work)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scans_keep_as_much_in_flight_as_fits() {
        let shape = |n, rows, pairs, units| {
            let s = scan_shape(n, rows, false, pairs, units, 132);
            (s.lanes, s.vec, s.rows, s.sub, s.threads)
        };
        assert_eq!(shape(128, 8192, false, 1), (32, 4, 8, 8, 32));
        assert_eq!(shape(128, 8192, true, 1), (16, 8, 8, 8, 64));
        assert_eq!(shape(256, 8192, true, 1), (32, 8, 8, 8, 64));
        assert_eq!(shape(100, 8192, true, 1), (1, 4, 1, 1, 32));
        assert_eq!(shape(128, 256, false, 1), (32, 4, 2, 2, 32));
        let channel = scan_shape(16, 4096, true, false, 1, 132);
        assert_eq!((channel.lanes, channel.rows, channel.threads), (4, 1, 128));
    }

    #[test]
    fn channels_fill_the_device() {
        let block = |channels, n, rows, shared| {
            channel_block(channels, n, rows, &Device::like_h200(shared)).map(|(columns, _)| columns)
        };
        assert_eq!(block(8192, 16, 1, 227), Some(64));
        assert_eq!(block(4096, 16, 1, 227), Some(32));
        assert_eq!(block(4096, 16, 4, 227), Some(64));
        assert_eq!(block(1568, 16, 1, 227), Some(32));
        assert_eq!(block(8192, 16, 1, 163), Some(32));
        assert_eq!(block(8192, 16, 1, 99), None);
        assert_eq!(block(8192, 32, 1, 227), None);
        assert_eq!(block(1544, 16, 1, 227), None);
    }

    #[test]
    fn chunked_blocks_fit() {
        let scan =
            |p, n, blocks, shared| scan_block(p, n, blocks, &Device::like_h200(shared)).map(|s| (s.columns, s.stages));
        assert_eq!(scan(64, 128, 128, 227), Some((64, 3)));
        assert_eq!(scan(64, 128, 48, 227), Some((32, 3)));
        assert_eq!(scan(64, 128, 128, 163), Some((64, 2)));
        assert_eq!(scan(64, 256, 128, 227), Some((32, 2)));
        assert_eq!(scan(64, 128, 128, 99), None);
        assert_eq!(scan(80, 128, 128, 227), None);
        assert_eq!(scan(64, 96, 128, 227), None);
        let delta = |dv, blocks, shared| {
            delta_block(128, dv, false, blocks, &Device::like_h200(shared)).map(|s| (s.columns, s.stages))
        };
        assert_eq!(delta(128, 64, 227), Some((32, 3)));
        assert_eq!(delta(128, 128, 227), Some((64, 3)));
        assert_eq!(delta(96, 128, 227), Some((32, 3)));
        assert_eq!(delta(128, 64, 163), Some((32, 2)));
        assert_eq!(delta(128, 64, 99), None);
        let olmo = |blocks, shared| {
            delta_block(96, 192, false, blocks, &Device::like_h200(shared)).map(|s| (s.columns, s.stages))
        };
        assert_eq!(olmo(90, 227), Some((48, 3)));
        assert_eq!(olmo(180, 227), Some((64, 3)));
        assert_eq!(olmo(45, 227), Some((32, 3)));
        assert_eq!(olmo(90, 163), Some((48, 2)));
        assert_eq!(delta_block(80, 192, false, 90, &Device::like_h200(227)), None);
        let kimi = |dk, dv, blocks, shared| {
            delta_block(dk, dv, true, blocks, &Device::like_h200(shared)).map(|s| (s.columns, s.stages))
        };
        assert_eq!(kimi(128, 128, 64, 227), Some((32, 3)));
        assert_eq!(kimi(128, 128, 64, 163), Some((32, 2)));
        assert_eq!(kimi(128, 128, 64, 99), None);
        assert_eq!(kimi(64, 64, 128, 163), Some((64, 3)));
        assert_eq!(kimi(80, 64, 128, 227), None);
        assert_eq!(delta_block(64, 64, false, 128, &Device::like_h200(227)), None);
        let channel =
            |dk, dv, blocks, shared| delta_channel_block(dk, dv, blocks, &Device::like_h200(shared)).map(|s| s.columns);
        assert_eq!(channel(128, 128, 128, 99), Some(32));
        assert_eq!(channel(128, 128, 64, 99), Some(16));
        assert_eq!(channel(64, 48, 128, 99), Some(16));
        assert_eq!(channel(256, 128, 128, 99), Some(16));
        assert_eq!(channel(20, 32, 128, 227), None);
        assert_eq!(channel(64, 36, 128, 227), None);
    }
}
