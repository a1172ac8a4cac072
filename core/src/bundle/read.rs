//! Reading a bundle: the head first, then its values row by row.

#[cfg(any(unix, windows))]
use std::fs::File;
use std::{
    io::{self, Cursor},
    mem,
};

use super::{
    Head, PIECE, Part, header,
    threads::{ahead, each},
};
use crate::{
    digest::{Digest, Hasher},
    error::{Error, Result},
    source::Shared,
};

/// Bytes that one thread reads at a time.
const CHUNK: usize = 1 << 20;
/// Bytes of a part that are read ahead and hashed at a time, which is the work of several threads.
const AHEAD: usize = 2 * PIECE;

/// What a bundle is read from.
pub trait Input: Shared {
    /// All of its bytes.
    ///
    /// # Errors
    /// What the system says.
    fn size(&self) -> io::Result<u64>;

    /// Fills `into` with the bytes from `at` on.
    ///
    /// # Errors
    /// [`io::ErrorKind::UnexpectedEof`] for less than that, and what the system says.
    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()>;

    /// All of its bytes, if they are in memory and nobody can change them.
    fn in_memory(&self) -> Option<&[u8]> {
        None
    }
}

#[cfg(any(unix, windows))]
impl Input for File {
    fn size(&self) -> io::Result<u64> {
        self.metadata().map(|file| file.len())
    }

    #[cfg(unix)]
    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(self, into, at)
    }

    #[cfg(windows)]
    fn read_at(&self, mut at: u64, mut into: &mut [u8]) -> io::Result<()> {
        while !into.is_empty() {
            match std::os::windows::fs::FileExt::seek_read(self, into, at)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                read => (at, into) = (at + read as u64, &mut into[read..]),
            }
        }
        Ok(())
    }
}

impl<T: AsRef<[u8]> + Shared> Input for Cursor<T> {
    fn size(&self) -> io::Result<u64> {
        Ok(self.get_ref().as_ref().len() as u64)
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let all = self.get_ref().as_ref();
        let part = usize::try_from(at).ok().and_then(|at| all.get(at..)?.get(..into.len()));
        into.copy_from_slice(part.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn in_memory(&self) -> Option<&[u8]> {
        Some(self.get_ref().as_ref())
    }
}

/// Takes some rows of a part: the number of the first one in the part, and the bytes of all.
pub type Visit<'a> = dyn FnMut(&Part, usize, &[u8]) -> Result<()> + 'a;

/// A bundle whose head is read and checked. Values come by [`Reader::rows`].
pub struct Reader<'a> {
    input: Box<dyn Input + 'a>,
    /// The file's name in messages.
    file: String,
    head: Head,
    /// Where the values begin.
    values: u64,
    /// Of each part.
    sums: Vec<Digest>,
    /// All values were compared with them.
    verified: bool,
}

impl<'a> Reader<'a> {
    /// Reads the head of all of `input`; `file` names it in messages.
    ///
    /// # Errors
    /// [`Error::BadModel`] if this is not a bundle, not a whole one, or not as it was written, with the place; [`Error::Io`].
    pub fn open(input: impl Input + 'a, file: &str) -> Result<Self> {
        let bad = |why: String| Error::model(file, why);
        let size = input.size().map_err(|e| Error::io(file, e))?;
        if size < 8 {
            return Err(bad(format!("a file of {size} bytes is not a bundle")));
        }
        let mut from = Checked { input: &input, file, at: 0 };
        let length = from.take(8)?;
        let bytes = u64::from_le_bytes(length.as_slice().try_into().expect("eight bytes were read"));
        if bytes > header::MOST_HEADER || bytes > size - 8 {
            return Err(bad(format!("the header claims {bytes} bytes of {size}: truncated, or not a bundle")));
        }
        let json = from.take(bytes)?;
        let header::Layout { mut head, tokens, ends, messages } =
            header::parse(&json, size - 8 - bytes).map_err(bad)?;
        let header = [length, json].concat();
        let mut small = vec![(header::TOKENS, from.take(tokens)?), (header::ENDS, from.take(ends)?)];
        if let Some(bytes) = messages {
            small.push((header::MESSAGES, from.take(bytes)?));
        }
        let values = 8 + bytes + tokens + ends + messages.unwrap_or(0);
        let rows = 1 + header::summed(messages.is_some(), head.parts.len()) as u64;
        let sums = Checked { input: &input, file, at: size - 32 * rows }.take(32 * rows)?;
        let mut sums: Vec<Digest> = sums.as_chunks::<32>().0.iter().map(|sum| Digest(*sum)).collect();
        let of_parts = sums.split_off(1 + small.len());
        let whole = [("header", &header)].into_iter().chain(small.iter().map(|(name, bytes)| (*name, bytes)));
        for ((name, bytes), sum) in whole.zip(sums) {
            if Digest::of(bytes) != sum {
                return Err(bad(altered(name)));
            }
        }
        let mut small = small.into_iter().map(|(_, bytes)| bytes);
        head.tokens = words(&small.next().unwrap_or_default());
        head.ends = words(&small.next().unwrap_or_default());
        head.messages = match small.next().map(String::from_utf8) {
            Some(Err(_)) => return Err(bad(format!("tensor `{}` is not UTF-8", header::MESSAGES))),
            Some(Ok(text)) => Some(text.trim_end().to_owned()),
            None => None,
        };
        head.check().map_err(bad)?;
        Ok(Self { input: Box::new(input), file: file.to_owned(), head, values, sums: of_parts, verified: false })
    }

    /// Everything but the values.
    pub fn head(&self) -> &Head {
        &self.head
    }

