//! Mamba-2: one projection `[z | x | B | C | dt]`, convolution over `x B C`, the scan, a gated norm per group, and the
//! output projection.

use std::ops::Range;

use super::{ALIGN, Out, Pass, Scratch, Widths, conv, divided, divided_or_repeated};
use crate::{
    Result,
    backend::{Backend, Handle},
    layer::{LayerPools, LayerState, StateShare},
    ops::{Act, Activation, Gate, RankNorm, RmsNorm, ScanForm, SelectiveScan},
    tensor::Tensor,
    weights::{Linear, Loader, Part, Rank},
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

    /// Heads by rank, and groups, or one group for several ranks: then they have its B and C each, and its norm is over all of
    /// them.
    pub(super) fn share(&self, ranks: usize) -> Result<Self, String> {
        let heads = divided("heads", self.heads, ranks)?;
        Ok(Self { heads, groups: divided_or_repeated("groups", self.groups, ranks)?, ..self.clone() })
    }

    pub(super) fn state(&self) -> LayerState {
        LayerState {
            conv: Some([self.channels(), self.kernel - 1]),
            recurrent: Some([self.heads, self.head_dim, self.state]),
            ..LayerState::default()
        }
    }

    pub(super) fn state_share(&self, rank: Rank) -> StateShare {
        let recurrent = vec![rank.share(self.heads)];
        StateShare { conv: self.own_channels(rank), recurrent, ..StateShare::default() }
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

    /// What a rank has of z, x, B, C and dt, which are rows of one tensor.
    fn input(&self, name: &str, rank: Rank) -> Vec<Part> {
        let (inner, bc) = (rank.share_of(self.heads, self.head_dim), rank.share_of(self.groups, self.state));
        let sections = [
            (self.inner(), inner.clone()),
            (self.inner(), inner),
            (self.groups * self.state, bc.clone()),
            (self.groups * self.state, bc),
            (self.heads, rank.share(self.heads)),
        ];
        let (mut first, mut col, mut parts) = (0, 0, Vec::with_capacity(5));
        for ((section, own), scale) in sections.into_iter().zip(self.scales) {
            let rows = first + own.start..first + own.end;
            parts.push(Part::rows(name, self.proj_width(), rows, col).scaled(scale));
            (first, col) = (first + section, col + own.len());
        }
        parts
    }

    /// The channels of the convolution that a rank has: x, B, C.
    fn own_channels(&self, rank: Rank) -> Vec<Range<usize>> {
        let (x, bc) = (rank.share_of(self.heads, self.head_dim), rank.share_of(self.groups, self.state));
        let (b, c) = (self.inner(), self.inner() + self.groups * self.state);
        vec![x, b + bc.start..b + bc.end, c + bc.start..c + bc.end]
    }

    pub(super) async fn load<B: Backend>(
        &self,
        mine: Self,
        l: &mut Loader<'_, B>,
        prefix: &str,
        scale: f32,
    ) -> Result<Mamba2<B::Buf>> {
        let name = |leaf: &str| format!("{prefix}{leaf}");
        let inner = |rank: Rank| rank.share_of(self.heads, self.head_dim);
        let output = |rank| {
            let part = Part::whole(name("out_proj.weight"), self.width, 0).scaled(scale);
            vec![part.columns(inner(rank), self.inner())]
        };
        let h = [self.heads];
        let a: Vec<f32> = l.values(&name("A_log"), &h).await?.into_iter().map(|a| -a.exp()).collect();
        let (d, dt) = (l.values(&name("D"), &h).await?, l.values(&name("dt_bias"), &h).await?);
        let par = |rank: Rank| [&a, &d, &dt].into_iter().flat_map(|p| &p[rank.share(self.heads)]).copied().collect();
        let input = name("in_proj.weight");
        let conv = [(name("conv1d"), self.channels())];
        Ok(Mamba2 {
            input: l.linear_on(self.width, |rank| self.input(&input, rank), self.bias[0], self.input_scale).await?,
            conv: conv::load(l, &conv, self.kernel, self.conv_bias, |rank| self.own_channels(rank)).await?,
            par: l.upload_on(&name("A_log"), &[3, mine.heads], par)?,
            norm: match self.gate {
                Gating::WithoutNorm => None,
                _ => {
                    let name = name("norm.weight");
                    let weight = l.values(&name, &[self.inner()]).await?;
                    Some(l.upload_on(&name, &[mine.inner()], |rank| weight[inner(rank)].to_vec())?)
                }
            },
            norm_ranks: (l.ranks().len() / self.groups).max(1),
            output: l.linear_on(mine.inner(), output, self.bias[1], 1.0).await?,
            plan: mine,
        })
    }
}

/// A Mamba-2 layer on a device.
#[derive(Clone, Debug)]
pub struct Mamba2<Buf> {
    /// With the sizes of one rank.
    plan: Plan,
    input: Linear<Buf>,
    /// `[C, K + 1]`.
    conv: Tensor<Buf>,
    /// `[3, H]`: A, D, dt_bias.
    par: Tensor<Buf>,
    /// `[DI]`.
    norm: Option<Tensor<Buf>>,
    /// Ranks that have a group together.
    norm_ranks: usize,
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
            Some(weight) => {
                let norm = RmsNorm {
                    x: y,
                    add: None,
                    weight: weight.clone(),
                    gate: Some(Gate { z, act: Act::Silu, before: p.gate == Gating::BeforeNorm }),
                    out: gated.clone(),
                    accumulate: false,
                    eps: p.eps,
                    groups: p.groups,
                };
                match self.norm_ranks {
                    1 => pass.op(norm)?,
                    ranks => pass.op(RankNorm { norm, ranks })?,
                }
            }
            None => pass.op(Activation { gate: z, up: Some(y), row_gate: None, out: gated.clone(), act: Act::Silu })?,
        }
        pass.output(&self.output, &gated, out)
    }
}
