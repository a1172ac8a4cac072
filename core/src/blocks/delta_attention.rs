//! Kimi Delta Attention: one projection `[q | k | v | f | g | b]`, convolution over `q k v`, the delta rule with a decay per
//! key channel, a norm per head that the sigmoid of z gates, and the output projection. The decays' inputs and z are
//! projections of the narrow f and g.

use std::ops::Range;

use super::{ALIGN, Out, Pass, Scratch, Widths, conv, divided};
use crate::{
    Result,
    backend::{Backend, Handle},
    layer::{LayerPools, LayerState, StateShare},
    ops::{self, Act, Gate, RmsNorm},
    tensor::Tensor,
    weights::{Linear, Loader, Part, Rank},
};

/// A layer of Kimi Delta Attention, as data. Keys and values have the same heads.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Model width D.
    pub width: usize,
    /// Heads H.
    pub heads: usize,
    /// Width d of a key and of a value, and of f and g.
    pub head_dim: usize,
    /// Taps K of the convolution.
    pub kernel: usize,
    /// Epsilon of the gated norm.
    pub eps: f32,
}

/// Raw inputs of the decays.
const DECAYS: Scratch = Scratch::activations("decays per channel");
/// The gate of the norm.
const GATE: Scratch = Scratch::activations("gate of a delta rule's norm");

impl Plan {
    /// Columns of all heads.
    fn inner(&self) -> usize {
        self.heads * self.head_dim
    }

    fn channels(&self) -> usize {
        3 * self.inner()
    }

    fn proj_width(&self) -> usize {
        self.channels() + 2 * self.head_dim + self.heads
    }

    pub(super) fn sizes(&self) -> String {
        format!("{} heads of {}, a decay per channel", self.heads, self.head_dim)
    }

    pub(super) fn share(&self, ranks: usize) -> Result<Self, String> {
        Ok(Self { heads: divided("heads", self.heads, ranks)?, ..self.clone() })
    }

    pub(super) fn state(&self) -> LayerState {
        LayerState {
            conv: Some([self.channels(), self.kernel - 1]),
            recurrent: Some([self.heads, self.head_dim, self.head_dim]),
            ..LayerState::default()
        }
    }

    pub(super) fn state_share(&self, rank: Rank) -> StateShare {
        let recurrent = vec![rank.share(self.heads)];
        StateShare { conv: self.own_channels(rank), recurrent, ..StateShare::default() }
    }

    pub(super) fn parameters(&self) -> u64 {
        let matrices = self.width * (self.proj_width() + self.inner()) + 2 * self.head_dim * self.inner();
        // Taps, A_log, dt_bias and the norm.
        (matrices + self.channels() * self.kernel + self.heads + self.inner() + self.head_dim) as u64
    }

    pub(super) fn want(&self, w: &mut Widths) {
        w.want(Scratch::PROJ, self.proj_width().next_multiple_of(ALIGN));
        w.want(Scratch::MID, self.channels());
        w.want(DECAYS, self.inner());
        w.want(GATE, self.inner());
        w.want(Scratch::OUT, self.inner());
        w.want(Scratch::GATED, self.inner());
    }

    /// Columns of the heads that a rank has.
    fn own(&self, rank: Rank) -> Range<usize> {
        rank.share_of(self.heads, self.head_dim)
    }

    /// The channels of the convolution that a rank has: q, k, v.
    fn own_channels(&self, rank: Rank) -> Vec<Range<usize>> {
        let own = self.own(rank);
        (0..3).map(|i| i * self.inner()).map(|first| first + own.start..first + own.end).collect()
    }

    /// Rows of the stored projections that a rank has, by output column. It has all of f and g.
    fn parts(&self, prefix: &str, rank: Rank) -> Vec<Part> {
        let (d, inner) = (self.head_dim, self.inner());
        let leaf = |name: &'static str, of: usize, own: Range<usize>| (name, of, own);
        let heads = ["q_proj", "k_proj", "v_proj"].map(|name| leaf(name, inner, self.own(rank)));
        let narrow = ["f_a_proj", "g_a_proj"].map(|name| leaf(name, d, 0..d));
        let all = heads.into_iter().chain(narrow).chain([leaf("b_proj", self.heads, rank.share(self.heads))]);
        let mut col = 0;
        let part = |(name, of, own): (&str, usize, Range<usize>)| {
            col += own.len();
            Part::rows(format!("{prefix}{name}.weight"), of, own.clone(), col - own.len())
        };
        all.map(part).collect()
    }

