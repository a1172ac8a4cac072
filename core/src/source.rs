//! Where a model's bytes come from: a directory, the executable itself, or (in the browser) a server or a file handle.
//!
//! Reading is asynchronous because the browser's sources are; native sources are ready immediately, and a native caller
//! blocks on the future. Files are named by plain file names, never by paths.

use std::{fmt, future::Future, ops::Range, pin::Pin, sync::Arc};

use crate::{Error, Result};

/// A boxed future of the engine's thread (no `Send`: browser handles have none).
pub type LocalFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// A counted, sliceable range of bytes that keeps its owner alive.
///
/// The owner may be a memory map, a heap block or a static. Clones and slices share it, so a backend that computes in
/// host memory can use weights in place.
#[derive(Clone)]
pub struct Bytes {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl Bytes {
    /// All bytes of `owner`, whose `as_ref` must give the same slice every time (true of vectors, maps and statics).
    pub fn new(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Self {
        let range = 0..(*owner).as_ref().len();
        Self { owner, range }
    }

    /// Bytes of the executable.
    pub fn from_static(bytes: &'static [u8]) -> Self {
        Self::new(Arc::new(bytes))
    }

    /// A part of these bytes, sharing the owner; `None` if it does not lie inside.
    pub fn get(&self, range: Range<usize>) -> Option<Self> {
        if range.start > range.end || range.end > self.len() {
            return None;
        }
        Some(self.slice(range))
    }

    /// A part of these bytes, sharing the owner; panics if it does not lie inside.
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len(), "bytes {range:?} of {}", self.len());
        let range = self.range.start + range.start..self.range.start + range.end;
        Self { owner: self.owner.clone(), range }
    }
}

impl Default for Bytes {
    /// None.
    fn default() -> Self {
        Self::from_static(&[])
    }
}

impl std::ops::Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }
}

impl AsRef<[u8]> for Bytes {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self::new(Arc::new(bytes))
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bytes({} bytes)", self.range.len())
    }
}

/// `Send + Sync` where there are threads; the handles of a browser's files are neither.
#[cfg(not(target_arch = "wasm32"))]
pub trait Shared: Send + Sync {}
#[cfg(not(target_arch = "wasm32"))]
impl<T: Send + Sync + ?Sized> Shared for T {}

/// `Send + Sync` where there are threads; the handles of a browser's files are neither.
#[cfg(target_arch = "wasm32")]
pub trait Shared {}
#[cfg(target_arch = "wasm32")]
impl<T: ?Sized> Shared for T {}

/// A flat collection of named files. A model's files may be opened on one thread and loaded on another.
pub trait Source: Shared {
    /// Name of the collection in messages: the directory as the user named it, a URL, or `the embedded model`.
    fn label(&self) -> String;

    /// Size of a file in bytes; `None` if there is no such file.
    ///
    /// # Errors
    /// [`Error::Io`] if the file is there but cannot be used.
    fn size<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<Option<u64>>>;

    /// The bytes `range` of a file.
    ///
    /// # Errors
    /// [`Error::Io`] if the file is missing or cannot be read, [`Error::BadModel`] if it ends before `range` does.
    fn read<'a>(&'a self, name: &'a str, range: Range<u64>) -> LocalFuture<'a, Result<Bytes>>;

    /// The GGUF file of the collection that is the model, where a user named it or it is the only model there.
    ///
    /// # Errors
    /// [`Error::BadModel`] if it is not clear which one is meant.
    fn gguf(&self) -> Result<Option<String>> {
        Ok(None)
    }

    /// Name of one of the files in messages.
    fn path(&self, name: &str) -> String {
        format!("{}/{name}", self.label().trim_end_matches('/'))
    }
}

/// The whole of a file, or `None` if there is no such file.
///
/// # Errors
/// Those of [`Source`], and [`Error::BadModel`] if the file has more than `limit` bytes (it is meant for small files).
pub async fn read_small(source: &dyn Source, name: &str, limit: u64) -> Result<Option<Bytes>> {
    let Some(size) = source.size(name).await? else { return Ok(None) };
    if size > limit {
        let why = format!("{size} bytes are too many for this kind of file (at most {limit})");
        return Err(Error::model(source.path(name), why));
    }
    let bytes = source.read(name, 0..size).await?;
    not_a_pointer(source, name, &bytes)?;
    Ok(Some(bytes))
}

