//! The tree as a subscriber knows it: the events alone must reproduce the scheduler's tree.

use std::collections::HashMap;

use selkie_core::{
    engine::Scheduler,
    state::{CacheEvent, PrefixHash, prefix::NONE},
};

/// A page as the events describe it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Page {
    parent: PrefixHash,
    tokens: Box<[u32]>,
    has_state: bool,
}

/// All pages that were stored and not removed.
#[derive(Debug, Default)]
pub struct Mirror {
    pages: HashMap<PrefixHash, Page>,
    log: Vec<CacheEvent>,
}

impl Mirror {
    /// Applies the events since the last call, and compares the result with the tree.
    pub fn follow(&mut self, scheduler: &mut Scheduler, has_slots: bool) {
        for event in scheduler.take_events() {
            self.log.push(event.clone());
            self.apply(event);
        }
        let tree = scheduler.tree();
        let nodes = tree.iter().filter(|(_, node)| node.parent != NONE);
        let pages: HashMap<PrefixHash, Page> = nodes
            .map(|(_, node)| {
                let has_state = !has_slots || node.slot != 0;
                (node.hash, Page { parent: tree[node.parent].hash, tokens: node.tokens.clone(), has_state })
            })
            .collect();
        assert_eq!(self.pages, pages, "the events do not give the tree");
    }

    /// The events since the last call, oldest first.
    pub fn take_log(&mut self) -> Vec<CacheEvent> {
        std::mem::take(&mut self.log)
    }

    fn apply(&mut self, event: CacheEvent) {
        match event {
            CacheEvent::Stored { hash, parent, tokens, has_state } => {
                assert_eq!(hash, parent.child(&tokens), "a page is stored under another name than its own");
                self.pages.insert(hash, Page { parent, tokens, has_state });
            }
            CacheEvent::Removed { hash } => {
                assert!(self.pages.remove(&hash).is_some(), "a page is removed that was not there");
                assert!(self.pages.values().all(|page| page.parent != hash), "a page is removed before those below it");
            }
            CacheEvent::Host { .. } => panic!("the scheduler alone has no lower tier"),
            CacheEvent::Cleared => self.pages.clear(),
        }
    }
}
