//! Feed-forward layers: `down(act(gate(u)) * up(u))`, or `down(act(up(u)))` without a gate.

use super::{ALIGN, Out, Pass, Scratch, Widths, adapter, divided};
use crate::{
    Result,
    backend::{Backend, Handle},
    layer::{LayerPools, LayerState, StateShare},
    ops::{Act, Activation},
    tensor::Tensor,
    weights::{Linear, Loader, Part, Rank},
};

/// How the input projection is stored; names stand below the layer's prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// Gate and up projections of their own.
    Separate {
        /// `[I, D]`, activated.
        gate: &'static str,
        /// `[I, D]`.
        up: &'static str,
    },
    /// One `[2 I, D]`, the gate's rows first.
    Fused(&'static str),
    /// No gate: one `[I, D]`, activated.
    Ungated(&'static str),
}

/// A feed-forward layer, as data.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Model width D.
    pub width: usize,
    /// Inner width I.
    pub inner: usize,
    /// Input projections.
    pub input: Input,
    /// `[D, I]`.
    pub output: &'static str,
    /// Activation of the gate, or of the input without one.
    pub act: Act,
    /// The projections have biases.
    pub bias: bool,
    /// Factor on the gate before its activation; only where it is stored separately.
    pub gate_scale: f32,
    /// Name of a `[1, D]` whose sigmoid scales the output of each token (Qwen's shared expert), below the layer's prefix.
    pub row_gate: Option<&'static str>,
    /// Additions to the input projections for this layer alone: to all of [`Input::Fused`], or to each separate one.
    pub adapter: Option<adapter::Plan>,
}

impl Plan {
    fn gated(&self) -> bool {
        !matches!(self.input, Input::Ungated(_))
    }

    /// Columns of the activated halves.
    fn halves(&self) -> usize {
        self.inner * (1 + usize::from(self.gated()))
    }

    /// Columns of the input projection; the gate of each row is the last.
    fn proj_width(&self) -> usize {
        self.halves() + usize::from(self.row_gate.is_some())
    }

    pub(super) fn sizes(&self) -> String {
        format!("{} wide", self.inner)
    }

    /// The inner width by rank; the gate of each row is computed by all.
    pub(super) fn share(&self, ranks: usize) -> Result<Self, String> {
        Ok(Self { inner: divided("inner columns", self.inner, ranks)?, ..self.clone() })
    }

    pub(super) fn state(&self) -> LayerState {
        LayerState::default()
    }

    pub(super) fn state_share(&self, _: Rank) -> StateShare {
        StateShare::default()
    }

    pub(super) fn parameters(&self) -> u64 {
        let bias = if self.bias { self.proj_width() + self.width } else { 0 };
        (self.width * (self.proj_width() + self.inner) + bias) as u64
    }

    pub(super) fn adapter_parameters(&self) -> u64 {
        self.adapter.as_ref().map_or(0, |a| a.parameters(self.width, self.halves()))
    }

    pub(super) fn want(&self, w: &mut Widths) {
        w.want(Scratch::PROJ, self.proj_width().next_multiple_of(ALIGN));
        w.want(Scratch::MID, self.inner);
        if let Some(adapter) = &self.adapter {
            adapter.want(w);
        }
    }

    pub(super) async fn load<B: Backend>(
        &self,
        mine: Self,
        l: &mut Loader<'_, B>,
        prefix: &str,
        scale: f32,
    ) -> Result<Mlp<B::Buf>> {
        let adapter = match &self.adapter {
            Some(adapter) => Some(adapter.load(l, prefix, self.width, |rank| self.halves_parts(prefix, rank)).await?),
            None => None,
        };
        let output = |rank: Rank| {
            let part = Part::whole(format!("{prefix}{}.weight", self.output), self.width, 0).scaled(scale);
            vec![part.columns(rank.share(self.inner), self.inner)]
        };
        Ok(Mlp {
            input: l.linear_on(self.width, |rank| self.input_parts(prefix, rank), self.bias, 1.0).await?,
            output: l.linear_on(mine.inner, output, self.bias, 1.0).await?,
            adapter,
            plan: mine,
        })
    }

    /// What a rank has of the rows of the input projections; the gate of each row is whole.
    fn input_parts(&self, prefix: &str, rank: Rank) -> Vec<Part> {
        let mut parts = self.halves_parts(prefix, rank);
        let halves = parts.iter().map(|p| p.rows.len()).sum();
        parts.extend(self.row_gate.map(|leaf| Part::whole(format!("{prefix}{leaf}.weight"), 1, halves)));
        parts
    }

    /// Those of the activated halves.
    fn halves_parts(&self, prefix: &str, rank: Rank) -> Vec<Part> {
        let own = rank.share(self.inner);
        let part = |leaf: &str, of: usize, first: usize, col: usize| {
            Part::rows(format!("{prefix}{leaf}.weight"), of, first + own.start..first + own.end, col)
        };
        let (inner, mine) = (self.inner, own.len());
        match self.input {
            Input::Separate { gate, up } => {
                vec![part(gate, inner, 0, 0).scaled(self.gate_scale), part(up, inner, 0, mine)]
            }
            Input::Fused(both) => vec![part(both, 2 * inner, 0, 0), part(both, 2 * inner, inner, mine)],
            Input::Ungated(up) => vec![part(up, inner, 0, 0)],
        }
    }
}

/// A feed-forward layer on a device.
#[derive(Clone, Debug)]
pub struct Mlp<Buf> {
    /// With the sizes of one rank.
    plan: Plan,
    input: Linear<Buf>,
    adapter: Option<adapter::Adapter<Buf>>,
    output: Linear<Buf>,
}

impl<Buf: Handle> Mlp<Buf> {
    pub(super) fn forward(
        &self,
        pass: &mut Pass<'_, Buf>,
        _: &LayerPools<Buf>,
        u: &Tensor<Buf>,
        out: &Out<Buf>,
    ) -> Result<()> {
        let p = &self.plan;
        // Padded rows begin at aligned addresses.
        let proj = pass.scratch(Scratch::PROJ, p.proj_width().next_multiple_of(ALIGN)).cols(0, p.proj_width());
        let mid = pass.scratch(Scratch::MID, p.inner);
        pass.linear(&self.input, u, &proj)?;
        if let Some(adapter) = &self.adapter {
            adapter.add(pass, u, &proj)?;
        }
        pass.op(Activation {
            gate: proj.cols(0, p.inner),
            up: p.gated().then(|| proj.cols(p.inner, p.inner)),
            row_gate: p.row_gate.map(|_| proj.cols(p.halves(), 1)),
            out: mid.clone(),
            act: p.act,
        })?;
        pass.output(&self.output, &mid, out)
    }
}
