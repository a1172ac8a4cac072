//! Each token's vector handed to the token after it: a convolution whose only tap is the token before. Its state in a slot is
//! the vector of the last token, so that a row may begin anywhere.

use super::{Pass, conv};
use crate::{
    Result,
    backend::{Backend, Handle},
    layer::{LayerPools, LayerState},
    ops::Act,
    tensor::Tensor,
    weights::Loader,
};

/// What a slot keeps of vectors of `width` elements.
pub fn state(width: usize) -> LayerState {
    LayerState { conv: Some([width, 1]), ..LayerState::default() }
}

/// The shift on a device: `[D, 3]`, the taps 1 and 0 and no bias.
#[derive(Clone, Debug)]
pub struct Shift<Buf>(Tensor<Buf>);

impl<Buf: Handle> Shift<Buf> {
    /// Of vectors of `width` elements. `label` names it in errors.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn load<B: Backend<Buf = Buf>>(l: &mut Loader<'_, B>, label: &str, width: usize) -> Result<Self> {
        let taps: Vec<f32> = (0..width).flat_map(|_| [1.0, 0.0, 0.0]).collect();
        l.upload(label, &taps, &[width, 3]).map(Self)
    }

    /// Writes to row t of `out` the row of `x` that belongs to the token before, zeros at the start of a sequence; both are
    /// `[T, D]`.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn record(
        &self,
        pass: &mut Pass<'_, Buf>,
        pools: &LayerPools<Buf>,
        x: &Tensor<Buf>,
        out: &Tensor<Buf>,
    ) -> Result<()> {
        conv::record(pass, &pools.conv, x, &self.0, out, Act::Identity)
    }
}
