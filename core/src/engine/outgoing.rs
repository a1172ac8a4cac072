//! Pieces of prefixes that are copied to host memory while the engine runs, for those who send them on.
//!
//! The device makes the copies in the order of its steps. CUDA copies and computes at the same time, as for lower tiers. So the first pages of
//! a prompt leave while its last ones are computed. What arrived is put in the form of a bundle by another thread.

use std::{collections::VecDeque, io, io::Write, ops::Range, sync::Arc};

use super::{Engine, EngineOptions, Export, landing::Path, lower::Layout};
use crate::{
    backend::Backend,
    bundle::{Dtypes, Head, Part, Writer, parts},
    error::{Error, Result},
    layer::LayerState,
    saved::{HostMemory, Saving},
    source::Bytes,
    state::GRID,
};

/// There is memory for the pages of all pieces, and for so many states.
const STATES: u64 = 2;

/// Called with a piece that has arrived, on the engine's thread. Dropped with the engine if it never does.
pub type Arrived = Box<dyn FnOnce(Piece) + Send>;

/// A piece on its way to host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaving {
    /// Tokens up to its end.
    pub depth: usize,
    /// Whether nothing of the prefix is left after it.
    pub last: bool,
}

/// Pages of a prefix that follow each other, and perhaps the state at its end, in host memory.
pub struct Piece {
    head: Head,
    /// Each with its parts, those of all ranks one after the other.
    pages: Vec<Bytes>,
    state: Option<Bytes>,
    /// Where a row of each part of the head lies in a page or in the state.
    places: Arc<[Vec<Place>]>,
    last: bool,
    /// Counts it until it is dropped.
    _alive: Arc<()>,
}

/// Bytes of a page or a state that belong to a row of a part, and where in the row they do.
struct Place {
    at: usize,
    row: Vec<Range<usize>>,
}

impl Piece {
    /// What it was when it left.
    pub fn left(&self) -> Leaving {
        Leaving { depth: self.head.depth(), last: self.last }
    }

    /// Bytes of it as a bundle.
    pub fn bytes(&self) -> u64 {
        self.head.file_bytes()
    }

    /// Writes it as a bundle and returns its bytes.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write(&self, out: impl Write) -> io::Result<u64> {
        let rows = |(part, places): (&Part, &Vec<Place>)| -> Vec<Bytes> {
            let entries = if part.kind.is_paged() { &self.pages } else { self.state.as_slice() };
            entries.iter().map(|entry| row(entry, part.row_bytes(), places)).collect()
        };
        let parts: Vec<Vec<Bytes>> = self.head.parts.iter().zip(&*self.places).map(rows).collect();
        Writer::new(out, &self.head)?.write_all(&parts).map(|(_, bytes)| bytes)
    }
}

/// A row of `bytes` bytes. What several ranks have of it is taken from the last of them.
fn row(entry: &Bytes, bytes: usize, places: &[Place]) -> Bytes {
    let whole = |place: &&Place| matches!(&place.row[..], [all] if *all == (0..bytes));
    if let Some(Place { at, .. }) = places.last().filter(whole) {
        return entry.slice(*at..at + bytes);
    }
    let mut joined = vec![0; bytes];
    for place in places {
        let mut at = place.at;
        for range in &place.row {
            joined[range.clone()].copy_from_slice(&entry[at..at + range.len()]);
            at += range.len();
        }
    }
    joined.into()
}

/// Copies in flight and the memory for them.
pub(super) struct Outgoing {
    memory: Box<dyn HostMemory>,
    page: Layout,
    state: Layout,
    /// Most pieces that exist at a time.
    pieces: usize,
    /// Most bytes of the pages of one.
    of_pages: u64,
    alive: Arc<()>,
    /// In the order in which they were enqueued.
    coming: VecDeque<Coming>,
}

struct Coming {
    piece: Piece,
    /// Of pages, then of the state.
    savings: VecDeque<Box<dyn Saving>>,
    arrived: Arrived,
}

impl Outgoing {
    /// With memory for some pieces at a time, if there are to be any.
    pub fn open<B: Backend>(options: &EngineOptions, backend: &B, layers: &[LayerState]) -> Result<Option<Self>> {
        let (pieces, caps) = (options.outgoing, backend.caps());
        if pieces == 0 {
            return Ok(None);
        }
        let (page, state) = (Layout::new(layers, caps, true), Layout::new(layers, caps, false));
        let of_pages = if page.bytes == 0 { 0 } else { options.outgoing_bytes.max(page.bytes) };
        let memory = backend.host_memory(pieces as u64 * of_pages + STATES * state.bytes)?;
        Ok(Some(Self { memory, page, state, pieces, of_pages, alive: Arc::default(), coming: VecDeque::new() }))
    }

    pub fn is_empty(&self) -> bool {
        self.coming.is_empty()
    }

    /// Hands on what has arrived.
    pub fn collect(&mut self) -> Result<()> {
        while let Some(first) = self.coming.front_mut() {
            while let Some(saving) = first.savings.front_mut() {
                let Some(value) = saving.take() else { return Ok(()) };
                first.take(value?);
            }
            self.hand_on();
        }
        Ok(())
    }

    /// Waits for all of it.
    pub async fn settle(&mut self) -> Result<()> {
        while let Some(first) = self.coming.front_mut() {
            while let Some(saving) = first.savings.front_mut() {
                let value = saving.arrive().await?;
                first.take(value);
            }
            self.hand_on();
        }
        Ok(())
    }

