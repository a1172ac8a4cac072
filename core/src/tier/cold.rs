//! States as int8, for lower tiers: the rows of recurrent states, which are their last dimension, become a scale (f32) and a code
//! (i8) per value. Everything else of a value stays as it is.
//!
//! A value is `scale * code`, with the row's largest magnitude over 127 as its scale, so that it differs by at most half a scale from
//! what it was. A row with a value that is not finite becomes NaN. Coding what was decoded gives the same codes.
//!
//! The work is done on threads of its own where there are threads, so that no step waits for it.

use std::{io, sync::Arc};

use futures_channel::oneshot;
#[cfg(not(target_arch = "wasm32"))]
use rayon::prelude::*;

use super::Value;
use crate::{saved::Room, tensor::DType};

/// Bytes of a row's scale.
const SCALE: usize = 4;

/// A value that is being coded or decoded. Cancelled if that is not possible.
pub type Converting = oneshot::Receiver<Value>;

/// A run of bytes of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// They stay as they are.
    Kept(usize),
    /// Rows of values.
    Rows {
        /// How many.
        rows: usize,
        /// Values of a row.
        width: usize,
        /// What they are.
        dtype: DType,
    },
}

impl Piece {
    /// Bytes as they are on the device.
    fn bytes(self) -> usize {
        match self {
            Self::Kept(bytes) => bytes,
            Self::Rows { rows, width, dtype } => rows * width * dtype.bytes(),
        }
    }

    fn coded_bytes(self) -> usize {
        match self {
            Self::Kept(bytes) => bytes,
            Self::Rows { rows, width, .. } => rows * (SCALE + width),
        }
    }

    fn encode(self, value: &[u8], coded: &mut [u8]) {
        match self {
            Self::Kept(_) => coded.copy_from_slice(value),
            Self::Rows { width, dtype, .. } => {
                let rows = value.chunks_exact(width * dtype.bytes());
                rows.zip(coded.chunks_exact_mut(SCALE + width)).for_each(|(row, coded)| encode_row(row, dtype, coded));
            }
        }
    }

    fn decode(self, coded: &[u8], value: &mut [u8]) {
        match self {
            Self::Kept(_) => value.copy_from_slice(coded),
            Self::Rows { width, dtype, .. } => {
                let rows = value.chunks_exact_mut(width * dtype.bytes());
                coded.chunks_exact(SCALE + width).zip(rows).for_each(|(coded, row)| decode_row(coded, dtype, row));
            }
        }
    }
}

fn encode_row(row: &[u8], dtype: DType, coded: &mut [u8]) {
    let values = dtype.to_f32(row);
    let finite = values.iter().all(|x| x.is_finite());
    let largest = values.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let scale = if finite { largest / 127.0 } else { f32::NAN };
    let (head, codes) = coded.split_at_mut(SCALE);
    head.copy_from_slice(&scale.to_le_bytes());
    for (code, x) in codes.iter_mut().zip(values) {
        // Rows of zeros and of numbers too small for a scale are zeros.
        let near = if scale > 0.0 { (x / scale).round_ties_even().clamp(-127.0, 127.0) } else { 0.0 };
        *code = (near as i8) as u8;
    }
}

fn decode_row(coded: &[u8], dtype: DType, row: &mut [u8]) {
    let (head, codes) = coded.split_at(SCALE);
    let scale = f32::from_le_bytes([head[0], head[1], head[2], head[3]]);
    for (code, out) in codes.iter().zip(row.chunks_exact_mut(dtype.bytes())) {
        // The largest number over 127 and back is infinite by a rounding.
        let x = (scale * f32::from(*code as i8)).clamp(f32::MIN, f32::MAX);
        match dtype {
            DType::Bf16 => out.copy_from_slice(&half::bf16::from_f32(x).to_le_bytes()),
            DType::F16 => out.copy_from_slice(&half::f16::from_f32(x).to_le_bytes()),
            _ => out.copy_from_slice(&x.to_le_bytes()),
        }
    }
}

/// How the states of a model are coded.
#[derive(Clone, Debug)]
pub struct Coding {
    pieces: Vec<Piece>,
    bytes: usize,
    coded: usize,
}

impl Coding {
    /// For values of these pieces; `None` if they have no rows that would become smaller.
    pub fn new(pieces: Vec<Piece>) -> Option<Self> {
        let sum = |of: fn(Piece) -> usize| pieces.iter().map(|piece| of(*piece)).sum();
        let (bytes, coded) = (sum(Piece::bytes), sum(Piece::coded_bytes));
        (coded < bytes).then_some(Self { pieces, bytes, coded })
    }

    /// Bytes of a coded value.
    pub fn coded_bytes(&self) -> u64 {
        self.coded as u64
    }

