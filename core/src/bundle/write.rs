//! Writing a bundle in one pass.

use std::{
    io::{self, Write},
    mem,
    sync::mpsc::{SyncSender, sync_channel},
    thread::{self, JoinHandle},
};

use super::{
    Head, header, messages_bytes,
    threads::{beside, map},
};
use crate::{
    digest::{Digest, Hasher},
    source::Bytes,
};

/// Writes a bundle: the head at once, then the values of all parts in their order, in pieces of any size.
///
/// It keeps no value. A bundle that was not finished is not readable.
pub struct Writer<W> {
    out: W,
    /// Of what comes before the values.
    sums: Vec<Digest>,
    /// Bytes of values that are missing.
    left: u64,
    /// Bytes of the parts, the next one last.
    sizes: Vec<u64>,
    /// From the first values on.
    values: Option<Values>,
    written: u64,
}

/// The checksums of the parts. To compute them takes about as long as to write the values, so a thread does it, where there is one.
enum Values {
    Here(Box<Sums>),
    Beside(SyncSender<Bytes>, JoinHandle<Sums>),
}

/// Checksums of parts whose values come in pieces of any size.
#[derive(Clone)]
struct Sums {
    complete: Vec<Digest>,
    /// Bytes of the parts that are not complete yet, the next one last.
    left: Vec<u64>,
    hasher: Hasher,
}

/// Pieces of values that wait for their checksums.
const WAITING: usize = 4;

impl<W: Write> Writer<W> {
    /// Writes everything before the values.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a head that no reader would accept, with the reason; those of `out`.
    pub fn new(out: W, head: &Head) -> io::Result<Self> {
        let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidInput, why);
        head.check().map_err(invalid)?;
        let mut messages = head.messages.clone().map(String::into_bytes);
        if let Some(text) = &mut messages {
            text.resize(head.messages.as_deref().map_or(0, messages_bytes), b' ');
        }
        let bytes = header::write(head, messages.as_ref().map(Vec::len));
        if bytes.len() as u64 - 8 > header::MOST_HEADER {
            return Err(invalid(format!("a bundle of {} tensors has too large a header", head.parts.len())));
        }
        let left = head.parts.iter().rev().map(|p| p.bytes().ok_or_else(|| invalid("a part is too large".into())));
        let left: Vec<u64> = left.collect::<io::Result<_>>()?;
        let all = left.iter().try_fold(0u64, |all, part| all.checked_add(*part));
        let all = all.ok_or_else(|| invalid("its parts are too large".into()))?;
        let mut writer = Self { out, sums: Vec::new(), left: all, sizes: left, values: None, written: 0 };
        writer.whole(&bytes)?;
        writer.whole(&little_endian(&head.tokens))?;
        writer.whole(&little_endian(&head.ends))?;
        messages.map_or(Ok(()), |text| writer.whole(&text))?;
        Ok(writer)
    }

    fn whole(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.sums.push(Digest::of(bytes));
        self.put(bytes)
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len() as u64;
        self.out.write_all(bytes)
    }

    /// The next bytes of the values.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for more than the parts hold; those of the output.
    pub fn write(&mut self, bytes: impl Into<Bytes>) -> io::Result<()> {
        let bytes = bytes.into();
        let Some(left) = self.left.checked_sub(bytes.len() as u64) else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "more values than the bundle's head names"));
        };
        self.left = left;
        let sizes = &mut self.sizes;
        self.values.get_or_insert_with(|| Values::start(Sums::of(mem::take(sizes)))).add(&bytes);
        self.put(&bytes)
    }

    /// Writes the values of all parts, each in pieces that are in memory, and finishes. Several threads compute the checksums meanwhile.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if there are more or fewer values than the head names; those of the output.
    pub fn write_all(mut self, parts: &[Vec<Bytes>]) -> io::Result<(W, u64)> {
        let bytes: u64 = parts.iter().flatten().map(|piece| piece.len() as u64).sum();
        if bytes != self.left {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "other values than the bundle's head names"));
        }
        let sums = || map(parts.iter().collect(), |part| sum(part));
        let (sums, put) = beside(sums, || parts.iter().flatten().try_for_each(|piece| self.put(piece)));
        put?;
        self.end(&sums)
    }

    /// Writes the checksums; returns the output and the bytes of the bundle. The output is flushed.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if values are missing; those of the output.
    pub fn finish(mut self) -> io::Result<(W, u64)> {
        if self.left > 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "fewer values than the bundle's head names"));
        }
        let values = self.values.take().map_or_else(Vec::new, Values::finish);
        self.end(&values)
    }

    fn end(mut self, of_parts: &[Digest]) -> io::Result<(W, u64)> {
        let sums: Vec<u8> = self.sums.iter().chain(of_parts).flat_map(|sum| sum.0).collect();
        self.put(&sums)?;
        self.out.flush()?;
        Ok((self.out, self.written))
    }
}

impl Values {
    fn start(mut sums: Sums) -> Self {
        let (here, (pieces, arriving)) = (sums.clone(), sync_channel::<Bytes>(WAITING));
        let work = move || {
            arriving.iter().for_each(|bytes| sums.add(&bytes));
            sums
        };
        match thread::Builder::new().name("selkie-checksums".into()).spawn(work) {
            Ok(thread) => Self::Beside(pieces, thread),
            // A browser has none, and the system may refuse one.
            Err(_) => Self::Here(Box::new(here)),
        }
    }

    fn add(&mut self, bytes: &Bytes) {
        match self {
            Self::Here(sums) => sums.add(bytes),
            // The thread ends after the last piece only.
            Self::Beside(pieces, _) => drop(pieces.send(bytes.clone())),
        }
    }

    fn finish(self) -> Vec<Digest> {
        match self {
            Self::Here(sums) => sums.complete,
            Self::Beside(pieces, thread) => {
                drop(pieces);
                thread.join().expect("checksums do not fail").complete
            }
        }
    }
}

impl Sums {
    fn of(left: Vec<u64>) -> Self {
        Self { complete: Vec::new(), left, hasher: Hasher::default() }
    }

    /// The next bytes, no more than the parts have.
    fn add(&mut self, mut bytes: &[u8]) {
        while let Some(left) = self.left.last_mut().filter(|_| !bytes.is_empty()) {
            let (now, later) = bytes.split_at(bytes.len().min(usize::try_from(*left).unwrap_or(usize::MAX)));
            *left -= now.len() as u64;
            self.hasher.update(now);
            if *left == 0 {
                self.left.pop();
                self.complete.push(mem::take(&mut self.hasher).finish());
            }
            bytes = later;
        }
    }
}

fn sum(part: &[Bytes]) -> Digest {
    let mut hasher = Hasher::default();
    part.iter().for_each(|piece| hasher.update(piece));
    hasher.finish()
}

fn little_endian(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}
