//! Slots and pages of a prefix that leaves or enters the tree without being computed.

use super::{line::cold_realm, plan::SeqId, schedule::Scheduler, sequence::Sequence};
use crate::{
    error::{Error, Result},
    state::{
        CacheEvent, GRID, PrefixHash, PrefixKey, Realm,
        cache::{Evicted, Match},
        prefix::NodeId,
    },
    tier::{Place, Tier},
};

/// The deepest prefix of some tokens that a request could be continued from.
#[derive(Debug, Default)]
pub(super) struct Path {
    /// Tokens, a multiple of [`GRID`]; 0: the tree has none.
    pub depth: usize,
    /// Its pages; empty for a model without attention.
    pub pages: Vec<u32>,
    /// Positions and slots of its states, ascending.
    pub states: Vec<(usize, u32)>,
}

/// How much of some tokens the prefix tree has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Coverage {
    /// Tokens whose pages it has, a multiple of [`GRID`].
    pub known: usize,
    /// Tokens from which a request could be continued.
    pub usable: usize,
}

/// Slots and pages that wait for their values. Nobody sees them before [`Scheduler::land`]; [`Scheduler::close_landing`] frees them.
#[derive(Debug)]
pub(super) struct Landing {
    pub realm: Realm,
    /// Of the whole path.
    hashes: Vec<PrefixHash>,
    tokens: Vec<u32>,
    /// Nodes of the path that exist, guarded down to the last of them or to the root.
    nodes: Vec<NodeId>,
    tip: NodeId,
    /// Of the nodes that do not exist yet; empty without attention.
    pages: Vec<u32>,
    /// Positions and slots of states that the tree has not.
    slots: Vec<(usize, u32)>,
    /// Slots of the path's own states, held so that the new ones do not evict them.
    held: Vec<u32>,
}

impl Landing {
    /// The page to write at this place of the path; `None` if the tree has one.
    pub fn page(&self, index: usize) -> Option<u32> {
        self.pages.get(index.checked_sub(self.nodes.len())?).copied()
    }

    /// Nodes of the path that the tree has.
    pub fn known(&self) -> usize {
        self.nodes.len()
    }

    /// The slot to write for this position.
    pub fn slot(&self, position: usize) -> Option<u32> {
        self.slots.iter().find(|(p, _)| *p == position).map(|(_, slot)| *slot)
    }

    /// States that it brings.
    pub fn states(&self) -> usize {
        self.slots.len()
    }

    /// Pages that it brings.
    pub fn pages(&self) -> usize {
        self.pages.len()
    }
}

/// What lower tiers may have for a request that waits.
#[derive(Debug)]
pub(super) struct Sought {
    /// The names of the prompt's pages that a match may use: those of its own realm, and those of the realm that converted values are
    /// brought into. Without such values there is one realm.
    pub keys: Vec<Vec<PrefixKey>>,
    /// How many of them the tree has in the realm that values are brought into.
    pub known: usize,
    /// How many of them a request can go on from now, in either realm.
    pub hit: usize,
    /// Pages that the tree has in its own realm, if values are brought into the other one.
    pub near: Vec<Evicted>,
}

impl Scheduler {
    /// Requests of each share that the next plan may admit, in order, as far as lower tiers were not looked up for them.
    pub(super) fn candidates(&self) -> Vec<Vec<SeqId>> {
        let mut shares = self.shares.next(self.free_lanes.len());
        for share in &mut shares {
            share.retain(|id| self.queue.get(id).is_some_and(|seq| !seq.looked && seq.outstanding == 0));
        }
        shares
    }

    /// Whether a request waits for its admission.
    pub(super) fn is_waiting(&self, id: SeqId) -> bool {
        self.queue.contains_key(&id)
    }

    /// What lower tiers may have for a request that waits; `None` if nothing could be used, or if it will wait for what is being
    /// computed.
    pub(super) fn seek(&mut self, id: SeqId) -> Option<Sought> {
        if !self.rules.cache {
            return None;
        }
        let seq = self.queue.get_mut(&id)?;
        let pages = seq.matchable_pages();
        seq.extend_hashes(pages);
        let (home, cold) = seq.find(&self.cache, pages, self.step + 1);
        let hit = cold.as_ref().map_or(0, |cold| cold.hit).max(home.hit);
        let waits = self.running.iter().any(|other| other.will_capture(seq, hit, pages));
        if waits || hit == pages {
            return None;
        }
        let mut keys = Vec::new();
        let Sequence { home: line, cold: other, tokens, .. } = seq;
        for (line, found) in [(Some(line), Some(&home)), (other.as_mut(), cold.as_ref())] {
            let (Some(line), Some(found)) = (line, found) else { continue };
            // Those of the tree's pages are known.
            line.adopt_keys(found.nodes.iter().map_while(|id| self.cache.tree()[*id].key));
            keys.push(line.keys(self.cache.root_key(&line.realm)?, tokens, pages).to_vec());
        }
        let near =
            if cold.is_some() { home.nodes.iter().filter_map(|id| self.cache.page(*id)).collect() } else { vec![] };
        Some(Sought { keys, known: cold.unwrap_or(home).nodes.len(), hit, near })
    }

