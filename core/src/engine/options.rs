//! Options and sizes that are fixed when an engine is loaded.

use crate::backend::Caps;
use crate::error::{Error, Result};
use crate::models::ModelSpec;
use crate::state::budget::Split;
use crate::state::{CapturePolicy, GRID, Limits, StateShape};

use super::{
    draft::{MOST_DRAFTS, Speculate},
    pools,
};
use crate::tier::TierOptions;

/// Memory for states and pages where the device cannot report its free memory, in bytes (wgpu).
const BLIND_BUDGET: u64 = 1 << 30;

/// Most requests in a batch. A larger number is a mistake, and sizes that grow with it would overflow.
pub const MOST_BATCH: usize = 1 << 16;
/// Most tokens in a step, for the same reasons.
pub const MOST_STEP_TOKENS: usize = 1 << 20;

/// Options of an engine. The defaults suit one machine with a few users.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Bytes for recurrent slots and KV pages together; `None` asks the device.
    pub memory: Option<u64>,
    /// Engines of this process that divide the memory of the CPU, at least 1. Each engine on a GPU has that of its own.
    pub engines: usize,
    /// Usable slots, instead of what the budget gives. Ignored by a model without recurrent state.
    pub slots: Option<usize>,
    /// Usable KV pages, instead of what the budget gives. Ignored by a model without attention.
    pub kv_pages: Option<usize>,
    /// Sequences that run at a time.
    pub max_batch: usize,
    /// Most tokens of one step.
    pub step_tokens: usize,
    /// Longest sequence, at most the model's own limit, which `None` means.
    pub context: Option<usize>,
    /// Keep and reuse prefixes.
    pub prefix_cache: bool,
    /// Where states and pages go that the tree has no room for.
    pub tiers: TierOptions,
    /// Pieces of prefixes that can leave at a time while the engine runs, see [`super::Engine::copy_out`]. A backend that copies into
    /// memory of its own ([`crate::backend::Backend::host_memory`]) takes it at load.
    pub outgoing: usize,
    /// Most bytes of the pages of such a piece, unless one page has more.
    pub outgoing_bytes: u64,
    /// Which states are kept.
    pub policy: CapturePolicy,
    /// Whether requests draft, without rules or with a constraint.
    pub speculate: Speculate,
    /// Most drafts of a row, 1 to [`MOST_DRAFTS`]; 1, 3 and 7 are used.
    pub drafts: usize,
    /// Measure what more tokens of a step cost when the model is loaded, if no earlier start did, so that [`Speculate::Auto`] need not
    /// guess. It is for who loads the model: [`super::Engine::measure_costs`].
    pub measure_costs: bool,
    /// Return the logits with every token: for comparisons, not for speed.
    pub logits: bool,
    /// Milliseconds since some moment, for [`super::Timing`]. wasm32 has no clock of its own: there the default stands still.
    pub clock: fn() -> f64,
}

#[cfg(not(target_arch = "wasm32"))]
fn clock() -> f64 {
    use std::sync::LazyLock;
    use std::time::Instant;
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    START.elapsed().as_secs_f64() * 1e3
}

#[cfg(target_arch = "wasm32")]
fn clock() -> f64 {
    0.0
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            memory: None,
            engines: 1,
            slots: None,
            kv_pages: None,
            max_batch: 8,
            step_tokens: 512,
            context: None,
            prefix_cache: true,
            tiers: TierOptions::default(),
            outgoing: 0,
            outgoing_bytes: 64 << 20,
            policy: CapturePolicy::Default,
            speculate: Speculate::Off,
            drafts: MOST_DRAFTS,
            measure_costs: false,
            logits: false,
            clock,
        }
    }
}

/// How an engine's memory is divided, before any weight is loaded.
#[derive(Clone, Debug)]
pub struct Sizes {
    /// State of one sequence.
    pub shape: StateShape,
    /// Limits for the scheduler.
    pub limits: Limits,
    /// Slots and pages.
    pub split: Split,
    /// The budget that was split, in bytes.
    pub budget: u64,
}

impl Sizes {
    /// Most tokens of one sequence, prompt and completion together: what the context and the pages hold. The last token is
    /// sampled and never computed.
    pub fn longest(&self) -> usize {
        let pages =
            if self.shape.has_pages() { self.split.pages.saturating_mul(GRID).saturating_add(1) } else { usize::MAX };
        self.shape.context.min(pages)
    }

