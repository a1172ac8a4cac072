//! Lowers the stateful ops: convolution, selective scan, gated delta rule.

use selkie_core::backend::Handle;
use selkie_core::error::Result;
use selkie_core::ops::Access::{InPlace, Read, Write};
use selkie_core::ops::{Conv1d, GatedDelta, ScanForm, SelectiveScan};
use selkie_core::step::{Bucket, PAGE, Step};
use selkie_core::tensor::Tensor;

use super::{Facts, act, demand, quads};
use crate::kernel::{Builder, Kernel, Shader, shader};

/// Maximum tokens per row for which a thread of the convolution walks all tokens in order.
const FEW_TOKENS: usize = 4;
/// Consecutive tokens per thread in a convolution of many tokens.
const RUN: usize = 8;

pub(super) fn conv1d<B: Handle>(op: &Conv1d<B>, facts: &Facts) -> Result<Vec<Kernel<B>>> {
    let b = &op.step.bucket;
    let channels = op.x.row_len();
    let base = |shader: Shader| {
        Builder::new(shader)
            .constant("TAPS", op.weight.row_len() - 1)
            .constant("ACT", act(op.act))
            .param("channels", channels)
            .param("chunks", b.chunks)
            .step(&op.step)
            .view("weight", Read, &op.weight)
    };
    let groups = |entries: usize| (entries * channels).div_ceil(64);
    if b.tokens <= FEW_TOKENS * b.rows {
        let walk =
            base(shader!("conv1d")).view("x", Read, &op.x).view("pool", InPlace, &op.pool).view("out", Write, &op.out);
        return Ok(vec![walk.build("conv1d", groups(b.rows), facts.max_binding)]);
    }
    quads("conv1d", "the number of channels", channels)?;
    let tokens = base(shader!("conv1d_tokens"))
        .constant("BACK", op.weight.row_len() - 2)
        .constant("RUN", RUN)
        .vectors("x", Read, &op.x)
        .view("pool", Read, &op.pool)
        .vectors("out", Write, &op.out);
    let states = base(shader!("conv1d_states")).view("x", Read, &op.x).view("pool", InPlace, &op.pool);
    Ok(vec![
        tokens.build("conv1d", (b.tokens.div_ceil(RUN) * channels / 4).div_ceil(64), facts.max_binding),
        states.build("conv1d", groups(b.chunks), facts.max_binding),
    ])
}

