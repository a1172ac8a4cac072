//! The format of a stored value.

use std::io;

use super::{Content, Name};
use crate::digest::Hasher;

/// Bytes before the value.
pub const HEAD: usize = 64;
/// Bytes after it.
pub const TAIL: usize = 32;

const MAGIC: [u8; 16] = *b"selkie value 1\r\n";

/// `selkie value 1\r\n`, key, content (u32: 1 a page, 2 a state, 3 a state in int8), zero (u32), length of the value (u64). Numbers are little endian. The value follows, then
/// BLAKE3 of all that.
pub fn head(name: &Name, bytes: u64) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[..16].copy_from_slice(&MAGIC);
    head[16..48].copy_from_slice(&name.key.0.0);
    head[48] = match name.content {
        Content::Page => 1,
        Content::State => 2,
        Content::Int8 => 3,
    };
    head[56..].copy_from_slice(&bytes.to_le_bytes());
    head
}

/// BLAKE3 of head and value.
pub fn tail(head: &[u8; HEAD], value: &[u8]) -> [u8; TAIL] {
    let mut hasher = Hasher::default();
    hasher.update(head);
    hasher.update(value);
    hasher.finish().0
}

/// A file that is not the record that it should be.
pub fn bad(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Whether these are head, value and tail of a record of that name; [`io::ErrorKind::InvalidData`] with what is wrong.
pub fn check(name: &Name, head: &[u8; HEAD], value: &[u8], tail: &[u8; TAIL]) -> io::Result<()> {
    match (self::tail(head, value) == *tail, *head == self::head(name, value.len() as u64)) {
        (false, _) => Err(bad("its checksum is wrong")),
        (_, false) => Err(bad("it is the value of another prefix")),
        _ => Ok(()),
    }
}