    /// The place of the first `pages` pages of a request that waits, in its own realm or in that of converted values.
    pub(super) fn place(&self, id: SeqId, pages: usize, own: bool) -> Option<Place> {
        let seq = self.queue.get(&id)?;
        let line = if own { &seq.home } else { seq.cold.as_ref()? };
        Some(Place { hash: line.hash(pages - 1), root: line.root() })
    }

    /// Takes slots and pages for the first `pages` pages of a request that waits and the state at their end; `None` if there is no
    /// room now.
    pub(super) fn open_lift(&mut self, id: SeqId, pages: usize) -> Option<Landing> {
        let seq = self.queue.get(&id)?;
        let realm = seq.cold.as_ref().unwrap_or(&seq.home).realm.clone();
        let tokens = seq.tokens[..pages * GRID].to_vec();
        let states = if self.rules.has_slots { vec![pages * GRID] } else { Vec::new() };
        self.open_landing(realm, &tokens, &states).ok()
    }

    /// Lower tiers were looked up for a request; `lifted` says which one led from and to which token.
    pub(super) fn looked(&mut self, id: SeqId, lifted: Option<(Tier, usize, usize)>) {
        if let Some(seq) = self.queue.get_mut(&id) {
            (seq.looked, seq.lifted) = (true, lifted);
        }
    }

    /// Computing was estimated to be faster than loading what this tier has of a request.
    pub(super) fn declined(&mut self, id: SeqId, tier: Tier) {
        if let Some(seq) = self.queue.get_mut(&id) {
            seq.declined = Some(tier);
        }
    }

    /// Tells subscribers about the host tier.
    pub(super) fn report_host(&mut self, place: Place, stored: bool) {
        self.cache.report(CacheEvent::Host { hash: place.hash, root: place.root, stored });
    }

    /// How much of `tokens` the tree has for requests of this realm.
    pub fn coverage(&self, realm: &Realm, tokens: &[u32]) -> Coverage {
        let (found, _) = self.follow(realm, tokens);
        Coverage { known: found.nodes.len() * GRID, usable: found.hit * GRID }
    }

    /// The deepest prefix of `tokens` in the tree that a request of this realm could be continued from, with its deepest `states`
    /// states, and the origin of its values.
    pub(super) fn path(&self, realm: &Realm, tokens: &[u32], states: usize) -> (Path, String) {
        let cold = self.cold.as_ref().map(|how| cold_realm(realm, how));
        let (mut found, mut origin) = (self.follow(realm, tokens).0, &realm.origin);
        if let Some(cold) = &cold {
            let other = self.follow(cold, tokens).0;
            if other.hit > found.hit {
                (found, origin) = (other, &cold.origin);
            }
        }
        let tree = self.cache.tree();
        let nodes = &found.nodes[..found.hit];
        let pages = if self.rules.has_pages { nodes.iter().map(|id| tree[*id].page).collect() } else { Vec::new() };
        let all = nodes.iter().enumerate().map(|(i, id)| ((i + 1) * GRID, tree[*id].slot));
        let mut kept: Vec<_> = all.filter(|(_, slot)| *slot != 0).collect();
        kept.drain(..kept.len().saturating_sub(states));
        (Path { depth: found.hit * GRID, pages, states: kept }, origin.clone())
    }

    /// All pages that the tree has of `tokens` in this realm, without states: those that are being computed too.
    pub(super) fn known(&self, realm: &Realm, tokens: &[u32]) -> Path {
        let mut hash = self.cache.root_hash(realm);
        let pages = tokens.chunks_exact(GRID).map(|page| {
            hash = hash.child(page);
            (hash, page)
        });
        // Names are computed as far as they are found.
        let nodes = self.cache.find(realm, pages, self.step + 1).nodes;
        let tree = self.cache.tree();
        let pages = if self.rules.has_pages { nodes.iter().map(|id| tree[*id].page).collect() } else { Vec::new() };
        Path { depth: nodes.len() * GRID, pages, states: Vec::new() }
    }

    /// What the tree has of the whole pages of `tokens`, and the names of all of them.
    fn follow(&self, realm: &Realm, tokens: &[u32]) -> (Match, Vec<PrefixHash>) {
        let mut hash = self.cache.root_hash(realm);
        let pages = tokens.chunks_exact(GRID);
        let hashes = pages.clone().map(|page| {
            hash = hash.child(page);
            hash
        });
        let hashes: Vec<PrefixHash> = hashes.collect();
        (self.cache.find(realm, hashes.iter().copied().zip(pages), self.step + 1), hashes)
    }