pub(super) fn selective_scan<B: Handle>(op: &SelectiveScan<B>, facts: &Facts) -> Result<Vec<Kernel<B>>> {
    let &[_, heads, p, n] = op.pool.dims() else { unreachable!("checked: four dims") };
    quads("selective_scan", "the state size", n)?;
    let quads = n / 4;
    // The largest allowed power of two that divides the quads of a row of the state.
    let most = if facts.few_barriers { 1 } else { facts.subgroup.map_or(16, |size| size.min(16)) };
    let lanes = (quads & quads.wrapping_neg()).min(most);
    let parts = (heads * p).div_ceil(256 / lanes);
    let base = |shader: Shader| {
        Builder::new(shader)
            .constant("HEAD_DIM", p)
            .constant("STATE", n)
            .param("first_head", op.first_head)
            .param("heads_per_group", op.heads_per_group)
            .float("dt_low", op.dt_limit.0)
            .float("dt_high", op.dt_limit.1.min(f32::MAX))
            .step(&op.step)
            .vectors("b", Read, &op.b)
            .vectors("c", Read, &op.c)
            .view("dt", Read, &op.dt)
            .view("par", Read, &op.par)
            .vectors("pool", InPlace, &op.pool)
    };
    let bucket = &op.step.bucket;
    let many = op.form == ScanForm::PerHead && bucket.tokens > FEW_TOKENS * bucket.rows && !facts.few_barriers;
    let mut kernels = vec![];
    // Maximum length of the rows that the chunked form skips.
    let mut longest = usize::MAX;
    if many
        && scan_words(op).is_some()
        && let Some(chunks) =
            Pairs::pick(bucket, n, (op.first_head, heads, op.heads_per_group)).filter(|c| c.fits(facts))
    {
        kernels.push(chunks.kernel("selective_scan", &op.step, &op.c, &op.b, 0, facts));
        kernels.push(
            base(shader!("selective_scan_chunk"))
                .constant("BLOCKS", p / CHUNK_COLUMNS)
                .constant("PARTS", n / 64)
                .constant("PART_QUADS", 512 / n)
                .constant("C_FETCHES", 512 / n)
                .constant("B_TOKENS", if n > 128 { 8 } else { 16 })
                .constant("B_FETCHES", if n > 128 { 2 } else { 4 })
                .constant("PAIR_FETCHES", 256 / n)
                .constant("X_FETCHES", 128_usize.div_ceil(n))
                .flag("TWO_PARTS", n == 128)
                .flag("FOUR_PARTS", n == 256)
                .param("heads", heads)
                .param("short", chunks.short)
                .param("first_group", chunks.first_group)
                .vectors("x", Read, &op.x)
                .vectors("y", Write, &op.y)
                .scratch("pairs", Read, 0, chunks.dims())
                .build("selective_scan", bucket.rows * heads * (p / CHUNK_COLUMNS), facts.max_binding),
        );
        if chunks.short == 0 {
            return Ok(kernels);
        }
        longest = chunks.short;
    }
    if let Some(plan) = ScanPlan::pick(p, n).filter(|_| many) {
        let threads = plan.rows / 4 * plan.lanes;
        let kernel = base(shader!("selective_scan_tile"))
            .constant("ROWS", plan.rows)
            .constant("PARTS", p / plan.rows)
            .constant("LANES", plan.lanes)
            .constant("VECTORS", n / 4 / plan.lanes)
            .constant("TILE", plan.tile)
            .constant("BC_FETCHES", (plan.tile * n / 4).div_ceil(threads))
            .constant("X_FETCHES", (plan.tile * plan.rows / 4).div_ceil(threads))
            .param("heads", heads)
            .param("longest", longest)
            .vectors("x", Read, &op.x)
            .vectors("y", Write, &op.y);
        kernels.push(kernel.build("selective_scan", bucket.rows * heads * (p / plan.rows), facts.max_binding));
        return Ok(kernels);
    }
    demand(quads / lanes <= 64, "selective_scan", || format!("a state size of {n}"))?;
    Ok(vec![
        base(shader!("selective_scan"))
            .constant("LANES", lanes)
            .constant("VECTORS", quads / lanes)
            .subgroup(facts.subgroup, lanes)
            .flag("PER_CHANNEL", op.form == ScanForm::PerChannel)
            .param("parts", parts)
            .param("state_rows", heads * p)
            .view("x", Read, &op.x)
            .view("y", Write, &op.y)
            .build("selective_scan", bucket.rows * parts, facts.max_binding),
    ])
}

/// Rows of more tokens than this use the chunked form, in steps that may also have shorter rows.
const LONG: usize = 32;
/// Rows or columns of a head's state per workgroup of a chunked form.
const CHUNK_COLUMNS: usize = 32;

/// The output of `chunk_pairs.wgsl` in the scratch arena: per group, the products of each token of a long row with the tokens
/// of its chunk.
struct Pairs {
    inner: usize,
    tokens: usize,
    first_group: usize,
    groups: usize,
    /// Rows of at most this many tokens are skipped; the token-by-token shader handles them.
    short: usize,
}

impl Pairs {
    /// `None` if the step cannot have long rows. `(first, heads, per_group)`: first head, number of heads, heads per group.
    fn pick(bucket: &Bucket, inner: usize, (first, heads, per_group): (usize, usize, usize)) -> Option<Self> {
        let (first_group, groups) = Self::groups(first, heads, per_group);
        (bucket.tokens > LONG).then_some(Self {
            inner,
            tokens: bucket.tokens,
            first_group,
            groups,
            short: if bucket.rows == 1 { 0 } else { LONG },
        })
    }

    /// The first group of these heads and the number of groups.
    fn groups(first: usize, heads: usize, per_group: usize) -> (usize, usize) {
        (first / per_group, (first + heads - 1) / per_group + 1 - first / per_group)
    }

    fn dims(&self) -> [usize; 2] {
        [self.tokens, self.groups * PAGE]
    }

    fn words(&self) -> usize {
        self.tokens * self.groups * PAGE
    }

    /// Whether a binding of the scratch arena can hold this.
    fn fits(&self, facts: &Facts) -> bool {
        4 * self.words() as u64 <= facts.max_binding
    }

