//! The engine's reports as plain objects; `web/js/selkie.d.ts` documents them.

use selkie_core::{
    engine::{FinishReason, SeqId},
    session::{Completion, Update},
};
use serde_json::{Value, json};

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
    let converted = c.is_converted();
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
            "diskTokens": cache.map_or(0, |r| r.disk),
            "computed": if cache.is_some() { end.prompt_tokens - reused } else { 0 },
            "reason": cache.map(|r| r.reason.name()),
            "converted": converted,
        },
        "ttftMs": ttft,
        "tokensPerSecond": rate,
    })
}
