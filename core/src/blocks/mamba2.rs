//! Mamba-2: one projection `[z | x | B | C | dt]`, convolution over `x B C`, the scan, a gated norm per group, and the
//! output projection.

use super::{Pass, Scratch, Widths};
use crate::{
    Result,
    backend::{Backend, Handle},
    layer::{LayerPools, LayerState},
    ops::{Act, Conv1d, Gate, RmsNorm, ScanForm, SelectiveScan},
    tensor::Tensor,
    weights::{Linear, Loader, Part},
};

/// A Mamba-2 layer, as data. `DI = H * P`.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Model width D.
    pub width: usize,
    /// Heads H.
    pub heads: usize,
    /// Head dim P.
    pub head_dim: usize,
    /// State size N.
    pub state: usize,
    /// Groups G of B and C, and of the gated norm.
    pub groups: usize,
    /// Taps K of the convolution.
    pub kernel: usize,
    /// The convolution has a bias.
    pub conv_bias: bool,
    /// The projections have biases.
    pub bias: bool,
    /// Epsilon of the gated norm.
    pub eps: f32,
    /// Bounds on dt.
    pub dt_limit: (f32, f32),
}

impl Plan {
    fn inner(&self) -> usize {
        self.heads * self.head_dim
    }

    fn channels(&self) -> usize {
        self.inner() + 2 * self.groups * self.state
    }

    fn proj_width(&self) -> usize {
        self.inner() + self.channels() + self.heads
    }

    pub(super) fn state(&self) -> LayerState {
        LayerState {
            conv: Some([self.channels(), self.kernel - 1]),
            recurrent: Some([self.heads, self.head_dim, self.state]),
            ..LayerState::default()
        }
    }

    pub(super) fn parameters(&self) -> u64 {
        let conv = self.channels() * (self.kernel + usize::from(self.conv_bias));
        let bias = if self.bias { self.proj_width() + self.width } else { 0 };
        (self.width * (self.proj_width() + self.inner())) as u64 + (conv + bias + 3 * self.heads + self.inner()) as u64
    }

    pub(super) fn want(&self, w: &mut Widths) {
        w.want(Scratch::Proj, self.proj_width());
        w.want(Scratch::Mid, self.channels());
        w.want(Scratch::Out, self.inner());
        w.want(Scratch::Gated, self.inner());
    }

    pub(super) async fn load<B: Backend>(
        &self,
        l: &mut Loader<'_, B>,
        prefix: &str,
        scale: f32,
    ) -> Result<Mamba2<B::Buf>> {
        let name = |leaf: &str| format!("{prefix}{leaf}");
        let input = Part::whole(name("in_proj.weight"), self.proj_width(), 0);
        let output = Part::whole(name("out_proj.weight"), self.width, 0);
        let h = [self.heads];
        let mut par: Vec<f32> = l.values(&name("A_log"), &h).await?.into_iter().map(|a| -a.exp()).collect();
        par.extend(l.values(&name("D"), &h).await?);
        par.extend(l.values(&name("dt_bias"), &h).await?);
        Ok(Mamba2 {
            input: l.linear(self.width, &[input], self.bias, 1.0).await?,
            conv: conv_weight(l, &name("conv1d"), self.channels(), self.kernel, self.conv_bias).await?,
            par: l.upload(&name("A_log"), &par, &[3, self.heads])?,
            norm: l.vector(&name("norm.weight"), self.inner(), |w| w).await?,
            output: l.linear(self.inner(), &[output], self.bias, scale).await?,
            plan: self.clone(),
        })
    }
}

/// Taps and bias of a depthwise convolution in the layout of [`Conv1d`]: `[C, K + 1] f32`.
pub(super) async fn conv_weight<B: Backend>(
    l: &mut Loader<'_, B>,
    name: &str,
    channels: usize,
    kernel: usize,
    bias: bool,
) -> Result<Tensor<B::Buf>> {
    let taps = l.values(&format!("{name}.weight"), &[channels, 1, kernel]).await?;
    let bias = match bias {
        true => l.values(&format!("{name}.bias"), &[channels]).await?,
        false => vec![0.0; channels],
    };
    let rows = taps.chunks(kernel).zip(bias);
    let packed: Vec<f32> = rows.flat_map(|(w, b)| w.iter().copied().chain([b])).collect();
    l.upload(&format!("{name}.weight"), &packed, &[channels, kernel + 1])
}

/// Records the convolution of all channels, block of channels by block.
pub(super) fn convolve<Buf: Handle>(
    pass: &mut Pass<'_, Buf>,
    pools: &[Tensor<Buf>],
    x: &Tensor<Buf>,
    weight: &Tensor<Buf>,
    out: &Tensor<Buf>,
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
            act: Act::Silu,
        })?;
        first += channels;
    }
    Ok(())
}

/// A Mamba-2 layer on a device.
#[derive(Clone, Debug)]
pub struct Mamba2<Buf> {
    plan: Plan,
    input: Linear<Buf>,
    /// `[C, K + 1]`.
    conv: Tensor<Buf>,
    /// `[3, H]`: A, D, dt_bias.
    par: Tensor<Buf>,
    /// `[DI]`.
    norm: Tensor<Buf>,
    output: Linear<Buf>,
}

impl<Buf: Handle> Mamba2<Buf> {
    pub(super) fn forward(
        &self,
        pass: &mut Pass<'_, Buf>,
        pools: &LayerPools<Buf>,
        u: &Tensor<Buf>,
        x: &Tensor<Buf>,
    ) -> Result<()> {
        let p = &self.plan;
        let (inner, channels, bc) = (p.inner(), p.channels(), p.groups * p.state);
        let proj = pass.scratch(Scratch::Proj, p.proj_width());
        let conv = pass.scratch(Scratch::Mid, channels);
        let y = pass.scratch(Scratch::Out, inner);
        let gated = pass.scratch(Scratch::Gated, inner);
        pass.linear(&self.input, u, &proj, false)?;
        convolve(pass, &pools.conv, &proj.cols(inner, channels), &self.conv, &conv)?;
        let mut first = 0;
        for pool in &pools.recurrent {
            let heads = pool.dims()[1];
            let cols = (first * p.head_dim, heads * p.head_dim);
            pass.op(SelectiveScan {
                step: pass.step.clone(),
                x: conv.cols(cols.0, cols.1),
                b: conv.cols(inner, bc),
                c: conv.cols(inner + bc, bc),
                dt: proj.cols(inner + channels + first, heads),
                par: self.par.cols(first, heads),
                pool: pool.clone(),
                y: y.cols(cols.0, cols.1),
                form: ScanForm::PerHead,
                heads_per_group: p.heads / p.groups,
                first_head: first,
                dt_limit: p.dt_limit,
            })?;
            first += heads;
        }
        pass.op(RmsNorm {
            x: y,
            add: None,
            weight: self.norm.clone(),
            gate: Some(Gate { z: proj.cols(0, inner), act: Act::Silu, before: true }),
            out: gated.clone(),
            eps: p.eps,
            groups: p.groups,
        })?;
        pass.linear(&self.output, &gated, x, true)
    }
}
