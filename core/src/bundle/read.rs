//! Reading a bundle: the head first, then its values row by row.

use std::io::{ErrorKind, Read, Seek, SeekFrom};

use super::{Head, PIECE, Part, header};
use crate::{
    digest::{Digest, Hasher},
    error::{Error, Result},
    source::Shared,
};

/// What a bundle is read from.
pub trait Input: Read + Seek + Shared {}

impl<T: Read + Seek + Shared> Input for T {}

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
}

impl<'a> Reader<'a> {
    /// Reads the head of all of `input`; `file` names it in messages.
    ///
    /// # Errors
    /// [`Error::BadModel`] if this is not a bundle, not a whole one, or not as it was written, with the place; [`Error::Io`].
    pub fn open(input: impl Input + 'a, file: &str) -> Result<Self> {
        let mut input: Box<dyn Input + 'a> = Box::new(input);
        let bad = |why: String| Error::model(file, why);
        let io = |e: std::io::Error| Error::io(file, e);
        let size = input.seek(SeekFrom::End(0)).map_err(io)?;
        input.seek(SeekFrom::Start(0)).map_err(io)?;
        if size < 8 {
            return Err(bad(format!("a file of {size} bytes is not a bundle")));
        }
        let mut from = Checked { input: &mut *input, file };
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
        input.seek(SeekFrom::Start(size - 32 * rows)).map_err(io)?;
        let sums = Checked { input: &mut *input, file }.take(32 * rows)?;
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
        Ok(Self { input, file: file.to_owned(), head, values, sums: of_parts })
    }

    /// Everything but the values.
    pub fn head(&self) -> &Head {
        &self.head
    }

    /// The file's name in messages.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Reads all values and compares the checksums.
    ///
    /// # Errors
    /// [`Error::BadModel`] naming the tensor that was altered; [`Error::Io`].
    pub fn verify(&mut self) -> Result<()> {
        self.rows(&mut |_, _, _| Ok(()))
    }

    /// Hands `visit` the rows of each part in order, some at a time. A part's checksum is compared after its last
    /// row: values that were not verified before may be damaged.
    ///
    /// # Errors
    /// As [`Reader::verify`], and those of `visit`.
    pub fn rows(&mut self, visit: &mut Visit<'_>) -> Result<()> {
        self.input.seek(SeekFrom::Start(self.values)).map_err(|e| Error::io(&self.file, e))?;
        let mut from = Checked { input: &mut *self.input, file: &self.file };
        let mut bytes = Vec::new();
        for (part, sum) in self.head.parts.iter().zip(&self.sums) {
            let mut hasher = Hasher::default();
            let (rows, each) = (part.rows(), part.row_bytes());
            let at_a_time = (PIECE / each).max(1);
            for first in (0..rows).step_by(at_a_time) {
                from.fill(&mut bytes, ((rows - first).min(at_a_time) * each) as u64)?;
                hasher.update(&bytes);
                visit(part, first, &bytes)?;
            }
            if hasher.finish() != *sum {
                return Err(Error::model(&self.file, altered(&part.name())));
            }
        }
        Ok(())
    }
}

fn altered(name: &str) -> String {
    let what = if name == "header" { "the header".to_owned() } else { format!("tensor `{name}`") };
    format!("{what} does not have the checksum that was written with it: the file is damaged or was altered")
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
}

/// Reads whole pieces.
struct Checked<'a> {
    input: &'a mut dyn Input,
    file: &'a str,
}

impl Checked<'_> {
    fn take(&mut self, n: u64) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.fill(&mut bytes, n)?;
        Ok(bytes)
    }

    /// Replaces `bytes` by the next `n` bytes.
    fn fill(&mut self, bytes: &mut Vec<u8>, n: u64) -> Result<()> {
        bytes.clear();
        // The size of the file was compared with the header's sizes, so this is no more than the file had. A page may have less.
        let room = usize::try_from(n).is_ok_and(|n| bytes.try_reserve_exact(n).is_ok());
        if !room {
            return Err(Error::OutOfMemory { what: self.file.to_owned(), asked: n, free: 0 });
        }
        let read = Read::take(&mut *self.input, n).read_to_end(bytes).map_err(|e| Error::io(self.file, e))?;
        if read as u64 != n {
            return Err(Error::io(self.file, ErrorKind::UnexpectedEof.into()));
        }
        Ok(())
    }
}
