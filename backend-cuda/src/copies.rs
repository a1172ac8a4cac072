//! Copies between states or pages and host memory, concurrent with the steps: a kernel gathers the pieces of a value into a buffer of the
//! device, in the order of the steps, and a stream of its own copies that buffer; the other way round likewise. Steps wait for the
//! kernel only, which takes microseconds, unless the buffer is full. What comes back is waited for on the device, or fetched into the
//! buffer beforehand.

use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, VecDeque},
    ops::Range,
    rc::Rc,
};

use cudarc::driver::result;
use selkie_core::{
    Result,
    saved::{Room, Saving},
    source::{Bytes, LocalFuture},
    tensor::Tensor,
};

use crate::{
    arguments::{At, CopyRows},
    backend::Cuda,
    driver::{Event, Stream, named},
    faults::Faults,
    launch::{Address, Launch, address},
    memory::Buf,
    spec::{File, Spec},
};

/// Bytes of each of both buffers.
const BUFFER: u64 = 128 << 20;
/// Most bytes of one copy, so that a large value is gathered and copied at the same time.
const PIECE: u64 = 32 << 20;

/// A stream for copies in one direction, and the buffer that they pass through.
struct Lane {
    stream: Rc<Stream>,
    buffer: Buf,
    head: u64,
    /// Parts of the buffer in use, oldest first, each until its event.
    busy: VecDeque<(Range<u64>, Rc<Event>)>,
    /// What was brought before anybody waited for it.
    fetched: Vec<Fetched>,
}

/// A value in a part of the buffer, until a restore takes it or the part is needed.
struct Fetched {
    value: Bytes,
    part: Range<u64>,
    done: Rc<Event>,
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

impl Lane {
    fn new(cuda: &Cuda, label: &str) -> Result<Self> {
        let stream = Stream::new(&cuda.context)?;
        let buffer = Buf::alloc(&cuda.context, &cuda.stream, label, BUFFER)?;
        Ok(Self { stream, buffer, head: 0, busy: VecDeque::new(), fetched: Vec::new() })
    }

    /// A part of the buffer that `user` may write once all that it has enqueued is done.
    fn part(&mut self, bytes: u64, user: &Stream) -> Result<Range<u64>> {
        let len = bytes.next_multiple_of(256);
        if self.head + len > BUFFER {
            self.head = 0;
        }
        let part = self.head..self.head + len;
        self.head = part.end;
        // Parts are left in the order in which they were taken.
        let last = self.busy.iter().rposition(|(other, _)| overlap(other, &part));
        if let Some(last) = last {
            user.follow(&self.busy[last].1)?;
            self.busy.drain(..=last);
        }
        self.fetched.retain(|fetched| !overlap(&fetched.part, &part));
        Ok(part)
    }

    /// Where this value was fetched to.
    fn find(&self, value: &Bytes) -> Option<usize> {
        self.fetched.iter().position(|fetched| std::ptr::eq(&*fetched.value, &**value))
    }
}

/// All copies of a device.
pub struct Copies {
    save: RefCell<Lane>,
    restore: RefCell<Lane>,
    /// Where the rows of tensors lie, in device memory, by their contents.
    tables: RefCell<HashMap<Vec<u64>, Buf>>,
    /// Values that are being restored, oldest first.
    held: RefCell<VecDeque<Held>>,
    /// Bytes and milliseconds of completed restores.
    restored: Cell<(u64, f64)>,
}

/// A value on its way to the device.
struct Held {
    value: Bytes,
    start: Event,
    done: Rc<Event>,
}

impl Copies {
    /// Takes both buffers, and starts to compile the kernels.
    pub fn new(cuda: &Cuda) -> Result<Self> {
        [true, false].iter().for_each(|save| cuda.compiler.borrow_mut().request(&spec(*save)));
        Ok(Self {
            save: RefCell::new(Lane::new(cuda, "states that leave the device")?),
            restore: RefCell::new(Lane::new(cuda, "states that come back")?),
            tables: RefCell::default(),
            held: RefCell::default(),
            restored: Cell::default(),
        })
    }

