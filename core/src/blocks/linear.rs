//! A single linear layer, for layers that project between their mixers.

use super::{Out, Pass, Widths};
use crate::{
    Result,
    backend::{Backend, Handle},
    layer::{LayerPools, LayerState, StateShare},
    tensor::Tensor,
    weights::{self, Loader, Part, Rank},
};

/// A linear layer without bias, as data. The weight is `weight` below the layer's prefix.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Model width D of input and output.
    pub width: usize,
}

impl Plan {
    pub(super) fn sizes(&self) -> String {
        format!("{0} x {0}", self.width)
    }

    /// All of it: its input is whole on every rank, and its output is then as well, without a sum.
    pub(super) fn share(&self, _: usize) -> Result<Self, String> {
        Ok(self.clone())
    }

    pub(super) fn state(&self) -> LayerState {
        LayerState::default()
    }

    pub(super) fn state_share(&self, _: Rank) -> StateShare {
        StateShare::default()
    }

    pub(super) fn parameters(&self) -> u64 {
        (self.width * self.width) as u64
    }

    pub(super) fn want(&self, _: &mut Widths) {}

    pub(super) async fn load<B: Backend>(
        &self,
        _: Self,
        l: &mut Loader<'_, B>,
        prefix: &str,
        scale: f32,
    ) -> Result<Single<B::Buf>> {
        let part = Part::whole(format!("{prefix}weight"), self.width, 0).scaled(scale);
        Ok(Single(l.linear(self.width, &[part], false, 1.0).await?))
    }
}

/// A linear layer on a device.
#[derive(Clone, Debug)]
pub struct Single<Buf>(weights::Linear<Buf>);

impl<Buf: Handle> Single<Buf> {
    pub(super) fn forward(
        &self,
        pass: &mut Pass<'_, Buf>,
        _: &LayerPools<Buf>,
        u: &Tensor<Buf>,
        out: &Out<Buf>,
    ) -> Result<()> {
        pass.output(&self.0, u, out)
    }
}
