//! A loaded model and its prefix cache as JSON, for pages that draw them. `web/js/selkie.d.ts` documents the fields.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, HashMap},
};

use serde_json::{Value, json};

use super::Model;
use crate::{
    engine::AnyEngine,
    state::{
        GRID, Realm, Reason,
        prefix::{NONE, NodeId, Tree},
    },
};

/// Maximum nodes of the tree in a report.
const MOST_NODES: usize = 200;

/// Facts fixed at load.
pub fn info(model: &Model) -> Value {
    let (facts, text) = (model.facts(), model.text());
    let sizes = &facts.sizes;
    let sampling = text.generation().sampling(0);
    json!({
        "backend": facts.backend,
        "device": facts.device,
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

/// Counters, pools and the prefix tree, all of it or the part of one realm.
pub fn stats(engine: &dyn AnyEngine, only: Option<&Realm>) -> Value {
    let scheduler = engine.scheduler();
    let (stats, split) = (scheduler.stats(), engine.sizes().split);
    let (nodes, count) = tree(scheduler.tree(), engine.sizes().shape.slot_bytes > 0, only);
    let reasons: serde_json::Map<String, Value> =
        Reason::ALL.iter().map(|r| (r.name().to_owned(), stats.reason(*r).into())).collect();
    json!({
        "backend": engine.caps().backend,
        "device": engine.caps().device,
        "slots": { "total": split.slots, "used": scheduler.slots().used(), "cached": scheduler.cached_states() },
        "pages": {
            "total": split.pages,
            "used": scheduler.pages().used(),
            "cached": if split.pages == 0 { 0 } else { scheduler.cached_pages() },
        },
        "tree": nodes,
        "treeNodes": count,
        "requests": stats.reasons.iter().sum::<u64>(),
        "reusedTokens": stats.tokens_reused,
        "computedTokens": stats.tokens_prefilled,
        "generatedTokens": stats.tokens_generated,
        "reasons": reasons,
    })
}

/// The most recently used nodes with all their ancestors, parents first, and how many there are. Without recurrent layers (no
/// `slots`) a prompt can continue from any node.
fn tree(tree: &Tree, slots: bool, only: Option<&Realm>) -> (Vec<Value>, usize) {
    // A realm without a root has no nodes.
    let root = only.map(|realm| tree.find_root(realm).unwrap_or(NONE));
    let mut known = HashMap::new();
    let mut is_shown = |id: NodeId| root.is_none_or(|root| root_of(tree, id, &mut known) == root);
    let mut all: Vec<(NodeId, u64)> =
        tree.iter().filter(|(id, n)| n.parent != NONE && is_shown(*id)).map(|(id, n)| (id, n.last_use())).collect();
    let count = all.len();
    // Each of them becomes a part of the picture or ends it, so more are not needed. A large cache has very many.
    if count > MOST_NODES {
        all.select_nth_unstable_by_key(MOST_NODES, |(_, used)| Reverse(*used));
        all.truncate(MOST_NODES + 1);
    }
    all.sort_by_key(|(_, used)| Reverse(*used));
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
    (shown.iter().map(node).collect(), count)
}

/// The root above a node. `known` has those that were found before: paths share most of their nodes.
fn root_of(tree: &Tree, id: NodeId, known: &mut HashMap<NodeId, NodeId>) -> NodeId {
    let (mut at, mut path) = (id, Vec::new());
    let root = loop {
        match known.get(&at) {
            Some(root) => break *root,
            None if tree[at].parent == NONE => break at,
            None => path.push(at),
        }
        at = tree[at].parent;
    };
    known.extend(path.into_iter().map(|node| (node, root)));
    root
}
