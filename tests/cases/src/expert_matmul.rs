//! Cases of `expert_matmul`.

use super::host::{Bound, Dtypes, Host, Rng, Want, Wants};
use super::{Size, Spec, Table, dot};
use selkie_core::backend::{Handle, Int8};
use selkie_core::format::Format;
use selkie_core::ops::{ExpertMatmul, ExpertRange, Op};
use selkie_core::step::NONE;
use selkie_core::tensor::DType;

/// How tokens choose.
#[derive(Clone, Copy, PartialEq)]
enum Choice {
    /// Any experts.
    Random,
    /// All tokens the same ones: all other experts are empty.
    Same,
    /// Only odd experts.
    Odd,
}

#[derive(Clone)]
pub(super) struct Experts {
    /// Tokens, and how many of them at the end are padding.
    tokens: usize,
    padding: usize,
    /// Choices per token.
    choices: usize,
    /// Experts of each range.
    ranges: Vec<usize>,
    n: usize,
    k: usize,
    /// `(first column, columns)` of each row block of a range; none = one block of all.
    blocks: Vec<(usize, usize)>,
    dtype: DType,
    /// Of the weights; other than plain, whatever the dtype.
    format: Format,
    choice: Choice,
    combine: bool,
    scale: f32,
    accumulate: bool,
    /// Gaps between the rows of x and out.
    views: bool,
}

impl Experts {
    fn blocks(&self) -> Vec<(usize, usize)> {
        if self.blocks.is_empty() { vec![(0, self.n)] } else { self.blocks.clone() }
    }

    fn ids(&self, rng: &mut Rng) -> Vec<u32> {
        let experts: usize = self.ranges.iter().sum();
        let mut draw = || {
            let mut all: Vec<u32> = (0..experts as u32).filter(|e| self.choice != Choice::Odd || e % 2 == 1).collect();
            let mut ids: Vec<u32> = (0..self.choices).map(|_| all.swap_remove(rng.below(all.len()))).collect();
            ids.sort_unstable();
            ids
        };
        let same = draw();
        let real = self.tokens - self.padding;
        let mut ids: Vec<u32> =
            (0..real).flat_map(|_| if self.choice == Choice::Same { same.clone() } else { draw() }).collect();
        ids.resize(self.tokens * self.choices, NONE);
        ids
    }
}

impl Spec for Experts {
    fn host(&self, d: &Dtypes, rng: &mut Rng) -> Host {
        let mut h = Host { int8: d.int8 == Int8::Always && self.format.is_integer(), ..Host::default() };
        let real = self.tokens - self.padding;
        let (x_rows, per_token) =
            if self.combine { (self.tokens * self.choices, self.choices) } else { (self.tokens, 1) };
        let mut x = rng.vec(x_rows * self.k, 1.0);
        x[real * per_token * self.k..].fill(f32::NAN);
        h.float("x", d.act, &[x_rows, self.k], x);
        for (r, &experts) in self.ranges.iter().enumerate() {
            for (i, &(_, n)) in self.blocks().iter().enumerate() {
                let (name, size) = (format!("w{r}.{i}"), 1.0 / (self.k as f32).sqrt());
                h.weight(&name, (self.dtype, self.format), &[experts, n, self.k], size, rng);
            }
        }
        h.int("ids", &[self.tokens, self.choices], self.ids(rng));
        let out_rows = if self.combine { self.tokens } else { self.tokens * self.choices };
        if self.combine {
            let mut c = rng.ranged(self.tokens * self.choices, 0.05, 1.0);
            c[real * self.choices..].fill(0.0);
            h.float("combine", DType::F32, &[self.tokens, self.choices], c);
        }
        if self.accumulate {
            h.float("out", d.act, &[out_rows, self.n], rng.vec(out_rows * self.n, 1.0));
        } else {
            h.out("out", d.act, &[out_rows, self.n]);
        }
        if self.views {
            h.spread("x", 4, 8);
            h.spread("out", 8, 12);
        }
        h
    }

