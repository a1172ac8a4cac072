//! Files that appear complete or not at all.

use std::{
    ffi::OsString,
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use selkie_core::Error;

/// Names that are tried for a temporary file: a killed run with our process id may have left some.
const NAMES: usize = 8;

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
        let invalid = |why| Err(Error::io(target, io::Error::new(io::ErrorKind::InvalidInput, why)));
        let Some(name) = target.file_name() else { return invalid("this names no file") };
        // The name of `DIR/` and `DIR/.` is `DIR`.
        let ends_in_name = target.as_os_str().as_encoded_bytes().ends_with(name.as_encoded_bytes());
        if target.is_dir() || !ends_in_name {
            return invalid("this is a directory; name a file in it");
        }
        if is_special(target) {
            let file = File::options().write(true).open(target).map_err(|e| Error::io(target, e))?;
            return Ok(Self { target: target.into(), temporary: None, file: Some(BufWriter::new(file)) });
        }
        let mut tried = 0;
        loop {
            let mut hidden = OsString::from(".");
            hidden.push(name);
            hidden.push(match tried {
                0 => format!(".{}.tmp", std::process::id()),
                n => format!(".{}-{n}.tmp", std::process::id()),
            });
            let temporary = target.with_file_name(hidden);
            tried += 1;
            match File::options().write(true).create_new(true).open(&temporary) {
                Ok(file) => {
                    let file = Some(BufWriter::new(file));
                    return Ok(Self { target: target.into(), temporary: Some(temporary), file });
                }
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists && tried < NAMES => {}
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                    let why = format!("{e}; it is left over from a killed run, remove it");
                    return Err(Error::io(temporary, io::Error::new(e.kind(), why)));
                }
                Err(e) => return Err(Error::io(target, e)),
            }
        }
    }

    /// Gives the file its name. If that fails, the complete file stays under its temporary name, which the error tells.
    pub fn commit(mut self) -> Result<(), Error> {
        let named = |e| Error::io(&self.target, e);
        let file = self.file.take().expect("a file is committed once");
        let file = file.into_inner().map_err(|e| named(e.into_error()))?;
        if self.temporary.is_some() {
            file.sync_all().map_err(named)?;
        }
        if let Some(temporary) = self.temporary.take() {
            fs::rename(&temporary, &self.target).map_err(|e| {
                let why = format!("{e}; what was written is in {}", temporary.display());
                Error::io(&self.target, io::Error::new(e.kind(), why))
            })?;
        }
        Ok(())
    }

    /// The target's name in an error.
    pub fn error(&self, e: io::Error) -> Error {
        Error::io(&self.target, e)
    }
}

/// Whether two paths name the same file, which one output would write over the other. Special files may be shared.
pub fn collide(a: &Path, b: &Path) -> bool {
    let place = |path: &Path| {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.into());
        let folder = path.parent().and_then(|p| p.canonicalize().ok());
        folder.zip(path.file_name()).map_or_else(|| path.clone(), |(folder, name)| folder.join(name))
    };
    place(a) == place(b) && !is_special(a)
}

/// Whether the path is there and is no regular file.
fn is_special(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|m| !m.is_file())
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
