//! Attention: fused projection, per-head norms and rotation with the write of keys and values, attention over pages, an
//! optional gate on the output, and the output projection.

use super::{Out, Pass, Scratch, Widths, adapter, divided, divided_or_repeated};
use crate::{
    Result,
    backend::{Backend, Handle},
    config::Heads,
    layer::{KvShape, LayerPools, LayerState, StateShare},
    ops::{self, Act, Activation, RankNorm, RmsNorm, RopeKv},
    rope::Rope,
    tensor::Tensor,
    weights::{Linear, Loader, NormKind, Part, Rank},
};

/// An attention layer, as data.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Model width D.
    pub width: usize,
    /// Width of the input: D, or more if the embeddings are a part of it.
    pub input: usize,
    /// Query and KV heads.
    pub heads: Heads,
    /// Name of the output projection `[D, H * hd]`.
    pub output: &'static str,
    /// `q_proj` holds per head `[query | gate]`; the sigmoid of the gate multiplies the output.
    pub gated: bool,
    /// q, k, v and output projections have biases.
    pub bias: bool,
    /// Additions to q, k and v for this layer alone, in this order; not with a gate.
    pub adapter: Option<adapter::Plan>,
    /// Factor on the input of the q, k and v projections.
    pub input_scale: f32,
    /// Factor on k.
    pub key_scale: f32,
    /// Norms of q and k.
    pub qk_norm: Option<QkNorm>,
    /// Rotation; none in models without positions.
    pub rope: Option<Rope>,
    /// Factor on q·k.
    pub scale: f32,
    /// Positions seen, the own one included.
    pub window: Option<u32>,
    /// Positions before this one are hidden from those after them.
    pub first: u32,
}

/// Norms of q and k before the rotation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkNorm {
    /// Meaning of the weights.
    pub kind: NormKind,
    /// Added to the mean square.
    pub eps: f32,
    /// Names of the weights for q and for k.
    pub names: [&'static str; 2],
    /// Over all of q and of k, `[H * hd]` and `[KH * hd]`, instead of per head, `[hd]`.
    pub whole: bool,
}

impl QkNorm {
    /// Norms of each head under the usual names.
    pub fn per_head(kind: NormKind, eps: f32) -> Self {
        Self { kind, eps, names: ["q_norm", "k_norm"], whole: false }
    }

    /// The weight of a norm over all heads, of which each rank has those of its heads.
    async fn load<B: Backend>(
        self,
        l: &mut Loader<'_, B>,
        name: &str,
        heads: usize,
        head_dim: usize,
    ) -> Result<Tensor<B::Buf>> {
        let stored = l.values(name, &[heads * head_dim]).await?;
        let share = |rank: Rank| stored[rank.share_of(heads, head_dim)].iter().map(|w| self.kind.weight(*w)).collect();
        let width = Rank::first(l.ranks().len()).share_of(heads, head_dim).len();
        l.upload_on(name, &[width], share)
    }
}

/// q and k after norms that are separate ops.
const NORMED: Scratch = Scratch::activations("normed queries and keys");

impl Plan {
    /// Ungated attention over all positions, without biases, norms and rotation, that scales by the root of the head dim.
    pub fn new(width: usize, heads: Heads) -> Self {
        Self {
            width,
            input: width,
            heads,
            adapter: None,
            output: "o_proj",
            gated: false,
            bias: false,
            input_scale: 1.0,
            key_scale: 1.0,
            qk_norm: None,
            rope: None,
            scale: (heads.head_dim as f32).sqrt().recip(),
            window: None,
            first: 0,
        }
    }

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

    pub(super) fn sizes(&self) -> String {
        let Heads { heads, kv_heads, head_dim } = self.heads;
        let rope = self.rope.map_or("no positions".into(), |r| format!("{} rotated", r.rotary_dims));
        let window = self.window.map_or(String::new(), |w| format!(", the last {w} positions"));
        format!("{heads} heads of {head_dim}, {kv_heads} for keys, {rope}{window}")
    }

    /// Heads by rank, and KV heads, or one KV head for several ranks.
    pub(super) fn share(&self, ranks: usize) -> Result<Self, String> {
        let Heads { heads, kv_heads, head_dim } = self.heads;
        let heads = divided("heads", heads, ranks)?;
        let kv_heads = divided_or_repeated("KV heads", kv_heads, ranks)?;
        Ok(Self { heads: Heads { heads, kv_heads, head_dim }, ..self.clone() })
    }

    pub(super) fn state(&self) -> LayerState {
        let Heads { kv_heads, head_dim, .. } = self.heads;
        let kv = KvShape { heads: kv_heads, key_dim: head_dim, value_dim: head_dim };
        LayerState { kv: Some(kv), ..LayerState::default() }
    }

