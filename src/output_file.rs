//! Files that appear complete or not at all.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use selkie_core::Error;

/// A file under a temporary name beside its target, which takes the target's name in [`OutputFile::commit`]. If that is
/// never called, nothing is left behind. A target that is there and is no regular file (a pipe, `/dev/null`) is
/// written directly.
pub struct OutputFile {
    target: PathBuf,
    temporary: Option<PathBuf>,
    file: Option<BufWriter<File>>,
}

impl OutputFile {
    /// Opens the temporary file.
    pub fn create(target: &Path) -> Result<Self, Error> {
        let special = fs::metadata(target).is_ok_and(|m| !m.is_file());
        if special {
            let file = File::options().write(true).open(target).map_err(|e| Error::io(target, e))?;
            return Ok(Self { target: target.into(), temporary: None, file: Some(BufWriter::new(file)) });
        }
        let Some(name) = target.file_name() else {
            return Err(Error::io(target, io::Error::new(io::ErrorKind::InvalidInput, "this names no file")));
        };
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}.tmp", std::process::id()));
        let temporary = target.with_file_name(hidden);
        let file = File::options().write(true).create_new(true).open(&temporary).map_err(|e| Error::io(target, e))?;
        Ok(Self { target: target.into(), temporary: Some(temporary), file: Some(BufWriter::new(file)) })
    }

    /// Gives the file its name.
    pub fn commit(mut self) -> Result<(), Error> {
        let named = |e| Error::io(&self.target, e);
        let file = self.file.take().expect("a file is committed once");
        let file = file.into_inner().map_err(|e| named(e.into_error()))?;
        if let Some(temporary) = &self.temporary {
            file.sync_all().map_err(named)?;
            fs::rename(temporary, &self.target).map_err(named)?;
            self.temporary = None;
        }
        Ok(())
    }

    /// The target's name in an error.
    pub fn error(&self, e: io::Error) -> Error {
        Error::io(&self.target, e)
    }
}

impl Write for OutputFile {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.file.as_mut().expect("a file is written before it is committed").write(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.as_mut().expect("a file is written before it is committed").flush()
    }
}

impl Drop for OutputFile {
    fn drop(&mut self) {
        if let Some(temporary) = self.temporary.take() {
            drop(self.file.take());
            let _ = fs::remove_file(temporary);
        }
    }
}
