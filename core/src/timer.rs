//! Timing of single steps by the device's own clock, for benches; the engine does not use it.

use std::{future::Future, time::Instant};

use crate::{
    backend::Backend,
    error::Result,
    tensor::{DType, Tensor},
};

/// A backend whose steps can be timed.
pub trait Timer: Backend {
    /// Moves more bytes than the device's caches hold, so that the next step finds none of its inputs there.
    ///
    /// # Errors
    /// Those of the device.
    fn flush(&self) -> Result<()>;

    /// A recorded step that does as little as a step of one kernel can: timed alone, it gives the cost of measuring.
    ///
    /// # Errors
    /// Those of [`Backend::record`].
    fn empty(&self) -> Result<Self::Tape> {
        self.record(|_| Ok(()))
    }

    /// Plays a recorded step after everything that runs, and returns the microseconds that the device took for it: by the
    /// device's clock where it has one, else by the host's.
    ///
    /// # Errors
    /// Those of [`Backend::play`] and [`Backend::read`].
    fn time(&self, tape: &Self::Tape) -> impl Future<Output = Result<f64>> {
        host_time(self, tape)
    }

    /// Lines for people about the backend's work since it was opened: launches, their cost on the host, compiled code.
    ///
    /// # Errors
    /// Those of [`Backend::play`] and [`Backend::read`].
    fn facts(&self) -> impl Future<Output = Result<Vec<String>>> {
        async { Ok(vec![]) }
    }
}

/// Microseconds by the host's clock from playing a step on an idle device to the first read after it.
///
/// # Errors
/// Those of [`Backend::play`] and [`Backend::read`].
pub async fn host_time<B: Backend>(backend: &B, tape: &B::Tape) -> Result<f64> {
    let fence = Tensor::new(backend.alloc("fence", 4)?, DType::U32, &[1]);
    backend.read(&fence).await?;
    let start = Instant::now();
    backend.play(tape)?;
    backend.read(&fence).await?;
    Ok(start.elapsed().as_secs_f64() * 1e6)
}