    /// Codes a value into as many bytes as it needs; false if one of both has another length.
    #[must_use]
    pub fn encode(&self, value: &[u8], coded: &mut [u8]) -> bool {
        let fits = value.len() == self.bytes && coded.len() == self.coded;
        if fits {
            self.each(value, Piece::bytes, coded, Piece::coded_bytes, Piece::encode);
        }
        fits
    }

    /// The value of a coded one; false if one of both has another length.
    #[must_use]
    pub fn decode(&self, coded: &[u8], value: &mut [u8]) -> bool {
        let fits = value.len() == self.bytes && coded.len() == self.coded;
        if fits {
            self.each(coded, Piece::coded_bytes, value, Piece::bytes, Piece::decode);
        }
        fits
    }

    fn each(
        &self,
        mut from: &[u8],
        from_bytes: fn(Piece) -> usize,
        mut to: &mut [u8],
        to_bytes: fn(Piece) -> usize,
        work: fn(Piece, &[u8], &mut [u8]),
    ) {
        let mut parts = Vec::with_capacity(self.pieces.len());
        for &piece in &self.pieces {
            let (now, later) = from.split_at(from_bytes(piece));
            let (into, rest) = to.split_at_mut(to_bytes(piece));
            (from, to) = (later, rest);
            parts.push((piece, now, into));
        }
        #[cfg(not(target_arch = "wasm32"))]
        let parts = parts.into_par_iter();
        #[cfg(target_arch = "wasm32")]
        let parts = parts.into_iter();
        parts.for_each(|(piece, from, to)| work(piece, from, to));
    }
}

/// Codes and decodes values: each on a thread of its own, so that a request waits for no value that nobody wants yet.
#[derive(Debug)]
pub struct Coder {
    coding: Arc<Coding>,
    encoder: Worker,
    decoder: Worker,
}

type Work = fn(&Coding, &[u8], &mut [u8]) -> bool;

struct Job {
    from: Value,
    room: Box<dyn Room>,
    reply: oneshot::Sender<Value>,
}

impl Job {
    fn run(mut self, coding: &Coding, work: Work) {
        // Whoever wanted it may be gone.
        if !self.reply.is_canceled() && work(coding, &self.from, self.room.bytes()) {
            let _ = self.reply.send(self.room.freeze());
        }
    }
}

impl Coder {
    /// # Errors
    /// If the system has no more threads.
    pub fn start(coding: Coding) -> io::Result<Self> {
        let coding = Arc::new(coding);
        let encoder = Worker::start("selkie-encode", &coding, Coding::encode)?;
        Ok(Self { encoder, decoder: Worker::start("selkie-decode", &coding, Coding::decode)?, coding })
    }

    /// Bytes of a coded value.
    pub fn coded_bytes(&self) -> u64 {
        self.coding.coded_bytes()
    }

    /// Codes a value into `room`, which has as many bytes as it needs.
    pub fn encode(&self, value: Value, room: Box<dyn Room>) -> Converting {
        self.encoder.give(value, room)
    }

    /// Brings the value of a coded one into `room`, which has as many bytes as it needs.
    pub fn decode(&self, coded: Value, room: Box<dyn Room>) -> Converting {
        self.decoder.give(coded, room)
    }
}

#[cfg(not(target_arch = "wasm32"))]
use worker::Worker;

#[cfg(not(target_arch = "wasm32"))]
mod worker {
    use std::{
        sync::mpsc::{Sender, channel},
        thread::{self, JoinHandle},
    };

    use super::{Arc, Coding, Converting, Job, Room, Value, Work, io, oneshot};

    /// A thread. What waits is dropped with it.
    #[derive(Debug)]
    pub struct Worker {
        jobs: Option<Sender<Job>>,
        thread: Option<JoinHandle<()>>,
    }

    impl Worker {
        pub fn start(name: &str, coding: &Arc<Coding>, work: Work) -> io::Result<Self> {
            let (jobs, todo) = channel::<Job>();
            let coding = coding.clone();
            let run = move || todo.into_iter().for_each(|job| job.run(&coding, work));
            let thread = thread::Builder::new().name(name.into()).spawn(run)?;
            Ok(Self { jobs: Some(jobs), thread: Some(thread) })
        }

        pub fn give(&self, from: Value, room: Box<dyn Room>) -> Converting {
            let (reply, converting) = oneshot::channel();
            if let Some(jobs) = &self.jobs {
                let _ = jobs.send(Job { from, room, reply });
            }
            converting
        }
    }

    impl Drop for Worker {
        fn drop(&mut self) {
            self.jobs = None;
            if let Some(thread) = self.thread.take() {
                let _ = thread.join();
            }
        }
    }
}

/// A page has no threads.
#[cfg(target_arch = "wasm32")]
#[derive(Debug)]
struct Worker {
    coding: Arc<Coding>,
    work: Work,
}