/// Refuses what git leaves in place of a large file that was not fetched; `bytes` are the file's first ones.
///
/// # Errors
/// [`Error::BadModel`] with the command that fetches it.
pub(crate) fn not_a_pointer(source: &dyn Source, name: &str, bytes: &[u8]) -> Result<()> {
    if !bytes.starts_with(LFS_POINTER) {
        return Ok(());
    }
    let why = "this is a git-lfs pointer and not the file itself; run `git lfs pull` in its folder, or download the model again";
    Err(Error::model(source.path(name), why))
}

/// How git-lfs pointers begin.
const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// Whether a name can only mean a file of the collection itself: no separators, no parent, no drive, no control characters.
pub fn is_plain_file_name(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && !name.chars().any(|c| matches!(c, '/' | '\\' | ':') || c.is_control())
}

/// `NAME-00001-of-00003.gguf` as name, number and count: a file of a split model.
pub fn part_of_gguf(name: &str) -> Option<(&str, usize, usize)> {
    let (rest, of) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, i) = rest.rsplit_once('-')?;
    let number = |n: &str| n.parse().ok().filter(|_| n.len() == 5);
    let (i, of): (usize, usize) = (number(i)?, number(of)?);
    (1 <= i && i <= of).then_some((stem, i, of))
}

/// The one model among the GGUF files of a folder with the files `names`: a file, or the first of a split model.
///
/// # Errors
/// [`Error::BadModel`] if there are several, with their names.
pub fn only_gguf(folder: &str, names: &[String]) -> Result<Option<String>> {
    let first =
        |n: &&String| n.ends_with(".gguf") && is_plain_file_name(n) && part_of_gguf(n).is_none_or(|(_, i, _)| i == 1);
    // Encoders of images lie beside the models that they belong to.
    let models: Vec<&String> = names.iter().filter(first).filter(|n| !n.starts_with("mmproj")).collect();
    match models.as_slice() {
        [] => Ok(None),
        [one] => Ok(Some((*one).clone())),
        many => {
            let names = many.iter().map(|n| n.as_str()).collect::<Vec<_>>().join(", ");
            Err(Error::model(folder, format!("there are several models here, {names}; give the file of one")))
        }
    }
}

fn slice(source: &dyn Source, name: &str, all: &Bytes, range: &Range<u64>) -> Result<Bytes> {
    let part = usize::try_from(range.start).ok().zip(usize::try_from(range.end).ok());
    part.and_then(|(start, end)| all.get(start..end)).ok_or_else(|| truncated(source, name, all.len() as u64, range))
}

fn truncated(source: &dyn Source, name: &str, len: u64, range: &Range<u64>) -> Error {
    let why = format!("bytes {}..{} of a file of {len} bytes: the file is truncated", range.start, range.end);
    Error::model(source.path(name), why)
}

/// Files compiled into the executable.
#[derive(Clone, Copy, Debug)]
pub struct Embedded {
    /// Name of the collection in messages.
    pub label: &'static str,
    /// Name and bytes of every file.
    pub files: &'static [(&'static str, &'static [u8])],
}

impl Embedded {
    fn file(&self, name: &str) -> Option<Bytes> {
        self.files.iter().find(|(n, _)| *n == name).map(|(_, bytes)| Bytes::from_static(bytes))
    }
}

impl Source for Embedded {
    fn label(&self) -> String {
        self.label.to_owned()
    }

    fn gguf(&self) -> Result<Option<String>> {
        let names: Vec<String> = self.files.iter().map(|(name, _)| (*name).to_owned()).collect();
        only_gguf(self.label, &names)
    }

    fn size<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<Option<u64>>> {
        Box::pin(std::future::ready(Ok(self.file(name).map(|bytes| bytes.len() as u64))))
    }

    fn read<'a>(&'a self, name: &'a str, range: Range<u64>) -> LocalFuture<'a, Result<Bytes>> {
        let missing = || Error::io(self.path(name), std::io::ErrorKind::NotFound.into());
        let bytes = self.file(name).ok_or_else(missing).and_then(|all| slice(self, name, &all, &range));
        Box::pin(std::future::ready(bytes))
    }
}

#[cfg(not(target_arch = "wasm32"))]
pub use dir::Dir;

