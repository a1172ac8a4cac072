//! Timing of steps, for benches: by the host's clock.

use selkie_core::{backend::Backend, error::Result, timer::Timer};

use crate::{WgpuBackend, buffer::Buf};

/// More than the largest cache of a GPU, within WebGPU's default limits.
const FLUSH_BYTES: u64 = 128 << 20;

impl Timer for WgpuBackend {
    fn flush(&self) -> Result<()> {
        let buf: Buf = self.alloc("flush", FLUSH_BYTES)?;
        self.clear(&buf);
        Ok(())
    }
}
