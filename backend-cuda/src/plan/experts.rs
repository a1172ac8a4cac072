//! Products of the experts that tokens chose: streamed for few pairs, grouped by expert on tensor cores, or pair by pair.

use selkie_core::{
    Result,
    ops::{Activation, ExpertMatmul, ExpertRange, Op, Route, Router, RowBlock},
    tensor::{DType, Tensor},
};

use super::{
    Arena, Device, Hazards, SMEM_LEFT_FREE, act,
    grouped::{self, FEW_PAIRS},
    pointwise::Rule,
    same_view, vector, wide,
};
use crate::{
    arguments::{self, Rows},
    codes::{self, Layout},
    launch::{Address, Launch, Work, address},
    spec::{File, Spec},
};

/// How many experts there are and their weights, if those are in one block.
pub(super) fn in_one_block<B: Address>(a: &ExpertMatmul<B>) -> Option<(usize, &RowBlock<B>)> {
    let [ExpertRange { experts, blocks, .. }] = &a.experts[..] else { return None };
    let [block] = &blocks[..] else { return None };
    Some((*experts, block))
}

/// Warps of a block of the kernel that streams W.
const STREAM_WARPS: usize = 8;

/// How that kernel is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct StreamShape {
    /// Neighbouring rows of a unit.
    rows: usize,
    stages: usize,
    blocks: usize,
    /// Dynamic shared memory.
    shared: usize,
}

/// Cuts the products of `tokens` tokens of `top` choices with experts of `n` rows of `k`, in `parts` halves, if x fits.
fn stream_shape([tokens, top, n, k]: [usize; 4], parts: usize, combine: bool, device: &Device) -> Option<StreamShape> {
    // Copies of some KiB, of rows that follow each other.
    let fits = |r: usize| n.is_multiple_of(parts * r) && 2 * parts * r * k <= 8 << 10;
    let rows = [1, 2, 4].into_iter().find(|&r| fits(r) && 2 * r * k >= 3 << 10);
    let rows = rows.or_else(|| [4, 2].into_iter().find(|&r| fits(r))).unwrap_or(1);
    let groups = n / parts / rows;
    let (units, blocks) = match combine {
        true => {
            let blocks = (tokens * groups).min(device.sms);
            ((tokens * groups).div_ceil(blocks) * top, blocks)
        }
        false => {
            let blocks = (tokens * top * groups).div_ceil(STREAM_WARPS).min(device.sms);
            ((tokens * top * groups).div_ceil(blocks), blocks)
        }
    };
    let x_bytes = 2 * k * tokens * if combine { top } else { 1 };
    let sums = if combine { 4 * rows * (units + units / top) } else { 0 };
    let room = device.shared.checked_sub(SMEM_LEFT_FREE + 4096 + x_bytes + sums)? / STREAM_WARPS;
    let (stage, needed) = (2 * parts * rows * k, units.div_ceil(STREAM_WARPS));
    let stages = (room / stage).min(needed).min(16);
    let shared = STREAM_WARPS * stages * stage + x_bytes + sums;
    (n.is_multiple_of(parts) && stages >= needed.min(2)).then_some(StreamShape { rows, stages, blocks, shared })
}

/// Warps of a block of the kernel that streams codes, the best first: fewer have room for longer spans.
const CODES_WARPS: [usize; 2] = [16, 8];

/// How that kernel is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CodesShape {
    warps: usize,
    stages: usize,
    blocks: usize,
    /// Dynamic shared memory.
    shared: usize,
}

/// As [`stream_shape`], of codes in this layout.
fn codes_shape(
    [tokens, top, n]: [usize; 3],
    parts: usize,
    combine: bool,
    layout: &Layout,
    device: &Device,
) -> Option<CodesShape> {
    let spans = layout.spans();
    let all = tokens * if combine { 1 } else { top } * (n / parts).div_ceil(codes::TILE);
    let blocks = all.min(device.sms);
    let jobs = all.div_ceil(blocks);
    let items = jobs * if combine { top } else { parts } * spans;
    let x_bytes = 2 * spans * codes::SPAN * tokens * if combine { top } else { 1 };
    let sums = 4 * codes::TILE * (items + jobs);
    let room = device.shared.checked_sub(SMEM_LEFT_FREE + 4096 + x_bytes + sums)?;
    let cut = |warps: usize| {
        let (stage, needed) = (warps * layout.span_bytes(), items.div_ceil(warps));
        let stages = (room / stage).min(needed).min(16);
        let shared = stages * stage + x_bytes + sums;
        (stages >= needed.min(2)).then_some(CodesShape { warps, stages, blocks, shared })
    };
    let halves = parts == 1 || n.is_multiple_of(2 * codes::TILE);
    CODES_WARPS.into_iter().find_map(cut).filter(|_| halves)
}

