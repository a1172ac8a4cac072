//! The pools and the tree together: match, enter, capture, evict.
//!
//! Two pools, two orders. Short of slots, the least recently used state that only the tree holds is dropped and its
//! node stays. Short of pages, the least recently used leaf goes, with its slot. Slots and pages that a running sequence
//! needs are held or guarded and therefore in neither order.

use std::collections::HashMap;

use super::{
    CacheEvent, Limits, Pool, PrefixHash, PrefixKey, Realm, Reason, StateShape,
    prefix::{NONE, NodeId, Stateless, Tree},
    recent::Recent,
};

/// How many removed nodes are remembered for the reason `evicted`.
const REMEMBERED: usize = 1 << 14;

/// The part of a prompt that is in the tree.
#[derive(Debug)]
pub struct Match {
    /// The matched nodes, from the first page on.
    pub nodes: Vec<NodeId>,
    /// How many of them lie before or at the deepest one that a request can continue from.
    pub hit: usize,
    /// Why `hit` is not more.
    pub reason: Reason,
    /// Whether the step that is being planned computes a matched page or state: the next step can use it.
    pub pending: bool,
}

/// A state that a prefill wants to leave in the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Position in tokens, a multiple of 64.
    pub position: usize,
    /// The prompt leaves a known path here.
    pub branch: bool,
    /// False: the policy or the cap decided against it.
    pub take: bool,
}

/// Counts of states and nodes lost for lack of room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evictions {
    /// States dropped, those of removed leaves included.
    pub slots: u64,
    /// Nodes removed.
    pub nodes: u64,
}

/// What the tree lost for lack of room. Slot and page keep their values until the next step is enqueued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evicted {
    /// Name of the prefix for lower tiers.
    pub key: PrefixKey,
    /// Its name in the tree, and that of its root.
    pub hash: PrefixHash,
    /// The root's.
    pub root: PrefixHash,
    /// The page at its end, 0 if that stays or there is none.
    pub page: u32,
    /// The state at its end, 0 if there is none.
    pub slot: u32,
}

/// Slots, pages and the prefix tree of one model.
#[derive(Debug)]
pub struct Cache {
    has_slots: bool,
    has_pages: bool,
    path_cap: usize,
    max_nodes: usize,
    /// Slots and pages that stay free as long as others can be evicted.
    reserved: (usize, usize),
    fingerprint: Vec<u8>,
    slots: Pool,
    pages: Pool,
    tree: Tree,
    /// The node that keeps each slot, or [`NONE`].
    node_of_slot: Vec<NodeId>,
    recent: Recent,
    events: Option<Vec<CacheEvent>>,
    evictions: Evictions,
    /// Names the model for lower tiers, if there are some.
    identity: Option<Vec<u8>>,
    evicted: Vec<Evicted>,
}

impl Cache {
    /// Empty pools and an empty tree. `fingerprint` names the model and everything else its states depend on.
    pub fn new(shape: &StateShape, limits: &Limits, fingerprint: &[u8]) -> Self {
        let slots = if shape.has_slots() { limits.slots } else { 0 };
        let pages = if shape.has_pages() { limits.pages } else { 0 };
        let reserved = limits.reserved();
        Self {
            has_slots: shape.has_slots(),
            has_pages: shape.has_pages(),
            path_cap: limits.path_cap,
            max_nodes: if shape.has_pages() { usize::MAX } else { limits.max_nodes },
            reserved: (reserved.0.min(slots), reserved.1.min(pages)),
            fingerprint: fingerprint.into(),
            slots: Pool::new(slots),
            pages: Pool::new(pages),
            tree: Tree::default(),
            node_of_slot: vec![NONE; slots + 1],
            recent: Recent::new(REMEMBERED),
            events: None,
            evictions: Evictions::default(),
            identity: None,
            evicted: Vec::new(),
        }
    }

    /// The slots.
    pub fn slots(&self) -> &Pool {
        &self.slots
    }

    /// The pages.
    pub fn pages(&self) -> &Pool {
        &self.pages
    }

    /// The tree.
    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    /// Evictions so far.
    pub fn evictions(&self) -> Evictions {
        self.evictions
    }

    /// Name of the empty prefix of `realm`.
    pub fn root_hash(&self, realm: &Realm) -> PrefixHash {
        PrefixHash::root_of(&self.fingerprint, realm)
    }

    /// Collects what is evicted from here on, for lower tiers. `identity` names the model and everything else that its states
    /// depend on; the tree is empty.
    pub fn keep_evicted(&mut self, identity: Vec<u8>) {
        assert!(self.tree.is_empty(), "nodes of the tree have no names for lower tiers");
        self.identity = Some(identity);
    }

