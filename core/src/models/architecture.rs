//! A model as data: the result of a family's file for a configuration, and the input of the decoder.

use std::collections::HashSet;

use crate::{
    Error, Result,
    blocks::Plan,
    checkpoint::Checkpoint,
    config::Config,
    layer::{Division, LayerState, StateShare},
    models::{Head, ModelSpec},
    ops::Feature,
    weights::{NormKind, Rank},
};

/// An RMS norm over the model width.
#[derive(Clone, Debug)]
pub struct Norm {
    /// Name of the weight `[D]`, below the model's prefix.
    pub name: String,
    /// Added to the mean square.
    pub eps: f32,
    /// Meaning of the weight.
    pub kind: NormKind,
}

/// Input of the branches of a residual step.
#[derive(Clone, Debug)]
pub enum Input {
    /// The norm of the stream.
    Normed(Norm),
    /// The stream itself.
    Stream,
    /// The norm of the stream beside the embeddings, `[stream | embeddings]`: twice the model width.
    BesideEmbedding(Norm),
    /// What an earlier step of the layer kept ([`Output::Keep`]), or its norm.
    Kept(Option<Norm>),
    /// The norm of the stream plus what an earlier step of the layer kept, which is lost.
    PlusKept(Norm),
}

impl Input {
    fn norm(&self) -> Option<&Norm> {
        match self {
            Self::Normed(norm) | Self::BesideEmbedding(norm) | Self::PlusKept(norm) => Some(norm),
            Self::Kept(norm) => norm.as_ref(),
            Self::Stream => None,
        }
    }

    /// Its columns in a model of that width.
    pub fn columns(&self, width: usize) -> usize {
        width * (1 + usize::from(matches!(self, Self::BesideEmbedding(_))))
    }
}

/// Use of the sum of a residual step's branches.
#[derive(Clone, Debug)]
pub enum Output {
    /// It is added to the stream.
    Add,
    /// Its norm is added to the stream.
    AddNormed(Norm),
    /// It is kept for the next steps of the layer; the stream stays as it is.
    Keep,
}

/// A mixer of a residual step.
#[derive(Clone, Debug)]
pub struct Branch {
    /// Prefix of its tensor names, below the model's prefix, or several separated by `|`, of which one is stored. Branches
    /// with the same prefix share their weights.
    pub prefix: String,
    /// The mixer as data.
    pub plan: Plan,
    /// Factor on its output.
    pub scale: f32,
}

impl Branch {
    /// A branch with a factor of 1.
    pub fn new(prefix: impl Into<String>, plan: impl Into<Plan>) -> Self {
        Self { prefix: prefix.into(), plan: plan.into(), scale: 1.0 }
    }

    /// The same with another factor.
    pub fn scaled(self, scale: f32) -> Self {
        Self { scale, ..self }
    }
}

/// One residual step of a layer: `x += Σ scale * mixer(norm(x))`, or with the norm after the mixers.
#[derive(Clone, Debug)]
pub struct SubLayer {
    /// Input of all branches.
    pub input: Input,
    /// Parallel mixers; the first gives the layer its letter. A mixture of experts comes first, and there is at most
    /// one: routing is recorded in order, the outputs are added in reverse order. Either all or none of them are
    /// whole on each of several ranks ([`Plan::repeated`]).
    pub branches: Vec<Branch>,
    /// Use of their sum.
    pub output: Output,
}

impl SubLayer {
    /// `x += Σ branch(norm(x))`.
    pub fn pre_norm(norm: Norm, branches: Vec<Branch>) -> Self {
        Self { input: Input::Normed(norm), branches, output: Output::Add }
    }

    /// The norms of its input and its output, and their columns in a model of that width.
    pub(super) fn norms(&self, width: usize) -> impl Iterator<Item = (&Norm, usize)> {
        let after = if let Output::AddNormed(norm) = &self.output { Some((norm, width)) } else { None };
        self.input.norm().map(|norm| (norm, self.input.columns(width))).into_iter().chain(after)
    }
}