#[cfg(not(target_arch = "wasm32"))]
mod dir {
    use std::{
        collections::HashMap,
        fs::File,
        io::{ErrorKind, Read, Seek, SeekFrom},
        path::{Path, PathBuf},
        sync::{Mutex, MutexGuard, PoisonError},
    };

    use super::*;

    /// The endings of the names of weights.
    const MAPPED: [&str; 2] = [".safetensors", ".gguf"];

    /// A directory. Each file of weights is mapped into memory once, on first use, and every read is a part of that map; all
    /// other files are small and are read.
    ///
    /// Mapped files must not be truncated while the model is in use: the operating system answers a read past the end of a
    /// mapped file with a signal.
    #[derive(Debug)]
    pub struct Dir {
        path: PathBuf,
        /// The file that was named instead of the directory.
        file: Option<String>,
        maps: Mutex<HashMap<String, Bytes>>,
    }

    impl Dir {
        /// The files of the directory `path`, or of that of a GGUF file; nothing is read yet.
        ///
        /// # Errors
        /// [`Error::BadModel`] if `path` is neither, [`Error::Io`] if it cannot be looked at.
        pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
            let path = path.into();
            let fault = |why: &str| Err(Error::model(path.display().to_string(), why));
            match std::fs::metadata(&path) {
                Ok(meta) if meta.is_dir() => Ok(Self { path, file: None, maps: Mutex::default() }),
                Ok(_) if path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf")) => {
                    let Some(file) = path.file_name().and_then(|name| name.to_str()).map(str::to_owned) else {
                        return fault("the name of this file is not UTF-8");
                    };
                    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
                    Ok(Self { path: folder.into(), file: Some(file), maps: Mutex::default() })
                }
                Ok(_) => {
                    fault("this is a file; give a GGUF file, or the directory that holds config.json and the weights")
                }
                Err(e) if e.kind() == ErrorKind::NotFound => {
                    fault("no such directory; give the directory of a downloaded Hugging Face model")
                }
                Err(e) => Err(Error::io(path, e)),
            }
        }

        /// The directory as it was given to [`Dir::open`].
        pub fn dir(&self) -> &Path {
            &self.path
        }

        /// Path and size of a regular file; `None` if there is no such file.
        fn find(&self, name: &str) -> Result<Option<(PathBuf, u64)>> {
            let path = self.path.join(name);
            if !is_plain_file_name(name) {
                return Err(Error::model(path.display().to_string(), "not a plain file name"));
            }
            match std::fs::metadata(&path) {
                Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
                Err(e) => Err(unusable(path, e.kind(), &e)),
                // A pipe or a device has no length and would block.
                Ok(meta) if !meta.is_file() => Err(unusable(path, ErrorKind::Other, &"not a regular file")),
                Ok(meta) => Ok(Some((path, meta.len()))),
            }
        }

        fn maps(&self) -> MutexGuard<'_, HashMap<String, Bytes>> {
            self.maps.lock().unwrap_or_else(PoisonError::into_inner)
        }

        /// All of a file of weights.
        fn map(&self, name: &str, path: &Path, len: u64) -> Result<Bytes> {
            if let Some(bytes) = self.maps().get(name) {
                return Ok(bytes.clone());
            }
            let io = |e| Error::io(path, e);
            // An empty file cannot be mapped on every system.
            let bytes = if len == 0 {
                Bytes::from(Vec::new())
            } else {
                let file = File::open(path).map_err(io)?;
                // SAFETY: the map is only read, through `&[u8]`. Another process that writes to the file while it is mapped
                // would change these bytes under us; like every engine that maps its weights we require that none does.
                Bytes::new(Arc::new(unsafe { memmap2::Mmap::map(&file) }.map_err(io)?))
            };
            self.maps().insert(name.to_owned(), bytes.clone());
            Ok(bytes)
        }

        fn part(&self, name: &str, range: &Range<u64>) -> Result<Bytes> {
            let missing = || Error::io(self.path.join(name), ErrorKind::NotFound.into());
            let (path, len) = self.find(name)?.ok_or_else(missing)?;
            if MAPPED.iter().any(|end| name.ends_with(end)) {
                return slice(self, name, &self.map(name, &path, len)?, range);
            }
            if range.start > range.end || range.end > len {
                return Err(truncated(self, name, len, range));
            }
            let io = |e| Error::io(&path, e);
            let mut file = File::open(&path).map_err(io)?;
            file.seek(SeekFrom::Start(range.start)).map_err(io)?;
            let mut bytes = Vec::new();
            let read = file.take(range.end - range.start).read_to_end(&mut bytes).map_err(io)? as u64;
            match read == range.end - range.start {
                true => Ok(bytes.into()),
                false => Err(truncated(self, name, range.start + read, range)),
            }
        }
    }

    /// The error of a file that is there but cannot be a model's.
    fn unusable(path: PathBuf, kind: ErrorKind, why: &dyn fmt::Display) -> Error {
        let why = format!("{why}; correct the file or the name that leads to it, or download the model again");
        Error::io(path, std::io::Error::new(kind, why))
    }

    impl Source for Dir {
        fn label(&self) -> String {
            self.file.as_ref().map_or(self.path.clone(), |file| self.path.join(file)).display().to_string()
        }

        fn path(&self, name: &str) -> String {
            self.path.join(name).display().to_string()
        }

        fn gguf(&self) -> Result<Option<String>> {
            if self.file.is_some() {
                return Ok(self.file.clone());
            }
            let io = |e| Error::io(&self.path, e);
            let mut names = Vec::new();
            for entry in std::fs::read_dir(&self.path).map_err(io)? {
                names.extend(entry.map_err(io)?.file_name().to_str().map(str::to_owned));
            }
            names.sort();
            only_gguf(&self.label(), &names)
        }

        fn size<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<Option<u64>>> {
            Box::pin(std::future::ready(self.find(name).map(|found| found.map(|(_, len)| len))))
        }

        fn read<'a>(&'a self, name: &'a str, range: Range<u64>) -> LocalFuture<'a, Result<Bytes>> {
            Box::pin(std::future::ready(self.part(name, &range)))
        }
    }
}

