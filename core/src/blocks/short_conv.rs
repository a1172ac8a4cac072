//! The gated short convolution of LFM2: one projection `[B | C | X]`, a convolution over `B * X` without activation, the gate C,
//! and the output projection.

use super::{Out, Pass, Scratch, Widths, conv, divided};
use crate::{
    Result,
    backend::{Backend, Handle},
    layer::{LayerPools, LayerState, StateShare},
    ops::{Act, Activation},
    tensor::Tensor,
    weights::{Linear, Loader, Part, Rank},
};

/// A gated short convolution, as data.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Model width D.
    pub width: usize,
    /// Channels C of the convolution: D, but for a rank's share.
    pub channels: usize,
    /// Taps K of the convolution.
    pub kernel: usize,
    /// The projections and the convolution have biases.
    pub bias: bool,
}

impl Plan {
    pub(super) fn sizes(&self) -> String {
        format!("{} channels, {} taps", self.channels, self.kernel)
    }

    /// Channels by rank.
    pub(super) fn share(&self, ranks: usize) -> Result<Self, String> {
        Ok(Self { channels: divided("channels", self.channels, ranks)?, ..self.clone() })
    }

    pub(super) fn state(&self) -> LayerState {
        LayerState { conv: Some([self.channels, self.kernel - 1]), ..LayerState::default() }
    }

    pub(super) fn state_share(&self, rank: Rank) -> StateShare {
        StateShare { conv: vec![rank.share(self.channels)], ..StateShare::default() }
    }

    pub(super) fn parameters(&self) -> u64 {
        let bias = if self.bias { 4 * self.channels + self.width } else { 0 };
        (self.channels * (4 * self.width + self.kernel) + bias) as u64
    }

    pub(super) fn want(&self, w: &mut Widths) {
        w.want(Scratch::PROJ, 3 * self.channels);
        w.want(Scratch::MID, self.channels);
        w.want(Scratch::OUT, self.channels);
        w.want(Scratch::GATED, self.channels);
    }

    pub(super) async fn load<B: Backend>(
        &self,
        mine: Self,
        l: &mut Loader<'_, B>,
        prefix: &str,
        scale: f32,
    ) -> Result<ShortConv<B::Buf>> {
        let c = self.channels;
        // B, C and X.
        let input = |rank: Rank| {
            let part = |i: usize| {
                let own = rank.share(c);
                let rows = i * c + own.start..i * c + own.end;
                Part::rows(format!("{prefix}in_proj.weight"), 3 * c, rows, i * own.len())
            };
            [0, 1, 2].map(part).into()
        };
        let output = |rank: Rank| {
            let part = Part::whole(format!("{prefix}out_proj.weight"), self.width, 0).scaled(scale);
            vec![part.columns(rank.share(c), c)]
        };
        let conv = [(format!("{prefix}conv"), c)];
        Ok(ShortConv {
            channels: mine.channels,
            input: l.linear_on(self.width, input, self.bias, 1.0).await?,
            conv: conv::load(l, &conv, self.kernel, self.bias, |rank| vec![rank.share(c)]).await?,
            output: l.linear_on(mine.channels, output, self.bias, 1.0).await?,
        })
    }
}

/// A gated short convolution on a device.
#[derive(Clone, Debug)]
pub struct ShortConv<Buf> {
    /// Of one rank.
    channels: usize,
    input: Linear<Buf>,
    /// `[C, K + 1]`.
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
        let d = self.channels;
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
