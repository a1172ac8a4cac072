//! Mamba-1: one projection `[x | z]`, convolution over x, a projection of that to B, C and the time step, the scan with a state per
//! channel, the gate z, and the output projection.

use super::{Out, Pass, Scratch, Widths, conv, divided};
use crate::{
    Result,
    backend::{Backend, Handle},
    layer::{LayerPools, LayerState, StateShare},
    ops::{Act, Activation, AllReduce, RmsNorm, ScanForm, SelectiveScan},
    tensor::Tensor,
    weights::{Linear, Loader, Part, Rank},
};

const SELECTED: Scratch = Scratch::activations("B, C and time steps of low rank");
const NORMED: Scratch = Scratch::activations("normed B, C and time steps of low rank");
const STEPS: Scratch = Scratch::activations("time steps");
/// Rows of low-rank activations are padded to a multiple of this many elements.
const ALIGN: usize = 8;

/// Norms of B, C and the time step of low rank, with their epsilon.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Norms {
    /// None.
    None,
    /// `b_layernorm`, `c_layernorm` and `dt_layernorm` (Jamba).
    Stored(f32),
    /// Without weights (Falcon-Mamba).
    Weightless(f32),
}

/// A Mamba-1 layer, as data.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Model width D.
    pub width: usize,
    /// Channels DI.
    pub inner: usize,
    /// State size N of a channel.
    pub state: usize,
    /// Rank R of the time step.
    pub rank: usize,
    /// Taps K of the convolution.
    pub kernel: usize,
    /// The convolution has a bias.
    pub conv_bias: bool,
    /// Input and output projections have biases.
    pub bias: bool,
    /// Norms after the second projection.
    pub norms: Norms,
}

impl Plan {
    /// Columns `[B | C | time step of low rank]`.
    fn selected(&self) -> usize {
        2 * self.state + self.rank
    }

    pub(super) fn sizes(&self) -> String {
        format!("{} channels, state {}, time steps of rank {}", self.inner, self.state, self.rank)
    }

    /// Channels by rank. B, C and the time step of low rank are summed over ranks.
    pub(super) fn share(&self, ranks: usize) -> Result<Self, String> {
        Ok(Self { inner: divided("channels", self.inner, ranks)?, ..self.clone() })
    }

    pub(super) fn state(&self) -> LayerState {
        LayerState {
            conv: Some([self.inner, self.kernel - 1]),
            recurrent: Some([self.inner, 1, self.state]),
            ..LayerState::default()
        }
    }

    pub(super) fn state_share(&self, rank: Rank) -> StateShare {
        let own = vec![rank.share(self.inner)];
        StateShare { conv: own.clone(), recurrent: own, ..StateShare::default() }
    }

    pub(super) fn parameters(&self) -> u64 {
        let projections = 3 * self.width + self.selected() + self.rank;
        let bias = if self.bias { 2 * self.inner + self.width } else { 0 };
        let norms = if matches!(self.norms, Norms::Stored(_)) { self.selected() } else { 0 };
        // Taps, A, D and the bias of the time step.
        let of_channel = self.kernel + usize::from(self.conv_bias) + self.state + 2;
        (self.inner * (projections + of_channel)) as u64 + (bias + norms) as u64
    }

    pub(super) fn want(&self, w: &mut Widths) {
        w.want(Scratch::PROJ, 2 * self.inner);
        w.want(Scratch::MID, self.inner);
        w.want(SELECTED, self.selected().next_multiple_of(ALIGN));
        if self.norms != Norms::None {
            w.want(NORMED, self.selected().next_multiple_of(ALIGN));
        }
        w.want(STEPS, self.inner);
        w.want(Scratch::OUT, self.inner);
        // Of several ranks it holds the sums of B, C and time steps before.
        w.want(Scratch::GATED, self.inner.max(self.selected().next_multiple_of(ALIGN)));
    }

