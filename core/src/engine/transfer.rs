//! Prefixes of the tree as bundles: read out of slots and pages, and written into free ones.
//!
//! Both run between two steps. Reads and writes are ordered with the steps on the device, so a step in flight is no obstacle.

use std::{borrow::Cow, collections::VecDeque, io::Write, iter, mem, ops::Range, pin::Pin};

use super::{Engine, landing::Landing, landing::Path};
use crate::{
    backend::Backend,
    bundle::{Dtypes, Head, Identity, PIECE, Part, Reader, Writer, convert, lineage, numerics, parts},
    error::{Error, Result},
    state::{GRID, Realm},
};

/// Runs of rows that are read from a device at a time, each a [`PIECE`] unless a row has more. On a GPU a copy of a row takes as
/// long as one of several.
const READS: usize = 8;

/// What is written into a bundle.
#[derive(Clone, Debug)]
pub struct Export {
    /// The loaded model.
    pub model: Identity,
    /// Its name, for people.
    pub name: String,
    /// The text from its start. The bundle covers as much of it as the cache holds, in whole pages.
    pub tokens: Vec<u32>,
    /// Positions where messages end, ascending.
    pub ends: Vec<u32>,
    /// The conversation that the tokens are, as a JSON array.
    pub messages: Option<String>,
    /// Whose prefix.
    pub realm: Realm,
    /// Most states, the deepest ones. At least one is written.
    pub states: usize,
    /// Tokens whose pages the reader has, so that they are left out; 0 for a bundle that anybody can read. The last page is
    /// always there.
    pub from: usize,
}

/// What a bundle got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exported {
    /// Tokens from which a reader need not compute.
    pub tokens: usize,
    /// States on the way there, 0 for a model without recurrent layers.
    pub states: usize,
    /// Bytes of the bundle.
    pub bytes: u64,
}

/// Where a bundle goes.
#[derive(Clone, Debug)]
pub struct Import {
    /// The loaded model.
    pub model: Identity,
    /// The tenant that may use it.
    pub namespace: String,
    /// Refuse values of other numerics.
    pub exact_only: bool,
    /// Take pages without the state at their end, which will follow.
    pub pieces: bool,
}

/// What the tree got.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Imported {
    /// Tokens that requests need not compute now; less than the bundle's if slots or nodes were scarce, or states will follow.
    pub tokens: usize,
    /// States that were written; those that the tree had already are not counted.
    pub states: usize,
    /// Pages that were written.
    pub pages: usize,
    /// Empty if the values are exact. Else they were converted, and only requests with this
    /// [`Request::origin`](super::Request::origin) use them.
    pub origin: String,
}

impl<B: Backend> Engine<B> {
    /// The numerics of the states that this engine computes, see [`numerics`].
    pub fn numerics(&self) -> String {
        numerics(self.caps())
    }

    /// Writes the deepest prefix of `what.tokens` that a request could be continued from. The engine does nothing else
    /// meanwhile; if the future is dropped, nothing has changed.
    ///
    /// # Errors
    /// [`Error::BadRequest`] if the tree holds no such prefix; [`Error::Io`] of `out`, which `file` names; a device error.
    pub async fn export(&self, what: Export, file: &str, out: &mut dyn Write) -> Result<Exported> {
        self.check_usable()?;
        let (path, origin) = self.scheduler.path(&what.realm, &what.tokens, what.states.max(1));
        if path.depth == 0 {
            let tokens = what.tokens.len();
            return Err(Error::BadRequest(format!(
                "{file}: the prefix cache holds nothing of these {tokens} tokens to save; it keeps whole blocks of {GRID} \
                 tokens of prompts and answers while it is on"
            )));
        }
        let dtypes = Dtypes::of(self.caps());
        let left_out = (what.from / GRID).min(path.pages.len().saturating_sub(1));
        let positions: Vec<usize> = path.states.iter().map(|(position, _)| *position).collect();
        let head = Head {
            name: what.name,
            model: what.model,
            numerics: lineage(&origin, &self.numerics()),
            tokens: what.tokens,
            ends: what.ends,
            messages: what.messages,
            from: left_out * GRID,
            parts: parts(&self.division.layers, dtypes, path.depth / GRID - left_out, &positions),
        };
        let io = |e| Error::io(file, e);
        let mut writer = Writer::new(out, &head).map_err(io)?;
        let runs = head.parts.iter().flat_map(|part| {
            let entries = (0..part.rows()).map(|row| Some(path.entry(part, left_out + row)));
            runs(entries, (PIECE / part.row_bytes()).max(1)).into_iter().map(move |run| (part, run))
        });
        let mut runs = runs.map(|(part, run)| self.read_rows(part, &run));
        let mut reads: VecDeque<RunRead<B>> = runs.by_ref().take(READS).collect();
        let mut piece = Vec::new();
        while let Some(first) = reads.pop_front() {
            let rows = first.arrive().await?;
            reads.extend(runs.next());
            // Most runs are a piece.
            if piece.is_empty() {
                piece = rows
            } else {
                piece.extend_from_slice(&rows)
            }
            if piece.len() >= PIECE / 2 || reads.is_empty() {
                writer.write(mem::take(&mut piece)).map_err(io)?;
            }
        }
        let (_, bytes) = writer.finish().map_err(io)?;
        Ok(Exported { tokens: path.depth, states: positions.len(), bytes })
    }

