//! Bundles on their way over HTTP are files without a name, so that the engine waits for no client and a bundle needs no memory.

use std::{
    fs::{self, File, OpenOptions},
    hash::{BuildHasher, RandomState},
    io::{self, Seek, SeekFrom, Write},
};

use selkie_core::{
    Error,
    engine::{Export, Exported},
    session::Model,
};

use super::refusal::Refusal;
use crate::bundle;

/// Bytes that are written to or read from a file at a time.
pub const PIECE: usize = 1 << 20;

/// A file in the folder for temporary ones that only this process can reach: it has no name any more.
///
/// # Errors
/// 500 if there can be none.
pub fn spool() -> Result<File, Refusal> {
    let path = std::env::temp_dir().join(format!("selkie-{:016x}.bundle", RandomState::new().hash_one("a name")));
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let file = options.open(&path).and_then(|file| fs::remove_file(&path).map(|()| file));
    file.map_err(on_disk)
}

/// Has the engine write a bundle of at most `most` bytes; `name` is the bundle's in messages. The file is at its start.
///
/// # Errors
/// Those of the engine; 413 for more bytes.
pub fn export(model: &Model, what: Export, name: &'static str, most: u64) -> Result<(File, Exported), Refusal> {
    let mut out = Limited { file: spool()?, left: most };
    let work = model.with(move |engine| {
        let saved = bundle::export_to(engine, what, name, &mut out);
        saved.map(|saved| (out.file, saved))
    });
    let (mut file, saved) = work.wait().map_err(|e| Refusal::from(&*e))?.map_err(|e| too_large(e, most))?;
    file.seek(SeekFrom::Start(0)).map_err(on_disk)?;
    Ok((file, saved))
}

/// A refusal for a disk that does not take a bundle.
pub fn on_disk(e: io::Error) -> Refusal {
    tracing::warn!("a file for a bundle: {e}");
    Refusal::new(500, format!("the server has no room for the bundle: {e}"))
}

/// A refusal for a bundle of more than `most` bytes.
pub fn too_long(most: u64) -> Refusal {
    Refusal::new(413, format!("the bundle has more than {most} bytes, which --max-state allows"))
}

fn too_large(e: Error, most: u64) -> Refusal {
    match e {
        Error::Io { source, .. } if source.kind() == io::ErrorKind::FileTooLarge => too_long(most),
        Error::Io { source, .. } => on_disk(source),
        e => e.into(),
    }
}

/// A file of a limited size.
struct Limited {
    file: File,
    left: u64,
}

impl Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let left = self.left.checked_sub(bytes.len() as u64).ok_or(io::ErrorKind::FileTooLarge)?;
        let written = self.file.write(bytes)?;
        self.left = left + (bytes.len() - written) as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