/// A decoder-only model.
#[derive(Clone, Debug)]
pub struct Architecture {
    /// The config's `model_type`.
    pub family: &'static str,
    /// Vocabulary size V.
    pub vocab: usize,
    /// Model width D.
    pub width: usize,
    /// Longest sequence, in tokens.
    pub context: usize,
    /// End-of-sequence ids.
    pub eos: Vec<u32>,
    /// Possible prefixes of all tensor names.
    pub prefixes: &'static [&'static str],
    /// Names of the embedding `[V, D]`, below the prefix.
    pub embedding: &'static [&'static str],
    /// Factor on embeddings.
    pub embedding_scale: f32,
    /// Residual steps of each layer.
    pub layers: Vec<Vec<SubLayer>>,
    /// Norm before the output matrix.
    pub norm: Norm,
    /// The output matrix is the embedding, unless a different one is stored; else it is `lm_head.weight`.
    pub tied: bool,
    /// Factor on logits.
    pub logits_scale: f32,
    /// The head for drafts that the family has, stored or not.
    pub head: Option<Head>,
    /// The head is loaded and filled, see [`Architecture::with_head`].
    pub drafts: bool,
}

impl Architecture {
    /// An architecture without layers: the keys that all families share. `context` is the default of a missing
    /// `max_position_embeddings`, `tied` that of `tie_word_embeddings`.
    ///
    /// # Errors
    /// [`crate::Error::BadModel`] naming the key.
    pub fn start(config: &Config, family: &'static str, context: usize, tied: bool, norm: Norm) -> Result<Self> {
        Ok(Self {
            family,
            vocab: config.usize("vocab_size")?,
            width: config.usize("hidden_size|d_model")?,
            context: config.max_positions()?.unwrap_or(context),
            eos: config.eos_token_ids()?,
            prefixes: &["model.", "model.language_model.", "language_model.model."],
            embedding: &["embed_tokens.weight"],
            embedding_scale: 1.0,
            layers: Vec::new(),
            norm,
            tied: config.tied_embeddings(tied)?,
            logits_scale: 1.0,
            head: None,
            drafts: false,
        })
    }

    /// The head, if it is loaded.
    pub(super) fn own_head(&self) -> Option<&Head> {
        self.head.as_ref().filter(|_| self.drafts)
    }

    /// The weights of the head, where `checkpoint` has one.
    pub fn head_parameters(&self, checkpoint: &Checkpoint) -> Option<u64> {
        let head = self.head.as_ref()?;
        checkpoint.contains(head.projection.trim_start_matches('/')).then(|| head.parameters(self.width))
    }

    /// The same model with its head for drafts. Its states are not those of the model without.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where `checkpoint` has no head.
    pub fn with_head(&self, checkpoint: &Checkpoint) -> Result<Self> {
        if self.head_parameters(checkpoint).is_some() {
            return Ok(Self { drafts: true, ..self.clone() });
        }
        Err(Error::Unsupported {
            what: format!("drafts of an MTP head with {}", self.family),
            why: "the model has none that can be run; take drafts from the text instead (--speculate ngram or auto)"
                .into(),
        })
    }

    /// What a backend needs to run it, of what not every backend has.
    pub fn features(&self) -> impl Iterator<Item = Feature> {
        self.layers.iter().flatten().flat_map(|s| &s.branches).filter_map(|b| b.plan.feature())
    }

    /// Whether it chooses experts. Small errors before a choice can have large effects, so its products are
    /// [precise](crate::ops::Matmul::precise).
    pub fn has_router(&self) -> bool {
        let head = self.own_head().into_iter().flat_map(|head| &head.steps);
        let mut branches = self.layers.iter().flatten().chain(head).flat_map(|s| &s.branches);
        branches.any(|b| matches!(b.plan, Plan::Moe(_)))
    }