    /// Puts a bundle's prefix into the tree of one namespace. The whole bundle is read and checked before a slot or a page is
    /// taken, then it is read again; of a file that changed in between nothing enters the tree.
    ///
    /// # Errors
    /// [`Error::BadModel`] for a damaged bundle, one of another model or of other shapes, by name; [`Error::BadRequest`] for
    /// other numerics with `exact_only`, while the cache is off, and without room; [`Error::Io`]; a device error.
    pub fn import(&mut self, bundle: &mut Reader<'_>, into: &Import) -> Result<Imported> {
        self.check_usable()?;
        let file = bundle.file().to_owned();
        let origin = self.admissible(bundle.head(), &file, into)?;
        bundle.verify()?;
        let head = bundle.head();
        let realm = Realm { namespace: into.namespace.clone(), origin };
        let tokens = &head.tokens[..head.depth()];
        let waits = self.sizes.shape.has_slots() && head.positions().is_empty();
        if waits && !into.pieces {
            return Err(Error::model(file, "it has pages without the state at their end, and so no use"));
        }
        let landing = self.scheduler.open_landing(realm, tokens, &head.positions()).map_err(|e| match e {
            Error::BadRequest(why) => Error::BadRequest(format!("{file}: {why}")),
            e => e,
        })?;
        let left_out = head.from / GRID;
        // What made room for it goes to a lower tier before it is overwritten.
        let ready = match landing.known() < left_out {
            true => Err(Error::BadRequest(format!("{file}: it leaves out pages that are no longer in the cache"))),
            false => self.demote(),
        };
        if let Err(e) = ready {
            self.scheduler.close_landing(landing);
            return Err(e);
        }
        let written = bundle.rows(&mut |part, first, bytes| {
            let each = part.row_bytes();
            let entries = (first..).take(bytes.len() / each).map(|row| landing.entry(part, left_out + row));
            let mut runs = runs(entries, usize::MAX).into_iter();
            runs.try_for_each(|run| {
                self.write_rows(&file, part, run.entry, &bytes[run.first * each..][..run.rows * each])
            })
        });
        if let Err(e) = written {
            self.scheduler.close_landing(landing);
            return Err(e);
        }
        let (states, pages, origin) = (landing.states(), landing.pages(), landing.realm.origin.clone());
        let tokens = self.scheduler.land(landing);
        if tokens == 0 && !waits {
            return Err(Error::BadRequest(format!("{file}: the prefix tree has no room for its {GRID}-token blocks")));
        }
        Ok(Imported { tokens, states, pages, origin })
    }

    /// Checks everything about a bundle but its values; returns the origin under which they would live.
    fn admissible(&self, head: &Head, file: &str, into: &Import) -> Result<String> {
        head.check_model(file, &into.model)?;
        head.check_parts(file, &self.division.layers)?;
        let vocab = self.spec().vocab;
        if let Some(id) = head.tokens.iter().find(|id| **id as usize >= vocab) {
            return Err(Error::model(file, format!("token id {id} is outside the vocabulary of {vocab}")));
        }
        let own = self.numerics();
        if head.numerics != own {
            if into.exact_only {
                return Err(Error::BadRequest(format!(
                    "{file}: its values come from `{}`, this engine computes with `{own}`; without the option for exact \
                     values only they are converted and kept apart",
                    head.numerics
                )));
            }
            return Ok(head.numerics.clone());
        }
        let differs = |part: &&Part| self.runner.pools_of(part).any(|pool| pool.dtype != part.dtype);
        match head.parts.iter().find(differs) {
            Some(part) => {
                let why = format!("tensor `{}` is {:?}, which its numerics `{own}` exclude", part.name(), part.dtype);
                Err(Error::model(file, why))
            }
            None => Ok(String::new()),
        }
    }

    /// Starts the reads of rows of a part, from slots or pages.
    fn read_rows(&self, part: &Part, run: &Run) -> RunRead<B> {
        let (backend, mut reads) = (self.runner.backend(), Vec::new());
        for (rank, shares) in self.division.shares.iter().enumerate() {
            let mut places = part.places(&shares[part.layer as usize]);
            for pool in self.runner.pools_of(part) {
                let here = spread(places.take(pool.dims()[1] * part.unit_bytes()), part.row_bytes(), run.rows);
                let bytes = Box::pin(backend.read_on(rank, &pool.slice_rows(run.entry as usize, run.rows)));
                reads.push(ShareRead { bytes, places: here });
            }
        }
        RunRead { bytes: run.rows * part.row_bytes(), reads }
    }

