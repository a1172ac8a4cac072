//! Which rows and columns of which stored tensors a weight is made of.

use std::ops::Range;

/// Rows of a stored matrix that become output columns.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Name of the tensor, without the model's prefix.
    pub name: String,
    /// Rows of the whole tensor.
    pub of: usize,
    /// Rows taken.
    pub rows: Range<usize>,
    /// Output column of the first of them.
    pub col: usize,
    /// Factor on these output columns, their bias included.
    pub scale: f32,
    /// Elements taken of each row, if not all, and how many are stored. The bias goes with the first of them.
    pub columns: Option<(Range<usize>, usize)>,
}

impl Part {
    /// All `rows` rows of a tensor, from output column `col` on.
    pub fn whole(name: impl Into<String>, rows: usize, col: usize) -> Self {
        Self::rows(name, rows, 0..rows, col)
    }

    /// Some of the `of` rows of a tensor, from output column `col` on.
    pub fn rows(name: impl Into<String>, of: usize, rows: Range<usize>, col: usize) -> Self {
        Self { name: name.into(), of, rows, col, scale: 1.0, columns: None }
    }

    /// The same with a factor.
    pub fn scaled(self, scale: f32) -> Self {
        Self { scale, ..self }
    }

    /// The same with only some of the `of` elements of each row.
    pub fn columns(self, range: Range<usize>, of: usize) -> Self {
        Self { columns: (range != (0..of)).then_some((range, of)), ..self }
    }

    /// Stored elements of a row of which `k` are taken.
    pub(super) fn stored_k(&self, k: usize) -> usize {
        self.columns.as_ref().map_or(k, |(_, of)| *of)
    }

    /// Whether it has the bias of its rows: of a sum over ranks, one part has.
    pub(super) fn has_bias(&self) -> bool {
        self.columns.as_ref().is_none_or(|(range, _)| range.start == 0)
    }
}

/// Parts in the order of their columns, without factors; those that follow one another as one.
pub(super) fn joined(parts: Vec<Part>) -> Vec<Part> {
    let mut parts: Vec<Part> = parts.into_iter().map(|p| p.scaled(1.0)).collect();
    parts.sort_by_key(|p| p.col);
    parts.dedup_by(|b, a| {
        let ends = (&a.name, &a.columns, a.rows.end, a.col + a.rows.len());
        let joined = ends == (&b.name, &b.columns, b.rows.start, b.col);
        if joined {
            a.rows.end = b.rows.end;
        }
        joined
    });
    parts
}

/// One of the ranks that share a model's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rank {
    /// Its number, from 0 on.
    pub index: usize,
    /// All ranks.
    pub of: usize,
}

impl Rank {
    /// The first of some ranks.
    pub fn first(of: usize) -> Self {
        Self { index: 0, of }
    }

    /// Its equal part of `0..units`: one of them, the same for several ranks, if there are fewer units than ranks.
    pub fn share(self, units: usize) -> Range<usize> {
        let first = self.index * units / self.of;
        first..first + (units / self.of).max(1)
    }

    /// The same of units of `each` elements.
    pub fn share_of(self, units: usize, each: usize) -> Range<usize> {
        let units = self.share(units);
        units.start * each..units.end * each
    }
}

/// Where the matrices `[N, K]` of all experts of a layer are stored: in one tensor, or in some per expert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertParts {
    /// Names of one tensor `[E, N, K]`, any of which may exist.
    pub stacked: Vec<String>,
    /// Tensors of one expert, with `{}` for its number, and their rows; together N. Empty if only the stacked form exists.
    pub each: Vec<(String, usize)>,
}

/// What each of several ranks has of the matrices of all experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertShare {
    /// Equal parts of the rows, of each of so many equal sections: two if gate and up are stored in one.
    Rows(usize),
    /// Equal parts of the columns.
    Columns,
}
