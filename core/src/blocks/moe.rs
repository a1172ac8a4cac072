//! A mixture of experts: router, the chosen experts' MLPs, and their weighted sum; optionally in a narrower latent space.
//! Shared experts are feed-forward mixers of the same residual step.

use super::{Out, Pass, Scratch, Widths, divided, undivided};
use crate::{
    Result,
    backend::{Backend, Handle},
    layer::{LayerPools, LayerState, StateShare},
    ops::{Act, Activation, ExpertMatmul, ExpertRange, Route, Router},
    tensor::{DType, Tensor},
    weights::{ExpertParts, ExpertShare, Linear, Loader, Part, Rank},
};

const LOGITS: Scratch = Scratch::of("router logits", DType::F32);
const CHOSEN: Scratch = Scratch::of("chosen experts", DType::U32);
const WEIGHTS: Scratch = Scratch::of("expert weights", DType::F32);

/// How the experts' input matrices are stored; all names stand below the layer's prefix, `{}` is the expert's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// One tensor `[E, N, K]` for all.
    pub stacked: &'static str,
    /// Tensors of one expert in the order of their output columns; empty if only the stacked form exists.
    pub each: &'static [&'static str],
}

/// Experts in a latent space: `fc2(Σ w expert(fc1(u)))`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latent {
    /// Width of the latent space.
    pub width: usize,
    /// `[width, D]`.
    pub input: &'static str,
    /// `[D, width]`.
    pub output: &'static str,
    /// Both have biases.
    pub bias: bool,
}

/// A mixture of experts, as data.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Model width D.
    pub width: usize,
    /// Experts E.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Inner width of an expert.
    pub inner: usize,
    /// Name of the router's matrix `[E, D]`.
    pub router: &'static str,
    /// Name of the `[E]` bias that is added for the choice only.
    pub router_bias: Option<&'static str>,
    /// The rule for the choice.
    pub rule: Router,
    /// Input matrices: `[gate | up]` rows if gated.
    pub input: Experts,
    /// Output matrices.
    pub output: Experts,
    /// The activated half multiplies the other.
    pub gated: bool,
    /// Activation of an expert.
    pub act: Act,
    /// Latent space, if the experts work in one.
    pub latent: Option<Latent>,
}

impl Plan {
    /// Width of the experts' inputs and outputs.
    fn expert_width(&self) -> usize {
        self.latent.map_or(self.width, |l| l.width)
    }

    fn proj_width(&self) -> usize {
        self.inner * (1 + usize::from(self.gated))
    }

    pub(super) fn sizes(&self) -> String {
        format!("{} of {} experts, {} wide", self.top_k, self.experts, self.inner)
    }

    /// Columns of every expert by rank. All ranks route, and project to and from a latent space.
    pub(super) fn share(&self, ranks: usize) -> Result<Self, String> {
        if self.latent.is_some_and(|latent| latent.bias) {
            // The sum over ranks would have each bias several times.
            return undivided("a latent space of experts with biases");
        }
        Ok(Self { inner: divided("columns of an expert", self.inner, ranks)?, ..self.clone() })
    }

    pub(super) fn state(&self) -> LayerState {
        LayerState::default()
    }

    pub(super) fn state_share(&self, _: Rank) -> StateShare {
        StateShare::default()
    }

    pub(super) fn parameters(&self) -> u64 {
        let expert = self.expert_width() as u64 * (self.proj_width() + self.inner) as u64;
        // The bias for the choice is not a trained weight and does not count.
        let router = self.experts * self.width;
        let bias = |l: Latent| if l.bias { l.width + self.width } else { 0 };
        let latent = self.latent.map_or(0, |l| 2 * l.width * self.width + bias(l));
        // The only product of three sizes, each up to 2^24.
        (self.experts as u64).saturating_mul(expert).saturating_add((router + latent) as u64)
    }

    pub(super) fn want(&self, w: &mut Widths) {
        w.want(LOGITS, self.experts);
        w.want(CHOSEN, self.top_k);
        w.want(WEIGHTS, self.top_k);
        w.want(Scratch::PROJ, self.top_k * self.proj_width());
        w.want(Scratch::MID, self.top_k * self.inner);
        if let Some(latent) = self.latent {
            w.want(Scratch::OUT, latent.width);
            w.want(Scratch::GATED, latent.width);
        }
    }

