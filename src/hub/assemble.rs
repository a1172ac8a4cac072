//! A partial file that grows from its start.
//!
//! Connections deliver ranges in any order. Only bytes that follow the written ones are written; the rest waits in memory.
//! So the file is always a prefix of the whole one, even if the process is killed. Its length says where to continue, also
//! for those of Python's tools that append to a file of this name. The checksum is computed on the way.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
    path::Path,
};

use ring::digest::{Context, SHA256};

/// A growing file.
pub struct Assembler {
    file: File,
    written: u64,
    hash: Option<Context>,
    early: BTreeMap<u64, Vec<u8>>,
}

impl Assembler {
    /// Continues the file `path`, which may be missing. A file of more than `size` bytes has other content and starts again.
    /// With `hashed` the sha256 is computed.
    ///
    /// # Errors
    /// If the file cannot be read and written.
    pub fn open(path: &Path, size: u64, hashed: bool) -> io::Result<Self> {
        let mut file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
        let mut written = file.metadata()?.len();
        if written > size {
            file.set_len(0)?;
            written = 0;
        }
        let mut hash = hashed.then(|| Context::new(&SHA256));
        if let Some(hash) = &mut hash {
            let mut buffer = vec![0; 1 << 20];
            loop {
                match file.read(&mut buffer)? {
                    0 => break,
                    n => hash.update(&buffer[..n]),
                }
            }
        }
        file.seek(SeekFrom::Start(written))?;
        Ok(Self { file, written, hash, early: BTreeMap::new() })
    }

    /// Bytes from the start that are in the file.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Takes the bytes from `at` on. Every byte comes once.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn add(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        if at != self.written {
            self.early.insert(at, bytes.to_vec());
            return Ok(());
        }
        self.append(bytes)?;
        while let Some(next) = self.early.remove(&self.written) {
            self.append(&next)?;
        }
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        if let Some(hash) = &mut self.hash {
            hash.update(bytes);
        }
        self.written += bytes.len() as u64;
        Ok(())
    }

    /// Syncs the file to disk; returns its sha256 in hexadecimal digits, if it was requested.
    ///
    /// # Errors
    /// If that fails.
    pub fn finish(self) -> io::Result<Option<String>> {
        self.file.sync_all()?;
        Ok(self.hash.map(|h| h.finish().as_ref().iter().map(|b| format!("{b:02x}")).collect()))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn ranges_in_any_order_make_a_file_that_is_always_a_prefix() {
        let path = std::env::temp_dir().join(format!("selkie-assemble-{}", std::process::id()));
        let _ = fs::remove_file(&path);
        let mut part = Assembler::open(&path, 9, true).unwrap();
        part.add(6, b"ghi").unwrap();
        part.add(0, b"ab").unwrap();
        assert_eq!((part.written(), fs::read(&path).unwrap()), (2, b"ab".to_vec()));
        drop(part);
        // Waiting bytes are lost, written ones are not.
        let mut part = Assembler::open(&path, 9, true).unwrap();
        assert_eq!(part.written(), 2);
        part.add(6, b"ghi").unwrap();
        part.add(4, b"ef").unwrap();
        part.add(2, b"cd").unwrap();
        assert_eq!((part.written(), fs::read(&path).unwrap()), (9, b"abcdefghi".to_vec()));
        let sum = part.finish().unwrap().unwrap();
        assert_eq!(sum, "19cc02f26df43cc571bc9ed7b0c4d29224a3ec229529221725ef76d021c8326f");
        assert_eq!(Assembler::open(&path, 8, false).unwrap().written(), 0);
        fs::remove_file(&path).unwrap();
    }
}