    pub(super) fn state_share(&self, rank: Rank) -> StateShare {
        StateShare { kv: vec![rank.share(self.heads.kv_heads)], ..StateShare::default() }
    }

    pub(super) fn parameters(&self) -> u64 {
        let bias = if self.bias { self.proj_width() + self.width } else { 0 };
        let norms = match self.qk_norm {
            Some(norm) if norm.whole => self.q_width() + self.kv_width(),
            Some(_) => 2 * self.heads.head_dim,
            None => 0,
        };
        (self.input * self.proj_width() + self.width * self.q_width()) as u64 + (bias + norms) as u64
    }

    pub(super) fn adapter_parameters(&self) -> u64 {
        self.adapter.as_ref().map_or(0, |a| a.parameters(self.input, self.q_width() + 2 * self.kv_width()))
    }

    pub(super) fn want(&self, w: &mut Widths) {
        w.want(Scratch::PROJ, self.proj_width());
        w.want(Scratch::MID, self.q_width());
        w.want(Scratch::OUT, self.q_width());
        if self.gated {
            w.want(Scratch::GATED, self.q_width());
        }
        if self.qk_norm.is_some_and(|norm| norm.whole) {
            w.want(NORMED, self.q_width() + self.kv_width());
        }
        if let Some(adapter) = &self.adapter {
            adapter.want(w);
        }
    }

    pub(super) async fn load<B: Backend>(
        &self,
        mine: Self,
        l: &mut Loader<'_, B>,
        prefix: &str,
        scale: f32,
    ) -> Result<Attention<B::Buf>> {
        let ranks = l.ranks().len();
        let (q, hd) = (self.q_width(), self.heads.head_dim);
        let parts = |rank: Rank| self.input_parts(&mine, prefix, rank);
        let input = l.linear_on(self.input, parts, self.bias, self.input_scale).await?;
        let adapter = match &self.adapter {
            Some(adapter) => Some(adapter.load(l, prefix, self.input, parts).await?),
            None => None,
        };
        let norm = match self.qk_norm {
            Some(norm) => Some(self.load_norm(l, prefix, norm).await?),
            None => None,
        };
        let inv_freq = match &self.rope {
            Some(rope) => {
                let f = rope.inv_freq();
                Some(l.upload("rope frequencies", &f, &[f.len()])?)
            }
            None => None,
        };
        let output = |rank: Rank| {
            let part = Part::whole(format!("{prefix}{}.weight", self.output), self.width, 0).scaled(scale);
            vec![part.columns(rank.share_of(self.heads.heads, hd), q)]
        };
        let output = l.linear_on(mine.q_width(), output, self.bias, 1.0).await?;
        Ok(Attention { plan: mine, ranks, input, adapter, norm, inv_freq, output })
    }

    /// The rows of q, k, v and, if there is one, the gate that a rank has; `mine` has its sizes.
    fn input_parts(&self, mine: &Self, prefix: &str, rank: Rank) -> Vec<Part> {
        let name = |leaf: &str| format!("{prefix}{leaf}.weight");
        let (hd, heads, kv_heads) = (self.heads.head_dim, self.heads.heads, self.heads.kv_heads);
        let (q, kv) = (mine.q_width(), mine.kv_width());
        let mut parts = Vec::new();
        if self.gated {
            for (col, h) in rank.share(heads).enumerate() {
                for (half, first) in [(0, 0), (1, q + 2 * kv)] {
                    let from = (2 * h + half) * hd;
                    parts.push(Part::rows(name("q_proj"), 2 * self.q_width(), from..from + hd, first + col * hd));
                }
            }
        } else {
            parts.push(Part::rows(name("q_proj"), self.q_width(), rank.share_of(heads, hd), 0));
        }
        let keys = rank.share_of(kv_heads, hd);
        parts.push(Part::rows(name("k_proj"), self.kv_width(), keys.clone(), q).scaled(self.key_scale));
        parts.push(Part::rows(name("v_proj"), self.kv_width(), keys, q + kv));
        parts
    }

    async fn load_norm<B: Backend>(&self, l: &mut Loader<'_, B>, prefix: &str, norm: QkNorm) -> Result<Norm<B::Buf>> {
        let [q, k] = norm.names.map(|leaf| format!("{prefix}{leaf}.weight"));
        let (Heads { heads, kv_heads, head_dim }, eps) = (self.heads, norm.eps);
        if norm.whole && (heads != kv_heads || l.ranks().len() > 1) {
            let q = norm.load(l, &q, heads, head_dim).await?;
            let k = norm.load(l, &k, kv_heads, head_dim).await?;
            return Ok(Norm::Whole { weights: vec![(q, 1), (k, 1)], eps });
        }
        let width = if norm.whole { heads * head_dim } else { head_dim };
        let mut both = l.values(&q, &[width]).await?;
        both.extend(l.values(&k, &[width]).await?);
        both.iter_mut().for_each(|w| *w = norm.kind.weight(*w));
        Ok(match norm.whole {
            // As many keys as queries: two groups of one norm.
            true => Norm::Whole { weights: vec![(l.upload(&q, &both, &[2 * width])?, 2)], eps },
            false => Norm::PerHead(l.upload(&q, &both, &[2, width])?, eps),
        })
    }
}

