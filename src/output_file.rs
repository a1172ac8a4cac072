//! Files that appear complete or not at all.

use std::{
    borrow::Cow,
    ffi::OsString,
    fs::{self, File, OpenOptions, Permissions, TryLockError},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use selkie_core::Error;

/// Most symbolic links that are followed from one name to a file.
const MOST_LINKS: usize = 40;
/// How often creating a temporary file is retried if other processes create and remove it at the same time.
const TRIES: usize = 8;

/// A file with a temporary name in the target's folder. [`OutputFile::commit`] renames it to the target; without that call it
/// is removed.
///
/// Symbolic links are followed, and the mode of an existing file is kept. A target that exists and is not a regular file (a
/// pipe, `/dev/null`) is written directly. The temporary file is locked while it is written, which distinguishes the leftover
/// of a killed run from a file that another process is writing.
pub struct OutputFile {
    target: PathBuf,
    temporary: Option<PathBuf>,
    file: Option<BufWriter<File>>,
}

impl OutputFile {
    /// Opens the temporary file.
    ///
    /// # Errors
    /// If the target is a directory, cannot be written, or another process is writing it.
    pub fn create(target: &Path) -> Result<Self, Error> {
        let target = resolve(target)?;
        if is_special(&target) {
            let file = File::options().write(true).open(&target).map_err(|e| Error::io(&target, e))?;
            return Ok(Self { target, temporary: None, file: Some(BufWriter::new(file)) });
        }
        let mode = mode(&target)?;
        Self::beside(target, mode)
    }

    /// The same for a regular file `target`, resolved, that is to have the mode `mode`.
    pub fn beside(target: PathBuf, mode: Option<Permissions>) -> Result<Self, Error> {
        let name = target.file_name().unwrap_or_default();
        let dot = if name.as_encoded_bytes().starts_with(b".") { "" } else { "." };
        let hidden: OsString = [dot.as_ref(), name, ".tmp".as_ref()].into_iter().collect();
        let temporary = target.with_file_name(hidden);
        match claim(&temporary, mode) {
            Ok(file) => Ok(Self { target, temporary: Some(temporary), file: Some(BufWriter::new(file)) }),
            Err(e) => Err(Error::io(target, e)),
        }
    }

    /// Gives the file its name. If that fails, the complete file stays under its temporary name, which the error tells.
    pub fn commit(self) -> Result<(), Error> {
        self.publish().map(drop)
    }

    /// [`OutputFile::commit`], and the file, open for more.
    pub fn publish(mut self) -> Result<File, Error> {
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
        Ok(file)
    }

    /// The target's name in an error.
    pub fn error(&self, e: io::Error) -> Error {
        Error::io(&self.target, e)
    }
}

/// The file that `target` names, which may not exist: for a symbolic link, its target. A special file is itself.
///
/// # Errors
/// If it can only be a directory.
pub fn resolve(target: &Path) -> Result<PathBuf, Error> {
    let invalid = |why| Err(Error::io(target, io::Error::new(io::ErrorKind::InvalidInput, why)));
    let Some(name) = target.file_name() else { return invalid("this names no file") };
    // The name of `DIR/` and `DIR/.` is `DIR`.
    let ends_in_name = target.as_os_str().as_encoded_bytes().ends_with(name.as_encoded_bytes());
    if target.is_dir() || !ends_in_name {
        return invalid("this is a directory; name a file in it");
    }
    if is_special(target) {
        return Ok(target.into());
    }
    let mut place = target.to_path_buf();
    for _ in 0..MOST_LINKS {
        let Ok(next) = fs::read_link(&place) else { return Ok(place) };
        place = place.parent().unwrap_or("".as_ref()).join(next);
    }
    invalid("too many symbolic links")
}

/// The mode of a regular file that an output replaces; `None` if there is none.
///
/// # Errors
/// If the file may not be written.
pub fn mode(target: &Path) -> Result<Option<Permissions>, Error> {
    match File::options().write(true).open(target).and_then(|file| file.metadata()) {
        Ok(meta) => Ok(Some(meta.permissions())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io(target, e)),
    }
}

/// Makes a file that this process alone writes, in the place of one that a killed run has left.
fn claim(path: &Path, mode: Option<Permissions>) -> io::Result<File> {
    for _ in 0..TRIES {
        match create_new(path, mode.clone()) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            file => return file,
        }
        if is_locked(path) {
            break;
        }
        match fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(io::Error::new(e.kind(), format!("{} cannot be removed: {e}", path.display())));
            }
            _ => {}
        }
    }
    Err(io::Error::other("another process is writing this file"))
}

fn create_new(path: &Path, mode: Option<Permissions>) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true);
    #[cfg(unix)]
    if let Some(mode) = &mode {
        use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
        // Set when the file is created, so that a private file is never readable for others.
        options.mode(mode.mode() & 0o777);
    }
    let file = options.open(path)?;
    // Where files cannot be locked there is no protection against a second process.
    let _ = file.try_lock();
    if let Some(mode) = mode {
        file.set_permissions(mode)?;
    }
    Ok(file)
}

/// Whether another process writes the regular file `path`.
pub fn is_locked(path: &Path) -> bool {
    let regular = fs::symlink_metadata(path).is_ok_and(|m| m.is_file());
    regular && File::open(path).is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

/// Whether two paths name the same file, which one output would write over. Special files may be shared.
pub fn collide(a: &Path, b: &Path) -> bool {
    place(a) == place(b) && !is_special(a)
}

fn place(path: &Path) -> PathBuf {
    // Standard input may have been redirected from a file.
    let path = if path == "-" { "/dev/stdin".as_ref() } else { path };
    path.canonicalize().unwrap_or_else(|_| {
        let path = resolve(path).map_or(Cow::Borrowed(path), Cow::Owned);
        let path = std::path::absolute(&path).unwrap_or_else(|_| path.into());
        let folder = path.parent().and_then(|p| p.canonicalize().ok());
        folder.zip(path.file_name()).map_or_else(|| path.clone(), |(folder, name)| folder.join(name))
    })
}

/// Whether the path exists and is not a regular file.
pub fn is_special(path: &Path) -> bool {
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
            // Removed while the lock is held: afterwards the name may belong to another process.
            let _ = fs::remove_file(temporary);
        }
    }
}