/// How the kernel that streams codes is cut for few pairs, in `parts` halves, if it takes this op.
fn codes_cut<B: Address>(a: &ExpertMatmul<B>, parts: usize, device: &Device) -> Option<(Layout, CodesShape)> {
    let (_, block) = in_one_block(a)?;
    let (tokens, top, k, n) = (a.ids.rows(), a.ids.row_len(), a.x.row_len(), a.out.row_len());
    let layout = Layout::of(block.format, k)?;
    let few = device.tuned && device.bulk_copies && tokens * top < FEW_PAIRS;
    if !(few && k.is_multiple_of(8) && wide(&[&a.x])) {
        return None;
    }
    let shape = codes_shape([tokens, top, n], parts, a.combine.is_some(), &layout, device)?;
    Some((layout, shape))
}

/// Whether a kernel that streams W takes this op.
fn streams<B: Address>(a: &ExpertMatmul<B>, device: &Device) -> bool {
    stream_cut(a, 1, device).is_some() || codes_cut(a, 1, device).is_some()
}

/// How the kernel that streams W is cut for few pairs, in `parts` halves, if it takes this op.
fn stream_cut<B: Address>(a: &ExpertMatmul<B>, parts: usize, device: &Device) -> Option<StreamShape> {
    let (_, block) = in_one_block(a)?;
    let (tokens, top, k, n) = (a.ids.rows(), a.ids.row_len(), a.x.row_len(), a.out.row_len());
    let few = device.tuned && device.bulk_copies && tokens * top < FEW_PAIRS;
    if !(few && k.is_multiple_of(8) && wide(&[&a.x, &block.w])) {
        return None;
    }
    stream_shape([tokens, top, n, k], parts, a.combine.is_some(), device)
}

/// Few pairs in a kernel that streams W, with the choice of the experts before the products and the activation after them, if one takes
/// this op. `rounds`: the input is rounded.
fn streamed<B: Address>(
    a: &ExpertMatmul<B>,
    rounds: bool,
    route: Option<&Route<B>>,
    then: Option<&Activation<B>>,
    device: &Device,
    hazards: &Hazards,
) -> Option<Work> {
    let (experts, block) = in_one_block(a)?;
    let (tokens, top, k, n) = (a.ids.rows(), a.ids.row_len(), a.x.row_len(), a.out.row_len());
    let parts = grouped::parts(then);
    let codes = codes_cut(a, parts, device);
    let plain = if rounds { None } else { stream_cut(a, parts, device) };
    let (spec, warps, stages) = match (&codes, plain) {
        (Some((layout, shape)), _) => {
            let spec = Spec::new(File::ExpertStreamCodes).int("FORMAT", layout.format);
            (spec.flag("ROUND", rounds), shape.warps, shape.stages)
        }
        (None, Some(shape)) => (Spec::new(File::ExpertStream).int("ROWS", shape.rows), STREAM_WARPS, shape.stages),
        (None, None) => return None,
    };
    let spec = spec
        .int("TOKENS", tokens)
        .int("K", k)
        .int("N", n)
        .int("TOP", top)
        .int("WARPS", warps)
        .int("STAGES", stages)
        .int("PARTS", parts)
        .flag("COMBINE", a.combine.is_some())
        .flag("ACCUMULATE", a.accumulate)
        .flag("HAS_MID", then.is_some())
        .int("ACT", then.map_or(0, |t| act(t.act)))
        .flag("ROUTE", route.is_some());
    let rule = Rule::from(route.map_or(&Router::TopKSoftmax, |r| &r.router));
    let bias = route.and_then(|r| r.bias.as_ref());
    let spec = rule
        .constants(spec, route.map_or(1, |r| r.logits.row_len()), bias.is_some())
        .ty("out_t", a.out.dtype)
        .ty("mid_t", then.map_or(DType::F32, |t| t.out.dtype));
    let mut args = arguments::ExpertStream {
        x: (&a.x).into(),
        w: (&block.w).into(),
        experts: experts as u32,
        ids: (&a.ids).into(),
        out: (&a.out).into(),
        mid: then.map(|t| &t.out).into(),
        weights: a.combine.as_ref().or(route.map(|r| &r.weights)).into(),
        scale: a.scale,
        logits: route.map(|r| &r.logits).into(),
        bias: bias.into(),
        sum_eps: rule.sum_eps,
        route_scale: rule.scale,
        inputs_complete: u32::from(hazards.inputs_complete),
    };
    if let Some((layout, _)) = &codes {
        args.w = Rows { at: address(&block.w), stride: layout.bytes(n) as u64 };
    }
    let (blocks, shared) =
        codes.map_or_else(|| plain.map(|s| (s.blocks, s.shared)), |(_, s)| Some((s.blocks, s.shared)))?;
    let launch = Launch::new(spec, [blocks, 1, 1], 32 * warps, &args);
    Some(Work::Kernel(launch.with_shared(shared)))
}