#[cfg(target_arch = "wasm32")]
impl Worker {
    fn start(_: &str, coding: &Arc<Coding>, work: Work) -> io::Result<Self> {
        Ok(Self { coding: coding.clone(), work })
    }

    fn give(&self, from: Value, room: Box<dyn Room>) -> Converting {
        let (reply, converting) = oneshot::channel();
        Job { from, room, reply }.run(&self.coding, self.work);
        converting
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::saved::{Heap, HostMemory};

    fn bytes_of(values: &[f32], dtype: DType) -> Vec<u8> {
        match dtype {
            DType::Bf16 => values.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        }
    }

    fn numbers(count: usize) -> Vec<f32> {
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        // Rows of very different sizes.
        (0..count).map(|i| next() * 10f32.powi((i / 24) as i32 % 9 - 4)).collect()
    }

    #[test]
    fn a_decoded_value_is_near_and_codes_again_to_the_same() {
        for dtype in [DType::F32, DType::Bf16] {
            let values = numbers(24 * 10);
            let pieces = vec![Piece::Kept(7), Piece::Rows { rows: 10, width: 24, dtype }, Piece::Kept(2)];
            let coding = Coding::new(pieces).unwrap();
            let value = [&[1; 7][..], &bytes_of(&values, dtype), &[2; 2]].concat();
            assert_eq!(coding.coded_bytes(), 9 + 10 * 28);
            let (mut coded, mut back) = (vec![0; 289], vec![0; value.len()]);
            assert!(coding.encode(&value, &mut coded) && coding.decode(&coded, &mut back));
            assert_eq!((&back[..7], &back[back.len() - 2..]), (&[1; 7][..], &[2; 2][..]));
            let decoded = dtype.to_f32(&back[7..back.len() - 2]);
            for (row, was) in decoded.chunks(24).zip(dtype.to_f32(&value[7..value.len() - 2]).chunks(24)) {
                let scale = was.iter().fold(0.0f32, |most, x| most.max(x.abs())) / 127.0;
                // bf16 rounds what is decoded once more.
                let most = scale * if dtype == DType::F32 { 0.501 } else { 0.8 };
                assert!(row.iter().zip(was).all(|(a, b)| (a - b).abs() <= most), "{dtype:?}: {row:?} {was:?}");
            }
            let mut again = vec![0; coded.len()];
            assert!(coding.encode(&back, &mut again));
            let codes = |coded: &[u8]| coded[7..287].chunks(28).flat_map(|row| row[4..].to_vec()).collect::<Vec<_>>();
            assert_eq!(codes(&coded), codes(&again), "{dtype:?}");
        }
    }

    #[test]
    fn rows_without_a_scale_are_zero_or_nan() {
        let tiny = f32::from_bits(1);
        let rows = [[0.0; 8], [tiny; 8], [f32::INFINITY, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [f32::MAX; 8], [-1.0; 8]];
        let coding = Coding::new(vec![Piece::Rows { rows: 5, width: 8, dtype: DType::F32 }]).unwrap();
        let value = bytes_of(rows.as_flattened(), DType::F32);
        let (mut coded, mut back) = (vec![0; 60], vec![0; value.len()]);
        assert!(coding.encode(&value, &mut coded) && coding.decode(&coded, &mut back));
        let back = DType::F32.to_f32(&back);
        assert!(back[..16].iter().all(|x| *x == 0.0) && back[16..24].iter().all(|x| x.is_nan()), "{back:?}");
        assert!(back[24..32].iter().all(|x| x.is_finite() && *x > 3.4e38), "{back:?}");
        assert!(back[32..].iter().all(|x| (x + 1.0).abs() < 1e-6), "{back:?}");
        assert!(!coding.encode(&value[1..], &mut coded) && !coding.decode(&coded[1..], &mut vec![0; value.len()]));
    }

    #[test]
    fn only_rows_that_become_smaller_are_coded() {
        assert!(Coding::new(vec![Piece::Kept(100)]).is_none());
        assert!(Coding::new(vec![Piece::Rows { rows: 3, width: 4, dtype: DType::Bf16 }]).is_none());
        assert!(Coding::new(Vec::new()).is_none());
    }

    #[test]
    fn threads_code_and_decode() {
        let coding = Coding::new(vec![Piece::Rows { rows: 4, width: 64, dtype: DType::F32 }]).unwrap();
        let coder = Coder::start(coding).unwrap();
        let value: Value = bytes_of(&numbers(256), DType::F32).into();
        let room = |bytes| Heap.take(bytes).unwrap();
        let coded = pollster::block_on(coder.encode(value.clone(), room(coder.coded_bytes() as usize))).unwrap();
        let back = pollster::block_on(coder.decode(coded.clone(), room(value.len()))).unwrap();
        assert_eq!((coded.len(), back.len()), (4 * 68, value.len()));
        assert!(pollster::block_on(coder.decode(coded, room(3))).is_err(), "another length");
    }
}