    /// The dispatch that multiplies rows of `c` and `b` and writes to word `offset` of the scratch arena.
    fn kernel<B: Handle>(
        &self,
        op: &'static str,
        step: &Step<B>,
        c: &Tensor<B>,
        b: &Tensor<B>,
        offset: usize,
        facts: &Facts,
    ) -> Kernel<B> {
        Builder::new(shader!("chunk_pairs"))
            .constant("INNER", self.inner)
            .param("short", self.short)
            .param("first_group", self.first_group)
            .param("bc_groups", self.groups)
            .step(step)
            .vectors("b", Read, b)
            .vectors("c", Read, c)
            .scratch("pairs", Write, offset, self.dims())
            .build(op, step.bucket.chunks * self.groups, facts.max_binding)
    }
}

/// Tiling of the scan of many tokens: see `selective_scan_tile.wgsl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ScanPlan {
    /// Rows of a head's state per workgroup.
    rows: usize,
    /// Threads that share a row.
    lanes: usize,
    /// Tokens in workgroup memory at a time.
    tile: usize,
}

impl ScanPlan {
    /// The tiling for heads of `p` rows of `n`, `None` if they do not fit.
    fn pick(p: usize, n: usize) -> Option<Self> {
        // Two workgroups per head occupy more of a device than one.
        let rows = if p > 32 && p.is_multiple_of(32) { 32 } else { p };
        let quads = n / 4;
        let lanes = (quads & quads.wrapping_neg()).min(8);
        let floats = |tile: usize| tile * (2 * n + rows + rows * lanes) + 128;
        let tile = [8, 4, 2, 1].into_iter().find(|t| floats(*t) <= 4096)?;
        (rows.is_multiple_of(4) && quads / lanes <= 8 && rows / 4 * lanes <= 256).then_some(Self { rows, lanes, tile })
    }
}

pub(super) fn gated_delta<B: Handle>(op: &GatedDelta<B>, facts: &Facts) -> Result<Vec<Kernel<B>>> {
    let &[_, heads, dk, dv] = op.pool.dims() else { unreachable!("checked: four dims") };
    // Keys and queries of 4 tokens, and decays per channel, are in workgroup memory.
    let each = op.decays_per_channel();
    let most = if each { 192 } else { 256 };
    demand(dk <= most, "gated_delta", || format!("a key dim of {dk}; at most {most} is supported"))?;
    let bucket = &op.step.bucket;
    let many = bucket.tokens > FEW_TOKENS * bucket.rows && !facts.few_barriers;
    let chunked = if many { chunked_delta(op, facts) } else { None };
    // The token-by-token form takes the rows that the chunked form skips.
    let (mut kernels, longest) = chunked.unwrap_or((vec![], usize::MAX));
    if longest == 0 {
        return Ok(kernels);
    }
    let parts = dv.div_ceil(32);
    kernels.push(
        delta_gates(shader!("gated_delta"), op)
            .constant("VALUE", dv)
            .flag("EACH", each)
            .param("parts", parts)
            .param("longest", longest)
            .view("q", Read, &op.q)
            .view("k", Read, &op.k)
            .view("v", Read, &op.v)
            .view("pool", InPlace, &op.pool)
            .view("out", Write, &op.out)
            .build("gated_delta", bucket.rows * heads * parts, facts.max_binding),
    );
    Ok(kernels)
}

/// A shader of the delta rule.
fn delta_base<B: Handle>(shader: Shader, op: &GatedDelta<B>) -> Builder<B> {
    Builder::new(shader)
        .constant("KEY", op.pool.dims()[2])
        .param("heads", op.pool.dims()[1])
        .param("first_head", op.first_head)
        .param("heads_per_key", op.heads_per_key)
        .step(&op.step)
}

/// A shader of the delta rule with the arguments of the per-token gates, which do not depend on the state.
fn delta_gates<B: Handle>(shader: Shader, op: &GatedDelta<B>) -> Builder<B> {
    delta_base(shader, op)
        .float("query_scale", 1.0 / (op.pool.dims()[2] as f32).sqrt())
        .float("beta_scale", op.beta_scale)
        .view("a", Read, &op.a)
        .view("b", Read, &op.b)
        .view("par", Read, &op.par)
}

