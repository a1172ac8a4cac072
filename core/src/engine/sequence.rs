//! One request: its tokens, the slots and pages that it holds while it runs, and their release.

use std::{collections::VecDeque, sync::Arc};

use super::{
    draft::Drafter,
    gauge::Gauge,
    line::{Line, cold_realm},
    plan::SeqId,
    verify::Trial,
};
use crate::{
    controls::{Constraint, Controls},
    sample::Sampling,
    state::{
        Cache, GRID, Realm, Report,
        cache::{Match, Wanted},
        prefix::{NONE, NodeId, Stateless},
    },
    step::TokenRef,
    tier::Tier,
};

/// A request as the caller submits it.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// The prompt, at least one token.
    pub prompt: Vec<u32>,
    /// Most tokens to generate, at least one.
    pub max_tokens: usize,
    /// The tenant. Different namespaces never share anything; the empty one is a namespace like any other.
    pub namespace: String,
    /// The [`Imported::origin`](super::Imported::origin) of a bundle with converted values that the prompt may begin with; empty
    /// for all others.
    pub origin: String,
    /// For whom it is computed: prompt tokens and room are divided equally between shares. Its name divides nothing else.
    pub share: String,
    /// Requests of a share are admitted in ascending order of this, equal ones by arrival.
    pub priority: i32,
    /// Positions in tokens where the system prompt and the chat messages end, in any order. They need not lie on the
    /// grid.
    pub boundaries: Vec<usize>,
    /// How tokens are chosen. The scheduler does not look at it.
    pub sampling: Sampling,
    /// Ids that end the text; the id itself is the last token. The scheduler does not look at them.
    pub stop_ids: Vec<u32>,
    /// Report the log probability of every token of the prompt but the first, and of this number of most likely tokens at its
    /// place. Nothing of the prompt is reused.
    pub prompt_logprobs: Option<u8>,
    /// Rules over the logits, and which log probabilities are reported. The scheduler does not look at them.
    pub controls: Controls,
    /// Says before each token which ones may come; its state goes with the request.
    pub constraint: Option<Box<dyn Constraint + Send>>,
    /// Guesses its tokens, where [`EngineOptions::speculate`](super::EngineOptions::speculate) lets requests draft; `None` takes
    /// [`Ngram`](super::Ngram), or the model's head. With a constraint, [`Constrained`](super::Constrained) asks it. A request with penalties,
    /// log probabilities, or rules but no constraint does not draft.
    pub drafter: Option<Box<dyn Drafter>>,
    /// Take the places of the ids that are sampled, from the first on, so that a benchmark knows an answer which a model with
    /// random weights would not repeat. The work stays the same.
    pub forced: Arc<[u32]>,
}

/// A captured state that is not in the tree yet: its node may not exist.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taken {
    pub position: usize,
    pub slot: u32,
    pub decode: bool,
}

/// Choices that are the same for all sequences of an engine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    /// The prefix cache is on.
    pub cache: bool,
    /// The model has recurrent state and the policy is the default: decode captures, the cap, states kept at the end.
    pub captures_all: bool,
    /// The model has recurrent state and the policy is one capture a prefill.
    pub one_capture: bool,
    pub has_slots: bool,
    pub has_pages: bool,
}

/// A request in the queue or in the batch. In the queue it holds nothing: `cur`, `trial`, `spare`, `pages`, `taken` and
/// `guard` are empty.
#[derive(Debug)]
pub(super) struct Sequence {
    pub id: SeqId,
    /// The prompt and all committed tokens.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    pub max_tokens: usize,
    /// Its own realm.
    pub home: Line,
    /// The realm of what lower tiers have converted, if they do.
    pub cold: Option<Line>,
    /// Its last admission chose that one.
    pub in_cold: bool,
    pub share: Arc<str>,
    pub priority: i32,
    /// The logits of all positions of the prompt are wanted, and it is not complete.
    pub scores: bool,
    pub boundaries: Vec<usize>,
    /// Lower tiers were looked up since it waits.
    pub looked: bool,
    /// What came from one: the tier, and the tokens from and to which it led.
    pub lifted: Option<(Tier, usize, usize)>,
    /// The lower tier that has more of it than was loaded, since computing was estimated to be faster.
    pub declined: Option<Tier>,
    /// The match of the first admission.
    pub report: Option<Report>,
    /// Sampled tokens that the host has not read.
    pub outstanding: usize,
    /// Positions computed so far by this request, or reused; not reset by a pre-emption.
    pub computed: usize,
    pub drafter: Option<Box<dyn Drafter>>,
    /// See [`Request::forced`].
    pub forced: Arc<[u32]>,
    pub gauge: Gauge,