#[cfg(test)]
mod tests {
    use pollster::block_on;

    use super::*;

    #[test]
    fn a_slice_shares_its_owner_and_stays_inside() {
        let all = Bytes::from(vec![0, 1, 2, 3, 4, 5]);
        let part = all.slice(1..5).slice(1..3);
        assert_eq!(&*part, [2, 3]);
        assert_eq!(part.as_ptr(), all[2..].as_ptr());
        assert!(part.get(1..3).is_none());
        assert!(all.get(Range { start: 4, end: 3 }).is_none());
    }

    #[test]
    fn a_directory_maps_weights_once_and_tells_missing_from_unreadable() {
        let dir = Dir::open(concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo")).unwrap();
        let weights = "model.gguf";
        let a = block_on(dir.read(weights, 0..10)).unwrap();
        let b = block_on(dir.read(weights, 2..4)).unwrap();
        assert_eq!(a[2..].as_ptr(), b.as_ptr());
        // Small files are copies, which no other process can truncate.
        let a = block_on(dir.read("config.json", 0..10)).unwrap();
        let b = block_on(dir.read("config.json", 2..4)).unwrap();
        assert!(a[2..4] == *b && a[2..].as_ptr() != b.as_ptr());
        assert_eq!(block_on(dir.size("nothing.json")).unwrap(), None);
        assert!(matches!(block_on(dir.read("nothing.json", 0..1)), Err(Error::Io { .. })));
        // A directory in the place of a file exists, but is not a file.
        let error = block_on(dir.size("training")).unwrap_err().to_string();
        assert!(error.contains("training: not a regular file; ") && error.contains("download"), "{error}");
        let size = block_on(dir.size("config.json")).unwrap().unwrap();
        assert!(block_on(dir.read("config.json", size - 1..size + 1)).unwrap_err().to_string().contains("truncated"));
        assert!(block_on(dir.read("../demo/config.json", 0..1)).is_err());
    }

    #[test]
    fn a_missing_directory_says_what_to_give() {
        let message = Dir::open("/no/such/model").unwrap_err().to_string();
        assert!(message.starts_with("/no/such/model: no such directory"), "{message}");
    }

    #[test]
    fn plain_file_names() {
        for name in ["model.safetensors", "model-00001-of-00002.safetensors", ".hidden"] {
            assert!(is_plain_file_name(name), "{name}");
        }
        for name in ["", ".", "..", "a/b", "/etc/passwd", "..\\x", "C:x", "a\0"] {
            assert!(!is_plain_file_name(name), "{name}");
        }
    }
}
