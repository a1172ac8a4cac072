//! The prefix tree: one node per 64 tokens under a parent, one root per realm.
//!
//! A node holds a KV page (0 in a model without attention) and sometimes a slot, the state at its end. The tree only
//! keeps the numbers; [`Cache`](super::Cache) owns the pools and counts the holders.
//!
//! A running sequence **guards** the deepest node that it matched or entered, which counts on every node from there to
//! the root. `guards == 0` therefore means that no running sequence needs the node or anything below it, and the
//! number of unguarded nodes is the number of pages that eviction can free.
//!
//! Two orders, both kept exactly, so that eviction takes the first entry and never looks for one: `states` are the slots
//! that only the tree holds, by last use; `leaves` are the nodes without child and guard, and with no other holder of
//! their page or slot, by last use of them or of removed nodes below.

use std::collections::{BTreeSet, HashMap};

use super::{PrefixHash, PrefixKey, Realm, pool::Pool};

/// Index of a node. Reused after the node is removed.
pub type NodeId = u32;

/// No node.
pub const NONE: NodeId = NodeId::MAX;

/// Why a node has no state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stateless {
    /// No capture was wanted here, or no slot was free.
    Never,
    /// It had one that was dropped for lack of room.
    Evicted,
    /// It had one that the policy dropped, or the policy did not take one.
    Policy,
}

/// One page of a path.
#[derive(Debug)]
pub struct Node {
    /// Name of the prefix that ends here.
    pub hash: PrefixHash,
    /// Its name for lower tiers; `None` if there are none.
    pub key: Option<PrefixKey>,
    /// The root above it; itself for a root.
    pub root: NodeId,
    /// [`NONE`] for a root.
    pub parent: NodeId,
    /// Pages from the root to here, this one included.
    pub depth: u32,
    /// The 64 tokens; empty for a root.
    pub tokens: Box<[u32]>,
    /// KV page, 0 if the model has none.
    pub page: u32,
    /// State at the end, 0 if there is none.
    pub slot: u32,
    /// Why `slot` is 0.
    pub stateless: Stateless,
    /// Nodes below.
    pub children: u32,
    /// Running sequences whose guarded node is this one or lies below it.
    pub guards: u32,
    /// Whether a request was continued from the state.
    pub hit: bool,
    /// Number of the step that computes the page or the state: not to be read by another row of that step.
    pub step: u64,
    used: u64,
    state_used: u64,
    alive: bool,
}

impl Node {
    /// When its page or state was last used: larger is later.
    pub fn last_use(&self) -> u64 {
        self.used.max(self.state_used)
    }
}

/// Nodes, their names and the two orders of eviction.
#[derive(Debug, Default)]
pub struct Tree {
    nodes: Vec<Node>,
    free: Vec<NodeId>,
    by_hash: HashMap<PrefixHash, NodeId>,
    roots: HashMap<Realm, NodeId>,
    /// Realm of each root.
    names: HashMap<NodeId, Realm>,
    states: BTreeSet<(u64, NodeId)>,
    leaves: BTreeSet<(u64, NodeId)>,
    guarded: usize,
    with_state: usize,
    clock: u64,
}

impl std::ops::Index<NodeId> for Tree {
    type Output = Node;

    fn index(&self, id: NodeId) -> &Node {
        &self.nodes[id as usize]
    }
}

impl std::ops::IndexMut<NodeId> for Tree {
    fn index_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id as usize]
    }
}

impl Tree {
    /// Nodes, roots not counted.
    pub fn len(&self) -> usize {
        self.by_hash.len()
    }

    /// Whether there is no page in the tree.
    pub fn is_empty(&self) -> bool {
        self.by_hash.is_empty()
    }

    /// Nodes with a slot.
    pub fn with_state(&self) -> usize {
        self.with_state
    }

    /// Nodes that no running sequence guards: all of them can be evicted, leaf by leaf.
    pub fn unguarded(&self) -> usize {
        self.len() - self.guarded
    }

    /// Slots that only the tree holds.
    pub fn idle_states(&self) -> usize {
        self.states.len()
    }

    /// Leaves that can be evicted.
    pub fn idle_leaves(&self) -> usize {
        self.leaves.len()
    }

    /// Whether `id` is still a node.
    pub fn is_alive(&self, id: NodeId) -> bool {
        self[id].alive
    }

    /// The root of `realm`, if it has any node.
    pub fn find_root(&self, realm: &Realm) -> Option<NodeId> {
        self.roots.get(realm).copied()
    }

    /// The root of `realm`. The next change removes a root without guard and without child.
    pub fn root(&mut self, realm: &Realm, hash: PrefixHash, key: Option<PrefixKey>) -> NodeId {
        if let Some(root) = self.find_root(realm) {
            return root;
        }
        let root = self.add(hash, key, NONE, Box::default(), 0);
        self.roots.insert(realm.clone(), root);
        self.names.insert(root, realm.clone());
        root
    }

    /// The child of `parent` with this name and these tokens.
    pub fn child(&self, parent: NodeId, hash: PrefixHash, tokens: &[u32]) -> Option<NodeId> {
        let &id = self.by_hash.get(&hash)?;
        (self[id].parent == parent && *self[id].tokens == *tokens).then_some(id)
    }