    pub lane: u32,
    /// Positions whose computation is planned.
    pub done: usize,
    /// Whether the known tokens were computed once since admission: from then on the sequence takes one token per step.
    pub decoding: bool,
    /// Slot with the state at `done`, perhaps shared; 0 before the first row.
    pub cur: u32,
    /// Drafts after `done` that the host has not read the verdict on. Until then the sequence is not planned.
    pub trial: Option<Trial>,
    /// A slot of its own to write next.
    pub spare: Option<u32>,
    /// Lent to the rows of a step while it is planned.
    pub pages: Arc<Vec<u32>>,
    /// Captures to take in prefill, by position.
    pub wanted: Vec<Wanted>,
    pub taken: VecDeque<Taken>,
    /// Pages may enter the tree up to this position.
    pub enter_to: usize,
    /// Pages that the tree and `pages` share, counted from the first.
    pub entered: usize,
    /// The node of page `entered - 1`, or the root; [`NONE`] with the cache off.
    pub tip: NodeId,
    /// The guarded node: `tip` or, where the match went beyond the hit, below it.
    pub guard: NodeId,
    /// The newest decode capture: node and slot.
    pub decode_state: Option<(NodeId, u32)>,
}

impl Sequence {
    /// `cold` says what lower tiers do with states, if they convert them.
    pub fn new(id: SeqId, request: Request, cache: &Cache, cold: Option<&str>) -> Self {
        let realm = Realm { namespace: request.namespace, origin: request.origin };
        let cold = cold.map(|how| Line::new(cold_realm(&realm, how), cache));
        Self {
            id,
            prompt_len: request.prompt.len(),
            tokens: request.prompt,
            max_tokens: request.max_tokens,
            boundaries: request.boundaries,
            home: Line::new(realm, cache),
            cold,
            in_cold: false,
            looked: false,
            lifted: None,
            declined: None,
            share: request.share.into(),
            priority: request.priority,
            scores: request.prompt_logprobs.is_some(),
            report: None,
            outstanding: 0,
            computed: 0,
            drafter: request.drafter,
            forced: request.forced,
            gauge: Gauge::default(),
            lane: 0,
            done: 0,
            decoding: false,
            cur: 0,
            trial: None,
            spare: None,
            pages: Arc::default(),
            wanted: Vec::new(),
            taken: VecDeque::new(),
            enter_to: 0,
            entered: 0,
            tip: NONE,
            guard: NONE,
            decode_state: None,
        }
    }

    /// Tokens sampled so far, read or not.
    pub fn outputs(&self) -> usize {
        self.tokens.len() - self.prompt_len + self.outstanding
    }

    /// The token at a position that is not committed.
    pub fn unread(&self, position: usize) -> TokenRef {
        self.forced.get(position - self.prompt_len).map_or(TokenRef::FromDevice(self.lane), |&id| TokenRef::Known(id))
    }

    /// Whole pages of the known tokens that a match may use: at least one token is left to compute.
    pub fn matchable_pages(&self) -> usize {
        (self.tokens.len() - 1) / GRID
    }

    /// Where its prefixes are.
    pub fn line(&self) -> &Line {
        self.cold.as_ref().filter(|_| self.in_cold).unwrap_or(&self.home)
    }

    /// Computes the names of the first `pages` pages, wherever it may be matched.
    pub fn extend_hashes(&mut self, pages: usize) {
        for line in std::iter::once(&mut self.home).chain(&mut self.cold) {
            line.extend(&self.tokens, pages);
        }
    }

    /// How much of its first `pages` pages, whose names are computed, the tree has in its own realm and in that of what lower tiers
    /// have converted.
    pub fn find(&self, cache: &Cache, pages: usize, step: u64) -> (Match, Option<Match>) {
        let find = |line: &Line| line.find(cache, &self.tokens, pages, step);
        (find(&self.home), self.cold.as_ref().map(find))
    }

    /// Whether the rest of this prefill will leave a state on the path of `later`: after the `hit` pages that the tree can give
    /// now, and within the `pages` that `later` may match.
    pub fn will_capture(&self, later: &Self, hit: usize, pages: usize) -> bool {
        let ahead = |w: &&Wanted| w.take && w.position > self.done && (hit + 1..=pages).contains(&(w.position / GRID));
        self.wanted.iter().rev().filter(ahead).any(|w| {
            let last = w.position / GRID - 1;
            let name = self.line().hash(last);
            later.home.hash(last) == name || later.cold.as_ref().is_some_and(|cold| cold.hash(last) == name)
        })
    }