    pub(super) async fn load<B: Backend>(
        &self,
        mine: Self,
        l: &mut Loader<'_, B>,
        prefix: &str,
        scale: f32,
    ) -> Result<Mamba1<B::Buf>> {
        let name = |leaf: &str| format!("{prefix}{leaf}");
        let (inner, n, r) = (self.inner, self.state, self.rank);
        let input = |rank: Rank| {
            let own = rank.share(inner);
            let z = inner + own.start..inner + own.end;
            [(own.clone(), 0), (z, own.len())]
                .map(|(rows, col)| Part::rows(name("in_proj.weight"), 2 * inner, rows, col))
                .into()
        };
        // B and C first: then they begin at aligned columns with any rank of the time step.
        let select = |rank: Rank| {
            let part = |(row, rows, col): (usize, usize, usize)| {
                let part = Part::rows(name("x_proj.weight"), self.selected(), row..row + rows, col);
                part.columns(rank.share(inner), inner)
            };
            [(r, n, 0), (r + n, n, n), (0, r, 2 * n)].map(part).into()
        };
        let steps = |rank: Rank| vec![Part::rows(name("dt_proj.weight"), inner, rank.share(inner), 0)];
        let output = |rank: Rank| {
            let part = Part::whole(name("out_proj.weight"), self.width, 0).scaled(scale);
            vec![part.columns(rank.share(inner), inner)]
        };
        let conv = [(name("conv1d"), inner)];
        Ok(Mamba1 {
            input: l.linear_on(self.width, input, self.bias, 1.0).await?,
            conv: conv::load(l, &conv, self.kernel, self.conv_bias, |rank| vec![rank.share(inner)]).await?,
            select: l.linear_on(mine.inner, select, false, 1.0).await?,
            norms: self.norm_weights(l, prefix).await?,
            steps: l.linear_on(r, steps, false, 1.0).await?,
            par: self.parameters_of_channels(l, prefix).await?,
            output: l.linear_on(mine.inner, output, self.bias, 1.0).await?,
            ranks: l.ranks().len(),
            plan: mine,
        })
    }

    /// Weights of the norms of B, C and the time step.
    async fn norm_weights<B: Backend>(
        &self,
        l: &mut Loader<'_, B>,
        prefix: &str,
    ) -> Result<Option<LoadedNorms<B::Buf>>> {
        let leaves = [("b_layernorm", self.state), ("c_layernorm", self.state), ("dt_layernorm", self.rank)];
        let mut weights = Vec::with_capacity(3);
        let (eps, stored) = match self.norms {
            Norms::None => return Ok(None),
            Norms::Stored(eps) => (eps, true),
            Norms::Weightless(eps) => (eps, false),
        };
        for (leaf, len) in leaves {
            let name = format!("{prefix}{leaf}.weight");
            weights.push(match stored {
                true => l.vector(&name, len, |w| w).await?,
                false => l.upload(&name, &vec![1.0; len], &[len])?,
            });
        }
        Ok(Some(LoadedNorms { weights, eps }))
    }

    /// `[N + 2, DI]`: A of each state, then D, then the bias of the time step.
    async fn parameters_of_channels<B: Backend>(&self, l: &mut Loader<'_, B>, prefix: &str) -> Result<Tensor<B::Buf>> {
        let (inner, n) = (self.inner, self.state);
        let name = format!("{prefix}A_log");
        let a_log = l.values(&name, &[inner, n]).await?;
        let d = l.values(&format!("{prefix}D"), &[inner]).await?;
        let bias = l.values(&format!("{prefix}dt_proj.bias"), &[inner]).await?;
        let par = |rank: Rank| {
            let own = rank.share(inner);
            let mut par = Vec::with_capacity((n + 2) * own.len());
            for state in 0..n {
                par.extend(own.clone().map(|c| -a_log[c * n + state].exp()));
            }
            par.extend(&d[own.clone()]);
            par.extend(&bias[own]);
            par
        };
        l.upload_on(&name, &[n + 2, Rank::first(l.ranks().len()).share(inner).len()], par)
    }
}

