//! Text files that are read as a whole.

use std::io::{self, Read};

/// A UTF-8 byte order mark, which some editors put before a text.
const MARK: &[u8] = b"\xef\xbb\xbf";

/// All bytes of a text without its byte order mark.
///
/// # Errors
/// What reading says, and a text of more than `most` bytes: a device may never end.
pub fn read(from: impl Read, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("more than {most} bytes are too many")));
    }
    if bytes.starts_with(MARK) {
        bytes.drain(..MARK.len());
    }
    Ok(bytes)
}