    /// Takes pages for the blocks of `tokens`, which are whole, that the tree does not have, and slots for states at `positions`,
    /// the last of which is the end: as many as can be had, the deepest first, at least one.
    ///
    /// # Errors
    /// [`Error::BadRequest`] with the numbers if that is not possible; then nothing is held.
    pub(super) fn open_landing(&mut self, realm: Realm, tokens: &[u32], positions: &[usize]) -> Result<Landing> {
        if !self.rules.cache {
            return Err(Error::BadRequest("it can only be used with the prefix cache on".into()));
        }
        if tokens.len() > self.shape.context {
            let (tokens, context) = (tokens.len(), self.shape.context);
            return Err(Error::BadRequest(format!("its {tokens} tokens are more than the context of {context} holds")));
        }
        let (mut found, hashes) = self.follow(&realm, tokens);
        found.hit = found.nodes.len();
        let fresh = if self.rules.has_pages { hashes.len() - found.hit } else { 0 };
        let possible = self.cache.obtainable_pages(&found);
        if fresh > possible {
            return Err(Error::BadRequest(format!(
                "it needs {fresh} KV pages of {GRID} tokens, {possible} of {} can be had now; more memory for the cache holds it",
                self.limits.pages
            )));
        }
        let tip = found.nodes.last().copied().unwrap_or_else(|| self.cache.root(&realm));
        self.cache.guard(tip);
        let mut landing = Landing {
            realm,
            hashes,
            tokens: tokens.to_vec(),
            nodes: found.nodes,
            tip,
            pages: Vec::new(),
            slots: Vec::new(),
            held: Vec::new(),
        };
        let all = self.take_landing_slots(&mut landing, positions) && self.cache.take_pages(fresh, &mut landing.pages);
        if !all {
            self.close_landing(landing);
            return Err(Error::BadRequest(
                "there is no free slot or page for it now; try again when fewer requests run".into(),
            ));
        }
        Ok(landing)
    }

    /// False if not even the deepest state has a slot.
    fn take_landing_slots(&mut self, landing: &mut Landing, positions: &[usize]) -> bool {
        for id in &landing.nodes {
            let slot = self.cache.tree()[*id].slot;
            self.cache.hold_slot(slot);
            landing.held.push(slot);
        }
        let states = landing.held.iter().filter(|slot| **slot != 0).count();
        let has =
            |landing: &Landing, position: usize| landing.held.get(position / GRID - 1).is_some_and(|slot| *slot != 0);
        let most = self.limits.path_cap.saturating_sub(states).max(1);
        for &position in positions.iter().rev() {
            if has(landing, position) {
                continue;
            }
            if landing.slots.len() == most {
                break;
            }
            let Some(slot) = self.cache.take_slot() else { break };
            landing.slots.push((position, slot));
        }
        let deepest = positions.last().copied();
        deepest.is_none_or(|deepest| has(landing, deepest) || landing.slot(deepest).is_some())
    }

    /// Frees everything that a landing holds.
    pub(super) fn close_landing(&mut self, landing: Landing) {
        for slot in landing.slots.iter().map(|(_, slot)| *slot).chain(landing.held) {
            self.cache.release_slot(slot);
        }
        for page in landing.pages {
            self.cache.release_page(page);
        }
        self.cache.unguard(landing.tip);
    }

    /// Gives the tree a landing whose slots and pages are written. Returns the tokens that requests need not compute now: all of
    /// them, or fewer if the tree of a model without pages is full.
    pub(super) fn land(&mut self, mut landing: Landing) -> usize {
        let mut pages = std::mem::take(&mut landing.pages).into_iter();
        for i in landing.nodes.len()..landing.hashes.len() {
            let page = pages.next().unwrap_or(0);
            let tokens = &landing.tokens[i * GRID..(i + 1) * GRID];
            let node = self.cache.enter(landing.tip, landing.hashes[i], tokens, page, self.step);
            if let Some(node) = node {
                self.cache.guard_child(node);
                landing.nodes.push(node);
                landing.tip = node;
            }
            // The tree holds it now, or nobody does.
            self.cache.release_page(page);
            if node.is_none() {
                break;
            }
        }
        landing.pages = pages.collect();
        for (position, slot) in std::mem::take(&mut landing.slots) {
            match landing.nodes.get(position / GRID - 1) {
                Some(node) if self.cache.tree()[*node].slot == 0 => self.cache.attach(*node, slot, self.step),
                _ => self.cache.release_slot(slot),
            }
        }
        let ready = |node: &NodeId| !self.rules.has_slots || self.cache.tree()[*node].slot != 0;
        let deepest = landing.nodes.iter().rposition(ready).map_or(0, |i| (i + 1) * GRID);
        self.close_landing(landing);
        deepest
    }
}