/// Whether the kernel of `a` may compute the activation after it too.
pub(super) fn may_fuse<B: Address>(a: &ExpertMatmul<B>, device: &Device) -> bool {
    a.combine.is_none() && streams(a, device) || grouped::may_fuse(a, device)
}

/// Whether the second half of the experts may be computed from the tables of `a`, the first one.
pub(super) fn may_share_tables<B: Address>(a: &ExpertMatmul<B>, device: &Device) -> bool {
    grouped::may_fuse(a, device)
}

/// Products and the activation that reads all of them, as one kernel (after the sort, if they are grouped).
pub(super) fn with_activation<B: Address>(
    a: &ExpertMatmul<B>,
    rounds: bool,
    then: &Activation<B>,
    device: &Device,
    arena: &Arena,
    hazards: &Hazards,
) -> Option<Vec<Work>> {
    if !reads_all(then, a) {
        return None;
    }
    let work = streamed(a, rounds, None, Some(then), device, hazards).map(|work| vec![work]);
    work.or_else(|| if rounds { None } else { grouped::with_activation(a, then, device, arena) })
}

/// Whether an activation reads all products of the first half of the experts, and may be computed with them.
fn reads_all<B: Address>(then: &Activation<B>, a: &ExpertMatmul<B>) -> bool {
    let n = a.out.row_len();
    let reads = match &then.up {
        Some(up) => {
            let half = n / 2;
            n.is_multiple_of(2) && same_view(&then.gate, &a.out.cols(0, half)) && same_view(up, &a.out.cols(half, half))
        }
        None => same_view(&then.gate, &a.out),
    };
    let read = [&a.x, &a.ids].into_iter().chain(a.experts.iter().flat_map(|r| &r.blocks).map(|b| &b.w));
    let apart = read.chain([&a.out]).all(|t| t.buf.id() != then.out.buf.id());
    a.combine.is_none() && then.row_gate.is_none() && reads && apart
}

/// Whether the kernels that stream W for `a` may choose its experts too: of one token, without groups of experts.
pub(super) fn may_choose<B: Address>(route: &Route<B>, a: &ExpertMatmul<B>, device: &Device) -> bool {
    may_begin(route) && same_view(&route.ids, &a.ids) && a.combine.is_none() && streams(a, device)
}

/// Whether they may, as far as the routing decides.
pub(super) fn may_begin<B: Address>(route: &Route<B>) -> bool {
    route.logits.rows() == 1 && Rule::from(&route.router).groups == [1, 1]
}

/// The choice of a token's experts and their first half, and of `rest` the activation and the second half, as far as these follow: each
/// half chooses by itself, so that its weights are on their way as soon as the logits are there. `rounds`: of each op, whether its input
/// is rounded.
pub(super) fn with_choice<B: Address>(
    route: &Route<B>,
    up: &ExpertMatmul<B>,
    rest: &[Op<B>],
    rounds: &[bool],
    device: &Device,
    hazards: &Hazards,
) -> Option<Vec<Work>> {
    let (then, down) = match rest {
        [] => (None, None),
        [Op::Activation(then)] => (Some(then), None),
        [Op::Activation(then), Op::ExpertMatmul(down)] => (Some(then), Some(down)),
        _ => return None,
    };
    // Blocks read the logits while others write results.
    let written = [Some(&route.ids), Some(&route.weights), Some(&up.out), then.map(|t| &t.out), down.map(|d| &d.out)];
    let apart = written.iter().flatten().all(|t| t.buf.id() != route.logits.buf.id() && t.buf.id() != up.x.buf.id());
    if !may_choose(route, up, device) || !apart || then.is_some_and(|then| !reads_all(then, up)) {
        return None;
    }
    let first = streamed(up, rounds[1], Some(route), then, device, hazards)?;
    let Some(down) = down else { return Some(vec![first]) };
    let fits = same_view(&down.ids, &route.ids)
        && down.combine.as_ref().is_some_and(|weights| same_view(weights, &route.weights))
        && then.is_some_and(|then| same_view(&down.x, &then.out));
    if !fits {
        return None;
    }
    // The first half starts the second one when all before it is complete, the logits too.
    let hazards = Hazards { inputs_complete: true, ..*hazards };
    Some(vec![first, streamed(down, rounds[3], Some(route), None, device, &hazards)?])
}

