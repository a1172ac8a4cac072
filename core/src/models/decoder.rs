//! The one decoder: embeds, runs every residual step of every layer, and computes the logits of the wanted positions.

use super::{Architecture, Hidden, Input, Limits, Model, ModelSpec, Norm, Output, SubLayer, head::LoadedHead};
use crate::{
    Error, Result,
    backend::{Backend, Ops},
    blocks::{Mixer, Out, Pass, Scratch, Widths, Workspace},
    layer::LayerPools,
    ops::{AllGather, AllReduce, Embed, Gather, Matmul, RmsNorm, Weight},
    step::{Bucket, Step},
    tensor::{DType, Tensor},
    weights::{Loader, Part, Rank},
};

/// Names of the output matrix `[V, D]`; a leading slash: outside of the prefix.
const OUTPUT: &[&str] =
    &["/lm_head.weight", "lm_head.weight", "/language_model.lm_head.weight", "/model.lm_head.weight"];

/// A norm on a device.
pub(super) struct LoadedNorm<Buf> {
    weight: Tensor<Buf>,
    eps: f32,
}

/// The sum of a residual step's branches before its norm, or for the next steps. A step that reads the one kept before
/// it writes the other.
pub(super) const BRANCHES: [Scratch; 2] =
    [Scratch::activations("outputs of branches"), Scratch::activations("outputs of the next branches")];

/// What one of several ranks has of the sum of a residual step's branches.
const PARTIAL: Scratch = Scratch::activations("a rank's outputs of branches");

/// Input of a residual step's branches.
enum Reads<Buf> {
    Stream,
    Normed(LoadedNorm<Buf>),
    BesideEmbedding(LoadedNorm<Buf>),
    Kept(Scratch, Option<LoadedNorm<Buf>>),
    PlusKept(Scratch, LoadedNorm<Buf>),
}

/// Use of their sum.
enum Gives<Buf> {
    Add,
    AddNormed(LoadedNorm<Buf>),
    Keep(Scratch),
}

/// A residual step on a device.
pub(super) struct LoadedSubLayer<Buf> {
    reads: Reads<Buf>,
    mixers: Vec<Mixer<Buf>>,
    gives: Gives<Buf>,
    /// Of several ranks each has a part of the branches' sum.
    shared: bool,
}

/// What the residual steps of a pass read and write.
pub(super) struct Stream<Buf> {
    /// `[T, D]`: the residual stream.
    pub x: Tensor<Buf>,
    /// `[T, 2 D]`: stream and embeddings, if a step reads both; else the stream.
    pub both: Tensor<Buf>,
}

/// An [`Architecture`] with its weights and activations on a device.
pub(super) struct Decoder<B: Backend> {
    spec: ModelSpec,
    embedding: Weight<B::Buf>,
    embedding_scale: f32,
    layers: Vec<Vec<LoadedSubLayer<B::Buf>>>,
    norm: LoadedNorm<B::Buf>,
    head: Option<LoadedHead<B::Buf>>,
    output: Weight<B::Buf>,
    logits_scale: f32,
    work: Workspace<B::Buf>,
    /// `[max tokens, D]`: the residual stream; or `[max tokens, 2 D]`, with the embeddings beside it.
    stream: Tensor<B::Buf>,
    /// `[max outputs, V] f32`.
    logits: Tensor<B::Buf>,
    /// `[max outputs, V / W] f32`: the columns of one of several ranks.
    own_logits: Option<Tensor<B::Buf>>,
    precise: bool,
}

