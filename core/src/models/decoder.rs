//! The one decoder: embeds, runs every residual step of every layer, and computes the logits of the wanted positions.

use super::{Architecture, Limits, Model, ModelSpec, Norm};
use crate::{
    Result,
    backend::{Backend, Ops},
    blocks::{Mixer, Pass, Scratch, Widths, Workspace},
    layer::LayerPools,
    ops::{Embed, Gather, Matmul, RmsNorm, Weight},
    step::{Bucket, Step},
    tensor::{DType, Tensor},
    weights::{Loader, Part},
};

/// Names of the output matrix `[V, D]`; a leading slash: outside of the prefix.
const OUTPUT: &[&str] =
    &["/lm_head.weight", "lm_head.weight", "/language_model.lm_head.weight", "/model.lm_head.weight"];

/// A norm on a device.
struct LoadedNorm<Buf> {
    weight: Tensor<Buf>,
    eps: f32,
}

/// A residual step on a device.
struct LoadedSubLayer<Buf> {
    norm: LoadedNorm<Buf>,
    mixers: Vec<Mixer<Buf>>,
}

/// An [`Architecture`] with its weights and activations on a device.
pub(super) struct Decoder<B: Backend> {
    spec: ModelSpec,
    embedding: Weight<B::Buf>,
    embedding_scale: f32,
    layers: Vec<Vec<LoadedSubLayer<B::Buf>>>,
    norm: LoadedNorm<B::Buf>,
    output: Weight<B::Buf>,
    logits_scale: f32,
    work: Workspace<B::Buf>,
    /// `[max tokens, D]`: the residual stream.
    stream: Tensor<B::Buf>,
    /// `[max outputs, V] f32`.
    logits: Tensor<B::Buf>,
}

impl<B: Backend> Decoder<B> {
    pub(super) async fn load(a: &Architecture, l: &mut Loader<'_, B>, limits: Limits) -> Result<Self> {
        l.set_prefix(a.prefixes, a.embedding);
        let (mut table, head) = (l.choose(a.embedding), l.choose(OUTPUT));
        // As transformers has it: two different matrices are not tied whatever the configuration says, and a tied one may be
        // stored under either name.
        let tied = a.tied && !l.differ(table, head).await?;
        if tied && !l.stores(table) && l.stores(head) {
            table = head;
        }
        let embedding = l.matrix(a.width, &[Part::whole(table, a.vocab, 0)]).await?;
        let output = match tied {
            true => embedding.clone(),
            false => l.matrix(a.width, &[Part::whole(head, a.vocab, 0)]).await?,
        };
        let mut widths = Widths::default();
        widths.want(Scratch::Norm, a.width);
        widths.want(Scratch::Mid, a.width);
        let mut layers = Vec::with_capacity(a.layers.len());
        for layer in &a.layers {
            let mut loaded = Vec::with_capacity(layer.len());
            for step in layer {
                let norm = load_norm(l, &step.norm, a.width).await?;
                let mut mixers = Vec::with_capacity(step.mixers.len());
                for (prefix, plan) in &step.mixers {
                    plan.want(&mut widths);
                    mixers.push(plan.load(l, prefix, step.residual).await?);
                }
                loaded.push(LoadedSubLayer { norm, mixers });
            }
            layers.push(loaded);
        }
        let norm = load_norm(l, &a.norm, a.width).await?;
        let backend = l.backend();
        let largest = Bucket::holding(limits.max_tokens, 1, 1, limits.max_outputs, 1);
        let tensor = |label: &str, dtype: DType, dims: [usize; 2]| {
            let bytes = (dims[0] * dims[1] * dtype.bytes()).next_multiple_of(4);
            Ok::<_, crate::Error>(Tensor::new(backend.alloc(label, bytes as u64)?, dtype, &dims))
        };
        Ok(Self {
            spec: a.spec(),
            embedding,
            embedding_scale: a.embedding_scale,
            layers,
            norm,
            output,
            logits_scale: a.logits_scale,
            // Outputs are rows of the batch, but their bucket may be rounded up further than that of the tokens.
            work: Workspace::alloc(backend, &widths, largest.tokens.max(largest.outputs))?,
            stream: tensor("residual stream", backend.caps().act, [largest.tokens, a.width])?,
            logits: tensor("logits", DType::F32, [largest.outputs, a.vocab])?,
        })
    }
}

async fn load_norm<B: Backend>(l: &mut Loader<'_, B>, norm: &Norm, width: usize) -> Result<LoadedNorm<B::Buf>> {
    let weight = l.vector(&norm.name, width, |w| norm.kind.weight(w)).await?;
    Ok(LoadedNorm { weight, eps: norm.eps })
}

impl<Buf: crate::backend::Handle> LoadedNorm<Buf> {
    fn op(&self, x: &Tensor<Buf>, out: &Tensor<Buf>) -> RmsNorm<Buf> {
        RmsNorm {
            x: x.clone(),
            add: None,
            weight: self.weight.clone(),
            gate: None,
            out: out.clone(),
            eps: self.eps,
            groups: 1,
        }
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
        let mut pass = Pass { ops, step, work: &self.work };
        let (x, u) = (self.stream.head(pass.tokens()), pass.scratch(Scratch::Norm, self.spec.width));
        pass.op(Embed {
            step: step.clone(),
            last: last.clone(),
            table: self.embedding.clone(),
            out: x.clone(),
            scale: self.embedding_scale,
        })?;
        for (layer, pools) in self.layers.iter().zip(pools) {
            for sub in layer {
                pass.op(sub.norm.op(&x, &u))?;
                for mixer in &sub.mixers {
                    mixer.begin(&mut pass, &u)?;
                }
                // Experts last: what stands beside them covers the time that routing takes.
                for mixer in sub.mixers.iter().rev() {
                    mixer.forward(&mut pass, pools, &u, &x)?;
                }
            }
        }
        let outputs = step.bucket.outputs;
        let picked = self.work.view(Scratch::Mid, outputs, self.spec.width);
        let normed = self.work.view(Scratch::Norm, outputs, self.spec.width);
        pass.op(Gather { step: step.clone(), x, out: picked.clone() })?;
        pass.op(self.norm.op(&picked, &normed))?;
        pass.op(Matmul {
            x: normed,
            w: self.output.clone(),
            bias: None,
            out: self.logits.head(outputs),
            scale: self.logits_scale,
            accumulate: false,
        })
    }

    fn logits(&self) -> &Tensor<B::Buf> {
        &self.logits
    }
}