    fn hand_on(&mut self) {
        if let Some(Coming { piece, arrived, .. }) = self.coming.pop_front() {
            arrived(piece);
        }
    }

    /// The first of `pages` pages that one piece takes.
    fn most(&self, pages: usize) -> usize {
        pages.min((self.of_pages / self.page.bytes.max(1)) as usize)
    }
}

impl Coming {
    /// The value of the first copy in flight.
    fn take(&mut self, value: Bytes) {
        self.savings.pop_front();
        // The state is the last one.
        match self.piece.head.positions().is_empty() || !self.savings.is_empty() {
            true => self.piece.pages.push(value),
            false => self.piece.state = Some(value),
        }
    }
}

impl<B: Backend> Engine<B> {
    /// Begins to copy pages of `what.tokens` from `what.from` on to host memory, as many as one piece takes: of a `whole` prefix, which no
    /// request computes any more, also the deepest state if all pages before it fit, else those that the tree has by now. `None`: there
    /// is nothing yet, or there are as many pieces as there may be. `what.states` is taken as 1. The engine goes on meanwhile.
    ///
    /// # Errors
    /// [`Error::BadRequest`] if the tree has nothing of a whole prefix, or has converted values, and without
    /// [`EngineOptions::outgoing`]; a device error.
    pub fn copy_out(&mut self, what: Export, whole: bool, arrived: Arrived) -> Result<Option<Leaving>> {
        self.check_usable()?;
        let Some(mut outgoing) = self.outgoing.take() else {
            return Err(Error::BadRequest("this engine has no memory for what leaves while it runs".into()));
        };
        let begun = self.begin_copy(&mut outgoing, what, whole, arrived);
        self.outgoing = Some(outgoing);
        begun
    }

    fn begin_copy(
        &self,
        outgoing: &mut Outgoing,
        what: Export,
        whole: bool,
        arrived: Arrived,
    ) -> Result<Option<Leaving>> {
        // One holder is the original.
        if Arc::strong_count(&outgoing.alive) > outgoing.pieces {
            return Ok(None);
        }
        let path = self.leaving(&what, whole)?;
        let pages = path.pages.len();
        // A whole prefix ends with a page and its state.
        let first = (what.from / GRID).min(if whole { pages.saturating_sub(1) } else { pages });
        let count = outgoing.most(pages - first);
        let mut last = whole && first + count == pages;
        // Before any page, which might be one that has left already.
        let mut state = None;
        if let Some((position, slot)) = path.states.last().filter(|_| last) {
            state = outgoing.memory.take(outgoing.state.bytes as usize).map(|room| (*position, *slot, room));
            if state.is_none() && what.from >= pages * GRID {
                return Ok(None);
            }
            last = state.is_some();
        }
        let mut savings = VecDeque::new();
        for &page in &path.pages[first..first + count] {
            let Some(room) = outgoing.memory.take(outgoing.page.bytes as usize) else { break };
            savings.push_back(self.runner.save_entry(&outgoing.page.parts, page, room)?);
        }
        last &= savings.len() == count;
        let to = first + savings.len();
        let mut positions = Vec::new();
        if let Some((position, slot, room)) = state.filter(|_| last) {
            positions.push(position);
            savings.push_back(self.runner.save_entry(&outgoing.state.parts, slot, room)?);
        }
        if savings.is_empty() {
            return Ok(None);
        }
        let depth = if last { path.depth } else { to * GRID };
        let head = self.head(what, first, depth, to - first, &positions);
        let places = self.places(&head.parts).into();
        let piece = Piece { head, pages: Vec::new(), state: None, places, last, _alive: outgoing.alive.clone() };
        let leaving = piece.left();
        outgoing.coming.push_back(Coming { piece, savings, arrived });
        Ok(Some(leaving))
    }

    /// The entries that can leave.
    fn leaving(&self, what: &Export, whole: bool) -> Result<Path> {
        if !whole {
            return Ok(self.scheduler.known(&what.realm, &what.tokens));
        }
        let (path, origin) = self.scheduler.path(&what.realm, &what.tokens, 1);
        match (path.depth, origin.is_empty()) {
            (0, _) => Err(Error::BadRequest("the prefix cache holds nothing of it any more".into())),
            (_, false) => Err(Error::BadRequest("the prefix cache holds it as converted values only".into())),
            _ => Ok(path),
        }
    }

    fn head(&self, what: Export, first: usize, depth: usize, pages: usize, positions: &[usize]) -> Head {
        let mut tokens = what.tokens;
        tokens.truncate(depth);
        let dtypes = Dtypes::of(self.caps());
        Head {
            name: what.name,
            model: what.model,
            numerics: self.numerics(),
            tokens,
            ends: what.ends,
            messages: what.messages,
            from: first * GRID,
            parts: parts(&self.division.layers, dtypes, pages, positions),
        }
    }

    /// Where the rows of these parts lie in pages and states as [`Backend::save`] copies them.
    fn places(&self, parts: &[Part]) -> Vec<Vec<Place>> {
        let mut all: Vec<Vec<Place>> = parts.iter().map(|_| Vec::new()).collect();
        for paged in [true, false] {
            let mut at = 0;
            for shares in &self.division.shares {
                for (part, places) in parts.iter().zip(&mut all).filter(|(part, _)| part.kind.is_paged() == paged) {
                    let mut own = part.places(&shares[part.layer as usize]);
                    for pool in self.runner.pools_of(part) {
                        let bytes = pool.dims()[1] * part.unit_bytes();
                        places.push(Place { at, row: own.take(bytes) });
                        at += bytes;
                    }
                }
            }
        }
        all
    }
}
