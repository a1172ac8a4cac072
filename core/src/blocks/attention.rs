//! Attention: fused projection, per-head norms and rotation with the write of keys and values, attention over pages, an
//! optional gate on the output, and the output projection.

use super::{Pass, Scratch, Widths};
use crate::{
    Result,
    backend::{Backend, Handle},
    config::Heads,
    layer::{KvShape, LayerPools, LayerState},
    ops::{self, Act, Activation, RopeKv},
    rope::Rope,
    tensor::Tensor,
    weights::{Linear, Loader, NormKind, Part},
};

/// An attention layer, as data.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Model width D.
    pub width: usize,
    /// Query and KV heads.
    pub heads: Heads,
    /// Name of the output projection `[D, H * hd]`.
    pub output: &'static str,
    /// `q_proj` holds per head `[query | gate]`; the sigmoid of the gate multiplies the output.
    pub gated: bool,
    /// q, k, v and output projections have biases.
    pub bias: bool,
    /// Per-head norms of q and k (`q_norm`, `k_norm`), and their epsilon.
    pub qk_norm: Option<(NormKind, f32)>,
    /// Rotation; none in models without positions.
    pub rope: Option<Rope>,
    /// Factor on q·k.
    pub scale: f32,
    /// Positions seen, the own one included.
    pub window: Option<u32>,
}

impl Plan {
    fn q_width(&self) -> usize {
        self.heads.heads * self.heads.head_dim
    }

    fn kv_width(&self) -> usize {
        self.heads.kv_heads * self.heads.head_dim
    }

    /// Columns of the fused projection: q, k, v and, if there is one, the gate.
    fn proj_width(&self) -> usize {
        self.q_width() * (1 + usize::from(self.gated)) + 2 * self.kv_width()
    }

    pub(super) fn state(&self) -> LayerState {
        let kv = KvShape { heads: self.heads.kv_heads, head_dim: self.heads.head_dim };
        LayerState { kv: Some(kv), ..LayerState::default() }
    }

    pub(super) fn parameters(&self) -> u64 {
        let bias = if self.bias { self.proj_width() + self.width } else { 0 };
        let norms = if self.qk_norm.is_some() { 2 * self.heads.head_dim } else { 0 };
        (self.width as u64) * (self.proj_width() + self.q_width()) as u64 + (bias + norms) as u64
    }

    pub(super) fn want(&self, w: &mut Widths) {
        w.want(Scratch::Proj, self.proj_width());
        w.want(Scratch::Mid, self.q_width());
        w.want(Scratch::Out, self.q_width());
        if self.gated {
            w.want(Scratch::Gated, self.q_width());
        }
    }

    pub(super) async fn load<B: Backend>(
        &self,
        l: &mut Loader<'_, B>,
        prefix: &str,
        scale: f32,
    ) -> Result<Attention<B::Buf>> {
        let (q, kv, hd) = (self.q_width(), self.kv_width(), self.heads.head_dim);
        let name = |leaf: &str| format!("{prefix}{leaf}.weight");
        let mut parts = Vec::new();
        if self.gated {
            for h in 0..self.heads.heads {
                for (half, col) in [(0, 0), (1, q + 2 * kv)] {
                    let from = (2 * h + half) * hd;
                    parts.push(Part { name: name("q_proj"), of: 2 * q, rows: from..from + hd, col: col + h * hd });
                }
            }
        } else {
            parts.push(Part::whole(name("q_proj"), q, 0));
        }
        parts.push(Part::whole(name("k_proj"), kv, q));
        parts.push(Part::whole(name("v_proj"), kv, q + kv));
        let input = l.linear(self.width, &parts, self.bias, 1.0).await?;
        let norm = match self.qk_norm {
            Some((kind, eps)) => {
                let mut both = Vec::with_capacity(2 * hd);
                for leaf in ["q_norm", "k_norm"] {
                    both.extend(l.values(&name(leaf), &[hd]).await?.into_iter().map(|w| kind.weight(w)));
                }
                Some((l.upload(&name("q_norm"), &both, &[2, hd])?, eps))
            }
            None => None,
        };
        let inv_freq = match &self.rope {
            Some(rope) => {
                let f = rope.inv_freq();
                Some(l.upload("rope frequencies", &f, &[f.len()])?)
            }
            None => None,
        };
        let output = l.linear(q, &[Part::whole(name(self.output), self.width, 0)], self.bias, scale).await?;
        Ok(Attention { plan: self.clone(), input, norm, inv_freq, output })
    }
}

/// An attention layer on a device.
#[derive(Clone, Debug)]
pub struct Attention<Buf> {
    plan: Plan,
    input: Linear<Buf>,
    norm: Option<(Tensor<Buf>, f32)>,
    inv_freq: Option<Tensor<Buf>>,
    output: Linear<Buf>,
}

impl<Buf: Handle> Attention<Buf> {
    pub(super) fn forward(
        &self,
        pass: &mut Pass<'_, Buf>,
        pools: &LayerPools<Buf>,
        u: &Tensor<Buf>,
        x: &Tensor<Buf>,
    ) -> Result<()> {
        let p = &self.plan;
        let (q, kv, hd) = (p.q_width(), p.kv_width(), p.heads.head_dim);
        let group = p.heads.heads / p.heads.kv_heads;
        let proj = pass.scratch(Scratch::Proj, p.proj_width());
        let rotated = pass.scratch(Scratch::Mid, q);
        let mut out = pass.scratch(Scratch::Out, q);
        pass.linear(&self.input, u, &proj, false)?;
        let mut first = 0;
        for pool in &pools.kv {
            let heads = pool.k.dims()[1];
            let (qs, kvs) = ((first * group * hd, heads * group * hd), (first * hd, heads * hd));
            pass.op(RopeKv {
                step: pass.step.clone(),
                q: proj.cols(qs.0, qs.1),
                k: proj.cols(q + kvs.0, kvs.1),
                v: proj.cols(q + kv + kvs.0, kvs.1),
                norm: self.norm.clone(),
                inv_freq: self.inv_freq.clone(),
                q_out: rotated.cols(qs.0, qs.1),
                pool: pool.clone(),
                head_dim: hd,
            })?;
            pass.op(ops::Attention {
                step: pass.step.clone(),
                q: rotated.cols(qs.0, qs.1),
                pool: pool.clone(),
                out: out.cols(qs.0, qs.1),
                head_dim: hd,
                scale: p.scale,
                window: p.window,
            })?;
            first += heads;
        }
        if p.gated {
            let gated = pass.scratch(Scratch::Gated, q);
            pass.op(Activation {
                gate: proj.cols(q + 2 * kv, q),
                up: Some(out),
                row_gate: None,
                out: gated.clone(),
                act: Act::Sigmoid,
            })?;
            out = gated;
        }
        pass.linear(&self.output, &out, x, true)
    }
}