/// Both halves of the experts with the activation in between, if the second one is computed from the tables of the first. `round`: the
/// kernels of a rounding before the second half.
pub(super) fn both_halves<B: Address>(
    up: &ExpertMatmul<B>,
    then: &Activation<B>,
    round: Vec<Work>,
    down: &ExpertMatmul<B>,
    device: &Device,
    arena: &Arena,
    hazards: &Hazards,
) -> Option<Vec<Work>> {
    if !may_share_tables(up, device) {
        return None;
    }
    let mut first = with_activation(up, false, then, device, arena, hazards)?;
    first.extend(round);
    grouped::both_halves(up, first, down, device, arena)
}

/// Few pairs of which the input is rounded.
pub(super) fn rounded<B: Address>(a: &ExpertMatmul<B>, device: &Device, hazards: &Hazards) -> Option<Work> {
    streamed(a, true, None, None, device, hazards)
}

pub(super) fn expert_matmul<B: Address>(
    a: &ExpertMatmul<B>,
    device: &Device,
    arena: &Arena,
    hazards: &Hazards,
) -> Result<Vec<Work>> {
    if let Some(work) = streamed(a, false, None, None, device, hazards) {
        return Ok(vec![work]);
    }
    if let Some((block, form)) = grouped::form(a, device) {
        let mut work = vec![grouped::sort(a, form, arena)];
        work.extend(grouped::second_half(a, (block, form), false, device, arena));
        return Ok(work);
    }
    let mut work = pair_by_pair(a, arena);
    work.extend(grouped::combine(a, DType::F32, arena));
    Ok(work)
}

/// The products of each pair on its own.
fn pair_by_pair<B: Address>(a: &ExpertMatmul<B>, arena: &Arena) -> Vec<Work> {
    let (pairs, top, k, n) = (a.ids.len(), a.ids.row_len(), a.x.row_len(), a.out.row_len());
    let (to, stride, dtype) = match a.combine {
        Some(_) => (grouped::products(a, arena), n as u64, DType::F32),
        None => (address(&a.out), a.out.row_stride as u64, a.out.dtype),
    };
    let blocks = a.experts.iter().flat_map(|range| range.blocks.iter().map(move |block| (range, block)));
    let launch = |(range, block): (&ExpertRange<B>, &RowBlock<B>)| {
        let rows = block.w.dims()[1];
        // The kernel, the elements (of codes, bytes) from one expert to the next, and the rows of a block of threads.
        let (spec, expert, tile) = match Layout::of(block.format, k) {
            Some(layout) => {
                (Spec::new(File::ExpertCodes).int("FORMAT", layout.format), layout.bytes(rows), codes::TILE)
            }
            None => (Spec::new(File::ExpertMatmul).int("VEC", pair_vector(&a.x, &block.w, k)), block.w.row_stride, 32),
        };
        let spec = spec
            .int("K", k)
            .int("TOP", top)
            .flag("X_PER_PAIR", a.combine.is_some())
            .ty("x_t", a.x.dtype)
            .ty("w_t", block.w.dtype)
            .ty("out_t", dtype);
        let args = arguments::ExpertMatmul {
            x: (&a.x).into(),
            w: Rows { at: address(&block.w), stride: expert as u64 },
            first: range.first as u32,
            experts: range.experts as u32,
            n: rows as i32,
            ids: (&a.ids).into(),
            out: Rows { at: to + (block.col * dtype.bytes()) as u64, stride },
        };
        Work::Kernel(Launch::new(spec, [pairs, rows.div_ceil(tile), 1], 256, &args))
    };
    blocks.map(launch).collect()
}

/// Width of the loads along k, for rows that follow each other without a gap.
fn pair_vector<B: Address>(x: &Tensor<B>, w: &Tensor<B>, k: usize) -> usize {
    let v = vector(k, &[x, w]);
    if v == 8 && (x.dtype.bytes() == 4 || w.dtype.bytes() == 4) { 4 } else { v }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_fit_beside_their_inputs() {
        let device = Device::like_h200(227);
        for (dims, parts, combine, rows, stages) in [
            ([1, 6, 1856, 2688], 1, false, 1, 4),
            ([1, 6, 2688, 1856], 1, true, 1, 6),
            ([1, 10, 1024, 2048], 2, false, 1, 3),
            ([1, 10, 2048, 512], 1, true, 4, 5),
            ([5, 6, 2688, 1856], 1, true, 1, 3),
        ] {
            let f = stream_shape(dims, parts, combine, &device).expect("a published shape");
            assert_eq!((f.rows, f.stages), (rows, stages), "{dims:?}");
            assert!(f.shared + 4096 <= device.shared);
        }
        // A stage of one row does not fit twice.
        assert_eq!(stream_shape([1, 2, 4096, 14336], 1, true, &device), None);
    }
}