impl<B: Backend> Decoder<B> {
    pub(super) async fn load(a: &Architecture, l: &mut Loader<'_, B>, limits: Limits) -> Result<Self> {
        l.set_prefix(a.prefixes, a.embedding);
        let (mut table, head) = (l.choose(a.embedding), l.choose(OUTPUT));
        // As in transformers: two different matrices are not tied even if the configuration says so, and a tied one may
        // be stored under either name.
        let tied = a.tied && !l.differ(table, head).await?;
        if tied && !l.stores(table) && l.stores(head) {
            table = head;
        }
        let embedding = l.matrix(a.width, &[Part::whole(table, a.vocab, 0)]).await?;
        let ranks = l.ranks().len();
        let rows = |rank: Rank| vec![Part::rows(if tied { table } else { head }, a.vocab, rank.share(a.vocab), 0)];
        let output = l.matrix_on(a.width, rows).await?;
        let mut widths = Widths::default();
        let columns = a.layers.iter().flatten().map(|s| s.input.columns(a.width)).max().unwrap_or(a.width);
        widths.want(Scratch::NORM, columns);
        widths.want(Scratch::MID, a.width);
        if ranks > 1 {
            widths.want(PARTIAL, a.width);
        }
        let mut layers = Vec::with_capacity(a.layers.len());
        for layer in &a.layers {
            let mut loaded = Vec::with_capacity(layer.len());
            let mut kept = BRANCHES[0];
            for step in layer {
                loaded.push(load_step(l, step, a.width, &mut widths, &mut kept).await?);
            }
            layers.push(loaded);
        }
        let head = match a.own_head() {
            Some(head) => Some(LoadedHead::load(head, l, a.width, &mut widths).await?),
            None => None,
        };
        let norm = load_norm(l, &a.norm, a.width).await?;
        if l.rounded() > 0 {
            widths.want(Scratch::ROUNDED, l.rounded());
        }
        let backend = l.backend();
        let largest = Bucket::holding(limits.max_tokens, 1, 1, limits.max_outputs, 1);
        let tensor = |label: &str, dtype: DType, dims: [usize; 2]| {
            let bytes = (dims[0] * dims[1] * dtype.bytes()).next_multiple_of(4);
            Ok::<_, Error>(Tensor::new(backend.alloc(label, bytes as u64)?, dtype, &dims))
        };
        let own_logits = match ranks {
            1 => None,
            _ => Some(tensor("logits of a rank", DType::F32, [largest.outputs, a.vocab / ranks])?),
        };
        Ok(Self {
            spec: a.spec_on(ranks)?,
            embedding,
            embedding_scale: a.embedding_scale,
            layers,
            norm,
            head,
            output,
            logits_scale: a.logits_scale,
            // Outputs are rows of the batch, but their bucket may be larger than that of the tokens.
            work: Workspace::alloc(backend, &widths, largest.tokens.max(largest.outputs))?,
            stream: tensor("residual stream", backend.caps().act, [largest.tokens, columns])?,
            logits: tensor("logits", DType::F32, [largest.outputs, a.vocab])?,
            own_logits,
            precise: a.has_router(),
        })
    }
}

/// `kept` is the buffer that the steps before it kept their result in.
pub(super) async fn load_step<B: Backend>(
    l: &mut Loader<'_, B>,
    step: &SubLayer,
    width: usize,
    widths: &mut Widths,
    kept: &mut Scratch,
) -> Result<LoadedSubLayer<B::Buf>> {
    let (columns, ranks) = (step.input.columns(width), l.ranks().len());
    let reads = match &step.input {
        Input::Stream => Reads::Stream,
        Input::Normed(norm) => Reads::Normed(load_norm(l, norm, columns).await?),
        Input::BesideEmbedding(norm) => Reads::BesideEmbedding(load_norm(l, norm, columns).await?),
        Input::Kept(None) => Reads::Kept(*kept, None),
        Input::Kept(Some(norm)) => Reads::Kept(*kept, Some(load_norm(l, norm, columns).await?)),
        Input::PlusKept(norm) => Reads::PlusKept(*kept, load_norm(l, norm, columns).await?),
    };
    let mut mixers = Vec::with_capacity(step.branches.len());
    for branch in &step.branches {
        branch.plan.share(ranks).map_err(|why| Error::Unsupported { what: branch.prefix.clone(), why })?.want(widths);
        let prefix = l.stored_prefix(&branch.prefix).to_owned();
        mixers.push(branch.plan.load(l, &prefix, branch.scale).await?);
    }
    let gives = match &step.output {
        Output::Add => Gives::Add,
        Output::AddNormed(norm) => {
            widths.want(BRANCHES[0], width);
            Gives::AddNormed(load_norm(l, norm, width).await?)
        }
        Output::Keep => {
            *kept = BRANCHES[usize::from(*kept == BRANCHES[0])];
            widths.want(*kept, width);
            Gives::Keep(*kept)
        }
    };
    let repeated = step.branches.iter().filter(|b| b.plan.repeated()).count();
    assert!(repeated == 0 || repeated == mixers.len(), "branches that ranks divide beside one that each has");
    Ok(LoadedSubLayer { reads, mixers, gives, shared: ranks > 1 && repeated == 0 })
}

