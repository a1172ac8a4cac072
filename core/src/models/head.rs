//! A head for drafts (multi-token prediction, MTP): from the final hidden vector of a token and the embedding of the next one it
//! predicts the token after that, and from its own result the ones after.
//!
//! Its rows lie under the positions of the tokens that they embed, so a page holds nothing of the page after it, and every slot
//! has the hidden vector of its last token. Both are filled by every step of the trunk. What drafts write lies beyond the end of
//! a sequence, and the trunk's next step overwrites it. The first token has no token before it: its row is hidden.

use super::{
    Norm, SubLayer,
    decoder::{BRANCHES, LoadedNorm, LoadedSubLayer, Stream, load_norm, load_step},
};
use crate::{
    Result,
    backend::{Backend, Handle},
    blocks::{
        Pass, Scratch, Widths,
        shift::{self, Shift},
    },
    layer::{LayerPools, LayerState, StateShare},
    tensor::Tensor,
    weights::{Linear, Loader, Part, Rank},
};

/// A head as data. Embedding and output matrix are those of the model.
#[derive(Clone, Debug)]
pub struct Head {
    /// Norm of the embedding.
    pub embedding_norm: Norm,
    /// Norm of the hidden vector.
    pub hidden_norm: Norm,
    /// Name of the weight `[D, 2 D]` over both, the embedding first.
    pub projection: String,
    /// The layer, whose attention hides the first position.
    pub steps: Vec<SubLayer>,
    /// Norm before the output matrix; its result is the hidden vector of the next draft.
    pub norm: Norm,
}

impl Head {
    /// What it keeps of a sequence.
    pub(super) fn state(&self, width: usize) -> LayerState {
        let plans = self.steps.iter().flat_map(|s| &s.branches).map(|b| b.plan.state());
        plans.fold(shift::state(width), LayerState::and)
    }

    /// What a rank has of that. The vector of the last token is whole on all of them.
    pub(super) fn state_share(&self, width: usize, rank: Rank) -> StateShare {
        let plans = self.steps.iter().flat_map(|s| &s.branches).map(|b| b.plan.state_share(rank));
        plans.fold(StateShare::whole(shift::state(width)), StateShare::and)
    }

    /// Its weights.
    pub(super) fn parameters(&self, width: usize) -> u64 {
        let norms = self.steps.iter().flat_map(|s| s.norms(width)).map(|(_, columns)| columns as u64);
        let plans = self.steps.iter().flat_map(|s| &s.branches).map(|b| b.plan.parameters());
        let own = (3 * width + 2 * width * width) as u64;
        norms.chain(plans).fold(own, u64::saturating_add)
    }

    /// How many steps there are up to the last one with a state: those that filling takes.
    fn filling(&self) -> usize {
        let keeps = |s: &SubLayer| s.branches.iter().any(|b| b.plan.state() != LayerState::default());
        self.steps.iter().rposition(keeps).map_or(0, |last| last + 1)
    }
}

/// Where a draft's hidden vectors come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Hidden {
    /// The slots: those of the last tokens that the trunk computed.
    Slot,
    /// The head's own results of the pass before, for the same rows.
    Own,
}

/// Embeddings and hidden vectors, normed.
const BOTH: Scratch = Scratch::activations("inputs of the head");
/// Final hidden vectors of the trunk.
const HIDDEN: Scratch = Scratch::activations("hidden vectors");
/// Those of the tokens before.
const BEFORE: Scratch = Scratch::activations("hidden vectors of the tokens before");
/// The head's own, kept from pass to pass.
const OWN: Scratch = Scratch::activations("hidden vectors of drafts");

/// A head on a device.
pub(super) struct LoadedHead<Buf> {
    shift: Shift<Buf>,
    embedding_norm: LoadedNorm<Buf>,
    hidden_norm: LoadedNorm<Buf>,
    projection: Linear<Buf>,
    steps: Vec<LoadedSubLayer<Buf>>,
    filling: usize,
    norm: LoadedNorm<Buf>,
}

