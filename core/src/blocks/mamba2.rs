//! Mamba-2: one projection `[z | x | B | C | dt]`, convolution over `x B C`, the scan, a gated norm per group, and the
//! output projection.

use super::{ALIGN, Out, Pass, Scratch, Widths, conv};
use crate::{
    Result,
    backend::{Backend, Handle},
    layer::{LayerPools, LayerState},
    ops::{Act, Activation, Gate, RmsNorm, ScanForm, SelectiveScan},
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
    /// The input and the output projection have biases.
    pub bias: [bool; 2],
    /// Factor on the input of the layer.
    pub input_scale: f32,
    /// Factors on z, x, B, C and dt.
    pub scales: [f32; 5],
    /// The use of z.
    pub gate: Gating,
    /// Epsilon of the gated norm.
    pub eps: f32,
    /// Bounds on dt.
    pub dt_limit: (f32, f32),
}

/// How z gates the result of the scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gating {
    /// Before the norm.
    BeforeNorm,
    /// After it.
    AfterNorm,
    /// There is no norm.
    WithoutNorm,
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

    pub(super) fn sizes(&self) -> String {
        let Self { heads, head_dim, state, groups, .. } = self;
        format!("{heads} heads of {head_dim}, state {state}, {groups} groups")
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
        let bias = usize::from(self.bias[0]) * self.proj_width() + usize::from(self.bias[1]) * self.width;
        let norm = if self.gate == Gating::WithoutNorm { 0 } else { self.inner() };
        (self.width * (self.proj_width() + self.inner())) as u64 + (conv + bias + 3 * self.heads + norm) as u64
    }

    pub(super) fn want(&self, w: &mut Widths) {
        w.want(Scratch::PROJ, self.proj_width().next_multiple_of(ALIGN));
        w.want(Scratch::MID, self.channels());
        w.want(Scratch::OUT, self.inner());
        w.want(Scratch::GATED, self.inner());
    }

    /// The input projection: z, x, B, C and dt are rows of one tensor.
    fn input(&self, name: String) -> Vec<Part> {
        let bc = self.groups * self.state;
        let (mut first, mut parts) = (0, Vec::with_capacity(5));
        for (rows, scale) in [self.inner(), self.inner(), bc, bc, self.heads].into_iter().zip(self.scales) {
            parts.push(Part::rows(name.clone(), self.proj_width(), first..first + rows, first).scaled(scale));
            first += rows;
        }
        parts
    }

    pub(super) async fn load<B: Backend>(
        &self,
        l: &mut Loader<'_, B>,
        prefix: &str,
        scale: f32,
    ) -> Result<Mamba2<B::Buf>> {
        let name = |leaf: &str| format!("{prefix}{leaf}");
        let output = Part::whole(name("out_proj.weight"), self.width, 0).scaled(scale);
        let h = [self.heads];
        let mut par: Vec<f32> = l.values(&name("A_log"), &h).await?.into_iter().map(|a| -a.exp()).collect();
        par.extend(l.values(&name("D"), &h).await?);
        par.extend(l.values(&name("dt_bias"), &h).await?);
        Ok(Mamba2 {
            input: l.linear(self.width, &self.input(name("in_proj.weight")), self.bias[0], self.input_scale).await?,
            conv: conv::load(l, &[(name("conv1d"), self.channels())], self.kernel, self.conv_bias).await?,
            par: l.upload(&name("A_log"), &par, &[3, self.heads])?,
            norm: match self.gate {
                Gating::WithoutNorm => None,
                _ => Some(l.vector(&name("norm.weight"), self.inner(), |w| w).await?),
            },
            output: l.linear(self.inner(), &[output], self.bias[1], 1.0).await?,
            plan: self.clone(),
        })
    }
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
    norm: Option<Tensor<Buf>>,
    output: Linear<Buf>,
}

impl<Buf: Handle> Mamba2<Buf> {
    pub(super) fn forward(
        &self,
        pass: &mut Pass<'_, Buf>,
        pools: &LayerPools<Buf>,
        u: &Tensor<Buf>,
        out: &Out<Buf>,
    ) -> Result<()> {
        let p = &self.plan;
        let (inner, channels, bc) = (p.inner(), p.channels(), p.groups * p.state);
        // Rows begin where wide accesses may.
        let proj = pass.scratch(Scratch::PROJ, p.proj_width().next_multiple_of(ALIGN)).cols(0, p.proj_width());
        let mixed = pass.scratch(Scratch::MID, channels);
        let y = pass.scratch(Scratch::OUT, inner);
        let gated = pass.scratch(Scratch::GATED, inner);
        pass.linear(&self.input, u, &proj)?;
        conv::record(pass, &pools.conv, &proj.cols(inner, channels), &self.conv, &mixed, Act::Silu)?;
        let mut first = 0;
        for pool in &pools.recurrent {
            let heads = pool.dims()[1];
            let cols = (first * p.head_dim, heads * p.head_dim);
            pass.op(SelectiveScan {
                step: pass.step.clone(),
                x: mixed.cols(cols.0, cols.1),
                b: mixed.cols(inner, bc),
                c: mixed.cols(inner + bc, bc),
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
        let z = proj.cols(0, inner);
        match &self.norm {
            Some(weight) => pass.op(RmsNorm {
                x: y,
                add: None,
                weight: weight.clone(),
                gate: Some(Gate { z, act: Act::Silu, before: p.gate == Gating::BeforeNorm }),
                out: gated.clone(),
                accumulate: false,
                eps: p.eps,
                groups: p.groups,
            })?,
            None => pass.op(Activation { gate: z, up: Some(y), row_gate: None, out: gated.clone(), act: Act::Silu })?,
        }
        pass.output(&self.output, &gated, out)
    }
}
