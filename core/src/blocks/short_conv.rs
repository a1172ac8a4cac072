//! The gated short convolution of LFM2: one projection `[B | C | X]`, a convolution over `B * X` without activation, the gate C,
//! and the output projection.

use super::{Out, Pass, Scratch, Widths, conv};
use crate::{
    Result,
    backend::{Backend, Handle},
    layer::{LayerPools, LayerState},
    ops::{Act, Activation},
    tensor::Tensor,
    weights::{Linear, Loader, Part},
};

/// A gated short convolution, as data.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Model width D, the channels of the convolution.
    pub width: usize,
    /// Taps K of the convolution.
    pub kernel: usize,
    /// The projections and the convolution have biases.
    pub bias: bool,
}

impl Plan {
    pub(super) fn sizes(&self) -> String {
        format!("{} channels, {} taps", self.width, self.kernel)
    }

    pub(super) fn state(&self) -> LayerState {
        LayerState { conv: Some([self.width, self.kernel - 1]), ..LayerState::default() }
    }

    pub(super) fn parameters(&self) -> u64 {
        let bias = if self.bias { 5 * self.width } else { 0 };
        (4 * self.width * self.width + self.width * self.kernel + bias) as u64
    }

    pub(super) fn want(&self, w: &mut Widths) {
        w.want(Scratch::PROJ, 3 * self.width);
        w.want(Scratch::MID, self.width);
        w.want(Scratch::OUT, self.width);
        w.want(Scratch::GATED, self.width);
    }

    pub(super) async fn load<B: Backend>(
        &self,
        l: &mut Loader<'_, B>,
        prefix: &str,
        scale: f32,
    ) -> Result<ShortConv<B::Buf>> {
        let input = Part::whole(format!("{prefix}in_proj.weight"), 3 * self.width, 0);
        let output = Part::whole(format!("{prefix}out_proj.weight"), self.width, 0).scaled(scale);
        Ok(ShortConv {
            width: self.width,
            input: l.linear(self.width, &[input], self.bias, 1.0).await?,
            conv: conv::load(l, &[(format!("{prefix}conv"), self.width)], self.kernel, self.bias).await?,
            output: l.linear(self.width, &[output], self.bias, 1.0).await?,
        })
    }
}

/// A gated short convolution on a device.
#[derive(Clone, Debug)]
pub struct ShortConv<Buf> {
    width: usize,
    input: Linear<Buf>,
    /// `[D, K + 1]`.
    conv: Tensor<Buf>,
    output: Linear<Buf>,
}

impl<Buf: Handle> ShortConv<Buf> {
    pub(super) fn forward(
        &self,
        pass: &mut Pass<'_, Buf>,
        pools: &LayerPools<Buf>,
        u: &Tensor<Buf>,
        out: &Out<Buf>,
    ) -> Result<()> {
        let d = self.width;
        let proj = pass.scratch(Scratch::PROJ, 3 * d);
        let (product, mixed) = (pass.scratch(Scratch::MID, d), pass.scratch(Scratch::OUT, d));
        let gated = pass.scratch(Scratch::GATED, d);
        pass.linear(&self.input, u, &proj)?;
        let times = |gate: Tensor<Buf>, up: Tensor<Buf>, out: &Tensor<Buf>| Activation {
            gate,
            up: Some(up),
            row_gate: None,
            out: out.clone(),
            act: Act::Identity,
        };
        pass.op(times(proj.cols(0, d), proj.cols(2 * d, d), &product))?;
        conv::record(pass, &pools.conv, &product, &self.conv, &mixed, Act::Identity)?;
        pass.op(times(proj.cols(d, d), mixed, &gated))?;
        pass.output(&self.output, &gated, out)
    }
}
