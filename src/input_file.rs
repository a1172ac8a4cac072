//! Reads whole text files.

use std::{
    fs::{self, File},
    io::{self, IsTerminal, Read},
    path::Path,
};

use selkie_core::Error;

use crate::{
    failure::{Failure, Outcome},
    terminal,
};

/// A UTF-8 byte order mark, which some editors put before a text.
const MARK: &[u8] = b"\xef\xbb\xbf";

/// Maximum bytes read from inputs of unknown size: a pipe, a device, standard input.
const MAX_STREAM_BYTES: u64 = 1 << 30;

/// All bytes of a text without its byte order mark; `-` is standard input. A pipe is waited for.
///
/// # Errors
/// If it cannot be read or has more than `most` bytes: a device may never end.
pub fn load(path: &Path, most: u64) -> Outcome<Vec<u8>> {
    let stream = most.min(MAX_STREAM_BYTES);
    if path == Path::new("-") {
        let stdin = io::stdin().lock();
        if stdin.is_terminal() {
            terminal::note("standard input: one JSON object a line; Ctrl-D ends");
        }
        return read(stdin, stream).map_err(|e| Failure::Other(format!("standard input: {e}")));
    }
    let loaded = fs::metadata(path).and_then(|meta| {
        if meta.is_file() {
            check_size(meta.len(), most)?;
            return read(File::open(path)?, most);
        }
        read(File::open(path)?, stream)
    });
    Ok(loaded.map_err(|e| Error::io(path, e))?)
}

/// All bytes of the regular file `path`, without its byte order mark.
///
/// # Errors
/// If it cannot be read, has more than `most` bytes, or is a pipe, a device or a directory.
pub fn load_regular(path: &Path, most: u64) -> Outcome<Vec<u8>> {
    let loaded = fs::metadata(path).and_then(|meta| {
        if !meta.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "this is no regular file"));
        }
        check_size(meta.len(), most)?;
        read(File::open(path)?, most)
    });
    Ok(loaded.map_err(|e| Error::io(path, e))?)
}

/// All bytes of a stream, without its byte order mark.
///
/// # Errors
/// Those of reading, and a stream of more than `most` bytes.
pub fn read(from: impl Read, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(most + 1).read_to_end(&mut bytes)?;
    check_size(bytes.len() as u64, most)?;
    if bytes.starts_with(MARK) {
        bytes.drain(..MARK.len());
    }
    Ok(bytes)
}

fn check_size(bytes: u64, most: u64) -> io::Result<()> {
    if bytes <= most {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("more than {} are too many", terminal::size(most))))
}
