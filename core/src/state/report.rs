//! A request's report about its match, and the events that tell a subscriber how the tree changes.

use super::PrefixHash;

/// Why a request reused as much as it did: the first that applies, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The prefix cache is off.
    Off,
    /// The request asked for log probabilities of its prompt, so all of it was computed.
    PromptLogprobs,
    /// More of it is in host memory, and computing was estimated to be faster than loading.
    Host,
    /// More of it is on disk, and computing was estimated to be faster than loading.
    Disk,
    /// The deepest matched node lost its state for lack of room, or the next page was removed recently.
    Evicted,
    /// The state of the deepest matched node was dropped by the cap per path, replaced by a newer decode snapshot, or
    /// not taken under the capture policy.
    Policy,
    /// More tokens matched than have a state.
    NoState,
    /// Everything that can be reused was reused: all whole pages before the last token.
    Full,
    /// The tree had not seen the next page.
    FirstSight,
}

impl Reason {
    /// All reasons, in the order in which they are tried.
    pub const ALL: [Self; 9] = [
        Self::Off,
        Self::PromptLogprobs,
        Self::Host,
        Self::Disk,
        Self::Evicted,
        Self::Policy,
        Self::NoState,
        Self::Full,
        Self::FirstSight,
    ];

    /// The name used in outputs: `off`, `prompt_logprobs`, `host`, `disk`, `evicted`, `policy`, `no_state`, `full` or `first_sight`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::PromptLogprobs => "prompt_logprobs",
            Self::Host => "host",
            Self::Disk => "disk",
            Self::Evicted => "evicted",
            Self::Policy => "policy",
            Self::NoState => "no_state",
            Self::Full => "full",
            Self::FirstSight => "first_sight",
        }
    }
}

/// The match of one request, made when it was first admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// Tokens of the prompt that were in the tree, a multiple of 64 and less than the prompt.
    pub matched: usize,
    /// Prompt tokens that were not computed. A multiple of 64, unless the request was pre-empted during its prefill and
    /// found, when admitted again, pages of other requests beyond its own.
    pub reused: usize,
    /// Why `reused` is not larger.
    pub reason: Reason,
    /// Tokens of `reused` that came back from host memory.
    pub host: usize,
    /// Tokens of `reused` that came back from disk.
    pub disk: usize,
    /// What was reused goes back to converted values, of a bundle or of a lower tier, see [`Realm::origin`](super::Realm::origin): the
    /// answer may differ from one computed here.
    pub converted: bool,
}

/// A change of the tree or of the host tier. A later `Stored` of the same hash replaces the earlier one (a node gained or lost its state).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheEvent {
    /// A page is in the tree.
    Stored {
        /// Its name.
        hash: PrefixHash,
        /// Its parent's name; the namespace's root for a first page.
        parent: PrefixHash,
        /// Its 64 tokens.
        tokens: Box<[u32]>,
        /// Whether a request can be continued from its end. Always true for a model without recurrent state.
        has_state: bool,
    },
    /// A page left the tree.
    Removed {
        /// Its name.
        hash: PrefixHash,
    },
    /// A prefix from whose end a request can be continued came into host memory, or left it. It may be in the tree as well.
    Host {
        /// Its name.
        hash: PrefixHash,
        /// The name of its root.
        root: PrefixHash,
        /// Whether it is there now.
        stored: bool,
    },
    /// All pages left the tree and host memory.
    Cleared,
}