/// The chunked form and the most tokens of the rows that it skips; `None` for pools that it does not support, and if the
/// step cannot have long rows or its data exceeds a binding.
fn chunked_delta<B: Handle>(op: &GatedDelta<B>, facts: &Facts) -> Option<(Vec<Kernel<B>>, usize)> {
    let &[_, heads, dk, dv] = op.pool.dims() else { unreachable!("checked: four dims") };
    let (bucket, each) = (&op.step.bucket, op.decays_per_channel());
    let pairs = Pairs::pick(bucket, dk, (op.first_head, heads, op.heads_per_key))?;
    if 4 * (bucket.tokens * delta_words(op)?) as u64 > facts.max_binding {
        return None;
    }
    let prepared = [bucket.tokens, heads * PREPARED];
    let kept = [bucket.tokens, heads * 2 * dk];
    // Scratch per head: K K' and Q K', then what is prepared. With decays per channel, the products take the places of what is
    // prepared from them, and decays follow it.
    let (qk, prep, products) =
        if each { (PAGE, 0, prepared) } else { (pairs.words(), 2 * pairs.words(), pairs.dims()) };
    let decays = prepared[0] * prepared[1];
    let mut kernels = if each {
        let shader = delta_base(shader!("chunk_pairs_channel"), op)
            .param("short", pairs.short)
            .vectors("q", Read, &op.q)
            .vectors("k", Read, &op.k)
            .vectors("a", Read, &op.a)
            .vectors("par", Read, &op.par)
            .scratch("prep", Write, prep, prepared)
            .scratch("decays", Write, decays, kept);
        vec![shader.build("gated_delta", bucket.chunks * heads, facts.max_binding)]
    } else {
        let of = |rows: &Tensor<B>, offset| pairs.kernel("gated_delta", &op.step, rows, &op.k, offset, facts);
        vec![of(&op.k, 0), of(&op.q, qk)]
    };
    let prepare = delta_gates(shader!("gated_delta_prepare"), op)
        .flag("EACH", each)
        .param("short", pairs.short)
        .param("first_key", pairs.first_group)
        .vectors("q", Read, &op.q)
        .scratch("kk", Read, 0, products)
        .scratch("qk", Read, qk, products)
        .scratch("prep", Write, prep, prepared);
    kernels.push(prepare.build("gated_delta", bucket.chunks * heads, facts.max_binding));
    let mut chunk = delta_base(shader!("gated_delta_chunk"), op)
        .constant("VALUE", dv)
        .constant("BLOCKS", dv / CHUNK_COLUMNS)
        .flag("EACH", each)
        .param("short", pairs.short)
        .vectors("q", Read, &op.q)
        .vectors("k", Read, &op.k)
        .vectors("v", Read, &op.v)
        .vectors("pool", InPlace, &op.pool)
        .vectors("out", Write, &op.out)
        .scratch("prep", Read, prep, prepared);
    if each {
        chunk = chunk.scratch("decays", Read, decays, kept);
    }
    kernels.push(chunk.build("gated_delta", bucket.rows * heads * (dv / CHUNK_COLUMNS), facts.max_binding));
    Some((kernels, pairs.short))
}

/// Words per token and head that `gated_delta_prepare.wgsl` writes to scratch.
const PREPARED: usize = 152;

/// Whether `selective_scan_chunk.wgsl` takes heads of `p` rows of `n`.
fn scan_is_chunked(p: usize, n: usize) -> bool {
    p.is_multiple_of(CHUNK_COLUMNS) && [64, 128, 256].contains(&n)
}

/// Whether `gated_delta_chunk.wgsl` takes keys of `dk` with values of `dv`.
fn delta_is_chunked(dk: usize, dv: usize) -> bool {
    [64, 96, 128].contains(&dk) && dv.is_multiple_of(CHUNK_COLUMNS)
}

/// Scratch words per token of the chunked scan; `None` for pools that it does not support.
fn scan_words<B: Handle>(op: &SelectiveScan<B>) -> Option<usize> {
    let &[_, heads, p, n] = op.pool.dims() else { unreachable!("checked: four dims") };
    let takes = op.form == ScanForm::PerHead && scan_is_chunked(p, n);
    takes.then(|| Pairs::groups(op.first_head, heads, op.heads_per_group).1 * PAGE)
}

