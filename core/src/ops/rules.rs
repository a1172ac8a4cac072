//! The packed words of a lane's rules: everything that [`super::Adjust`] and [`super::Logprobs`] read of a lane, in one buffer.

/// Bias entries of a lane at most, ids that end the text and may not come yet included.
pub const MOST_ENTRIES: usize = 1024;
/// Log probabilities that are reported of a position at most, besides the sampled token's.
pub const MOST_TOP: usize = 20;
/// Numbers of an output's report: the sampled token's log probability, then the id and the log probability of each of the
/// most likely tokens.
pub const REPORT_WORDS: usize = 1 + 2 * MOST_TOP;
/// Words of an entry: token id, bias (f32 bits), first position at which the token may come.
pub const ENTRY_WORDS: usize = 3;

/// Offsets within a lane's words `[header | entries | mask | counts]`, in words.
///
/// All zero is a lane without rules. Sections that the flags leave out are not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RuleWords {
    /// Tokens of the vocabulary.
    pub vocab: usize,
}

impl RuleWords {
    /// Word of the flags: [`RuleWords::RULED`] and others.
    pub const FLAGS: usize = 0;
    /// Word of the repetition penalty, f32 bits.
    pub const REPETITION: usize = 1;
    /// Word of the frequency penalty, f32 bits.
    pub const FREQUENCY: usize = 2;
    /// Word of the presence penalty, f32 bits.
    pub const PRESENCE: usize = 3;
    /// Word of the number of entries.
    pub const ENTRIES: usize = 4;
    /// Word of 1 + the number of the most likely tokens to report; 0 = no log probabilities.
    pub const TOP: usize = 5;
    /// Words before the entries, some of them unused.
    pub const HEADER: usize = 8;

    /// Flag: the lane's logits are adjusted; without it they are copied.
    pub const RULED: u32 = 1;
    /// Flag: there is a mask.
    pub const MASKED: u32 = 2;
    /// Flag: sampled tokens are counted, and the presence and frequency penalties apply.
    pub const COUNTED: u32 = 4;

    /// The entries `[MOST_ENTRIES, 3]`, each id at most once.
    pub const fn entries(&self) -> usize {
        Self::HEADER
    }

    /// The mask `[ceil(V / 32)]`: bit v is set if token v is allowed.
    pub const fn mask(&self) -> usize {
        self.entries() + ENTRY_WORDS * MOST_ENTRIES
    }

    /// The counts `[V]`: how often the lane has sampled each token.
    pub const fn counts(&self) -> usize {
        self.mask() + self.vocab.div_ceil(32)
    }

    /// Words of a lane.
    pub const fn words(&self) -> usize {
        self.counts() + self.vocab
    }
}
