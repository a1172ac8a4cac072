//! The engine's reports as plain objects; `web/js/selkie.d.ts` documents them.

use std::collections::BTreeSet;

use selkie_core::{
    engine::{AnyEngine, FinishReason, SeqId},
    session::{Completion, Model, Update},
    state::{
        GRID, Reason,
        prefix::{NONE, NodeId, Tree},
    },
};
use serde_json::{Value, json};

/// Maximum nodes of the tree in a report.
const MOST_NODES: usize = 200;

/// Facts fixed at load.
pub fn info(model: &Model, device: &str, fallback: Option<&str>, software: bool) -> Value {
    let (facts, text) = (model.facts(), model.text());
    let sizes = &facts.sizes;
    let sampling = text.generation().sampling(0);
    json!({
        "backend": facts.backend,
        "device": device,
        "fallback": fallback,
        "software": software,
        "label": facts.label,
        "family": facts.family,
        "layerMap": facts.layer_map,
        "parameters": facts.parameters,
        "weightBytes": facts.weight_bytes,
        "contextTokens": facts.context,
        "slots": facts.slots,
        "pages": facts.pages,
        "bytesPerSlot": sizes.shape.slot_bytes,
        "bytesPerPage": sizes.shape.page_bytes,
        "memoryBytes": sizes.split.bytes(&sizes.shape),
        "chat": text.has_chat(),
        "defaults": {
            "temperature": sampling.temperature,
            "topK": sampling.top_k,
            "topP": sampling.top_p,
            "minP": sampling.min_p,
            "repetitionPenalty": sampling.repetition_penalty,
        },
    })
}

/// Counters, pools and the prefix tree.
pub fn stats(engine: &dyn AnyEngine, device: &str) -> Value {
    let scheduler = engine.scheduler();
    let (stats, split) = (scheduler.stats(), engine.sizes().split);
    let reasons: serde_json::Map<String, Value> =
        Reason::ALL.iter().map(|r| (r.name().to_owned(), stats.reason(*r).into())).collect();
    json!({
        "backend": engine.caps().backend,
        "device": device,
        "slots": { "total": split.slots, "used": scheduler.slots().used(), "cached": scheduler.cached_states() },
        "pages": {
            "total": split.pages,
            "used": scheduler.pages().used(),
            "cached": if split.pages == 0 { 0 } else { scheduler.cached_pages() },
        },
        "tree": tree(scheduler.tree(), engine.sizes().shape.slot_bytes > 0),
        "treeNodes": scheduler.tree().len(),
        "requests": stats.reasons.iter().sum::<u64>(),
        "reusedTokens": stats.tokens_reused,
        "computedTokens": stats.tokens_prefilled,
        "generatedTokens": stats.tokens_generated,
        "reasons": reasons,
    })
}

/// The most recently used nodes with all their ancestors, parents first. Without recurrent layers (no `slots`) a prompt can
/// continue from any node.
fn tree(tree: &Tree, slots: bool) -> Vec<Value> {
    let mut all: Vec<(NodeId, u64)> =
        tree.iter().filter(|(_, n)| n.parent != NONE).map(|(id, n)| (id, n.last_use())).collect();
    all.sort_by_key(|(_, used)| std::cmp::Reverse(*used));
    let mut shown: BTreeSet<(u32, NodeId)> = BTreeSet::new();
    for (id, _) in all {
        let mut path = vec![];
        let mut at = id;
        while tree[at].parent != NONE && !shown.contains(&(tree[at].depth, at)) {
            path.push((tree[at].depth, at));
            at = tree[at].parent;
        }
        if shown.len() + path.len() > MOST_NODES {
            break;
        }
        shown.extend(path);
    }
    let name = |id: NodeId| format!("{:032x}", tree[id].hash.0);
    let node = |&(depth, id): &(u32, NodeId)| {
        let n = &tree[id];
        json!({
            "id": name(id),
            "parent": if tree[n.parent].parent == NONE { Value::Null } else { name(n.parent).into() },
            "tokens": depth as usize * GRID,
            "hasState": n.slot != 0 || !slots,
            "inUse": n.guards > 0,
            "lastUse": n.last_use(),
        })
    };
    shown.iter().map(node).collect()
}

/// An update of a step; `None` if it has nothing to show.
pub fn update((id, update): (SeqId, Update)) -> Option<Value> {
    match update {
        Update::Text { text, .. } if text.is_empty() => None,
        Update::Text { text, .. } => Some(json!({ "type": "text", "id": id.0, "text": text })),
        Update::Done(completion) => Some(done(id.0, completion)),
    }
}

fn done(id: u64, c: Completion) -> Value {
    let error = c.error().map(|e| {
        let (code, message) = crate::error::parts(e);
        json!({ "code": code, "message": message })
    });
    let (end, cache) = (&c.end, c.end.cache);
    let reused = c.reused();
    let timing = end.timing;
    let ttft = (end.completion_tokens > 0).then_some(timing.queue_ms + timing.prefill_ms);
    let rate = (end.completion_tokens > 1 && timing.decode_ms > 0.0)
        .then(|| (end.completion_tokens - 1) as f64 / timing.decode_ms * 1e3);
    json!({
        "type": "done",
        "id": id,
        "text": c.text.unwrap_or_default(),
        "finish": match c.finish {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Cancelled => "cancelled",
            FinishReason::Failed => "error",
        },
        "error": error,
        "leftOutMessages": c.dropped,
        "usage": {
            "promptTokens": end.prompt_tokens,
            "completionTokens": end.completion_tokens,
            "matched": cache.map_or(0, |r| r.matched),
            "reused": reused,
            "computed": if cache.is_some() { end.prompt_tokens - reused } else { 0 },
            "reason": cache.map(|r| r.reason.name()),
        },
        "ttftMs": ttft,
        "tokensPerSecond": rate,
    })
}
