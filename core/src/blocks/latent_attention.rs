//! Attention over latents: keys and values of all heads are products of one narrow latent per token, which is all that the
//! pages hold, besides a part of the keys that all heads share. Queries are brought into the space of the latents instead,
//! and results out of it, for prompts as for decode.

use super::{ALIGN, Out, Pass, Scratch, Widths, divided};
use crate::{
    Result,
    backend::{Backend, Handle},
    layer::{KvShape, LayerPools, LayerState, StateShare},
    ops::{self, HeadMatmul, LatentKv, RmsNorm},
    tensor::Tensor,
    weights::{Linear, Loader, Part, Rank},
};

/// A layer of attention over latents, as data. There are no positions.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Model width D.
    pub width: usize,
    /// Heads H.
    pub heads: usize,
    /// Width R of a latent.
    pub latent: usize,
    /// Width S of the shared part of a key.
    pub shared: usize,
    /// Width of the part of a head's key that is a product of the latent.
    pub key_dim: usize,
    /// Width of a head's value.
    pub value_dim: usize,
    /// Width of the latent that the queries are products of, if there is one.
    pub query_latent: Option<usize>,
    /// Epsilon of the norms of latents.
    pub eps: f32,
}

const QUERIES: Scratch = Scratch::activations("queries");
/// Queries in the space of the latents.
const ABSORBED: Scratch = Scratch::activations("queries for latents");
const ATTENDED: Scratch = Scratch::activations("attended latents");

impl Plan {
    /// Columns of a head's query.
    fn query_dim(&self) -> usize {
        self.key_dim + self.shared
    }

    fn q_width(&self) -> usize {
        self.heads * self.query_dim()
    }

    /// Columns of the projection for queries: themselves, or their latent.
    fn first_width(&self) -> usize {
        self.query_latent.unwrap_or(self.q_width())
    }

    fn proj_width(&self) -> usize {
        self.first_width() + self.latent + self.shared
    }

    /// Columns of keys and values that are products of the latent, per head.
    fn expanded(&self) -> usize {
        self.key_dim + self.value_dim
    }

    pub(super) fn sizes(&self) -> String {
        let Self { heads, key_dim, value_dim, latent, shared, .. } = self;
        format!("{heads} heads of {key_dim} + {shared}, values of {value_dim}, latents of {latent}, no positions")
    }

    pub(super) fn share(&self, ranks: usize) -> Result<Self, String> {
        Ok(Self { heads: divided("heads", self.heads, ranks)?, ..self.clone() })
    }

    pub(super) fn state(&self) -> LayerState {
        let kv = KvShape { heads: 1, key_dim: self.latent, value_dim: self.shared };
        LayerState { kv: Some(kv), ..LayerState::default() }
    }

    /// Every rank has the latents of all tokens.
    pub(super) fn state_share(&self, _: Rank) -> StateShare {
        StateShare::whole(self.state())
    }

    pub(super) fn parameters(&self) -> u64 {
        let queries = self.query_latent.map_or(0, |r| r + r * self.q_width());
        let values = self.heads * self.value_dim;
        let latent = self.latent + self.latent * self.heads * self.expanded();
        (self.width * (self.proj_width() + values) + queries + latent) as u64
    }

    pub(super) fn want(&self, w: &mut Widths) {
        w.want(Scratch::PROJ, self.proj_width().next_multiple_of(ALIGN));
        w.want(ABSORBED, self.heads * self.latent);
        w.want(ATTENDED, self.heads * self.latent);
        w.want(Scratch::OUT, self.heads * self.value_dim);
        if let Some(latent) = self.query_latent {
            w.want(Scratch::MID, latent);
            w.want(QUERIES, self.q_width());
        }
    }