    /// What was evicted since the last call.
    pub fn take_evicted(&mut self) -> Vec<Evicted> {
        std::mem::take(&mut self.evicted)
    }

    /// Everything in the tree, as if it were evicted, in no order; it stays. Nothing without lower tiers.
    pub fn contents(&self) -> Vec<Evicted> {
        let values = self.tree.iter().filter(|(_, node)| node.page != 0 || node.slot != 0);
        values.filter_map(|(id, node)| self.lost(id, node.page, node.slot)).collect()
    }

    /// The page of a node, as if it were evicted; it stays. `None` without lower tiers.
    pub fn page(&self, id: NodeId) -> Option<Evicted> {
        self.lost(id, self.tree[id].page, 0)
    }

    /// Name of the empty prefix of `realm` for lower tiers, if there are some.
    pub fn root_key(&self, realm: &Realm) -> Option<PrefixKey> {
        self.identity.as_ref().map(|identity| PrefixKey::root(identity, realm))
    }

    /// Starts to collect events, or stops.
    pub fn subscribe(&mut self, on: bool) {
        self.events = on.then(Vec::new);
    }

    /// The events since the last call, oldest first.
    pub fn take_events(&mut self) -> Vec<CacheEvent> {
        self.events.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Adds an event of a lower tier.
    pub fn report(&mut self, event: CacheEvent) {
        if let Some(events) = &mut self.events {
            events.push(event);
        }
    }

    /// Walks `pages` (name and tokens of each) from the root of `realm`. `step` is the step being planned.
    pub fn find<'a>(&self, realm: &Realm, pages: impl Iterator<Item = (PrefixHash, &'a [u32])>, step: u64) -> Match {
        let mut found = Match { nodes: Vec::new(), hit: 0, reason: Reason::Full, pending: false };
        let mut at = self.tree.find_root(realm);
        let mut next = None;
        for (hash, tokens) in pages {
            next = Some(hash);
            let Some(child) = at.and_then(|parent| self.tree.child(parent, hash, tokens)) else { break };
            next = None;
            at = Some(child);
            found.nodes.push(child);
            let node = &self.tree[child];
            found.pending |= node.step == step;
            if !self.has_slots || node.slot != 0 {
                found.hit = found.nodes.len();
            }
        }
        let deepest = found.nodes.last().map(|&id| &self.tree[id]);
        let stateless = match deepest {
            Some(node) if found.hit < found.nodes.len() => Some(node.stateless),
            _ => None,
        };
        found.reason = match stateless {
            _ if stateless == Some(Stateless::Evicted) || next.is_some_and(|h| self.recent.contains(h)) => {
                Reason::Evicted
            }
            Some(Stateless::Policy) => Reason::Policy,
            Some(_) => Reason::NoState,
            None if next.is_none() => Reason::Full,
            None => Reason::FirstSight,
        };
        found
    }

    /// Pages available now: free ones, and those of nodes that are neither guarded nor on the matched path
    /// down to the hit.
    pub fn obtainable_pages(&self, found: &Match) -> usize {
        let wanted = found.nodes[..found.hit].iter().filter(|&&id| self.tree[id].guards == 0).count();
        self.pages.free() + self.tree.unguarded() - wanted
    }

    /// Takes `count` pages into `to`; false if there are not so many.
    pub fn take_pages(&mut self, count: usize, to: &mut Vec<u32>) -> bool {
        for _ in 0..count {
            let Some(page) = self.take_page() else { return false };
            to.push(page);
        }
        true
    }

    /// A page with one holder, the caller: a free one that is not reserved, that of the least recently used leaf, or any free one.
    pub fn take_page(&mut self) -> Option<u32> {
        while self.pages.free() <= self.reserved.1 && self.evict_leaf() {}
        self.pages.take()
    }

    /// A slot with one holder, the caller: a free one that is not reserved, that of the least recently used idle state, or any free
    /// one.
    pub fn take_slot(&mut self) -> Option<u32> {
        while self.slots.free() <= self.reserved.0 && self.evict_state() {}
        self.slots.take()
    }

    /// A slot with one holder, the caller, if one is free.
    pub fn take_free_slot(&mut self) -> Option<u32> {
        self.slots.take()
    }

    /// A page with one holder, the caller, if one is free.
    pub fn take_free_page(&mut self) -> Option<u32> {
        self.pages.take()
    }

    /// One more holder of `slot`.
    pub fn hold_slot(&mut self, slot: u32) {
        self.slots.hold(slot);
        self.refresh_slot(slot);
    }

    /// One holder of `slot` fewer.
    pub fn release_slot(&mut self, slot: u32) {
        self.slots.release(slot);
        self.refresh_slot(slot);
    }

    /// One more holder of `page`. The caller guards the page's node, if it has one.
    pub fn hold_page(&mut self, page: u32) {
        self.pages.hold(page);
    }

    /// One holder of `page` fewer. The caller still guards the page's node, if it has one.
    pub fn release_page(&mut self, page: u32) {
        self.pages.release(page);
    }

    /// The root of `realm`. The caller guards it before the next change.
    pub fn root(&mut self, realm: &Realm) -> NodeId {
        let hash = self.root_hash(realm);
        let key = self.root_key(realm);
        self.tree.root(realm, hash, key)
    }

    /// A running sequence needs `id` and all its ancestors.
    pub fn guard(&mut self, id: NodeId) {
        self.tree.guard(id);
    }

    /// A sequence that guards the parent of `id` guards `id` instead.
    pub fn guard_child(&mut self, id: NodeId) {
        self.tree.guard_child(id);
    }

    /// A running sequence no longer needs `id`.
    pub fn unguard(&mut self, id: NodeId) {
        self.tree.touch(id);
        self.tree.unguard(id);
        self.tree.refresh(id, &self.slots, &self.pages);
        self.prune(id, false);
    }

    /// A request continues from the hit: its state and the matched pages are used now.
    pub fn touch_match(&mut self, found: &Match) {
        for &id in &found.nodes {
            if self.tree.is_alive(id) {
                self.tree.touch(id);
            }
        }
        if found.hit > 0 {
            let id = found.nodes[found.hit - 1];
            self.tree.touch_state(id);
            self.tree[id].hit = true;
        }
    }

    /// Enters a page of committed tokens under `parent`; the tree becomes one more holder of `page`. `None` if a model
    /// without pages has reached its largest number of nodes and none of them can be evicted.
    pub fn enter(&mut self, parent: NodeId, hash: PrefixHash, tokens: &[u32], page: u32, step: u64) -> Option<NodeId> {
        if self.tree.len() >= self.max_nodes && !self.evict_leaf() {
            return None;
        }
        let id = self.tree.insert(parent, hash, tokens, page)?;
        self.tree[id].step = step;
        self.pages.hold(page);
        self.recent.remove(hash);
        self.report_stored(id);
        Some(id)
    }

    /// Gives the tree the caller's hold of `slot`, the state at the end of `id`, which has none yet.
    pub fn attach(&mut self, id: NodeId, slot: u32, step: u64) {
        assert!(self.tree[id].slot == 0 && self.node_of_slot[slot as usize] == NONE);
        self.tree.set_slot(id, slot, Stateless::Never);
        self.tree[id].step = step;
        self.node_of_slot[slot as usize] = id;
        self.tree.refresh(id, &self.slots, &self.pages);
        self.report_stored(id);
    }

    /// Takes the state from a node. The node stays, unless it has neither page nor child.
    pub fn drop_state(&mut self, id: NodeId, why: Stateless) {
        let slot = self.tree[id].slot;
        if why == Stateless::Evicted {
            self.keep(id, 0, slot);
        }
        self.tree.set_slot(id, 0, why);
        self.node_of_slot[slot as usize] = NONE;
        self.slots.release(slot);
        self.evictions.slots += u64::from(why == Stateless::Evicted);
        self.tree.refresh(id, &self.slots, &self.pages);
        self.report_stored(id);
        self.prune(id, why == Stateless::Evicted);
    }

    /// Notes that a node has no state because the policy did not take one.
    pub fn mark_not_taken(&mut self, id: NodeId) {
        let node = &mut self.tree[id];
        if node.slot == 0 && node.stateless == Stateless::Never {
            node.stateless = Stateless::Policy;
        }
    }

    /// Applies the cap per path to the states from the root to `tip` and the `wanted` ones below it. The shallowest
    /// state whose node has at most one child is dropped, but never the first of the path, a branch, the newest, or one
    /// in use. If none can be dropped, the path keeps more than the cap: the next turn of a chat needs the newest
    /// state, and eviction bounds the pool anyway. `leaving` is a state that its owner drops, so it does not count.
    pub fn cap_path(&mut self, tip: NodeId, wanted: &mut [Wanted], leaving: Option<NodeId>) {
        let mut held = self.states_on_path(tip, leaving);
        let newest = wanted.iter().rposition(|w| w.take);
        loop {
            let taken = wanted.iter().filter(|w| w.take).count();
            if held.len() + taken <= self.path_cap {
                break;
            }
            if self.drop_one(&mut held) {
                continue;
            }
            let first = if held.is_empty() { wanted.iter().position(|w| w.take) } else { None };
            let may_skip = |i: usize, w: &Wanted| w.take && !w.branch && Some(i) != newest && Some(i) != first;
            let Some(i) = (0..wanted.len()).find(|&i| may_skip(i, &wanted[i])) else { break };
            wanted[i].take = false;
        }
    }

    /// Makes room for one more state below `tip`, by the rule of [`cap_path`](Self::cap_path). The caller keeps that state even if
    /// no other may go.
    pub fn make_room_on_path(&mut self, tip: NodeId, leaving: Option<NodeId>) {
        let mut held = self.states_on_path(tip, leaving);
        while held.len() >= self.path_cap && self.drop_one(&mut held) {}
    }

    /// Nodes with a state from the root to `tip`, without `leaving`.
    fn states_on_path(&self, tip: NodeId, leaving: Option<NodeId>) -> Vec<NodeId> {
        let mut held = Vec::new();
        let mut at = tip;
        while at != NONE {
            if self.tree[at].slot != 0 && Some(at) != leaving {
                held.push(at);
            }
            at = self.tree[at].parent;
        }
        held.reverse();
        held
    }

    /// Drops the shallowest state that nothing else uses, except for the path's first. False if there is none.
    fn drop_one(&mut self, held: &mut Vec<NodeId>) -> bool {
        let may_go = |&id: &NodeId| self.tree[id].children <= 1 && self.slots.holders(self.tree[id].slot) == 1;
        let Some(i) = (1..held.len()).find(|&i| may_go(&held[i])) else { return false };
        self.drop_state(held.remove(i), Stateless::Policy);
        true
    }

    /// Removes all nodes. Running sequences keep what they hold, but guard nothing from here on.
    pub fn clear(&mut self) {
        let held: Vec<_> = self.tree.iter().map(|(_, node)| (node.slot, node.page)).collect();
        self.tree = Tree::default();
        for (slot, page) in held {
            self.node_of_slot[slot as usize] = NONE;
            self.slots.release(slot);
            self.pages.release(page);
        }
        self.recent.clear();
        self.evicted.clear();
        if let Some(events) = &mut self.events {
            events.push(CacheEvent::Cleared);
        }
    }

    /// Compares every count with a recount, for tests. `slots`, `pages` and `guards` are those that the sequences hold.
    pub fn audit(&self, slots: &[u32], pages: &[u32], guards: &[NodeId]) -> Result<(), String> {
        let recount = |held: &[u32], of_tree: &dyn Fn(NodeId) -> u32| {
            let mut counts: HashMap<u32, u32> = HashMap::new();
            let tree = self.tree.iter().map(|(id, _)| of_tree(id));
            for id in held.iter().copied().chain(tree).filter(|&id| id != 0) {
                *counts.entry(id).or_default() += 1;
            }
            counts
        };
        for (name, pool, counts) in [
            ("slot", &self.slots, recount(slots, &|id| self.tree[id].slot)),
            ("page", &self.pages, recount(pages, &|id| self.tree[id].page)),
        ] {
            for id in 1..=pool.capacity() as u32 {
                let (said, found) = (pool.holders(id), counts.get(&id).copied().unwrap_or(0));
                if said != found {
                    return Err(format!("{name} {id} counts {said} holders and has {found}"));
                }
            }
            if (1..=pool.capacity() as u32).filter(|&id| pool.holders(id) == 0).count() != pool.free() {
                return Err(format!("the free {name}s are miscounted"));
            }
        }
        let mut guarded: HashMap<NodeId, u32> = HashMap::new();
        for &guard in guards {
            let mut at = guard;
            while at != NONE {
                *guarded.entry(at).or_default() += 1;
                at = self.tree[at].parent;
            }
        }
        let mut below: HashMap<NodeId, u32> = HashMap::new();
        for (_, node) in self.tree.iter() {
            *below.entry(node.parent).or_default() += 1;
        }
        let (mut states, mut leaves, mut with_state, mut unguarded) = (0, 0, 0, 0);
        for (id, node) in self.tree.iter() {
            let children = below.get(&id).copied().unwrap_or(0);
            if node.children != children || node.guards != guarded.get(&id).copied().unwrap_or(0) {
                return Err(format!("node {id} miscounts its children or guards"));
            }
            if node.slot != 0 && self.node_of_slot[node.slot as usize] != id {
                return Err(format!("slot {} does not know its node {id}", node.slot));
            }
            let alone = |pool: &Pool, held| held == 0 || pool.holders(held) == 1;
            let (slot_idle, page_idle) = (alone(&self.slots, node.slot), alone(&self.pages, node.page));
            let is_root = node.parent == NONE;
            let unused = children == 0 && node.guards == 0;
            if unused && (is_root || (!self.has_pages && self.has_slots && node.slot == 0)) {
                return Err(format!("node {id} should have been pruned"));
            }
            states += usize::from(node.slot != 0 && slot_idle);
            leaves += usize::from(!is_root && unused && slot_idle && page_idle);
            with_state += usize::from(node.slot != 0);
            unguarded += usize::from(!is_root && node.guards == 0);
        }
        let tree = &self.tree;
        let said = (tree.idle_states(), tree.idle_leaves(), tree.with_state(), tree.unguarded());
        if said != (states, leaves, with_state, unguarded) {
            return Err(format!(
                "idle states, leaves, states, unguarded: {said:?} is {states} {leaves} {with_state} {unguarded}"
            ));
        }
        Ok(())
    }

    /// Frees as much as is reserved, if it can be evicted: drafts became the state or the page of a sequence.
    pub fn restore_reserved(&mut self) {
        while self.slots.free() < self.reserved.0 && self.evict_state() {}
        while self.pages.free() < self.reserved.1 && self.evict_leaf() {}
    }

    fn evict_state(&mut self) -> bool {
        let Some(node) = self.tree.oldest_state() else { return false };
        self.drop_state(node, Stateless::Evicted);
        true
    }

    fn evict_leaf(&mut self) -> bool {
        let Some(leaf) = self.tree.oldest_leaf() else { return false };
        let parent = self.remove(leaf, true);
        self.prune(parent, true);
        true
    }

    /// Removes useless nodes from `id` upwards: roots without a page, and, in a recurrent model without pages, leaves
    /// without a slot.
    fn prune(&mut self, id: NodeId, evicted: bool) {
        let mut at = id;
        while at != NONE && self.tree.is_alive(at) {
            let node = &self.tree[at];
            let empty = node.parent == NONE || (!self.has_pages && self.has_slots && node.slot == 0);
            if node.children > 0 || node.guards > 0 || !empty {
                break;
            }
            at = self.remove(at, evicted);
        }
    }

    /// Removes a leaf with its page and slot, and returns its parent.
    fn remove(&mut self, id: NodeId, evicted: bool) -> NodeId {
        let (slot, page, hash) = (self.tree[id].slot, self.tree[id].page, self.tree[id].hash);
        if evicted {
            self.keep(id, page, slot);
        }
        let parent = self.tree.remove(id);
        if slot != 0 {
            self.node_of_slot[slot as usize] = NONE;
        }
        self.slots.release(slot);
        self.pages.release(page);
        if parent != NONE {
            if evicted {
                self.evictions.nodes += 1;
                self.evictions.slots += u64::from(slot != 0);
                self.recent.add(hash);
            }
            if let Some(events) = &mut self.events {
                events.push(CacheEvent::Removed { hash });
            }
            self.tree.refresh(parent, &self.slots, &self.pages);
        }
        parent
    }

    /// Notes what lower tiers may keep of a node that loses it.
    fn keep(&mut self, id: NodeId, page: u32, slot: u32) {
        if page != 0 || slot != 0 {
            let lost = self.lost(id, page, slot);
            self.evicted.extend(lost);
        }
    }

    fn lost(&self, id: NodeId, page: u32, slot: u32) -> Option<Evicted> {
        let node = &self.tree[id];
        Some(Evicted { key: node.key?, hash: node.hash, root: self.tree[node.root].hash, page, slot })
    }

    fn refresh_slot(&mut self, slot: u32) {
        let node = self.node_of_slot[slot as usize];
        if node != NONE {
            self.tree.refresh(node, &self.slots, &self.pages);
        }
    }

    fn report_stored(&mut self, id: NodeId) {
        if let Some(events) = &mut self.events {
            let node = &self.tree[id];
            events.push(CacheEvent::Stored {
                hash: node.hash,
                parent: self.tree[node.parent].hash,
                tokens: node.tokens.clone(),
                has_state: !self.has_slots || node.slot != 0,
            });
        }
    }
}
