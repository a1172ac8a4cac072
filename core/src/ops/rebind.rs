//! The same op over other handles: how one recorded step runs on several ranks, each with buffers of its own.

use super::{
    Act, Activation, Adjust, AllGather, AllReduce, Attention, Conv1d, Embed, ExpertMatmul, ExpertRange, Gate,
    GatedDelta, Gather, HeadMatmul, KvPool, LatentAttention, LatentKv, Logprobs, Matmul, RankNorm, RmsNorm, RopeKv,
    Round, Route, Router, RowBlock, Sample, ScanForm, SelectiveScan, Weight,
};
use crate::{
    format::Format,
    step::{Bucket, Step},
    tensor::Tensor,
};

/// An argument of an op that can be had over other handles.
pub trait Rebind<Buf> {
    /// The same with other handles.
    type With<New>;
    /// Replaces every handle by what `to` gives for it.
    fn rebind<New>(&self, to: &mut dyn FnMut(&Buf) -> New) -> Self::With<New>;
}

impl<Buf> Rebind<Buf> for Tensor<Buf> {
    type With<New> = Tensor<New>;
    fn rebind<New>(&self, to: &mut dyn FnMut(&Buf) -> New) -> Tensor<New> {
        self.on(to(&self.buf))
    }
}

impl<Buf, T: Rebind<Buf>> Rebind<Buf> for Option<T> {
    type With<New> = Option<T::With<New>>;
    fn rebind<New>(&self, to: &mut dyn FnMut(&Buf) -> New) -> Self::With<New> {
        self.as_ref().map(|t| t.rebind(to))
    }
}

impl<Buf, T: Rebind<Buf>> Rebind<Buf> for Vec<T> {
    type With<New> = Vec<T::With<New>>;
    fn rebind<New>(&self, to: &mut dyn FnMut(&Buf) -> New) -> Self::With<New> {
        self.iter().map(|t| t.rebind(to)).collect()
    }
}

impl<Buf, A: Rebind<Buf>, B: Rebind<Buf>> Rebind<Buf> for (A, B) {
    type With<New> = (A::With<New>, B::With<New>);
    fn rebind<New>(&self, to: &mut dyn FnMut(&Buf) -> New) -> Self::With<New> {
        (self.0.rebind(to), self.1.rebind(to))
    }
}

/// Arguments without handles.
macro_rules! plain {
    ($($t:ty),* $(,)?) => {
        $(impl<Buf> Rebind<Buf> for $t {
            type With<New> = Self;
            fn rebind<New>(&self, _: &mut dyn FnMut(&Buf) -> New) -> Self {
                *self
            }
        })*
    };
}

plain!(usize, u32, f32, bool, Act, Router, ScanForm, Format, Bucket);

/// Structs of such arguments; a field that is missing here does not compile.
macro_rules! fields {
    ($($name:ident { $($field:ident),* $(,)? })*) => {
        $(impl<Buf> Rebind<Buf> for $name<Buf> {
            type With<New> = $name<New>;
            fn rebind<New>(&self, to: &mut dyn FnMut(&Buf) -> New) -> $name<New> {
                $name { $($field: self.$field.rebind(to)),* }
            }
        })*
    };
}

fields! {
    Step { bucket, ints }
    RowBlock { w, format, col, squares }
    Weight { blocks, n, k }
    KvPool { k, v }
    Gate { z, act, before }
    ExpertRange { first, experts, blocks }
    Embed { step, last, table, out, scale }
    RmsNorm { x, add, weight, gate, out, accumulate, eps, groups }
    Matmul { x, w, columns, bias, out, scale, accumulate, precise }
    Activation { gate, up, row_gate, out, act }
    RopeKv { step, q, k, v, norm, inv_freq, q_out, pool, head_dim }
    Attention { step, q, pool, out, head_dim, scale, window, first }
    Conv1d { step, x, weight, pool, out, act }
    SelectiveScan { step, x, b, c, dt, par, pool, y, form, heads_per_group, first_head, dt_limit }
    GatedDelta { step, q, k, v, a, b, par, pool, out, heads_per_key, first_head, beta_scale }
    HeadMatmul { x, w, out, heads }
    LatentKv { step, kv, weight, eps, pool }
    LatentAttention { step, q, queries, pool, out, heads, scale }
    Route { step, logits, bias, ids, weights, router }
    ExpertMatmul { x, experts, ids, combine, out, scale, accumulate }
    Gather { step, x, out }
    Adjust { step, logits, rules, seen, out }
    Sample { step, logits, lanes, seen, last, ids }
    Logprobs { step, logits, ids, rules, report }
    AllReduce { x, out, accumulate }
    AllGather { x, out }
    RankNorm { norm, ranks }
    Round { x, out }
}
