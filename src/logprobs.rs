//! Log probabilities of an answer's tokens as JSON: in our own form and in the two of OpenAI.

#[cfg(feature = "serve")]
use selkie_core::controls::Logprobs;
use selkie_core::session::{Text, Token};
use serde_json::{Map, Value, json};

/// A list with the id of each token, its log probability, and the most likely ones at its place. `None` if the request asked
/// for none.
pub fn own(tokens: &[Token]) -> Option<Value> {
    let entry = |token: &Token| {
        let top: Vec<Value> = token.top.iter().map(|&(id, lp)| json!({ "id": id, "logprob": number(lp) })).collect();
        Some(json!({ "id": token.id, "logprob": number(token.logprob?), "top": top }))
    };
    let list: Vec<Value> = tokens.iter().filter_map(entry).collect();
    (!list.is_empty()).then(|| list.into())
}

/// The `logprobs` of a choice of a chat.
pub fn chat(tokens: &[Token], text: &Text) -> Option<Value> {
    let entry = |id: u32, lp: f32| {
        let bytes = text.token_bytes(id);
        json!({ "token": String::from_utf8_lossy(bytes), "logprob": number(lp), "bytes": bytes })
    };
    let entries = tokens.iter().filter_map(|token| {
        let mut value = entry(token.id, token.logprob?);
        value["top_logprobs"] = token.top.iter().map(|&(id, lp)| entry(id, lp)).collect();
        Some(value)
    });
    let content: Vec<Value> = entries.collect();
    (!content.is_empty()).then(|| json!({ "content": content, "refusal": null }))
}

/// The `logprobs` of a choice of a text completion. A token without one is the first of its text. As in vLLM, the sampled token is one of the `top_logprobs`. Offsets are counted
/// in characters of the tokens' texts from `at` on, which is moved to their end.
pub fn completion(tokens: &[Token], text: &Text, at: &mut usize) -> Option<Value> {
    let name = |id: u32| String::from_utf8_lossy(text.token_bytes(id)).into_owned();
    let (mut names, mut values, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
    if tokens.iter().all(|token| token.logprob.is_none()) {
        return None;
    }
    for token in tokens {
        let own = token.logprob.map(|own| (token.id, own));
        let all = token.top.iter().copied().chain(own);
        let mut top = Map::new();
        for (id, lp) in all {
            // Different tokens may have one text; the most likely one stays.
            top.entry(name(id)).or_insert_with(|| number(lp));
        }
        names.push(name(token.id));
        values.push(own.map(|(_, own)| number(own)));
        tops.push(own.map(|_| top));
        offsets.push(*at);
        *at += names.last().map_or(0, |name| name.chars().count());
    }
    Some(json!({ "tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets }))
}

/// vLLM's `prompt_logprobs`: nothing for the first token, then for each place the token of the prompt and the most likely ones by id.
#[cfg(feature = "serve")]
pub fn prompt(ids: &[u32], scored: &[Logprobs], text: &Text) -> Value {
    let entry = |id: u32, lp: f32, rank: Option<usize>| {
        let decoded = String::from_utf8_lossy(text.token_bytes(id)).into_owned();
        (id.to_string(), json!({ "logprob": number(lp), "rank": rank, "decoded_token": decoded }))
    };
    let place = |(id, scored): (&u32, &Logprobs)| -> Value {
        let top = scored.top.iter().enumerate().map(|(i, &(id, lp))| entry(id, lp, Some(i + 1)));
        let own = scored.top.iter().all(|(other, _)| other != id).then(|| entry(*id, scored.chosen, None));
        top.chain(own).collect::<Map<_, _>>().into()
    };
    [Value::Null].into_iter().chain(ids.iter().skip(1).zip(scored).map(place)).collect()
}

/// Minus infinity, which JSON does not have, becomes -9999, as in vLLM.
fn number(lp: f32) -> Value {
    lp.max(-9999.0).into()
}