impl<Buf: Handle> LoadedHead<Buf> {
    pub async fn load<B: Backend<Buf = Buf>>(
        head: &Head,
        l: &mut Loader<'_, B>,
        width: usize,
        widths: &mut Widths,
    ) -> Result<Self> {
        widths.want(BOTH, 2 * width);
        [HIDDEN, BEFORE, OWN].into_iter().for_each(|which| widths.want(which, width));
        let mut kept = BRANCHES[0];
        let mut steps = Vec::with_capacity(head.steps.len());
        for step in &head.steps {
            steps.push(load_step(l, step, width, widths, &mut kept).await?);
        }
        let projection = Part::whole(head.projection.clone(), width, 0);
        Ok(Self {
            shift: Shift::load(l, "the head's shift", width)?,
            embedding_norm: load_norm(l, &head.embedding_norm, width).await?,
            hidden_norm: load_norm(l, &head.hidden_norm, width).await?,
            projection: l.linear(2 * width, &[projection], false, 1.0).await?,
            steps,
            filling: head.filling(),
            norm: load_norm(l, &head.norm, width).await?,
        })
    }

    /// Keeps what drafts need of the step's tokens: `final_norm` of the trunk's stream `x` `[T, D]`, which is lost, and keys and
    /// values from the vectors of the tokens before. `embeddings` are `[T, D]`.
    pub fn fill(
        &self,
        pass: &mut Pass<'_, Buf>,
        pools: &LayerPools<Buf>,
        final_norm: &LoadedNorm<Buf>,
        embeddings: &Tensor<Buf>,
        x: &Tensor<Buf>,
    ) -> Result<()> {
        let (hidden, before) = (pass.scratch(HIDDEN, x.row_len()), pass.scratch(BEFORE, x.row_len()));
        pass.op(final_norm.op(x, &hidden))?;
        self.shift.record(pass, pools, &hidden, &before)?;
        self.run(pass, pools, embeddings, &before, x, self.filling)
    }

    /// The head's results `[T, D]` for the step's tokens, of which each is a row of its own. `embeddings` and `x`, which is
    /// scratch, are `[T, D]`.
    pub fn draft(
        &self,
        pass: &mut Pass<'_, Buf>,
        pools: &LayerPools<Buf>,
        hidden: Hidden,
        embeddings: &Tensor<Buf>,
        x: &Tensor<Buf>,
    ) -> Result<Tensor<Buf>> {
        let own = pass.scratch(OWN, x.row_len());
        let before = match hidden {
            Hidden::Own => own.clone(),
            Hidden::Slot => {
                // What is shifted in is not kept: the rows name no slot to write.
                let before = pass.scratch(BEFORE, x.row_len());
                self.shift.record(pass, pools, embeddings, &before)?;
                before
            }
        };
        self.run(pass, pools, embeddings, &before, x, self.steps.len())?;
        pass.op(self.norm.op(x, &own))?;
        Ok(own)
    }

    /// The first `steps` steps over `x`.
    fn run(
        &self,
        pass: &mut Pass<'_, Buf>,
        pools: &LayerPools<Buf>,
        embeddings: &Tensor<Buf>,
        hidden: &Tensor<Buf>,
        x: &Tensor<Buf>,
        steps: usize,
    ) -> Result<()> {
        let width = x.row_len();
        let both = pass.scratch(BOTH, 2 * width);
        pass.op(self.embedding_norm.op(embeddings, &both.cols(0, width)))?;
        pass.op(self.hidden_norm.op(hidden, &both.cols(width, width)))?;
        pass.linear(&self.projection, &both, x)?;
        let stream = Stream { x: x.clone(), both: x.clone() };
        self.steps[..steps].iter().try_for_each(|step| step.record(pass, pools, &stream))
    }
}