    pub(super) async fn load<B: Backend>(
        &self,
        mine: Self,
        l: &mut Loader<'_, B>,
        prefix: &str,
        scale: f32,
    ) -> Result<Moe<B::Buf>> {
        let name = |leaf: &str| format!("{prefix}{leaf}.weight");
        let (e, width) = (self.experts, self.expert_width());
        let parts = |from: &Experts, rows: usize| ExpertParts {
            // Stacked tensors are parameters themselves rather than parts of a linear layer, so some files have no
            // suffix.
            stacked: vec![name(from.stacked), format!("{prefix}{}", from.stacked)],
            each: from.each.iter().map(|leaf| (name(leaf), rows / from.each.len())).collect(),
        };
        let [up, down] = [parts(&self.input, self.proj_width()), parts(&self.output, width)];
        let rounds =
            [l.rounds_experts([e, self.proj_width(), width], &up), l.rounds_experts([e, width, self.inner], &down)];
        for (rounds, inputs) in rounds.into_iter().zip([width, self.top_k * mine.inner]) {
            l.will_round(if rounds { inputs } else { 0 });
        }
        let router = l.linear(self.width, &[Part::whole(name(self.router), e, 0)], false, 1.0).await?;
        let router_bias = match self.router_bias {
            Some(leaf) => Some(l.vector(&format!("{prefix}{leaf}"), e, |b| b).await?),
            None => None,
        };
        let sections = ExpertShare::Rows(1 + usize::from(self.gated));
        let input = l.experts(e, self.proj_width(), width, &up, sections).await?;
        let output = l.experts(e, width, self.inner, &down, ExpertShare::Columns).await?;
        let latent = match self.latent {
            Some(lat) => {
                let first = [Part::whole(name(lat.input), lat.width, 0)];
                let second = [Part::whole(name(lat.output), self.width, 0).scaled(scale)];
                Some((
                    l.linear(self.width, &first, lat.bias, 1.0).await?,
                    l.linear(lat.width, &second, lat.bias, 1.0).await?,
                ))
            }
            None => None,
        };
        Ok(Moe { plan: mine, router, router_bias, input, output, rounds, latent, scale })
    }
}

/// A mixture of experts on a device.
#[derive(Clone, Debug)]
pub struct Moe<Buf> {
    /// With the sizes of one rank.
    plan: Plan,
    router: Linear<Buf>,
    router_bias: Option<Tensor<Buf>>,
    input: Vec<ExpertRange<Buf>>,
    output: Vec<ExpertRange<Buf>>,
    /// Whether the inputs of each half are rounded.
    rounds: [bool; 2],
    latent: Option<(Linear<Buf>, Linear<Buf>)>,
    scale: f32,
}

impl<Buf: Handle> Moe<Buf> {
    fn choices(&self, pass: &Pass<'_, Buf>) -> (Tensor<Buf>, Tensor<Buf>) {
        let k = self.plan.top_k;
        (pass.scratch(CHOSEN, k), pass.scratch(WEIGHTS, k))
    }

    /// Whether the choice stands before the experts' first product, with which a backend may join it, instead of before
    /// the siblings, which cover its time. The latent space's input is complete too late for the former.
    fn chooses_late(&self, pass: &Pass<'_, Buf>) -> bool {
        pass.tokens() == 1 && self.plan.latent.is_none()
    }

    /// The router. Only the experts read its results.
    pub(super) fn begin(&self, pass: &mut Pass<'_, Buf>, u: &Tensor<Buf>) -> Result<()> {
        pass.linear(&self.router, u, &pass.scratch(LOGITS, self.plan.experts))?;
        if self.chooses_late(pass) { Ok(()) } else { self.choose(pass) }
    }

    fn choose(&self, pass: &mut Pass<'_, Buf>) -> Result<()> {
        let logits = pass.scratch(LOGITS, self.plan.experts);
        let (ids, weights) = self.choices(pass);
        let (bias, router) = (self.router_bias.clone(), self.plan.rule);
        pass.op(Route { step: pass.step.clone(), logits, bias, ids, weights, router })
    }

    pub(super) fn forward(
        &self,
        pass: &mut Pass<'_, Buf>,
        _: &LayerPools<Buf>,
        u: &Tensor<Buf>,
        out: &Out<Buf>,
    ) -> Result<()> {
        let (p, t) = (&self.plan, pass.tokens());
        let (ids, weights) = self.choices(pass);
        let proj = pass.work.view(Scratch::PROJ, t * p.top_k, p.proj_width());
        let mid = pass.work.view(Scratch::MID, t * p.top_k, p.inner);
        let (from, to) = match &self.latent {
            Some((first, _)) => {
                let narrow = pass.scratch(Scratch::OUT, p.expert_width());
                pass.linear(first, u, &narrow)?;
                (narrow, Out { to: pass.scratch(Scratch::GATED, p.expert_width()), add: false })
            }
            None => (u.clone(), out.clone()),
        };
        if self.chooses_late(pass) {
            self.choose(pass)?;
        }
        let from = pass.input(&from, self.rounds[0])?;
        pass.op(ExpertMatmul {
            x: from,
            experts: self.input.clone(),
            ids: ids.clone(),
            combine: None,
            out: proj.clone(),
            scale: 1.0,
            accumulate: false,
        })?;
        pass.op(Activation {
            gate: proj.cols(0, p.inner),
            up: p.gated.then(|| proj.cols(p.inner, p.inner)),
            row_gate: None,
            out: mid.clone(),
            act: p.act,
        })?;
        let mid = pass.input(&mid, self.rounds[1])?;
        pass.op(ExpertMatmul {
            x: mid,
            experts: self.output.clone(),
            ids,
            combine: Some(weights),
            out: to.to.clone(),
            scale: if self.latent.is_none() { self.scale } else { 1.0 },
            accumulate: to.add,
        })?;
        match &self.latent {
            Some((_, second)) => pass.output(second, &to.to, out),
            None => Ok(()),
        }
    }
}
