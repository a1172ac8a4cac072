//! Timing of steps for benchmarks, with the device's clock where there is one.

use selkie_core::{
    backend::Backend,
    error::Result,
    tensor::{DType, Tensor},
    timer::{Timer, host_time},
};

use crate::{
    WgpuBackend,
    backend::Tape,
    buffer::{Buf, Read},
    lower,
};

/// Larger than any GPU's cache, and within WebGPU's default limits.
const FLUSH_BYTES: u64 = 128 << 20;
/// Words that one run of the read probe reads, and the number of runs.
const PROBE_WORDS: usize = 128 << 20;
const PROBES: usize = 20;

impl Timer for WgpuBackend {
    fn flush(&self) -> Result<()> {
        let mut kept = self.flush.borrow_mut();
        let buf: &Buf = match &mut *kept {
            Some(buf) => buf,
            none => none.insert(self.alloc("flush", FLUSH_BYTES)?),
        };
        self.clear(buf);
        Ok(())
    }

    async fn time(&self, tape: &Tape) -> Result<f64> {
        match self.timed(tape) {
            Some(read) => {
                let bytes = read.await?;
                let tick = |i: usize| bytes[8 * i..8 * i + 8].iter().rev().fold(0, |v, b| v << 8 | u64::from(*b));
                Ok(tick(1).saturating_sub(tick(0)) as f64 * f64::from(self.gpu.queue.get_timestamp_period()) / 1e3)
            }
            None => host_time(self, tape).await,
        }
    }

    async fn facts(&self) -> Result<Vec<String>> {
        let mut lines = self.counts();
        let words = PROBE_WORDS.min(self.caps().max_binding as usize / 4) / 16384 * 16384;
        let src = Tensor::new(self.alloc("read probe", 4 * words as u64)?, DType::U32, &[words]);
        let out = Tensor::new(self.alloc("read probe", 4)?, DType::U32, &[1]);
        let kernel = lower::read_probe(&src, &out, self.caps().max_binding);
        let tape = self.tape(vec![kernel; PROBES])?;
        let mut times = vec![];
        for _ in 0..5 {
            times.push(self.time(&tape).await? / PROBES as f64);
        }
        times.sort_by(f64::total_cmp);
        lines.push(format!("a shader that only reads: {:.0} GB/s", 4e-3 * words as f64 / times[2]));
        Ok(lines)
    }
}

impl WgpuBackend {
    /// Plays a tape between two timestamps of the device and reads both; `None` if the device has no clock.
    fn timed(&self, tape: &Tape) -> Option<Read> {
        let device = &self.gpu.device;
        if !device.features().contains(wgpu::Features::TIMESTAMP_QUERY) {
            return None;
        }
        let query_set = device.create_query_set(&wgpu::QuerySetDescriptor {
            label: Some("times"),
            ty: wgpu::QueryType::Timestamp,
            count: 2,
        });
        let times = device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("times"),
            size: 16,
            usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        });
        let mut encoder = device.create_command_encoder(&Default::default());
        {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
                label: Some("timed step"),
                timestamp_writes: Some(wgpu::ComputePassTimestampWrites {
                    query_set: &query_set,
                    beginning_of_pass_write_index: Some(0),
                    end_of_pass_write_index: Some(1),
                }),
            });
            tape.dispatches.iter().for_each(|d| d.encode(&mut pass));
        }
        encoder.resolve_query_set(&query_set, 0..2, &times, 0);
        self.gpu.queue.submit([encoder.finish()]);
        Some(Read::new(&self.gpu, &times, 0, 16))
    }
}
