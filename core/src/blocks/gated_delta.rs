//! Gated DeltaNet: one projection `[q | k | v | z | b | a]`, convolution over `q k v`, the delta rule, a norm per value head
//! that is gated by z, and the output projection.

use super::{
    Pass, Scratch, Widths,
    mamba2::{conv_weight, convolve},
};
use crate::{
    Result,
    backend::{Backend, Handle},
    layer::{LayerPools, LayerState},
    ops::{self, Act, Gate, RmsNorm},
    tensor::Tensor,
    weights::{Linear, Loader, Part},
};

/// A Gated DeltaNet layer, as data. Value head `j` uses key head `j / (Hv / Hk)`.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Model width D.
    pub width: usize,
    /// Key heads Hk.
    pub key_heads: usize,
    /// Value heads Hv, a multiple of the key heads.
    pub value_heads: usize,
    /// Width dk of a key.
    pub key_dim: usize,
    /// Width dv of a value.
    pub value_dim: usize,
    /// Taps K of the convolution.
    pub kernel: usize,
    /// Epsilon of the gated norm.
    pub eps: f32,
    /// How the stored projections are laid out.
    pub projections: Projections,
}

/// Layout of the input projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Projections {
    /// `in_proj_qkvz` and `in_proj_ba`, a group of rows per key head: `[q | k | v | z]`, with the values of its value heads,
    /// and `[b | a]` (Qwen3-Next).
    PerKeyHead,
}

impl Plan {
    fn keys(&self) -> usize {
        self.key_heads * self.key_dim
    }

    fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }

    fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }

    fn proj_width(&self) -> usize {
        self.channels() + self.values() + 2 * self.value_heads
    }

    pub(super) fn state(&self) -> LayerState {
        LayerState {
            conv: Some([self.channels(), self.kernel - 1]),
            recurrent: Some([self.value_heads, self.key_dim, self.value_dim]),
            ..LayerState::default()
        }
    }

    pub(super) fn parameters(&self) -> u64 {
        let small = self.channels() * self.kernel + 2 * self.value_heads + self.value_dim;
        (self.width * (self.proj_width() + self.values())) as u64 + small as u64
    }

    pub(super) fn want(&self, w: &mut Widths) {
        w.want(Scratch::Proj, self.proj_width());
        w.want(Scratch::Mid, self.channels());
        w.want(Scratch::Out, self.values());
        w.want(Scratch::Gated, self.values());
    }

    /// Rows of the stored projections by output column.
    fn parts(&self, prefix: &str) -> Vec<Part> {
        let (hk, dk, dv) = (self.key_heads, self.key_dim, self.value_dim);
        let per_key = self.value_heads / hk;
        let mut parts = Vec::new();
        match self.projections {
            Projections::PerKeyHead => {
                let (qkvz, ba) = (2 * dk + 2 * per_key * dv, 2 * per_key);
                for g in 0..hk {
                    let mut put = |leaf: &str, of: usize, row: usize, rows: usize, col: usize| {
                        let name = format!("{prefix}{leaf}.weight");
                        parts.push(Part { name, of, rows: row..row + rows, col });
                    };
                    let (row, vs) = (g * qkvz, per_key * dv);
                    put("in_proj_qkvz", hk * qkvz, row, dk, g * dk);
                    put("in_proj_qkvz", hk * qkvz, row + dk, dk, self.keys() + g * dk);
                    put("in_proj_qkvz", hk * qkvz, row + 2 * dk, vs, 2 * self.keys() + g * vs);
                    put("in_proj_qkvz", hk * qkvz, row + 2 * dk + vs, vs, self.channels() + g * vs);
                    let col = self.channels() + self.values() + g * per_key;
                    put("in_proj_ba", hk * ba, g * ba, per_key, col);
                    put("in_proj_ba", hk * ba, g * ba + per_key, per_key, col + self.value_heads);
                }
            }
        }
        parts
    }

    pub(super) async fn load<B: Backend>(
        &self,
        l: &mut Loader<'_, B>,
        prefix: &str,
        scale: f32,
    ) -> Result<GatedDelta<B::Buf>> {
        let name = |leaf: &str| format!("{prefix}{leaf}");
        let output = Part::whole(name("out_proj.weight"), self.width, 0);
        let h = [self.value_heads];
        let mut par: Vec<f32> = l.values(&name("A_log"), &h).await?.into_iter().map(|a| -a.exp()).collect();
        par.extend(l.values(&name("dt_bias"), &h).await?);
        Ok(GatedDelta {
            input: l.linear(self.width, &self.parts(prefix), false, 1.0).await?,
            conv: conv_weight(l, &name("conv1d"), self.channels(), self.kernel, false).await?,
            par: l.upload(&name("A_log"), &par, &[2, self.value_heads])?,
            norm: l.vector(&name("norm.weight"), self.value_dim, |w| w).await?,
            output: l.linear(self.values(), &[output], false, scale).await?,
            plan: self.clone(),
        })
    }
}

/// A Gated DeltaNet layer on a device.
#[derive(Clone, Debug)]
pub struct GatedDelta<Buf> {
    plan: Plan,
    input: Linear<Buf>,
    /// `[C, K + 1]`.
    conv: Tensor<Buf>,
    /// `[2, Hv]`: -exp(A_log), dt_bias.
    par: Tensor<Buf>,
    /// `[dv]`.
    norm: Tensor<Buf>,
    output: Linear<Buf>,
}

impl<Buf: Handle> GatedDelta<Buf> {
    pub(super) fn forward(
        &self,
        pass: &mut Pass<'_, Buf>,
        pools: &LayerPools<Buf>,
        u: &Tensor<Buf>,
        x: &Tensor<Buf>,
    ) -> Result<()> {
        let p = &self.plan;
        let (keys, values, channels) = (p.keys(), p.values(), p.channels());
        let proj = pass.scratch(Scratch::Proj, p.proj_width());
        let conv = pass.scratch(Scratch::Mid, channels);
        let out = pass.scratch(Scratch::Out, values);
        let gated = pass.scratch(Scratch::Gated, values);
        pass.linear(&self.input, u, &proj, false)?;
        convolve(pass, &pools.conv, &proj.cols(0, channels), &self.conv, &conv)?;
        let mut first = 0;
        for pool in &pools.recurrent {
            let heads = pool.dims()[1];
            let cols = (first * p.value_dim, heads * p.value_dim);
            let b = channels + values + first;
            pass.op(ops::GatedDelta {
                step: pass.step.clone(),
                q: conv.cols(0, keys),
                k: conv.cols(keys, keys),
                v: conv.cols(2 * keys + cols.0, cols.1),
                a: proj.cols(b + p.value_heads, heads),
                b: proj.cols(b, heads),
                par: self.par.cols(first, heads),
                pool: pool.clone(),
                out: out.cols(cols.0, cols.1),
                heads_per_key: p.value_heads / p.key_heads,
                first_head: first,
                beta_scale: 1.0,
            })?;
            first += heads;
        }
        pass.op(RmsNorm {
            x: out,
            add: None,
            weight: self.norm.clone(),
            gate: Some(Gate { z: proj.cols(channels, values), act: Act::Silu, before: false }),
            out: gated.clone(),
            eps: p.eps,
            groups: p.value_heads,
        })?;
        pass.linear(&self.output, &gated, x, true)
    }
}
