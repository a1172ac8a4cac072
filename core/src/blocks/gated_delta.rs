//! Gated DeltaNet: one projection `[q | k | v | z | b | a]`, convolution over `q k v`, the delta rule, a norm per value head
//! that is gated by z, and the output projection.

use std::ops::Range;

use super::{ALIGN, Out, Pass, Scratch, Widths, conv, divided, divided_or_repeated};
use crate::{
    Result,
    backend::{Backend, Handle},
    layer::{LayerPools, LayerState, StateShare},
    ops::{self, Act, Gate, RmsNorm},
    tensor::Tensor,
    weights::{Linear, Loader, Part, Rank},
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

    /// Value heads by rank, and their key heads, or one key head for several ranks.
    pub(super) fn share(&self, ranks: usize) -> Result<Self, String> {
        let value_heads = divided("value heads", self.value_heads, ranks)?;
        let key_heads = divided_or_repeated("key heads", self.key_heads, ranks)?;
        Ok(Self { key_heads, value_heads, ..self.clone() })
    }

    pub(super) fn state(&self) -> LayerState {
        LayerState {
            conv: Some([self.channels(), self.kernel - 1]),
            recurrent: Some([self.value_heads, self.key_dim, self.value_dim]),
            ..LayerState::default()
        }
    }

    pub(super) fn state_share(&self, rank: Rank) -> StateShare {
        let recurrent = vec![rank.share(self.value_heads)];
        StateShare { conv: self.own_channels(rank), recurrent, ..StateShare::default() }
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

    /// Elements of the keys and of the values that a rank has.
    fn own(&self, rank: Rank) -> [Range<usize>; 2] {
        [rank.share_of(self.key_heads, self.key_dim), rank.share_of(self.value_heads, self.value_dim)]
    }

    /// The channels of the convolution that a rank has: q, k, v.
    fn own_channels(&self, rank: Rank) -> Vec<Range<usize>> {
        let ([keys, values], k, v) = (self.own(rank), self.keys(), 2 * self.keys());
        vec![keys.clone(), k + keys.start..k + keys.end, v + values.start..v + values.end]
    }

    /// Rows of the stored projections that a rank has, by output column.
    fn parts(&self, prefix: &str, rank: Rank) -> Vec<Part> {
        if self.projections == Projections::PerKeyHead {
            return self.parts_per_key_head(prefix, rank);
        }
        let ([keys, values], heads) = (self.own(rank), rank.share(self.value_heads));
        let (k, v, h) = (self.keys(), self.values(), self.value_heads);
        // The tensor, its rows, those of them before the section, and the rank's rows of the section.
        let sections = match self.projections {
            Projections::PerVector => [
                ("q_proj", k, 0, &keys),
                ("k_proj", k, 0, &keys),
                ("v_proj", v, 0, &values),
                ("g_proj", v, 0, &values),
                ("b_proj", h, 0, &heads),
                ("a_proj", h, 0, &heads),
            ],
            _ => [
                ("in_proj_qkv", self.channels(), 0, &keys),
                ("in_proj_qkv", self.channels(), k, &keys),
                ("in_proj_qkv", self.channels(), 2 * k, &values),
                ("in_proj_z", v, 0, &values),
                ("in_proj_b", h, 0, &heads),
                ("in_proj_a", h, 0, &heads),
            ],
        };
        let mut col = 0;
        let part = |(leaf, of, first, own): (&str, usize, usize, &Range<usize>)| {
            col += own.len();
            let rows = first + own.start..first + own.end;
            Part::rows(format!("{prefix}{leaf}.weight"), of, rows, col - own.len())
        };
        sections.into_iter().map(part).collect()
    }

    /// [`Projections::PerKeyHead`].
    fn parts_per_key_head(&self, prefix: &str, rank: Rank) -> Vec<Part> {
        let (hk, dk, dv) = (self.key_heads, self.key_dim, self.value_dim);
        let per_key = self.value_heads / hk;
        let (qkvz, ba) = (2 * dk + 2 * per_key * dv, 2 * per_key);
        let ([keys, values], heads) = (self.own(rank).map(|own| own.len()), rank.share(self.value_heads));
        let mut parts = Vec::new();
        let mut put = |leaf: &str, of: usize, row: usize, rows: usize, col: usize| {
            parts.push(Part::rows(format!("{prefix}{leaf}.weight"), of, row..row + rows, col));
        };
        for (i, g) in rank.share(hk).enumerate() {
            // The rank's heads among those of this key, by number and by column.
            let own = heads.start.max(g * per_key)..heads.end.min((g + 1) * per_key);
            let (skipped, at) = (own.start - g * per_key, own.start - heads.start);
            let (row, vs) = (g * qkvz, per_key * dv);
            put("in_proj_qkvz", hk * qkvz, row, dk, i * dk);
            put("in_proj_qkvz", hk * qkvz, row + dk, dk, keys + i * dk);
            let (value, col) = (row + 2 * dk + skipped * dv, 2 * keys + at * dv);
            put("in_proj_qkvz", hk * qkvz, value, own.len() * dv, col);
            put("in_proj_qkvz", hk * qkvz, value + vs, own.len() * dv, values + col);
            let (row, col) = (g * ba + skipped, 2 * (keys + values) + at);
            put("in_proj_ba", hk * ba, row, own.len(), col);
            put("in_proj_ba", hk * ba, row + per_key, own.len(), col + heads.len());
        }
        parts
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
        mine: Self,
        l: &mut Loader<'_, B>,
        prefix: &str,
        scale: f32,
    ) -> Result<GatedDelta<B::Buf>> {
        let name = |leaf: &str| format!("{prefix}{leaf}");
        let [norm, output] = self.projections.ends().map(|leaf| format!("{prefix}{leaf}.weight"));
        let output = |rank| {
            let [_, values] = self.own(rank);
            vec![Part::whole(&output, self.width, 0).scaled(scale).columns(values, self.values())]
        };
        let h = [self.value_heads];
        let a: Vec<f32> = l.values(&name("A_log"), &h).await?.into_iter().map(|a| -a.exp()).collect();
        let dt = l.values(&name("dt_bias"), &h).await?;
        let par = |rank: Rank| [&a, &dt].into_iter().flat_map(|p| &p[rank.share(self.value_heads)]).copied().collect();
        let conv = self.convolutions(prefix);
        Ok(GatedDelta {
            input: l.linear_on(self.width, |rank| self.parts(prefix, rank), false, 1.0).await?,
            conv: conv::load(l, &conv, self.kernel, false, |rank| self.own_channels(rank)).await?,
            par: l.upload_on(&name("A_log"), &[2, mine.value_heads], par)?,
            norm: l.vector(&norm, self.value_dim, |w| w).await?,
            output: l.linear_on(mine.values(), output, false, 1.0).await?,
            plan: mine,
        })
    }
}

/// A Gated DeltaNet layer on a device.
#[derive(Clone, Debug)]
pub struct GatedDelta<Buf> {
    /// With the sizes of one rank.
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