    /// The table of the rows of these tensors, and the bytes of a value.
    fn table(&self, cuda: &Cuda, pools: &[Tensor<Buf>]) -> Result<(At, u64)> {
        let (mut words, mut bytes) = (Vec::with_capacity(3 * pools.len()), 0);
        for pool in pools {
            assert!(pool.is_contiguous(), "rows of a view with gaps");
            let row = (pool.row_len() * pool.dtype.bytes()) as u64;
            words.extend([address(pool), row, bytes]);
            bytes += row;
        }
        if let Some(table) = self.tables.borrow().get(&words) {
            return Ok((At(table.address()), bytes));
        }
        let raw: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let table = Buf::alloc(&cuda.context, &cuda.stream, "table of rows", raw.len() as u64)?;
        cuda.write_to(&table, 0, &raw)?;
        let at = At(table.address());
        self.tables.borrow_mut().insert(words, table);
        Ok((at, bytes))
    }

    /// Copies a row of each tensor to host memory.
    pub fn save(
        &self,
        cuda: &Cuda,
        pools: &[Tensor<Buf>],
        row: usize,
        mut room: Box<dyn Room>,
    ) -> Result<Box<dyn Saving>> {
        let (tensors, bytes) = self.table(cuda, pools)?;
        assert_eq!(room.bytes().len() as u64, bytes, "room for another value");
        let lane = &mut *self.save.borrow_mut();
        match Self::enqueue_save(cuda, lane, room.bytes(), (tensors, pools.len()), row) {
            Ok(done) => {
                let (stream, faults) = (lane.stream.clone(), cuda.faults());
                Ok(Box::new(Arriving { room: Some(room), done, stream, faults }))
            }
            Err(e) => {
                // Pieces may still be written to the room.
                let _ = lane.stream.wait("save");
                Err(e)
            }
        }
    }

    fn enqueue_save(
        cuda: &Cuda,
        lane: &mut Lane,
        room: &mut [u8],
        (tensors, n): (At, usize),
        row: usize,
    ) -> Result<Rc<Event>> {
        let mut done = Rc::new(Event::new(false)?);
        for (first, piece) in room.chunks_mut(PIECE as usize).enumerate() {
            let (first, bytes) = (first as u64 * PIECE, piece.len() as u64);
            let part = lane.part(bytes, &cuda.stream)?;
            let at = lane.buffer.address() + part.start;
            let args = CopyRows { tensors, row: row as u64, first, bytes, packed: At(at) };
            cuda.run_alone("save", launch(true, bytes, n, &args))?;
            let gathered = Event::new(false)?;
            gathered.record(&cuda.stream)?;
            lane.stream.follow(&gathered)?;
            // SAFETY: the part is this copy's until its event; the caller keeps the room until then.
            named("save", unsafe { result::memcpy_dtoh_async(piece, at, lane.stream.raw) })?;
            done = Rc::new(Event::new(false)?);
            done.record(&lane.stream)?;
            lane.busy.push_back((part, done.clone()));
        }
        Ok(done)
    }

    /// Brings a value into the buffer, if it is small enough to wait there; true if it is there, or will not be.
    pub fn fetch(&self, value: &Bytes) -> Result<bool> {
        let lane = &mut *self.restore.borrow_mut();
        if let Some(i) = lane.find(value) {
            return lane.fetched[i].done.is_reached("fetch");
        }
        let waiting: u64 = lane.fetched.iter().map(|fetched| fetched.part.end - fetched.part.start).sum();
        if value.is_empty() || value.len() as u64 > PIECE || waiting + value.len() as u64 > BUFFER / 2 {
            return Ok(true);
        }
        let (part, done) = self.send(lane, value.clone()).inspect_err(|_| {
            let _ = lane.stream.wait("fetch");
        })?;
        lane.fetched.push(Fetched { value: value.clone(), part, done });
        Ok(false)
    }