    fn want(&self, h: &Host) -> Wants {
        let (x, ids) = (h.factors("x"), h.ints("ids"));
        let product = |row: usize, expert: usize, col: usize| -> f64 {
            let (mut r, mut e) = (0, expert);
            while e >= self.ranges[r] {
                e -= self.ranges[r];
                r += 1;
            }
            let blocks = self.blocks();
            let i = blocks.iter().position(|&(c, n)| (c..c + n).contains(&col)).expect("a block per column");
            let w = h.get(&format!("w{r}.{i}"));
            dot(&x[row * self.k..][..self.k], &w[(e * blocks[i].1 + col - blocks[i].0) * self.k..][..self.k])
        };
        let mut out = vec![Want::Keep; h.get("out").len()];
        for t in 0..self.tokens {
            let chosen = &ids[t * self.choices..(t + 1) * self.choices];
            for col in 0..self.n {
                if self.combine {
                    let at = t * self.n + col;
                    let real = (0..self.choices).filter(|&j| chosen[j] != NONE);
                    let sum: f64 = real
                        .map(|j| {
                            let i = t * self.choices + j;
                            f64::from(h.get("combine")[i]) * product(i, chosen[j] as usize, col)
                        })
                        .sum();
                    out[at] = match (self.accumulate, chosen.iter().all(|&c| c == NONE)) {
                        (true, true) => Want::Keep,
                        (true, false) => Want::Near(f64::from(h.get("out")[at]) + f64::from(self.scale) * sum),
                        (false, true) => Want::Exact(0.0),
                        (false, false) => Want::Near(f64::from(self.scale) * sum),
                    };
                } else {
                    for j in (0..self.choices).filter(|&j| chosen[j] != NONE) {
                        let y = product(t, chosen[j] as usize, col);
                        out[(t * self.choices + j) * self.n + col] = Want::Near(y);
                    }
                }
            }
        }
        vec![("out", out)]
    }

    fn format(&self) -> Format {
        self.format
    }

    fn op<Buf: Handle>(&self, b: &Bound<Buf>) -> Op<Buf> {
        let mut first = 0;
        let mut experts = vec![];
        for (r, &n) in self.ranges.iter().enumerate() {
            let block = |(i, (col, _))| b.block(&format!("w{r}.{i}"), col);
            experts.push(ExpertRange {
                first,
                experts: n,
                blocks: self.blocks().into_iter().enumerate().map(block).collect(),
            });
            first += n;
        }
        ExpertMatmul {
            x: b.t("x"),
            experts,
            ids: b.t("ids"),
            combine: b.opt("combine"),
            out: b.t("out"),
            scale: self.scale,
            accumulate: self.accumulate,
        }
        .into()
    }
}

