//! Low-rank additions to parts of a projection, for layers that share its weights: `part += B (A u)`.

use super::{ALIGN, Pass, Scratch, Widths};
use crate::{
    Result,
    backend::{Backend, Handle},
    tensor::Tensor,
    weights::{Linear, Loader, Part},
};

/// The additions to one projection, as data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Rows of A and columns of B.
    pub rank: usize,
    /// One per part of the projection, in the order of its columns: below the layer's prefix, `NAME.0.weight` is A
    /// `[rank, K]` and `NAME.1.weight` is B `[columns of the part, rank]`.
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

    /// Loads the matrices for a projection with `input` inputs; `columns` are those of its parts.
    pub(super) async fn load<B: Backend>(
        &self,
        l: &mut Loader<'_, B>,
        prefix: &str,
        input: usize,
        columns: &[usize],
    ) -> Result<Adapter<B::Buf>> {
        assert_eq!(self.names.len(), columns.len(), "an adapter names every part of its projection");
        let low = self.names.iter().enumerate();
        let low = low.map(|(i, name)| Part::whole(format!("{prefix}{name}.0.weight"), self.rank, i * self.rank));
        let down = l.linear(input, &low.collect::<Vec<_>>(), false, 1.0).await?;
        let mut up = Vec::with_capacity(columns.len());
        for (name, columns) in self.names.iter().zip(columns) {
            let part = Part::whole(format!("{prefix}{name}.1.weight"), *columns, 0);
            up.push(l.linear(self.rank, &[part], false, 1.0).await?);
        }
        Ok(Adapter { plan: self.clone(), down, up })
    }
}

/// The additions on a device.
#[derive(Clone, Debug)]
pub(super) struct Adapter<Buf> {
    plan: Plan,
    /// All A.
    down: Linear<Buf>,
    /// B of each part.
    up: Vec<Linear<Buf>>,
}

impl<Buf: Handle> Adapter<Buf> {
    /// Adds to the projection `proj` of `u`, whose first columns are the parts.
    pub(super) fn add(&self, pass: &mut Pass<'_, Buf>, u: &Tensor<Buf>, proj: &Tensor<Buf>) -> Result<()> {
        let (rank, width) = (self.plan.rank, self.plan.low_width());
        let low = pass.scratch(LOW, width.next_multiple_of(ALIGN)).cols(0, width);
        pass.linear(&self.down, u, &low)?;
        let mut col = 0;
        for (i, up) in self.up.iter().enumerate() {
            pass.add_linear(up, &low.cols(i * rank, rank), &proj.cols(col, up.w.n))?;
            col += up.w.n;
        }
        Ok(())
    }
}