pub(super) async fn load_norm<B: Backend>(
    l: &mut Loader<'_, B>,
    norm: &Norm,
    width: usize,
) -> Result<LoadedNorm<B::Buf>> {
    let weight = l.vector(&norm.name, width, |w| norm.kind.weight(w)).await?;
    Ok(LoadedNorm { weight, eps: norm.eps })
}

impl<Buf: crate::backend::Handle> LoadedNorm<Buf> {
    pub fn op(&self, x: &Tensor<Buf>, out: &Tensor<Buf>) -> RmsNorm<Buf> {
        RmsNorm {
            x: x.clone(),
            add: None,
            weight: self.weight.clone(),
            gate: None,
            out: out.clone(),
            accumulate: false,
            eps: self.eps,
            groups: 1,
        }
    }
}

impl<Buf: crate::backend::Handle> LoadedSubLayer<Buf> {
    /// Records the step over the stream.
    pub fn record(&self, pass: &mut Pass<'_, Buf>, pools: &LayerPools<Buf>, s: &Stream<Buf>) -> Result<()> {
        let read = self.read(pass, s)?;
        for mixer in &self.mixers {
            mixer.begin(pass, &read)?;
        }
        let width = s.x.row_len();
        let result = match &self.gives {
            Gives::Add => Out { to: s.x.clone(), add: true },
            Gives::AddNormed(_) => Out { to: pass.scratch(BRANCHES[0], width), add: false },
            Gives::Keep(to) => Out { to: pass.scratch(*to, width), add: false },
        };
        let mut out = match self.shared {
            true => Out { to: pass.scratch(PARTIAL, width), add: false },
            false => result.clone(),
        };
        // Experts last: the other mixers cover the time of routing.
        for mixer in self.mixers.iter().rev() {
            mixer.forward(pass, pools, &read, &out)?;
            out.add = true;
        }
        if self.shared {
            pass.op(AllReduce { x: out.to, out: result.to.clone(), accumulate: result.add })?;
        }
        match &self.gives {
            Gives::AddNormed(norm) => pass.op(RmsNorm { accumulate: true, ..norm.op(&result.to, &s.x) }),
            Gives::Add | Gives::Keep(_) => Ok(()),
        }
    }

    /// The input of the branches, computed where it is a norm.
    fn read(&self, pass: &mut Pass<'_, Buf>, s: &Stream<Buf>) -> Result<Tensor<Buf>> {
        let width = s.x.row_len();
        let (norm, x, add) = match &self.reads {
            Reads::Stream => return Ok(s.x.clone()),
            Reads::Kept(kept, None) => return Ok(pass.scratch(*kept, width)),
            Reads::Kept(kept, Some(norm)) => (norm, pass.scratch(*kept, width), None),
            Reads::PlusKept(kept, norm) => (norm, pass.scratch(*kept, width), Some((s.x.clone(), 1.0))),
            Reads::Normed(norm) => (norm, s.x.clone(), None),
            Reads::BesideEmbedding(norm) => (norm, s.both.clone(), None),
        };
        let u = pass.scratch(Scratch::NORM, x.row_len());
        pass.op(RmsNorm { add, ..norm.op(&x, &u) })?;
        Ok(u)
    }
}