    /// Most pages of one sequence: a column each of the page table of a step. None for a model without attention, whose
    /// context has no limit.
    pub fn pages_of_a_sequence(&self) -> usize {
        if self.shape.has_pages() { self.shape.context.div_ceil(GRID).min(self.split.pages) } else { 0 }
    }

    /// Checks that the pools fit into `free` bytes, before anything of their size is allocated.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] with both numbers.
    pub fn check(&self, free: Option<u64>) -> Result<()> {
        let asked = self.split.bytes(&self.shape);
        match free {
            Some(free) if asked > free => {
                Err(Error::OutOfMemory { what: "recurrent states and KV pages".into(), asked, free })
            }
            _ => Ok(()),
        }
    }
}

impl EngineOptions {
    /// The budget and its split for a model on a device with `free` bytes left.
    ///
    /// Without `--memory`: 85 % of the free memory of a CUDA device; on the CPU 25 % of the free memory, but not more
    /// than batch and context can use; 1 GiB where free memory cannot be queried.
    ///
    /// # Errors
    /// As [`Split::new`]; [`Error::BadRequest`] for numbers out of range.
    pub fn sizes(&self, spec: &ModelSpec, caps: &Caps, free: Option<u64>) -> Result<Sizes> {
        for (what, asked, most) in [
            ("requests in a batch", self.max_batch, MOST_BATCH),
            ("tokens in a step", self.step_tokens, MOST_STEP_TOKENS),
            ("drafts of a row", self.drafts, MOST_DRAFTS),
        ] {
            if asked == 0 || asked > most {
                return Err(Error::BadRequest(format!("{asked} {what}; 1 to {most} are supported")));
            }
        }
        let shape = StateShape {
            slot_bytes: pools::slot_bytes(spec, caps),
            page_bytes: pools::page_bytes(spec, caps),
            context: self.context.map_or(spec.context, |c| c.min(spec.context)),
        };
        let mut limits = Limits {
            max_batch: self.max_batch,
            step_tokens: self.step_tokens,
            prefix_cache: self.prefix_cache,
            policy: self.policy,
            drafts: if self.speculate == Speculate::Off { 0 } else { self.drafts },
            costs: self.speculate.costs(caps.backend),
            head_cost: if self.speculate == Speculate::Auto { spec.head_cost } else { 0.0 },
            ..Limits::default()
        };
        let useful = Split::useful_bytes(&shape, &limits, self.slots, self.kv_pages);
        let engines = if caps.backend == "cpu" { self.engines.max(1) as u64 } else { 1 };
        // A rank's share of the memory is for its share of the states.
        let of_each = |all: u64| all / caps.ranks as u64 / engines;
        let budget = self.memory.map(of_each).unwrap_or_else(|| match (caps.backend, free) {
            ("cpu", Some(free)) => useful.min(free / 4 / engines),
            (_, Some(free)) => free / 100 * 85,
            (_, None) => BLIND_BUDGET.min(useful),
        });
        let split = Split::new(&shape, &limits, budget, self.slots, self.kv_pages)?;
        (limits.slots, limits.pages) = (split.slots, split.pages);
        Ok(Sizes { shape, limits, split, budget })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{backend::Backend, config::Config, cpu::CpuBackend, models};

    #[test]
    fn the_page_table_is_as_wide_as_a_sequence_can_be() {
        let wide = |family: &str, kv_pages: Option<usize>| {
            let path = format!("{}/../tests/golden/{family}/config.json", env!("CARGO_MANIFEST_DIR"));
            let spec = models::spec(&Config::parse(&path, &std::fs::read(&path).unwrap()).unwrap()).unwrap();
            let options = EngineOptions { kv_pages, ..EngineOptions::default() };
            let sizes = options.sizes(&spec, CpuBackend::new().caps(), None).unwrap();
            (spec.context, sizes.pages_of_a_sequence())
        };
        assert_eq!(wide("nemotron_h", None), (2048, 32));
        assert_eq!(wide("nemotron_h", Some(5)), (2048, 5));
        assert_eq!(wide("mamba2", None), (i32::MAX as usize, 0));
    }
}