    pub(super) async fn load<B: Backend>(
        &self,
        mine: Self,
        l: &mut Loader<'_, B>,
        prefix: &str,
        scale: f32,
    ) -> Result<LatentAttention<B::Buf>> {
        let name = |leaf: &str| format!("{prefix}{leaf}.weight");
        let queries = |leaf: &str, rank: Rank| {
            Part::rows(name(leaf), self.q_width(), rank.share_of(self.heads, self.query_dim()), 0)
        };
        let input = |rank: Rank| {
            let first = match self.query_latent {
                Some(latent) => Part::whole(name("q_a_proj"), latent, 0),
                None => queries("q_proj", rank),
            };
            vec![first, Part::whole(name("kv_a_proj_with_mqa"), self.latent + self.shared, mine.first_width())]
        };
        let second = match self.query_latent {
            Some(latent) => {
                let norm = l.vector(&name("q_a_layernorm"), latent, |w| w).await?;
                Some((norm, l.linear_on(latent, |rank| vec![queries("q_b_proj", rank)], false, 1.0).await?))
            }
            None => None,
        };
        let kv_b = l.values(&name("kv_b_proj"), &[self.heads * self.expanded(), self.latent]).await?;
        let [keys, values] = self.expansions(&kv_b);
        let of = |all: &[f32], rank: Rank| all[rank.share_of(self.heads, all.len() / self.heads)].to_vec();
        let output = |rank: Rank| {
            let whole = Part::whole(name("o_proj"), self.width, 0).scaled(scale);
            vec![whole.columns(rank.share_of(self.heads, self.value_dim), self.heads * self.value_dim)]
        };
        let (key_rows, value_rows) = (mine.heads * self.latent, mine.heads * self.value_dim);
        Ok(LatentAttention {
            input: l.linear_on(self.width, input, false, 1.0).await?,
            queries: second,
            norm: l.vector(&name("kv_a_layernorm"), self.latent, |w| w).await?,
            keys: l.upload_on(&name("kv_b_proj"), &[key_rows, self.key_dim], |rank| of(&keys, rank))?,
            values: l.upload_on(&name("kv_b_proj"), &[value_rows, self.latent], |rank| of(&values, rank))?,
            output: l.linear_on(value_rows, output, false, 1.0).await?,
            plan: mine,
        })
    }

    /// The stored `[H * (key + value), R]` as the products per head `[H * R, key]` of queries and `[H * value, R]` of results.
    fn expansions(&self, stored: &[f32]) -> [Vec<f32>; 2] {
        let r = self.latent;
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for head in stored.chunks(self.expanded() * r) {
            let (key, value) = head.split_at(self.key_dim * r);
            keys.extend((0..r).flat_map(|column| key.iter().skip(column).step_by(r)));
            values.extend_from_slice(value);
        }
        [keys, values]
    }
}

/// A layer of attention over latents on a device.
#[derive(Clone, Debug)]
pub struct LatentAttention<Buf> {
    /// With the sizes of one rank.
    plan: Plan,
    input: Linear<Buf>,
    /// Norm of the queries' latent and their product.
    queries: Option<(Tensor<Buf>, Linear<Buf>)>,
    /// `[R]`.
    norm: Tensor<Buf>,
    /// `[H * R, key]`.
    keys: Tensor<Buf>,
    /// `[H * value, R]`.
    values: Tensor<Buf>,
    output: Linear<Buf>,
}

impl<Buf: Handle> LatentAttention<Buf> {
    pub(super) fn forward(
        &self,
        pass: &mut Pass<'_, Buf>,
        pools: &LayerPools<Buf>,
        u: &Tensor<Buf>,
        out: &Out<Buf>,
    ) -> Result<()> {
        let p = &self.plan;
        let heads = p.heads;
        // Rows begin where wide accesses may.
        let proj = pass.scratch(Scratch::PROJ, p.proj_width().next_multiple_of(ALIGN)).cols(0, p.proj_width());
        let q = pass.scratch(ABSORBED, heads * p.latent);
        let attended = pass.scratch(ATTENDED, heads * p.latent);
        let values = pass.scratch(Scratch::OUT, heads * p.value_dim);
        pass.linear(&self.input, u, &proj)?;
        let queries = self.queries(pass, &proj.cols(0, p.first_width()))?;
        // One head is never split.
        let pool = pools.kv[0].clone();
        pass.op(LatentKv {
            step: pass.step.clone(),
            kv: proj.cols(p.first_width(), p.latent + p.shared),
            weight: self.norm.clone(),
            eps: p.eps,
            pool: pool.clone(),
        })?;
        pass.op(HeadMatmul { x: queries.clone(), w: self.keys.clone(), out: q.clone(), heads })?;
        pass.op(ops::LatentAttention {
            step: pass.step.clone(),
            q,
            queries,
            pool,
            out: attended.clone(),
            heads,
            scale: (p.query_dim() as f32).sqrt().recip(),
        })?;
        pass.op(HeadMatmul { x: attended, w: self.values.clone(), out: values.clone(), heads })?;
        pass.output(&self.output, &values, out)
    }

    /// `[T, H * (key + shared)]`: the queries, of their latent if they have one.
    fn queries(&self, pass: &mut Pass<'_, Buf>, first: &Tensor<Buf>) -> Result<Tensor<Buf>> {
        let Some((weight, product)) = &self.queries else { return Ok(first.clone()) };
        let normed = pass.scratch(Scratch::MID, first.row_len());
        let queries = pass.scratch(QUERIES, self.plan.q_width());
        pass.op(RmsNorm {
            x: first.clone(),
            add: None,
            weight: weight.clone(),
            gate: None,
            out: normed.clone(),
            accumulate: false,
            eps: self.plan.eps,
            groups: 1,
        })?;
        pass.linear(product, &normed, &queries)?;
        Ok(queries)
    }
}