    /// Adds a page under `parent`. `None` if a node with other tokens has this name, which 128 bits make unlikely.
    pub fn insert(&mut self, parent: NodeId, hash: PrefixHash, tokens: &[u32], page: u32) -> Option<NodeId> {
        if self.by_hash.contains_key(&hash) {
            return None;
        }
        let key = self[parent].key.map(|key| key.child(tokens));
        let id = self.add(hash, key, parent, tokens.into(), page);
        self.by_hash.insert(hash, id);
        self[parent].children += 1;
        let key = (self[parent].used, parent);
        self.leaves.remove(&key);
        Some(id)
    }

    /// Removes a leaf, whose page and slot the caller releases, and returns its parent.
    pub fn remove(&mut self, id: NodeId) -> NodeId {
        assert!(self[id].children == 0 && self[id].guards == 0, "removing a node in use");
        let (parent, used, hash) = (self[id].parent, self[id].used, self[id].hash);
        self.leaves.remove(&(used, id));
        self.states.remove(&(self[id].state_used, id));
        self.with_state -= usize::from(self[id].slot != 0);
        self[id].alive = false;
        self.free.push(id);
        if parent == NONE {
            if let Some(name) = self.names.remove(&id) {
                self.roots.remove(&name);
            }
        } else {
            self.by_hash.remove(&hash);
            self[parent].children -= 1;
            // The whole path was in use whenever its end was. So its nodes are evicted from the end on, before paths
            // used later.
            // `parent` had a child, so it is in no order and its key may change.
            self[parent].used = self[parent].used.max(used);
        }
        parent
    }

    /// Marks the node as used now.
    pub fn touch(&mut self, id: NodeId) {
        let now = self.tick();
        let was_leaf = self.leaves.remove(&(self[id].used, id));
        self[id].used = now;
        if was_leaf {
            self.leaves.insert((now, id));
        }
    }

    /// Marks the node's state as used now.
    pub fn touch_state(&mut self, id: NodeId) {
        let now = self.tick();
        let was_idle = self.states.remove(&(self[id].state_used, id));
        self[id].state_used = now;
        if was_idle {
            self.states.insert((now, id));
        }
    }

    /// Sets or clears (0) the node's slot; `stateless` says why there is none.
    pub fn set_slot(&mut self, id: NodeId, slot: u32, stateless: Stateless) {
        self.states.remove(&(self[id].state_used, id));
        self.with_state -= usize::from(self[id].slot != 0);
        self.with_state += usize::from(slot != 0);
        let now = self.tick();
        let node = &mut self[id];
        (node.slot, node.stateless, node.hit, node.state_used) = (slot, stateless, false, now);
    }

    /// Puts the node into the orders it belongs to, after a change of its children, guards or holders.
    pub fn refresh(&mut self, id: NodeId, slots: &Pool, pages: &Pool) {
        let node = &self[id];
        let idle = |pool: &Pool, held: u32| held == 0 || pool.holders(held) == 1;
        let state = node.slot != 0 && idle(slots, node.slot);
        let leaf = node.parent != NONE
            && node.children == 0
            && node.guards == 0
            && idle(slots, node.slot)
            && idle(pages, node.page);
        let (state_key, leaf_key) = ((node.state_used, id), (node.used, id));
        if state {
            self.states.insert(state_key);
        } else {
            self.states.remove(&state_key);
        }
        if leaf {
            self.leaves.insert(leaf_key);
        } else {
            self.leaves.remove(&leaf_key);
        }
    }

    /// The node whose state was used least recently, among those that only the tree holds.
    pub fn oldest_state(&self) -> Option<NodeId> {
        self.states.first().map(|&(_, id)| id)
    }

    /// The leaf that was used least recently.
    pub fn oldest_leaf(&self) -> Option<NodeId> {
        self.leaves.first().map(|&(_, id)| id)
    }

    /// One more sequence needs `id` and all its ancestors.
    pub fn guard(&mut self, id: NodeId) {
        let mut at = id;
        while at != NONE {
            self.guard_child(at);
            at = self[at].parent;
        }
    }

    /// The sequence that guards the parent of `id` guards `id` from now on.
    pub fn guard_child(&mut self, id: NodeId) {
        self.leaves.remove(&(self[id].used, id));
        let node = &mut self[id];
        node.guards += 1;
        let newly = node.guards == 1 && node.parent != NONE;
        self.guarded += usize::from(newly);
    }

    /// Takes back one [`guard`](Self::guard) of `id`. The caller refreshes `id`.
    pub fn unguard(&mut self, id: NodeId) {
        let mut at = id;
        while at != NONE {
            let node = &mut self[at];
            node.guards -= 1;
            let freed = node.guards == 0 && node.parent != NONE;
            at = node.parent;
            self.guarded -= usize::from(freed);
        }
    }

    /// All nodes, roots included, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        self.nodes.iter().enumerate().filter(|(_, n)| n.alive).map(|(i, n)| (i as NodeId, n))
    }

    fn add(
        &mut self,
        hash: PrefixHash,
        key: Option<PrefixKey>,
        parent: NodeId,
        tokens: Box<[u32]>,
        page: u32,
    ) -> NodeId {
        let id = self.free.pop().unwrap_or(self.nodes.len() as NodeId);
        let (depth, root) = if parent == NONE { (0, id) } else { (self[parent].depth + 1, self[parent].root) };
        let used = self.tick();
        let node = Node {
            hash,
            key,
            root,
            parent,
            depth,
            tokens,
            page,
            slot: 0,
            stateless: Stateless::Never,
            children: 0,
            guards: 0,
            hit: false,
            step: 0,
            used,
            state_used: used,
            alive: true,
        };
        match self.nodes.get_mut(id as usize) {
            Some(free) => *free = node,
            None => self.nodes.push(node),
        }
        id
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }
}