/// Norms of q and k on a device.
#[derive(Clone, Debug)]
enum Norm<Buf> {
    /// `[2, hd]` and the epsilon: part of the rotation.
    PerHead(Tensor<Buf>, f32),
    /// Ops of their own, from the first column on: weights, and the number of norms that an op computes.
    Whole { weights: Vec<(Tensor<Buf>, usize)>, eps: f32 },
}

/// An attention layer on a device.
#[derive(Clone, Debug)]
pub struct Attention<Buf> {
    /// With the sizes of one rank.
    plan: Plan,
    ranks: usize,
    input: Linear<Buf>,
    adapter: Option<adapter::Adapter<Buf>>,
    norm: Option<Norm<Buf>>,
    inv_freq: Option<Tensor<Buf>>,
    output: Linear<Buf>,
}

impl<Buf: Handle> Attention<Buf> {
    pub(super) fn forward(
        &self,
        pass: &mut Pass<'_, Buf>,
        pools: &LayerPools<Buf>,
        u: &Tensor<Buf>,
        out: &Out<Buf>,
    ) -> Result<()> {
        let p = &self.plan;
        let (q, kv, hd) = (p.q_width(), p.kv_width(), p.heads.head_dim);
        let group = p.heads.heads / p.heads.kv_heads;
        let proj = pass.scratch(Scratch::PROJ, p.proj_width());
        let rotated = pass.scratch(Scratch::MID, q);
        let mut attended = pass.scratch(Scratch::OUT, q);
        pass.linear(&self.input, u, &proj)?;
        if let Some(adapter) = &self.adapter {
            adapter.add(pass, u, &proj)?;
        }
        let [queries, keys] = self.normed(pass, &proj)?;
        let per_head = match &self.norm {
            Some(Norm::PerHead(weights, eps)) => Some((weights.clone(), *eps)),
            _ => None,
        };
        let mut first = 0;
        for pool in &pools.kv {
            let heads = pool.k.dims()[1];
            let (qs, kvs) = ((first * group * hd, heads * group * hd), (first * hd, heads * hd));
            pass.op(RopeKv {
                step: pass.step.clone(),
                q: queries.cols(qs.0, qs.1),
                k: keys.cols(kvs.0, kvs.1),
                v: proj.cols(q + kv + kvs.0, kvs.1),
                norm: per_head.clone(),
                inv_freq: self.inv_freq.clone(),
                q_out: rotated.cols(qs.0, qs.1),
                pool: pool.clone(),
                head_dim: hd,
            })?;
            pass.op(ops::Attention {
                step: pass.step.clone(),
                q: rotated.cols(qs.0, qs.1),
                pool: pool.clone(),
                out: attended.cols(qs.0, qs.1),
                head_dim: hd,
                scale: p.scale,
                window: p.window,
                first: p.first,
            })?;
            first += heads;
        }
        if p.gated {
            let gated = pass.scratch(Scratch::GATED, q);
            pass.op(Activation {
                gate: proj.cols(q + 2 * kv, q),
                up: Some(attended),
                row_gate: None,
                out: gated.clone(),
                act: Act::Sigmoid,
            })?;
            attended = gated;
        }
        pass.output(&self.output, &attended, out)
    }

    /// `[T, H * hd]` and `[T, KH * hd]`: q and k of a projection, normed if that is not part of the rotation.
    fn normed(&self, pass: &mut Pass<'_, Buf>, proj: &Tensor<Buf>) -> Result<[Tensor<Buf>; 2]> {
        let (q, kv) = (self.plan.q_width(), self.plan.kv_width());
        let Some(Norm::Whole { weights, eps }) = &self.norm else {
            return Ok([proj.cols(0, q), proj.cols(q, kv)]);
        };
        let both = pass.scratch(NORMED, q + kv);
        let mut first = 0;
        for (weight, groups) in weights {
            let norm = RmsNorm {
                x: proj.cols(first, weight.len()),
                add: None,
                weight: weight.clone(),
                gate: None,
                out: both.cols(first, weight.len()),
                accumulate: false,
                eps: *eps,
                groups: *groups,
            };
            first += weight.len();
            match self.ranks {
                1 => pass.op(norm)?,
                // A KV head that several ranks have counts as often in the sum as in the number of columns.
                ranks => pass.op(RankNorm { norm, ranks })?,
            }
        }
        Ok([both.cols(0, q), both.cols(q, kv)])
    }
}
