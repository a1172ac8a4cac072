//! Sampling on the device: one token per output row.

use serde::{Deserialize, Serialize};

use super::{Access, Cost, ensure, expect};
use crate::backend::Handle;
use crate::step::Step;
use crate::tensor::{DType, Tensor};

/// Words of a lane's sampling parameters: temperature, top_p, min_p, repetition penalty (f32 bits), top_k (0 = off),
/// seed low, seed high, flags (unused, 0). Temperature 0 means greedy.
pub const LANE_WORDS: usize = 8;

/// `ids[o]` = token sampled from `logits[o]` with the parameters of the output's lane; also stored in `last[lane]`, and
/// its bit set in `seen[lane]`.
///
/// The random number is a hash of (seed, absolute position of the new token), so batching, pre-emption and the cache
/// never change a text. The rule is that of `crate::sample`. Padding outputs write nothing. Where that rule finds no token,
/// because the logits are not finite, `ids[o]` and `last[lane]` become [`crate::step::NONE`] and `seen[lane]` stays as it is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Sample<Buf> {
    /// Output tokens, lanes and positions.
    pub step: Step<Buf>,
    /// `[O, V] f32`, read only.
    pub logits: Tensor<Buf>,
    /// `[L, 8] u32`, see [`LANE_WORDS`].
    pub lanes: Tensor<Buf>,
    /// `[L, ceil(V / 32)] u32`: bit v of a lane's row: token v is known to the sequence.
    pub seen: Tensor<Buf>,
    /// `[L] u32`.
    pub last: Tensor<Buf>,
    /// `[O] u32`.
    pub ids: Tensor<Buf>,
}

impl<Buf: Handle> Sample<Buf> {
    pub(super) fn tensors(&self) -> Vec<(Access, &Tensor<Buf>)> {
        use Access::*;
        let reads = [&self.step.ints, &self.logits, &self.lanes];
        let mut t: Vec<_> = reads.into_iter().map(|r| (Read, r)).collect();
        t.extend([(InPlace, &self.seen), (InPlace, &self.last), (Write, &self.ids)]);
        t
    }

    pub(super) fn cost(&self) -> Cost {
        let logits = self.logits.len() * 4;
        let seen = self.step.bucket.outputs * self.seen.row_len() * 4;
        Cost { bytes: (logits + seen) as u64, held: 0, flops: self.logits.len() as u64 }
    }

    pub(super) fn check(&self) {
        let (o, v, lanes) = (self.step.bucket.outputs, self.logits.row_len(), self.lanes.rows());
        expect("sample", "logits", &self.logits, &[o, v]);
        expect("sample", "lanes", &self.lanes, &[lanes, LANE_WORDS]);
        expect("sample", "seen", &self.seen, &[lanes, v.div_ceil(32)]);
        expect("sample", "last", &self.last, &[lanes]);
        expect("sample", "ids", &self.ids, &[o]);
        ensure!("sample", self.logits.dtype == DType::F32, "logits are not f32");
    }
}