    /// Brings the tree up to date with the tokens known and computed: enters whole pages of committed tokens, uses the tree's
    /// page instead of its own where the tree has one already, and attaches the captures of those positions. Pages given up
    /// in exchange are pushed to `swapped`: a row that is planned already may still write them.
    pub fn settle(&mut self, cache: &mut Cache, rules: Rules, step: u64, swapped: &mut Vec<u32>) {
        if !rules.cache {
            return;
        }
        let full = self.tokens.len().min(self.done) / GRID;
        if self.entered < full {
            self.extend_hashes(full);
        }
        while self.entered < full {
            let i = self.entered;
            let (hash, tokens) = (self.line().hash(i), &self.tokens[i * GRID..(i + 1) * GRID]);
            let own = if rules.has_pages { self.pages[i] } else { 0 };
            let node = match cache.tree().child(self.tip, hash, tokens) {
                Some(node) => {
                    let page = cache.tree()[node].page;
                    if page != own {
                        cache.hold_page(page);
                        swapped.push(own);
                        Arc::make_mut(&mut self.pages)[i] = page;
                    }
                    node
                }
                None if (i + 1) * GRID <= self.enter_to => match cache.enter(self.tip, hash, tokens, own, step) {
                    Some(node) => node,
                    None => break,
                },
                None => break,
            };
            self.entered += 1;
            self.tip = node;
            if cache.tree()[self.guard].depth < cache.tree()[node].depth {
                cache.guard_child(node);
                self.guard = node;
            }
            let position = self.entered * GRID;
            if self.wanted.iter().any(|w| w.position == position && !w.take) {
                cache.mark_not_taken(node);
            }
            while let Some(taken) = self.taken.pop_front_if(|t| t.position == position) {
                self.attach(cache, taken.slot, taken.decode, step);
            }
        }
        // Without room for the node there is no place for its state.
        while let Some(taken) = self.taken.pop_front_if(|t| t.position <= full * GRID) {
            cache.release_slot(taken.slot);
        }
    }

    /// Releases everything. A state at a grid point whose page is in the tree stays in the tree: that costs no slot.
    pub fn release(&mut self, cache: &mut Cache, rules: Rules, step: u64) {
        if self.leaves_state(cache, rules) {
            let leaving = self.leaving(cache);
            cache.make_room_on_path(self.tip, leaving);
            self.attach(cache, self.cur, true, step);
            self.cur = 0;
        }
        let tried = self.trial.take().into_iter().flat_map(|trial| trial.slots);
        for slot in self.taken.drain(..).map(|t| t.slot).chain(tried).chain(self.spare.take()).chain([self.cur]) {
            cache.release_slot(slot);
        }
        for &page in std::mem::take(&mut self.pages).iter() {
            cache.release_page(page);
        }
        if self.guard != NONE {
            cache.unguard(self.guard);
        }
        (self.cur, self.done, self.entered, self.decoding) = (0, 0, 0, false);
        self.looked = false;
        // Its drafts would follow a row that they were not made for.
        self.drafter.as_mut().and_then(|drafter| drafter.head(&self.tokens)).into_iter().for_each(Vec::clear);
        (self.tip, self.guard, self.decode_state) = (NONE, NONE, None);
        self.wanted.clear();
    }

    /// The previous decode capture, if a newer one replaces it: no request has used it, and no other path continues
    /// from it.
    pub fn leaving(&self, cache: &Cache) -> Option<NodeId> {
        let (node, slot) = self.decode_state?;
        let found = &cache.tree()[node];
        (found.slot == slot && found.children <= 1 && !found.hit).then_some(node)
    }

    fn leaves_state(&self, cache: &Cache, rules: Rules) -> bool {
        rules.cache
            && rules.captures_all
            && self.cur != 0
            && self.entered > 0
            && self.done == self.entered * GRID
            && cache.tree()[self.tip].slot == 0
            && cache.slots().holders(self.cur) == 1
    }

    /// Gives the tree one hold of `slot` as the state at `tip`, unless that has one.
    fn attach(&mut self, cache: &mut Cache, slot: u32, decode: bool, step: u64) {
        if cache.tree()[self.tip].slot != 0 {
            cache.release_slot(slot);
            return;
        }
        cache.attach(self.tip, slot, step);
        if decode {
            if let Some(node) = self.leaving(cache) {
                cache.drop_state(node, Stateless::Policy);
            }
            self.decode_state = Some((self.tip, slot));
        }
    }
}