    /// The file's name in messages.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Reads all values and compares the checksums, of several parts at once; nothing the second time.
    ///
    /// # Errors
    /// [`Error::BadModel`] naming the first tensor that was altered; [`Error::Io`].
    pub fn verify(&mut self) -> Result<()> {
        if !self.verified {
            let parts: Vec<(&Part, u64, &Digest)> = self.parts().collect();
            each(parts, |part| self.verify_part(part))?;
            self.verified = true;
        }
        Ok(())
    }

    fn verify_part(&self, (part, mut at, sum): (&Part, u64, &Digest)) -> Result<()> {
        // The sizes were checked with the header.
        let (mut hasher, mut bytes, end) = (Hasher::default(), Vec::new(), at + part.bytes().unwrap_or(0));
        while at < end {
            self.fill(&mut bytes, at, (end - at).min(CHUNK as u64) as usize)?;
            hasher.update(&bytes);
            at += bytes.len() as u64;
        }
        self.compare(part, &hasher, sum)
    }

    /// Hands `visit` the rows of each part in order, some at a time, while the next ones are read. A part's checksum is compared
    /// when all of it is read: what `visit` gets may be damaged until this returns.
    ///
    /// # Errors
    /// As [`Reader::verify`], and those of `visit`.
    pub fn rows(&self, visit: &mut Visit<'_>) -> Result<()> {
        if let Some(all) = self.input.in_memory().filter(|_| self.verified) {
            let bytes = |piece: &Piece<'_>| &all[piece.at as usize..][..piece.length];
            return self.pieces().try_for_each(|piece| visit(piece.part, piece.first, bytes(&piece)));
        }
        let (mut pieces, mut hasher) = (self.pieces(), Hasher::default());
        let make = || pieces.next().map(|piece| self.load(&piece, &mut hasher).map(|bytes| (piece, bytes)));
        ahead(make, |loaded| loaded.and_then(|(piece, bytes)| visit(piece.part, piece.first, &bytes)))
    }

    /// The values of a piece. If its part ends with it, the part's checksum is compared.
    fn load(&self, piece: &Piece<'_>, hasher: &mut Hasher) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        room(&mut bytes, piece.length as u64, &self.file)?;
        let chunks = bytes.chunks_mut(CHUNK).enumerate().collect();
        each(chunks, |(i, chunk)| {
            let at = piece.at + (i * CHUNK) as u64;
            self.input.read_at(at, chunk).map_err(|e| Error::io(&self.file, e))
        })?;
        hasher.update(&bytes);
        if let Some(sum) = piece.last {
            self.compare(piece.part, &mem::take(hasher), sum)?;
        }
        Ok(bytes)
    }

    /// The parts with the places of their values and their checksums.
    fn parts(&self) -> impl Iterator<Item = (&Part, u64, &Digest)> {
        let mut end = self.values;
        self.head.parts.iter().zip(&self.sums).map(move |(part, sum)| {
            let at = end;
            end += part.bytes().unwrap_or(0);
            (part, at, sum)
        })
    }

    /// The rows of all parts, at most [`AHEAD`] bytes at a time unless one has more.
    fn pieces(&self) -> impl Iterator<Item = Piece<'_>> {
        self.parts().flat_map(|(part, at, sum)| {
            let (rows, each) = (part.rows(), part.row_bytes());
            let at_a_time = (AHEAD / each).max(1);
            (0..rows).step_by(at_a_time).map(move |first| {
                let now = at_a_time.min(rows - first);
                let last = (first + now == rows).then_some(sum);
                Piece { part, first, at: at + (first * each) as u64, length: now * each, last }
            })
        })
    }

    fn compare(&self, part: &Part, hasher: &Hasher, sum: &Digest) -> Result<()> {
        match hasher.finish() == *sum {
            true => Ok(()),
            false => Err(Error::model(&self.file, altered(&part.name()))),
        }
    }

    fn fill(&self, bytes: &mut Vec<u8>, at: u64, length: usize) -> Result<()> {
        Checked { input: &*self.input, file: &self.file, at }.fill(bytes, length as u64)
    }
}

/// Rows of a part that are read at once.
struct Piece<'r> {
    part: &'r Part,
    /// The first of them.
    first: usize,
    /// Where they are.
    at: u64,
    length: usize,
    /// The part's checksum, if it ends with them.
    last: Option<&'r Digest>,
}

fn altered(name: &str) -> String {
    let what = if name == "header" { "the header".to_owned() } else { format!("tensor `{name}`") };
    format!("{what} does not have the checksum that was written with it: the file is damaged or was altered")
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
}

/// Reads whole pieces, one after the other.
struct Checked<'a> {
    input: &'a dyn Input,
    file: &'a str,
    at: u64,
}

impl Checked<'_> {
    fn take(&mut self, n: u64) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.fill(&mut bytes, n)?;
        Ok(bytes)
    }

    /// Replaces `bytes` by the next `n` bytes.
    fn fill(&mut self, bytes: &mut Vec<u8>, n: u64) -> Result<()> {
        room(bytes, n, self.file)?;
        self.input.read_at(self.at, bytes).map_err(|e| Error::io(self.file, e))?;
        self.at += n;
        Ok(())
    }
}

/// Makes `bytes` `n` bytes long.
fn room(bytes: &mut Vec<u8>, n: u64, file: &str) -> Result<()> {
    // The size of the file was compared with the header's sizes, so this is no more than the file had. A page may have less.
    let wanted = usize::try_from(n).ok().filter(|n| bytes.try_reserve_exact(n.saturating_sub(bytes.len())).is_ok());
    let wanted = wanted.ok_or_else(|| Error::OutOfMemory { what: file.to_owned(), asked: n, free: 0 })?;
    bytes.resize(wanted, 0);
    Ok(())
}