/// Norms of B, C and the time step on a device.
#[derive(Clone, Debug)]
struct LoadedNorms<Buf> {
    weights: Vec<Tensor<Buf>>,
    eps: f32,
}

/// A Mamba-1 layer on a device.
#[derive(Clone, Debug)]
pub struct Mamba1<Buf> {
    /// With the sizes of one rank.
    plan: Plan,
    ranks: usize,
    input: Linear<Buf>,
    /// `[DI, K + 1]`.
    conv: Tensor<Buf>,
    select: Linear<Buf>,
    norms: Option<LoadedNorms<Buf>>,
    steps: Linear<Buf>,
    /// `[N + 2, DI]`.
    par: Tensor<Buf>,
    output: Linear<Buf>,
}

impl<Buf: Handle> Mamba1<Buf> {
    pub(super) fn forward(
        &self,
        pass: &mut Pass<'_, Buf>,
        pools: &LayerPools<Buf>,
        u: &Tensor<Buf>,
        out: &Out<Buf>,
    ) -> Result<()> {
        let (inner, n) = (self.plan.inner, self.plan.state);
        let proj = pass.scratch(Scratch::PROJ, 2 * inner);
        let mixed = pass.scratch(Scratch::MID, inner);
        let steps = pass.scratch(STEPS, inner);
        let (y, gated) = (pass.scratch(Scratch::OUT, inner), pass.scratch(Scratch::GATED, inner));
        pass.linear(&self.input, u, &proj)?;
        conv::record(pass, &pools.conv, &proj.cols(0, inner), &self.conv, &mixed, Act::Silu)?;
        let selected = self.selected(pass, &mixed)?;
        pass.linear(&self.steps, &selected.cols(2 * n, self.plan.rank), &steps)?;
        let mut first = 0;
        for pool in &pools.recurrent {
            let channels = pool.dims()[1];
            pass.op(SelectiveScan {
                step: pass.step.clone(),
                x: mixed.cols(first, channels),
                b: selected.cols(0, n),
                c: selected.cols(n, n),
                dt: steps.cols(first, channels),
                par: self.par.cols(first, channels),
                pool: pool.clone(),
                y: y.cols(first, channels),
                form: ScanForm::PerChannel,
                heads_per_group: inner,
                first_head: first,
                dt_limit: (0.0, f32::INFINITY),
            })?;
            first += channels;
        }
        pass.op(Activation {
            gate: proj.cols(inner, inner),
            up: Some(y),
            row_gate: None,
            out: gated.clone(),
            act: Act::Silu,
        })?;
        pass.output(&self.output, &gated, out)
    }

    /// `[T, 2 N + R]`: B, C and the time step of low rank, normed if the layer does so.
    fn selected(&self, pass: &mut Pass<'_, Buf>, mixed: &Tensor<Buf>) -> Result<Tensor<Buf>> {
        let (n, width) = (self.plan.state, self.plan.selected());
        let rows = |pass: &Pass<'_, Buf>, which| pass.scratch(which, width.next_multiple_of(ALIGN)).cols(0, width);
        let mut raw = rows(pass, SELECTED);
        pass.linear(&self.select, mixed, &raw)?;
        if self.ranks > 1 {
            let out = rows(pass, Scratch::GATED);
            pass.op(AllReduce { x: raw, out: out.clone(), accumulate: false })?;
            raw = out;
        }
        let Some(norms) = &self.norms else { return Ok(raw) };
        let normed = rows(pass, NORMED);
        for (weight, first) in norms.weights.iter().zip([0, n, 2 * n]) {
            pass.op(RmsNorm {
                x: raw.cols(first, weight.len()),
                add: None,
                weight: weight.clone(),
                gate: None,
                out: normed.cols(first, weight.len()),
                accumulate: false,
                eps: norms.eps,
                groups: 1,
            })?;
        }
        Ok(normed)
    }
}