/// Scratch words per token of the chunked delta rule; `None` for pools that it does not support.
fn delta_words<B: Handle>(op: &GatedDelta<B>) -> Option<usize> {
    let &[_, heads, dk, dv] = op.pool.dims() else { unreachable!("checked: four dims") };
    let groups = Pairs::groups(op.first_head, heads, op.heads_per_key).1;
    let others = if op.decays_per_channel() { 2 * heads * dk } else { 2 * groups * PAGE };
    delta_is_chunked(dk, dv).then_some(others + heads * PREPARED)
}

/// Maximum scratch bytes of a chunked form in steps of at most `tokens` tokens, in any rows. A larger step can need less: if
/// its data exceeds a binding, it goes token by token without scratch.
fn most(tokens: usize, words: Option<usize>, facts: &Facts) -> u64 {
    let words = words.filter(|_| !facts.few_barriers).unwrap_or(0);
    (4 * words as u64 * tokens as u64).min(facts.max_binding / 16 * 16)
}

/// Maximum scratch bytes of the scan: see [`most`].
pub(super) fn scan_scratch<B: Handle>(op: &SelectiveScan<B>, facts: &Facts) -> u64 {
    most(op.step.bucket.tokens, scan_words(op), facts)
}

/// Maximum scratch bytes of the delta rule: see [`most`].
pub(super) fn delta_scratch<B: Handle>(op: &GatedDelta<B>, facts: &Facts) -> u64 {
    most(op.step.bucket.tokens, delta_words(op), facts)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FACTS: Facts = Facts {
        max_binding: 1 << 20,
        subgroup: None,
        cooperative: false,
        precise: false,
        dots: true,
        few_barriers: false,
    };

    #[test]
    fn steps_that_can_have_long_rows_are_chunked() {
        let pick = |tokens, rows| Pairs::pick(&Bucket::holding(tokens, rows, rows, 1, 1), 128, (5, 4, 4));
        assert!(pick(32, 1).is_none());
        // Heads 5 to 8 belong to groups 1 and 2. A single row of any length is chunked.
        let one = pick(100, 1).expect("a long row");
        assert_eq!((one.first_group, one.groups, one.short), (1, 2, 0));
        assert_eq!(pick(100, 8).expect("maybe a long row").short, LONG);
        assert!(one.fits(&FACTS) && !one.fits(&Facts { max_binding: 4 * 100 * 2 * 64 - 1, ..FACTS }));
    }

    #[test]
    fn no_step_takes_more_scratch_than_one_of_the_most_tokens_says() {
        let (most_tokens, words) = (700, 512);
        let said = most(most_tokens, Some(words), &FACTS);
        for tokens in 1..=most_tokens {
            let need = 4 * (tokens * words) as u64;
            assert!(need > FACTS.max_binding || need <= said, "{tokens}");
        }
        assert_eq!(most(64, Some(words), &FACTS), 4 * 64 * 512);
        assert_eq!(most(64, Some(words), &Facts { few_barriers: true, ..FACTS }), 0);
    }

    #[test]
    fn sizes_of_published_models_are_chunked() {
        // Nemotron-H, Falcon-H1 7B and 1.5B, Granite 350M; Qwen3-Next and Kimi-Linear, Olmo-Hybrid.
        assert!([(64, 128), (128, 256), (64, 256), (32, 128)].iter().all(|&(p, n)| scan_is_chunked(p, n)));
        assert!([(128, 128), (96, 192)].iter().all(|&(dk, dv)| delta_is_chunked(dk, dv)));
        assert!(!scan_is_chunked(80, 128) && !scan_is_chunked(64, 96) && !delta_is_chunked(256, 128));
    }

    #[test]
    fn heads_of_published_models_are_tiled() {
        assert_eq!(ScanPlan::pick(64, 128), Some(ScanPlan { rows: 32, lanes: 8, tile: 4 }));
        assert_eq!(ScanPlan::pick(32, 128), Some(ScanPlan { rows: 32, lanes: 8, tile: 4 }));
        assert_eq!(ScanPlan::pick(64, 256), Some(ScanPlan { rows: 32, lanes: 8, tile: 4 }));
        // A thread holds four rows, so their number must be a multiple of four.
        assert_eq!(ScanPlan::pick(6, 128), None);
    }
}