pub(super) fn cases(to: &mut Table) {
    let up = Experts {
        tokens: 5,
        padding: 0,
        choices: 2,
        ranges: vec![8],
        n: 36,
        k: 64,
        blocks: vec![],
        dtype: DType::Bf16,
        format: Format::Plain,
        choice: Choice::Random,
        combine: false,
        scale: 1.0,
        accumulate: false,
        views: false,
    };
    let down = Experts { combine: true, ..up.clone() };
    for (half, base) in [("up", &up), ("down", &down)] {
        let mut add = |name: &str, spec| to.add(&format!("{half}, {name}"), spec);
        add("base", base.clone());
        add("one token", Experts { tokens: 1, ..base.clone() });
        add("33 tokens", Experts { tokens: 33, ..base.clone() });
        add("300 tokens", Experts { tokens: 300, ranges: vec![4], n: 12, k: 20, ..base.clone() });
        add("padding", Experts { tokens: 16, padding: 7, ..base.clone() });
        add("only padding", Experts { tokens: 2, padding: 2, ..base.clone() });
        add("one choice", Experts { choices: 1, ..base.clone() });
        add("8 choices of 16", Experts { choices: 8, ranges: vec![16], ..base.clone() });
        add("10 choices of 64", Experts { choices: 10, ranges: vec![64], n: 16, ..base.clone() });
        add("22 choices of 24", Experts { choices: 22, ranges: vec![24], n: 16, ..base.clone() });
        add("all experts chosen", Experts { choices: 8, tokens: 3, ..base.clone() });
        add("empty experts", Experts { choice: Choice::Same, tokens: 40, ..base.clone() });
        add("every other expert", Experts { choice: Choice::Odd, tokens: 17, ..base.clone() });
        add("two ranges", Experts { ranges: vec![3, 5], tokens: 17, ..base.clone() });
        add("three ranges, one empty", Experts { ranges: vec![1, 1, 6], choice: Choice::Odd, ..base.clone() });
        add("row blocks", Experts { blocks: vec![(12, 24), (0, 12)], tokens: 9, ..base.clone() });
        add("f32 weight", Experts { dtype: DType::F32, ..base.clone() });
        add("f16 weight", Experts { dtype: DType::F16, ..base.clone() });
        for format in Format::CODED.into_iter().chain(Format::SCALED) {
            let coded = Experts { format, k: 256, n: 20, blocks: vec![(12, 8), (0, 12)], ..base.clone() };
            add(&format!("{} weight", format.name()), coded.clone());
            add(&format!("{} weight, 33 tokens", format.name()), Experts { tokens: 33, ..coded.clone() });
            // Groups of pairs, of a few and of many, with weights in one block whose last rows are no whole tile.
            let one = Experts { blocks: vec![], n: 40, ..coded };
            add(&format!("{} weight, 33 tokens, one block", format.name()), Experts { tokens: 33, ..one.clone() });
            let many = Experts { tokens: 130, ranges: vec![4], padding: 3, ..one };
            add(&format!("{} weight, 130 tokens, one block", format.name()), many);
        }
        add("odd sizes", Experts { n: 20, k: 100, tokens: 19, ..base.clone() });
        add("64 x 256", Experts { n: 64, k: 256, tokens: 70, ..base.clone() });
        let few = Experts { tokens: 5, choices: 6, ranges: vec![16], n: 40, k: 520, ..base.clone() };
        add("5 x 6 of 16, k of no whole step", few.clone());
        add("5 x 6 of 16, padding", Experts { padding: 2, ..few.clone() });
        add("31 x 1 of 16", Experts { tokens: 31, choices: 1, ..few.clone() });
        add("1 x 6 of 16, many rows", Experts { tokens: 1, n: 2600, k: 72, ..few.clone() });
        add("2 x 3 of 16, long rows", Experts { tokens: 2, choices: 3, n: 20, k: 3720, ..few });
        add("columns of wider matrices", Experts { views: true, ..base.clone() });
        // Many pairs of an expert.
        let many = Experts { tokens: 130, choices: 4, ranges: vec![16], n: 264, k: 136, ..base.clone() };
        add("130 x 4 of 16", many.clone());
        add("130 x 4 of 16, padding", Experts { padding: 50, ..many.clone() });
        add("130 x 4 of 16, some experts empty", Experts { choice: Choice::Odd, n: 8, k: 8, ..many.clone() });
        add("130 x 4 of 16, columns of wider matrices", Experts { views: true, n: 600, k: 64, ..many.clone() });
        add(
            "330 x 1 of 4, all to one expert",
            Experts { tokens: 330, choices: 1, ranges: vec![4], choice: Choice::Same, ..many.clone() },
        );
        add("290 x 2 of 4", Experts { tokens: 290, choices: 2, ranges: vec![4], n: 40, k: 72, ..many.clone() });
        add("90 x 1 of 9", Experts { tokens: 90, choices: 1, ranges: vec![9], n: 512, k: 48, ..many });
    }
    to.add("down, residual", Experts { accumulate: true, ..down.clone() });
    to.add("down, residual and padding", Experts { accumulate: true, tokens: 8, padding: 3, ..down.clone() });
    to.add("down, scale", Experts { scale: 2.5, ..down.clone() });
    to.add("down, scale and residual", Experts { scale: 0.3, accumulate: true, tokens: 33, ..down.clone() });
    for tokens in [1, 4] {
        let wide = Experts { tokens, choices: 6, ranges: vec![8], n: 1856, k: 2688, ..up.clone() };
        to.sized(Size::Bench, &format!("up, {tokens} x 6 of 8, 1856 x 2688"), wide.clone());
        let back = Experts { n: 2688, k: 1856, combine: true, accumulate: true, ..wide };
        to.sized(Size::Bench, &format!("down, {tokens} x 6 of 8, 2688 x 1856"), back);
    }
    for tokens in [1, 64] {
        let wide = Experts { tokens, choices: 8, ranges: vec![64], n: 1024, k: 2048, ..up.clone() };
        to.sized(Size::Bench, &format!("up, {tokens} x 8 of 64, 1024 x 2048"), wide.clone());
        let back = Experts { n: 2048, k: 512, combine: true, accumulate: true, ..wide };
        to.sized(Size::Bench, &format!("down, {tokens} x 8 of 64, 2048 x 512"), back);
    }
    let wide = Experts { tokens: 128, choices: 8, ranges: vec![16], n: 1856, k: 2688, ..up.clone() };
    to.sized(Size::Bench, "up, 128 x 8 of 16, 1856 x 2688", wide.clone());
    let back = Experts { n: 2688, k: 1856, combine: true, accumulate: true, ..wide };
    to.sized(Size::Bench, "down, 128 x 8 of 16, 2688 x 1856", back);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hand_computed_combination() {
        let spec = Experts {
            tokens: 2,
            padding: 1,
            choices: 2,
            ranges: vec![1, 2],
            n: 1,
            k: 1,
            blocks: vec![],
            dtype: DType::F32,
            format: Format::Plain,
            choice: Choice::Random,
            combine: true,
            scale: 2.0,
            accumulate: false,
            views: false,
        };
        let mut h = Host::default();
        h.float("x", DType::F32, &[4, 1], vec![3.0, 5.0, f32::NAN, f32::NAN]);
        h.float("w0.0", DType::F32, &[1, 1, 1], vec![10.0]);
        h.float("w1.0", DType::F32, &[2, 1, 1], vec![100.0, 1000.0]);
        h.int("ids", &[2, 2], vec![0, 2, NONE, NONE]);
        h.float("combine", DType::F32, &[2, 2], vec![0.5, 0.25, 0.0, 0.0]);
        h.out("out", DType::F32, &[2, 1]);
        assert_eq!(spec.want(&h)[0].1, [Want::Near(2530.0), Want::Exact(0.0)]);
    }
}
