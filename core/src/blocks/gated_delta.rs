//! Gated DeltaNet: one projection `[q | k | v | z | b | a]`, convolution over `q k v`, the delta rule, a norm per value head
//! that is gated by z, and the output projection.

use super::{ALIGN, Out, Pass, Scratch, Widths, conv};
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
    /// Factor on β: 1, or 2 if the state may have negative eigenvalues.
    pub beta_scale: f32,
    /// Layout and names of the stored projections.
    pub projections: Projections,
}

/// Layout of the input projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Projections {
    /// `in_proj_qkvz` and `in_proj_ba`, a group of rows per key head: `[q | k | v | z]`, with the values of its value heads,
    /// and `[b | a]` (Qwen3-Next).
    PerKeyHead,
    /// `in_proj_qkv` with all of q, of k and of v, `in_proj_z`, `in_proj_b` and `in_proj_a` (Qwen3.5).
    Separate,
    /// `q_proj`, `k_proj` and `v_proj`, each with a convolution of its own, `g_proj` for z, `b_proj` and `a_proj`
    /// (Olmo-Hybrid).
    PerVector,
}

impl Projections {
    /// Names of the gated norm and of the output projection.
    fn ends(self) -> [&'static str; 2] {
        match self {
            Self::PerKeyHead | Self::Separate => ["norm", "out_proj"],
            Self::PerVector => ["o_norm", "o_proj"],
        }
    }
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

    pub(super) fn sizes(&self) -> String {
        let Self { key_heads, key_dim, value_heads, value_dim, .. } = self;
        format!("{key_heads} key heads of {key_dim}, {value_heads} value heads of {value_dim}")
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
        w.want(Scratch::PROJ, self.proj_width().next_multiple_of(ALIGN));
        w.want(Scratch::MID, self.channels());
        w.want(Scratch::OUT, self.values());
        w.want(Scratch::GATED, self.values());
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
                        parts.push(Part::rows(name, of, row..row + rows, col));
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
            Projections::Separate => self.in_order(
                &mut parts,
                prefix,
                &[
                    ("in_proj_qkv", self.channels()),
                    ("in_proj_z", self.values()),
                    ("in_proj_b", self.value_heads),
                    ("in_proj_a", self.value_heads),
                ],
            ),
            Projections::PerVector => self.in_order(
                &mut parts,
                prefix,
                &[
                    ("q_proj", self.keys()),
                    ("k_proj", self.keys()),
                    ("v_proj", self.values()),
                    ("g_proj", self.values()),
                    ("b_proj", self.value_heads),
                    ("a_proj", self.value_heads),
                ],
            ),
        }
        parts
    }

    /// Whole tensors, one after the other.
    fn in_order(&self, parts: &mut Vec<Part>, prefix: &str, leaves: &[(&str, usize)]) {
        let mut col = 0;
        for &(leaf, rows) in leaves {
            parts.push(Part::whole(format!("{prefix}{leaf}.weight"), rows, col));
            col += rows;
        }
    }

    /// Tensors of the convolution, with their channels.
    fn convolutions(&self, prefix: &str) -> Vec<(String, usize)> {
        let leaves = match self.projections {
            Projections::PerKeyHead | Projections::Separate => vec![("conv1d", self.channels())],
            Projections::PerVector => {
                vec![("q_conv1d", self.keys()), ("k_conv1d", self.keys()), ("v_conv1d", self.values())]
            }
        };
        leaves.into_iter().map(|(leaf, channels)| (format!("{prefix}{leaf}"), channels)).collect()
    }

    pub(super) async fn load<B: Backend>(
        &self,
        l: &mut Loader<'_, B>,
        prefix: &str,
        scale: f32,
    ) -> Result<GatedDelta<B::Buf>> {
        let name = |leaf: &str| format!("{prefix}{leaf}");
        let [norm, output] = self.projections.ends().map(|leaf| format!("{prefix}{leaf}.weight"));
        let output = Part::whole(output, self.width, 0).scaled(scale);
        let h = [self.value_heads];
        let mut par: Vec<f32> = l.values(&name("A_log"), &h).await?.into_iter().map(|a| -a.exp()).collect();
        par.extend(l.values(&name("dt_bias"), &h).await?);
        Ok(GatedDelta {
            input: l.linear(self.width, &self.parts(prefix), false, 1.0).await?,
            conv: conv::load(l, &self.convolutions(prefix), self.kernel, false).await?,
            par: l.upload(&name("A_log"), &par, &[2, self.value_heads])?,
            norm: l.vector(&norm, self.value_dim, |w| w).await?,
            output: l.linear(self.values(), &[output], false, 1.0).await?,
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
        out: &Out<Buf>,
    ) -> Result<()> {
        let p = &self.plan;
        let (keys, values, channels) = (p.keys(), p.values(), p.channels());
        // Rows begin where wide accesses may.
        let proj = pass.scratch(Scratch::PROJ, p.proj_width().next_multiple_of(ALIGN)).cols(0, p.proj_width());
        let mixed = pass.scratch(Scratch::MID, channels);
        let read = pass.scratch(Scratch::OUT, values);
        let gated = pass.scratch(Scratch::GATED, values);
        pass.linear(&self.input, u, &proj)?;
        conv::record(pass, &pools.conv, &proj.cols(0, channels), &self.conv, &mixed, Act::Silu)?;
        let mut first = 0;
        for pool in &pools.recurrent {
            let heads = pool.dims()[1];
            let cols = (first * p.value_dim, heads * p.value_dim);
            let b = channels + values + first;
            pass.op(ops::GatedDelta {
                step: pass.step.clone(),
                q: mixed.cols(0, keys),
                k: mixed.cols(keys, keys),
                v: mixed.cols(2 * keys + cols.0, cols.1),
                a: proj.cols(b + p.value_heads, heads),
                b: proj.cols(b, heads),
                par: self.par.cols(first, heads),
                pool: pool.clone(),
                out: read.cols(cols.0, cols.1),
                heads_per_key: p.value_heads / p.key_heads,
                first_head: first,
                beta_scale: p.beta_scale,
            })?;
            first += heads;
        }
        pass.op(RmsNorm {
            x: read,
            add: None,
            weight: self.norm.clone(),
            gate: Some(Gate { z: proj.cols(channels, values), act: Act::Silu, before: false }),
            out: gated.clone(),
            accumulate: false,
            eps: p.eps,
            groups: p.value_heads,
        })?;
        pass.output(&self.output, &gated, out)
    }
}