    /// Copies a value back into a row of each tensor.
    pub fn restore(&self, cuda: &Cuda, value: &Bytes, pools: &[Tensor<Buf>], row: usize) -> Result<()> {
        let (tensors, bytes) = self.table(cuda, pools)?;
        assert_eq!(value.len() as u64, bytes, "a value of another kind");
        let lane = &mut *self.restore.borrow_mut();
        for (first, piece) in value.chunks(PIECE as usize).enumerate() {
            let (first, bytes) = (first as u64 * PIECE, piece.len() as u64);
            let piece = value.slice(first as usize..first as usize + piece.len());
            let (at, done) = match lane.find(&piece).map(|i| lane.fetched.swap_remove(i)) {
                Some(Fetched { part, done, .. }) => (part, done),
                None => self.send(lane, piece).inspect_err(|_| {
                    let _ = lane.stream.wait("restore");
                })?,
            };
            cuda.stream.follow(&done)?;
            let args =
                CopyRows { tensors, row: row as u64, first, bytes, packed: At(lane.buffer.address() + at.start) };
            cuda.run_alone("restore", launch(false, bytes, pools.len(), &args))?;
            let scattered = Rc::new(Event::new(false)?);
            scattered.record(&cuda.stream)?;
            lane.busy.push_back((at, scattered));
        }
        self.release()
    }

    /// Copies a piece of a value into a part of the buffer, which it has from the event on.
    fn send(&self, lane: &mut Lane, value: Bytes) -> Result<(Range<u64>, Rc<Event>)> {
        let stream = lane.stream.clone();
        let part = lane.part(value.len() as u64, &stream)?;
        let (start, done) = (Event::new(true)?, Rc::new(Event::new(true)?));
        start.record(&stream)?;
        let to = lane.buffer.address() + part.start;
        // SAFETY: the part is this copy's until its event; the value is held until `done`, or until the caller has waited.
        named("restore", unsafe { result::memcpy_htod_async(to, &value[..], stream.raw) })?;
        done.record(&stream)?;
        self.held.borrow_mut().push_back(Held { value, start, done: done.clone() });
        Ok((part, done))
    }

    /// Lets go of values that have been copied, and counts them.
    fn release(&self) -> Result<()> {
        let mut held = self.held.borrow_mut();
        while let Some(first) = held.front() {
            if !first.done.is_reached("restore")? {
                break;
            }
            let (bytes, time) = self.restored.get();
            let took = f64::from(first.done.since(&first.start)?) / 1e3;
            self.restored.set((bytes + first.value.len() as u64, time + took));
            held.pop_front();
        }
        Ok(())
    }

    /// Bytes of the restores that were completed since the last call, and their milliseconds.
    pub fn restored(&self) -> (u64, f64) {
        // An error of the device fails the next read.
        let _ = self.release();
        self.restored.take()
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        // Copies read values and write rooms.
        let _ = self.restore.get_mut().stream.wait("restore");
        let _ = self.save.get_mut().stream.wait("save");
    }
}

fn spec(save: bool) -> Spec {
    Spec::new(File::CopyRows).int("SAVE", usize::from(save))
}

fn launch(save: bool, bytes: u64, tensors: usize, args: &CopyRows) -> Launch {
    // 16 bytes a thread, at most as many blocks as keep a device busy.
    let blocks = (bytes as usize / tensors.max(1)).div_ceil(256 * 16).clamp(1, 64);
    Launch::new(spec(save), [blocks, tensors, 1], 256, args)
}

/// A value on its way to host memory.
struct Arriving {
    /// `None` once it was taken.
    room: Option<Box<dyn Room>>,
    done: Rc<Event>,
    /// Alive as long as the event.
    stream: Rc<Stream>,
    faults: Rc<Faults>,
}

impl Arriving {
    fn finish(&mut self, reached: Result<()>) -> Result<Bytes> {
        reached.map_err(|e| self.faults.name(e))?;
        Ok(self.room.take().expect("a value is taken once").freeze())
    }
}

impl Saving for Arriving {
    fn take(&mut self) -> Option<Result<Bytes>> {
        match self.done.is_reached("a step run before this copy") {
            Ok(false) => None,
            reached => Some(self.finish(reached.map(|_| ()))),
        }
    }

    fn arrive(&mut self) -> LocalFuture<'_, Result<Bytes>> {
        Box::pin(async {
            let reached = self.done.wait("a step run before this copy");
            self.finish(reached)
        })
    }
}

impl Drop for Arriving {
    fn drop(&mut self) {
        if self.room.is_some() {
            // The copy may still be writing to it.
            let _ = self.stream.wait("a dropped copy");
        }
    }
}
