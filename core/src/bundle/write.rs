//! Writing a bundle in one pass.

use std::io::{self, Write};

use super::{Head, header};
use crate::digest::{Digest, Hasher};

/// Writes a bundle: the head at once, then the values of all parts in their order, in pieces of any size.
///
/// It keeps no value. A bundle that was not finished is not readable.
pub struct Writer<W> {
    out: W,
    sums: Vec<Digest>,
    /// Bytes of the parts that are not complete yet, the next one last.
    left: Vec<u64>,
    hasher: Hasher,
    written: u64,
}

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
            // White space after JSON; so all values lie at multiples of 4 bytes.
            text.resize(text.len().next_multiple_of(4), b' ');
        }
        let bytes = header::write(head, messages.as_ref().map(Vec::len));
        if bytes.len() as u64 - 8 > header::MOST_HEADER {
            return Err(invalid(format!("a bundle of {} tensors has too large a header", head.parts.len())));
        }
        let left = head.parts.iter().rev().map(|p| p.bytes().ok_or_else(|| invalid("a part is too large".into())));
        let left = left.collect::<io::Result<_>>()?;
        let mut writer = Self { out, sums: Vec::new(), left, hasher: Hasher::default(), written: 0 };
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
    pub fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let Some(left) = self.left.last_mut() else {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "more values than the bundle's head names"));
            };
            let n = bytes.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
            let (now, later) = bytes.split_at(n);
            *left -= n as u64;
            let complete = *left == 0;
            self.hasher.update(now);
            self.put(now)?;
            if complete {
                self.left.pop();
                self.sums.push(std::mem::take(&mut self.hasher).finish());
            }
            bytes = later;
        }
        Ok(())
    }

    /// Writes the checksums; returns the output and the bytes of the bundle. The output is flushed.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if values are missing; those of the output.
    pub fn finish(mut self) -> io::Result<(W, u64)> {
        if !self.left.is_empty() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "fewer values than the bundle's head names"));
        }
        for sum in std::mem::take(&mut self.sums) {
            self.put(&sum.0)?;
        }
        self.out.flush()?;
        Ok((self.out, self.written))
    }
}

fn little_endian(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}
