//! An RMS norm whose rows lie on several ranks: each has some columns, and the mean is over those of all.

use serde::{Deserialize, Serialize};

use super::{Access, Cost, RmsNorm, ensure};
use crate::backend::Handle;
use crate::tensor::Tensor;

/// [`RmsNorm`] with the mean over the rows of `ranks` consecutive ranks. Their sums of squares are added in ascending order of
/// ranks, so all of these ranks get the same factor. `norm` has one group, the columns of this rank, and no `add`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankNorm<Buf> {
    /// The norm of this rank's columns.
    pub norm: RmsNorm<Buf>,
    /// Ranks whose columns make a row; it divides the number of all ranks.
    pub ranks: usize,
}

impl<Buf: Handle> RankNorm<Buf> {
    pub(super) fn tensors(&self) -> Vec<(Access, &Tensor<Buf>)> {
        self.norm.tensors()
    }

    /// That of one rank.
    pub(super) fn cost(&self) -> Cost {
        self.norm.cost()
    }

    pub(super) fn check(&self) {
        self.norm.check();
        let plain = self.norm.add.is_none() && !self.norm.accumulate;
        ensure!("rank_norm", self.norm.groups == 1, "{} groups", self.norm.groups);
        ensure!("rank_norm", plain && self.ranks > 0, "adds, or {} ranks", self.ranks);
    }
}
