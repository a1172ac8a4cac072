//! Measures what more tokens of a step cost, which decides where drafts pay.

use std::sync::Arc;

use super::{Engine, MOST_DRAFTS, Speculate};
use crate::{
    Result,
    backend::Backend,
    sample::Sampling,
    state::TokenCosts,
    step::{Chunk, Row, Src, TokenRef},
};

/// Milliseconds of a step of one token from which on nothing is measured: that would delay the start for seconds.
const SLOW: f64 = 100.0;
/// Steps of each width that are timed, and milliseconds after which no more of them begin.
const ROUNDS: usize = 4;
const BUDGET: f64 = 200.0;

impl<B: Backend> Engine<B> {
    /// Runs steps of one sequence with 0, 1, 3 and 7 drafts, and returns what they cost, for [`Engine::set_costs`]. The first call of
    /// a process compiles their kernels and records them.
    ///
    /// `None` where that decides nothing ([`Speculate::Auto`] does not draft, or at most so few), where a step is so slow that measuring
    /// it would delay the start, and in an engine that is not new, whose slots and pages hold something.
    ///
    /// # Errors
    /// A device error.
    pub async fn measure_costs(&mut self) -> Result<Option<TokenCosts>> {
        let limits = &self.scheduler.limits;
        let most = TokenCosts::TOKENS[TokenCosts::TOKENS.len() - 1];
        let fits = limits.drafts == MOST_DRAFTS && limits.outputs().min(limits.step_tokens) >= most;
        let cache = &self.scheduler.cache;
        let new = self.is_idle() && cache.slots().used() + cache.pages().used() == 0;
        if self.speculate != Speculate::Auto || !fits || !new {
            return Ok(None);
        }
        self.runner.open_lane(0, &Sampling::default(), &[])?;
        let rows = TokenCosts::TOKENS.map(|tokens| [self.row_of(tokens)]);
        self.time(&rows[0]).await?;
        if self.time(&rows[0]).await? > SLOW {
            return Ok(None);
        }
        rows.iter().try_for_each(|row| self.runner.expect_step(row))?;
        for row in &rows[1..] {
            self.time(row).await?;
        }
        // The least of several, in turns: other work on the machine only adds to them.
        let mut times = [f64::INFINITY; TokenCosts::TOKENS.len()];
        let began = (self.clock)();
        for round in 0..ROUNDS {
            if round > 0 && (self.clock)() - began > BUDGET {
                break;
            }
            for (row, least) in rows.iter().zip(&mut times) {
                *least = least.min(self.time(row).await?);
            }
        }
        Ok(TokenCosts::measured(times.map(|time| time as f32)))
    }

    /// Reckons with these costs from now on, where [`Speculate::Auto`] drafts.
    pub fn set_costs(&mut self, costs: TokenCosts) {
        if self.speculate == Speculate::Auto {
            self.scheduler.limits.costs = costs;
        }
    }

    /// A sequence's first step, of one token and drafts after it, in the first slots and on the first page.
    fn row_of(&self, tokens: usize) -> Row {
        let shape = &self.sizes.shape;
        let most_slots = self.sizes.split.slots as u32;
        let chunk = |i: u32| Chunk {
            len: 1,
            src: if i == 0 { Src::Slot(0) } else { Src::Carry },
            dst: if i < most_slots { i + 1 } else { 0 },
        };
        Row {
            lane: 0,
            first_position: 0,
            tokens: (0..tokens).map(|i| if i == 0 { TokenRef::Known(0) } else { TokenRef::Draft(0) }).collect(),
            chunks: if shape.has_slots() { (0..tokens as u32).map(chunk).collect() } else { Vec::new() },
            pages: Arc::new(if shape.has_pages() { vec![1] } else { Vec::new() }),
            outputs: (0..tokens as u32).collect(),
        }
    }

    /// Milliseconds from the plan of a step to its ids.
    async fn time(&mut self, rows: &[Row]) -> Result<f64> {
        let began = (self.clock)();
        if let Some(ids) = self.runner.step(rows)? {
            ids.await?;
        }
        Ok((self.clock)() - began)
    }
}
