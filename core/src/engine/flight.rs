//! Steps on the device whose results have not been read.

use std::pin::Pin;

use super::{plan::SeqId, runner::Begun, tail::Needs};
use crate::{Result, backend::Backend};

/// A step in flight: the sequences that it samples for, and the reads of its results.
pub(super) struct Flight<B: Backend> {
    pub tokens: usize,
    /// Milliseconds of the engine's clock.
    pub enqueued: f64,
    /// The positions whose logits it computes.
    pub outputs: Vec<Output>,
    /// Those that are not sampled, by number: no text has the drafts before them.
    pub dead: Vec<usize>,
    /// Its sampling is not enqueued yet: masks wait for the ids of the step before.
    pub held: Option<(Begun, Needs)>,
    pub ids: Option<Incoming<B::Read>>,
    pub logits: Option<Incoming<B::Read>>,
    pub reports: Option<Incoming<B::Read>>,
    /// Logits of all outputs, if some of them are of a prompt.
    pub scores: Option<Incoming<B::Read>>,
}

/// A position whose logits a step computes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Output {
    pub id: SeqId,
    pub lane: u32,
    /// The position of the prompt's token that the logits are compared with; `None`: a token is sampled from them.
    pub target: Option<usize>,
    /// The draft in the place of the token sampled here, if the row has one; its next output is computed with it.
    pub draft: Option<u32>,
}

/// A read that keeps its result, so that a wait for it can be dropped and repeated.
pub(super) enum Incoming<R> {
    Pending(Pin<Box<R>>),
    Arrived(Vec<u8>),
}

impl<R: Future<Output = Result<Vec<u8>>>> Incoming<R> {
    pub fn new(read: R) -> Self {
        Self::Pending(Box::pin(read))
    }

    pub async fn arrive(&mut self) -> Result<()> {
        if let Self::Pending(read) = self {
            let bytes = read.as_mut().await?;
            *self = Self::Arrived(bytes);
        }
        Ok(())
    }

    /// The bytes; none before they have arrived.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Pending(_) => &[],
            Self::Arrived(bytes) => bytes,
        }
    }
}

impl<B: Backend> Flight<B> {
    /// Whether it verifies drafts.
    pub fn has_drafts(&self) -> bool {
        self.outputs.iter().any(|output| output.draft.is_some())
    }

    /// Waits for all results of the step.
    pub async fn arrive(&mut self) -> Result<()> {
        for read in self.ids.iter_mut().chain(&mut self.logits).chain(&mut self.reports).chain(&mut self.scores) {
            read.arrive().await?;
        }
        Ok(())
    }
}
