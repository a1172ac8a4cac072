//! Feed-forward layers: `down(act(gate(u)) * up(u))`, or `down(act(up(u)))` without a gate.

use super::{Pass, Scratch, Widths};
use crate::{
    Result,
    backend::{Backend, Handle},
    models::{LayerPools, LayerState},
    ops::{Act, Activation},
    tensor::Tensor,
    weights::{Linear, Loader, Part},
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
    /// Name of a `[1, D]` whose sigmoid scales the output of each token (Qwen's shared expert), below the layer's prefix.
    pub row_gate: Option<&'static str>,
}

impl Plan {
    fn gated(&self) -> bool {
        !matches!(self.input, Input::Ungated(_))
    }

    fn proj_width(&self) -> usize {
        self.inner * (1 + usize::from(self.gated()))
    }

    pub(super) fn state(&self) -> LayerState {
        LayerState::default()
    }

    pub(super) fn parameters(&self) -> u64 {
        let bias = if self.bias { self.proj_width() + self.width } else { 0 };
        let row_gate = if self.row_gate.is_some() { self.width } else { 0 };
        (self.width * (self.proj_width() + self.inner)) as u64 + (bias + row_gate) as u64
    }

    pub(super) fn want(&self, w: &mut Widths) {
        w.want(Scratch::Proj, self.proj_width());
        w.want(Scratch::Mid, self.inner);
        if self.row_gate.is_some() {
            w.want(Scratch::RowGate, 1);
        }
    }

    pub(super) async fn load<B: Backend>(
        &self,
        l: &mut Loader<'_, B>,
        prefix: &str,
        scale: f32,
    ) -> Result<Mlp<B::Buf>> {
        let whole = |leaf: &str, rows: usize, col: usize| Part::whole(format!("{prefix}{leaf}.weight"), rows, col);
        let parts = match self.input {
            Input::Separate { gate, up } => vec![whole(gate, self.inner, 0), whole(up, self.inner, self.inner)],
            Input::Fused(both) => vec![whole(both, 2 * self.inner, 0)],
            Input::Ungated(up) => vec![whole(up, self.inner, 0)],
        };
        Ok(Mlp {
            input: l.linear(self.width, &parts, self.bias, 1.0).await?,
            row_gate: match self.row_gate {
                Some(name) => Some(l.linear(self.width, &[whole(name, 1, 0)], false, 1.0).await?),
                None => None,
            },
            output: l.linear(self.inner, &[whole(self.output, self.width, 0)], self.bias, scale).await?,
            plan: self.clone(),
        })
    }
}

/// A feed-forward layer on a device.
#[derive(Clone, Debug)]
pub struct Mlp<Buf> {
    plan: Plan,
    input: Linear<Buf>,
    row_gate: Option<Linear<Buf>>,
    output: Linear<Buf>,
}

impl<Buf: Handle> Mlp<Buf> {
    pub(super) fn forward(
        &self,
        pass: &mut Pass<'_, Buf>,
        _: &LayerPools<Buf>,
        u: &Tensor<Buf>,
        x: &Tensor<Buf>,
    ) -> Result<()> {
        let p = &self.plan;
        let proj = pass.scratch(Scratch::Proj, p.proj_width());
        let mid = pass.scratch(Scratch::Mid, p.inner);
        pass.linear(&self.input, u, &proj, false)?;
        let row_gate = match &self.row_gate {
            Some(l) => {
                let out = pass.scratch(Scratch::RowGate, 1);
                pass.linear(l, u, &out, false)?;
                Some(out)
            }
            None => None,
        };
        pass.op(Activation {
            gate: proj.cols(0, p.inner),
            up: p.gated().then(|| proj.cols(p.inner, p.inner)),
            row_gate,
            out: mid.clone(),
            act: p.act,
        })?;
        pass.linear(&self.output, &mid, x, true)
    }
}