    /// Facts of which the states are those that one of `ranks` ranks has.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming the layer and the number that does not divide, and the numbers of ranks that are possible.
    pub fn spec_on(&self, ranks: usize) -> Result<ModelSpec> {
        let share = self.share(ranks).map_err(|why| {
            let possible = (1..=8).filter(|n| self.share(*n).is_ok()).map(|n| n.to_string());
            let what = format!("{} on {ranks} ranks", self.family);
            Error::Unsupported { what, why: format!("{why}; possible are {}", possible.collect::<Vec<_>>().join(", ")) }
        })?;
        Ok(ModelSpec { parameters: self.spec().parameters, vocab: self.vocab, ..share.spec() })
    }

    /// What each of some ranks has: its share of every mixer and of the output matrix. Norms and embeddings are whole.
    fn share(&self, ranks: usize) -> Result<Self, String> {
        let mut share = self.clone();
        if !self.vocab.is_multiple_of(ranks) {
            return Err(format!(
                "`vocab_size`: {} rows of the output matrix do not divide over {ranks} ranks",
                self.vocab
            ));
        }
        share.vocab /= ranks;
        let head = share.head.iter_mut().filter(|_| self.drafts).flat_map(|head| &mut head.steps);
        for branch in share.layers.iter_mut().flatten().chain(head).flat_map(|step| &mut step.branches) {
            branch.plan = branch.plan.share(ranks).map_err(|why| format!("`{}`: {why}", branch.prefix))?;
        }
        Ok(share)
    }

    /// The states of all layers, the head's last, and what each of `ranks` ranks has of them.
    pub fn division(&self, ranks: usize) -> Division {
        let share = |rank: Rank| {
            let of_layer = |layer: &Vec<SubLayer>| {
                let plans = layer.iter().flat_map(|s| &s.branches).map(|b| b.plan.state_share(rank));
                plans.fold(StateShare::default(), StateShare::and)
            };
            let head = self.own_head().map(|head| head.state_share(self.width, rank));
            self.layers.iter().map(of_layer).chain(head).collect()
        };
        let shares = (0..ranks).map(|index| share(Rank { index, of: ranks })).collect();
        Division { layers: self.spec().layers, shares }
    }

    /// Facts that need no weights. The head's state is the last one, its weights do not count.
    pub fn spec(&self) -> ModelSpec {
        let state = |layer: &Vec<SubLayer>| {
            let plans = layer.iter().flat_map(|s| &s.branches).map(|b| b.plan.state());
            plans.fold(LayerState::default(), LayerState::and)
        };
        let matrices = if self.tied { 1 } else { 2 } * (self.vocab * self.width) as u64;
        let steps = || self.layers.iter().flatten();
        let (mut names, mut prefixes) = (HashSet::new(), HashSet::new());
        // What layers share counts once, what is added to it for one of them counts for each.
        let norms = steps().flat_map(|s| s.norms(self.width)).filter(|(norm, _)| names.insert(&norm.name));
        let norms = (self.width + norms.map(|(_, columns)| columns).sum::<usize>()) as u64;
        let branches = || steps().flat_map(|s| &s.branches);
        let adapters = branches().map(|b| b.plan.adapter_parameters());
        let own = branches().filter(|b| prefixes.insert(&b.prefix)).map(|b| b.plan.parameters()).chain(adapters);
        let parameters = own.fold(matrices + norms, u64::saturating_add);
        let of_head = |head: &Head| head.parameters(self.width) + (self.vocab * self.width) as u64;
        ModelSpec {
            family: self.family.into(),
            vocab: self.vocab,
            width: self.width,
            context: self.context,
            layer_map: self.layers.iter().flatten().map(|s| s.branches[0].plan.letter()).collect(),
            layers: self.layers.iter().map(state).chain(self.own_head().map(|head| head.state(self.width))).collect(),
            eos: self.eos.clone(),
            parameters,
            head_cost: self.own_head().map_or(0.0, |head| of_head(head) as f32 / parameters as f32),
        }
    }
}