impl<B: Backend> Decoder<B> {
    fn embed(&self, pass: &mut Pass<'_, B::Buf>, last: &Tensor<B::Buf>, out: Tensor<B::Buf>) -> Result<()> {
        let (step, last) = (pass.step.clone(), last.clone());
        pass.op(Embed { step, last, table: self.embedding.clone(), out, scale: self.embedding_scale })
    }

    /// Room for the hidden vectors of the step's outputs `[O, D]`, and for their norms.
    fn outputs(&self, step: &Step<B::Buf>) -> (Tensor<B::Buf>, Tensor<B::Buf>) {
        let view = |which| self.work.view(which, step.bucket.outputs, self.spec.width);
        (view(Scratch::MID), view(Scratch::NORM))
    }

    /// The logits of the hidden vectors `[O, D]`.
    fn record_logits(&self, pass: &mut Pass<'_, B::Buf>, x: Tensor<B::Buf>) -> Result<()> {
        let logits = self.logits.head(x.rows());
        let own = self.own_logits.as_ref().map(|own| own.head(x.rows()));
        pass.op(Matmul {
            x,
            w: self.output.clone(),
            columns: None,
            bias: None,
            out: own.clone().unwrap_or_else(|| logits.clone()),
            scale: self.logits_scale,
            accumulate: false,
            precise: pass.precise,
        })?;
        own.map_or(Ok(()), |x| pass.op(AllGather { x, out: logits }))
    }
}

impl<B: Backend> Model<B> for Decoder<B> {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn forward(
        &self,
        ops: &mut dyn Ops<B::Buf>,
        step: &Step<B::Buf>,
        pools: &[LayerPools<B::Buf>],
        last: &Tensor<B::Buf>,
    ) -> Result<()> {
        let mut pass = Pass { ops, step, work: &self.work, precise: self.precise };
        let (both, width) = (self.stream.head(pass.tokens()), self.spec.width);
        for first in (0..both.row_len()).step_by(width) {
            self.embed(&mut pass, last, both.cols(first, width))?;
        }
        let x = both.cols(0, width);
        let stream = Stream { x: x.clone(), both };
        for (layer, pools) in self.layers.iter().zip(pools) {
            for sub in layer {
                sub.record(&mut pass, pools, &stream)?;
            }
        }
        let (picked, normed) = self.outputs(step);
        pass.op(Gather { step: step.clone(), x: x.clone(), out: picked.clone() })?;
        pass.op(self.norm.op(&picked, &normed))?;
        self.record_logits(&mut pass, normed)?;
        let Some((head, pools)) = self.head.as_ref().zip(pools.last()) else { return Ok(()) };
        let embeddings = pass.scratch(Scratch::NORM, width);
        self.embed(&mut pass, last, embeddings.clone())?;
        head.fill(&mut pass, pools, &self.norm, &embeddings, &x)
    }

    fn draft(
        &self,
        ops: &mut dyn Ops<B::Buf>,
        step: &Step<B::Buf>,
        pools: &[LayerPools<B::Buf>],
        last: &Tensor<B::Buf>,
        hidden: Hidden,
    ) -> Result<()> {
        let (head, pools) = self.head.as_ref().zip(pools.last()).expect("a model with its head");
        let mut pass = Pass { ops, step, work: &self.work, precise: self.precise };
        let x = self.stream.head(pass.tokens()).cols(0, self.spec.width);
        let embeddings = pass.scratch(Scratch::NORM, self.spec.width);
        self.embed(&mut pass, last, embeddings.clone())?;
        let own = head.draft(&mut pass, pools, hidden, &embeddings, &x)?;
        let (picked, _) = self.outputs(step);
        pass.op(Gather { step: step.clone(), x: own, out: picked.clone() })?;
        self.record_logits(&mut pass, picked)
    }

    fn has_head(&self) -> bool {
        self.head.is_some()
    }

    fn logits(&self) -> &Tensor<B::Buf> {
        &self.logits
    }
}