    /// Writes rows of a part into slots or pages from `entry` on, converted to the dtype there.
    fn write_rows(&self, file: &str, part: &Part, entry: u32, bytes: &[u8]) -> Result<()> {
        let rows = bytes.len() / part.row_bytes();
        for (rank, shares) in self.division.shares.iter().enumerate() {
            let mut places = part.places(&shares[part.layer as usize]);
            for pool in self.runner.pools_of(part) {
                let here = spread(places.take(pool.dims()[1] * part.unit_bytes()), part.row_bytes(), rows);
                let share: Cow<'_, [u8]> = match &here[..] {
                    [one] => bytes[one.clone()].into(),
                    several => several.iter().map(|at| &bytes[at.clone()]).collect::<Vec<_>>().concat().into(),
                };
                let values = convert(&share, part.dtype, pool.dtype, part.width()).ok_or_else(|| {
                    let why = format!("tensor `{}` has a value that {:?} cannot hold", part.name(), pool.dtype);
                    Error::model(file, why)
                })?;
                let at = pool.slice_rows(entry as usize, rows).byte_offset() as u64;
                self.runner.backend().write_on(rank, &pool.buf, at, &values)?;
            }
        }
        Ok(())
    }
}

/// Rows whose slots or pages follow each other, so that they lie side by side in a pool.
#[derive(Debug, PartialEq, Eq)]
struct Run {
    /// The first of them.
    first: usize,
    rows: usize,
    /// Its slot or page.
    entry: u32,
}

/// The runs of rows with these entries, of at most `most` rows each. Rows without an entry are in none.
fn runs(entries: impl Iterator<Item = Option<u32>>, most: usize) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (row, entry) in entries.enumerate() {
        let Some(entry) = entry else { continue };
        match runs.last_mut() {
            Some(run)
                if run.rows < most
                    && run.first + run.rows == row
                    && run.entry as usize + run.rows == entry as usize =>
            {
                run.rows += 1;
            }
            _ => runs.push(Run { first: row, rows: 1, entry }),
        }
    }
    runs
}

/// Where a share of `rows` rows of `each` bytes lies in them, from its places in one.
fn spread(places: Vec<Range<usize>>, each: usize, rows: usize) -> Vec<Range<usize>> {
    if matches!(&places[..], [one] if *one == (0..each)) {
        return iter::once(0..rows * each).collect();
    }
    (0..rows).flat_map(|row| places.iter().map(move |at| at.start + row * each..at.end + row * each)).collect()
}

/// Reads of rows of a part in flight.
struct RunRead<B: Backend> {
    bytes: usize,
    reads: Vec<ShareRead<B>>,
}

/// What one rank has of the rows, with its places in them.
struct ShareRead<B: Backend> {
    bytes: Pin<Box<B::Read>>,
    places: Vec<Range<usize>>,
}

impl<B: Backend> RunRead<B> {
    /// The rows. What several ranks have is taken from the last of them.
    async fn arrive(mut self) -> Result<Vec<u8>> {
        if self.reads.len() == 1 {
            return self.reads.remove(0).bytes.await;
        }
        let mut rows = vec![0; self.bytes];
        for share in self.reads {
            let (bytes, mut from) = (share.bytes.await?, 0);
            for at in share.places {
                rows[at.clone()].copy_from_slice(&bytes[from..from + at.len()]);
                from += at.len();
            }
        }
        Ok(rows)
    }
}

impl Path {
    fn entry(&self, part: &Part, row: usize) -> u32 {
        match part.kind.is_paged() {
            true => self.pages[row],
            false => self.states.iter().find(|(p, _)| *p == part.position as usize).map_or(0, |(_, slot)| *slot),
        }
    }
}

impl Landing {
    /// The slot or page of a row; `None` if the tree has it already, or there was no slot for it.
    fn entry(&self, part: &Part, row: usize) -> Option<u32> {
        match part.kind.is_paged() {
            true => self.page(row),
            false => self.slot(part.position as usize),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_side_by_side_are_one_run() {
        let split = |entries: &[u32], most| -> Vec<(usize, usize, u32)> {
            // 0 stands for none.
            let all = runs(entries.iter().map(|entry| Some(*entry).filter(|entry| *entry != 0)), most);
            all.into_iter().map(|Run { first, rows, entry }| (first, rows, entry)).collect()
        };
        assert_eq!(split(&[], 9), []);
        assert_eq!(split(&[4, 5, 6, 8, 7, 8], 9), [(0, 3, 4), (3, 1, 8), (4, 2, 7)]);
        assert_eq!(split(&[0, 4, 5, 0, 6, 7], 9), [(1, 2, 4), (4, 2, 6)]);
        assert_eq!(split(&[1, 2, 3, 4, 5], 2), [(0, 2, 1), (2, 2, 3), (4, 1, 5)]);
        assert_eq!(split(&[3, 3], 2), [(0, 1, 3), (1, 1, 3)]);
    }

    #[test]
    fn a_share_of_some_rows_is_that_of_each() {
        let one = |at: Range<usize>| iter::once(at).collect::<Vec<_>>();
        assert_eq!(spread(one(0..8), 8, 3), one(0..24));
        assert_eq!(spread(vec![2..4, 6..8], 8, 2), [2..4, 6..8, 10..12, 14..16]);
        assert_eq!(spread(one(4..8), 8, 1), one(4..8));
    }
}
