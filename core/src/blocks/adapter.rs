//! Low-rank additions to parts of a projection, for layers that share its weights: `part += B (A u)`.

use super::{ALIGN, Pass, Scratch, Widths};
use crate::{
    Result,
    backend::{Backend, Handle},
    tensor::Tensor,
    weights::{Linear, Loader, Part, Rank},
};

/// The additions to one projection, as data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Rows of A and columns of B.
    pub rank: usize,
    /// One per tensor of the projection, in the order of its columns: below the layer's prefix, `NAME.0.weight` is A
    /// `[rank, K]` and `NAME.1.weight` is B `[rows of the tensor, rank]`.
    pub names: Vec<String>,
}

const LOW: Scratch = Scratch::activations("low-rank activations");

impl Plan {
    /// Number of weights for a projection with `input` inputs and `columns` columns in all parts.
    pub(super) fn parameters(&self, input: usize, columns: usize) -> u64 {
        (self.rank * (self.names.len() * input + columns)) as u64
    }

    fn low_width(&self) -> usize {
        self.rank * self.names.len()
    }

    pub(super) fn want(&self, w: &mut Widths) {
        w.want(LOW, self.low_width().next_multiple_of(ALIGN));
    }

    /// Loads the matrices for a projection with `input` inputs and these `parts`. A is narrow and whole on every rank, of B
    /// each has the rows that it has of the projection.
    pub(super) async fn load<B: Backend>(
        &self,
        l: &mut Loader<'_, B>,
        prefix: &str,
        input: usize,
        parts: impl Fn(Rank) -> Vec<Part>,
    ) -> Result<Adapter<B::Buf>> {
        let named = by_tensor(&parts(Rank::first(l.ranks().len()))).count();
        assert_eq!(self.names.len(), named, "an adapter names every tensor of its projection");
        let low = self.names.iter().enumerate();
        let low = low.map(|(i, name)| Part::whole(format!("{prefix}{name}.0.weight"), self.rank, i * self.rank));
        let down = l.linear(input, &low.collect::<Vec<_>>(), false, 1.0).await?;
        let mut up = Vec::with_capacity(self.names.len());
        for (i, name) in self.names.iter().enumerate() {
            let name = format!("{prefix}{name}.1.weight");
            let rows = |rank: Rank| by_tensor(&parts(rank)).nth(i).map_or(Vec::new(), |of| same_rows(&name, of));
            up.push(l.linear_on(self.rank, rows, false, 1.0).await?);
        }
        Ok(Adapter { plan: self.clone(), down, up })
    }
}

/// The parts of a projection that are made of one tensor, for each of its tensors.
fn by_tensor(parts: &[Part]) -> impl Iterator<Item = &[Part]> {
    parts.chunk_by(|a, b| a.name == b.name)
}

/// Rows of B for parts of one tensor.
fn same_rows(name: &str, of: &[Part]) -> Vec<Part> {
    of.iter().map(|p| Part::rows(name, p.of, p.rows.clone(), p.col - of[0].col)).collect()
}

/// The additions on a device.
#[derive(Clone, Debug)]
pub(super) struct Adapter<Buf> {
    plan: Plan,
    /// All A.
    down: Linear<Buf>,
    /// B of each tensor.
    up: Vec<Linear<Buf>>,
}

impl<Buf: Handle> Adapter<Buf> {
    /// Adds to the projection `proj` of `u`, whose first columns are those of its tensors.
    pub(super) fn add(&self, pass: &mut Pass<'_, Buf>, u: &Tensor<Buf>, proj: &Tensor<Buf>) -> Result<()> {
        let (rank, width) = (self.plan.rank, self.plan.low_width());
        let low = pass.scratch(LOW, width.next_multiple_of(ALIGN)).cols(0, width);
        pass.linear(&self.down, u, &low)?;
        let mut col = 0;
        for (i, up) in self.up.iter().enumerate() {
            pass.add_linear(up, &low.cols(i * rank, rank), &proj.cols(col, up.n()))?;
            col += up.n();
        }
        Ok(())
    }
}