    pub(super) async fn load<B: Backend>(
        &self,
        mine: Self,
        l: &mut Loader<'_, B>,
        prefix: &str,
        scale: f32,
    ) -> Result<DeltaAttention<B::Buf>> {
        let (d, inner) = (self.head_dim, self.inner());
        let name = |leaf: &str| format!("{prefix}{leaf}");
        let rows = |leaf: &str, rank: Rank| vec![Part::rows(name(leaf), inner, self.own(rank), 0)];
        let output = |rank: Rank| {
            let whole = Part::whole(name("o_proj.weight"), self.width, 0).scaled(scale);
            vec![whole.columns(self.own(rank), inner)]
        };
        let convolutions = ["q_conv1d", "k_conv1d", "v_conv1d"].map(|leaf| (name(leaf), inner));
        let a_log = l.elements(&name("A_log"), self.heads).await?;
        let a: Vec<f32> = a_log.iter().flat_map(|a| std::iter::repeat_n(-a.exp(), d)).collect();
        let dt = l.elements(&name("dt_bias"), inner).await?;
        let par = |rank: Rank| [&a, &dt].into_iter().flat_map(|p| &p[self.own(rank)]).copied().collect();
        Ok(DeltaAttention {
            input: l.linear_on(self.width, |rank| self.parts(prefix, rank), false, 1.0).await?,
            decays: l.linear_on(d, |rank| rows("f_b_proj.weight", rank), false, 1.0).await?,
            gate: l.linear_on(d, |rank| rows("g_b_proj.weight", rank), false, 1.0).await?,
            conv: conv::load(l, &convolutions, self.kernel, false, |rank| self.own_channels(rank)).await?,
            par: l.upload_on(&name("A_log"), &[2, mine.inner()], par)?,
            norm: l.vector(&name("o_norm.weight"), d, |w| w).await?,
            output: l.linear_on(mine.inner(), output, false, 1.0).await?,
            plan: mine,
        })
    }
}

/// A layer of Kimi Delta Attention on a device.
#[derive(Clone, Debug)]
pub struct DeltaAttention<Buf> {
    /// With the sizes of one rank.
    plan: Plan,
    input: Linear<Buf>,
    /// From f.
    decays: Linear<Buf>,
    /// From g.
    gate: Linear<Buf>,
    /// `[C, K + 1]`.
    conv: Tensor<Buf>,
    /// `[2, H * d]`: -exp(A_log) of the channel's head, dt_bias.
    par: Tensor<Buf>,
    /// `[d]`.
    norm: Tensor<Buf>,
    output: Linear<Buf>,
}

impl<Buf: Handle> DeltaAttention<Buf> {
    pub(super) fn forward(
        &self,
        pass: &mut Pass<'_, Buf>,
        pools: &LayerPools<Buf>,
        u: &Tensor<Buf>,
        out: &Out<Buf>,
    ) -> Result<()> {
        let p = &self.plan;
        let (d, inner, channels) = (p.head_dim, p.inner(), p.channels());
        // Rows begin where wide accesses may.
        let proj = pass.scratch(Scratch::PROJ, p.proj_width().next_multiple_of(ALIGN)).cols(0, p.proj_width());
        let mixed = pass.scratch(Scratch::MID, channels);
        let (decays, z) = (pass.scratch(DECAYS, inner), pass.scratch(GATE, inner));
        let read = pass.scratch(Scratch::OUT, inner);
        let gated = pass.scratch(Scratch::GATED, inner);
        pass.linear(&self.input, u, &proj)?;
        conv::record(pass, &pools.conv, &proj.cols(0, channels), &self.conv, &mixed, Act::Silu)?;
        // One after the other: a backend may compute both at once.
        pass.linear(&self.decays, &proj.cols(channels, d), &decays)?;
        pass.linear(&self.gate, &proj.cols(channels + d, d), &z)?;
        let mut first = 0;
        for pool in &pools.recurrent {
            let heads = pool.dims()[1];
            let cols = (first * d, heads * d);
            pass.op(ops::GatedDelta {
                step: pass.step.clone(),
                q: mixed.cols(0, inner),
                k: mixed.cols(inner, inner),
                v: mixed.cols(2 * inner + cols.0, cols.1),
                a: decays.cols(cols.0, cols.1),
                b: proj.cols(channels + 2 * d + first, heads),
                par: self.par.cols(cols.0, cols.1),
                pool: pool.clone(),
                out: read.cols(cols.0, cols.1),
                heads_per_key: 1,
                first_head: first,
                beta_scale: 1.0,
            })?;
            first += heads;
        }
        pass.op(RmsNorm {
            x: read,
            add: None,
            weight: self.norm.clone(),
            gate: Some(Gate { z, act: Act::Sigmoid, before: false }),
            out: gated.clone(),
            accumulate: false,
            eps: p.eps,
            groups: p.heads,
        })?;
        pass.output(&self.output, &gated, out)
    }
}
