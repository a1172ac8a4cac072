//! The depthwise convolution of several mixers: its weights, and the ops over all blocks of its state.

use std::ops::Range;

use super::Pass;
use crate::{
    Error, Result,
    backend::{Backend, Handle},
    ops::{Act, Conv1d},
    tensor::Tensor,
    weights::{Loader, Rank},
};

/// Taps and bias in the layout of [`Conv1d`]: `[C, K + 1] f32`. `stored` are the tensors' names without `.weight`, in
/// the order of their channels, with the channels of each. The channels of several tensors may be divided differently
/// in a file: some files cut them into equal parts when they are saved. `share` are the channels that a rank has, in order.
pub(super) async fn load<B: Backend>(
    l: &mut Loader<'_, B>,
    stored: &[(String, usize)],
    kernel: usize,
    bias: bool,
    share: impl Fn(Rank) -> Vec<Range<usize>>,
) -> Result<Tensor<B::Buf>> {
    let channels: usize = stored.iter().map(|(_, c)| c).sum();
    let mut packed = Vec::with_capacity(channels * (kernel + 1));
    for (name, nominal) in stored {
        let weight = format!("{name}.weight");
        let shape = l.shape(&weight);
        let c = match shape {
            Some([c, ..]) if stored.len() > 1 => *c,
            _ => *nominal,
        };
        // Some files leave out the middle dim.
        let dims: &[usize] = if shape.is_some_and(|s| s.len() == 2) { &[c, kernel] } else { &[c, 1, kernel] };
        let taps = l.values(&weight, dims).await?;
        let bias = match bias {
            true => l.values(&format!("{name}.bias"), &[c]).await?,
            false => vec![0.0; c],
        };
        packed.extend(taps.chunks(kernel).zip(bias).flat_map(|(w, b)| w.iter().copied().chain([b])));
    }
    let (found, first) = (packed.len() / (kernel + 1), format!("{}.weight", stored[0].0));
    if found != channels {
        let why = format!("{found} channels with the tensors after it, but config.json asks for {channels}");
        return Err(Error::model(first, why));
    }
    let row = kernel + 1;
    let own = |rank| share(rank).into_iter().flat_map(|c| &packed[c.start * row..c.end * row]).copied().collect();
    let channels = share(Rank::first(l.ranks().len())).iter().map(Range::len).sum();
    l.upload_on(&first, &[channels, row], own)
}

/// Records the convolution of all channels, block of channels by block.
pub(super) fn record<Buf: Handle>(
    pass: &mut Pass<'_, Buf>,
    pools: &[Tensor<Buf>],
    x: &Tensor<Buf>,
    weight: &Tensor<Buf>,
    out: &Tensor<Buf>,
    act: Act,
) -> Result<()> {
    let mut first = 0;
    for pool in pools {
        let channels = pool.dims()[1];
        pass.op(Conv1d {
            step: pass.step.clone(),
            x: x.cols(first, channels),
            weight: weight.slice_rows(first, channels),
            pool: pool.clone(),
            out: out.cols(first, channels),
            act,
        })?;
        first += channels;
    }
    Ok(())
}
