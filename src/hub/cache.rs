//! The cache of Hugging Face's tools: `models--OWNER--NAME/{blobs,refs,snapshots}` and a folder of locks beside them.
//!
//! A blob is a file's content under its etag. A snapshot is a commit: a folder of links to blobs under the files' own names. A
//! ref holds the commit of a branch or tag. What is on its way to be a blob ends in `.incomplete`.

use std::{
    fs::{self, File, TryLockError},
    io,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use selkie_core::source::is_plain_file_name;
use serde_json::Value;

use crate::hub::name::{Name, is_part};

/// The weights of a model in one file, and the list of files if there are several.
pub const SINGLE: &str = "model.safetensors";
pub const INDEX: &str = "model.safetensors.index.json";
/// The longest index that is read.
const LONGEST_INDEX: u64 = 100_000_000;

/// Most files of a split model.
const MOST_PARTS: usize = 1000;

/// A repository's folder in the cache, be it there or not.
#[derive(Clone, Debug)]
pub struct Repo {
    cache: PathBuf,
    folder: String,
}

impl Repo {
    /// The folder of the model `owner/model`.
    pub fn new(cache: &Path, name: &Name) -> Self {
        Self { cache: cache.into(), folder: format!("models--{}--{}", name.owner, name.model) }
    }

    /// All repositories of models, with their names `owner/model`, in their order.
    pub fn all(cache: &Path) -> Vec<(String, Self)> {
        let mut all: Vec<_> = names(cache)
            .into_iter()
            .filter_map(|folder| {
                let (owner, model) = folder.strip_prefix("models--")?.split_once("--")?;
                let name = (is_part(owner) && is_part(model)).then(|| format!("{owner}/{model}"))?;
                Some((name, Self { cache: cache.into(), folder }))
            })
            .filter(|(_, repo)| repo.path().is_dir())
            .collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    }

    /// The folder itself.
    pub fn path(&self) -> PathBuf {
        self.cache.join(&self.folder)
    }

    /// The folder of its locks.
    pub fn locks(&self) -> PathBuf {
        self.cache.join(".locks").join(&self.folder)
    }

    /// The folder of its blobs.
    pub fn blobs(&self) -> PathBuf {
        self.path().join("blobs")
    }

    /// The content with this etag.
    pub fn blob(&self, etag: &str) -> PathBuf {
        self.blobs().join(etag)
    }

    /// What is there of it.
    pub fn part(&self, etag: &str) -> PathBuf {
        self.blobs().join(format!("{etag}.incomplete"))
    }

    /// The files of a commit.
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.path().join("snapshots").join(commit)
    }

    /// The commits of which something is there.
    pub fn commits(&self) -> Vec<String> {
        names(&self.path().join("snapshots"))
    }

    /// Branches and tags with their commits.
    pub fn refs(&self) -> Vec<(String, String)> {
        let root = self.path().join("refs");
        let mut refs: Vec<_> = files(&root)
            .into_iter()
            .filter_map(|name| Some((name.clone(), fs::read_to_string(root.join(&name)).ok()?.trim().to_owned())))
            .filter(|(_, commit)| is_plain_file_name(commit))
            .collect();
        refs.sort();
        refs
    }

    /// The commit that a revision means here, if it is known; a commit means itself.
    pub fn commit(&self, revision: &str) -> Option<String> {
        let known = self.refs().into_iter().find(|(name, _)| name == revision).map(|(_, commit)| commit);
        known.or_else(|| self.commits().into_iter().find(|commit| commit == revision))
    }

    /// The folder of a name's snapshot if everything that running it takes is there.
    pub fn complete(&self, name: &Name) -> Option<PathBuf> {
        let snapshot = self.snapshot(&self.commit(name.revision())?);
        missing(&snapshot, name.file.as_deref()).is_empty().then_some(snapshot)
    }

    /// Has a branch or tag name a commit.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write_ref(&self, revision: &str, commit: &str) -> io::Result<()> {
        if revision == commit {
            return Ok(());
        }
        let path = self.path().join("refs").join(revision);
        fs::create_dir_all(path.parent().unwrap_or(&path))?;
        fs::write(path, commit)
    }

    /// Shows the blob `etag` as the file `name` of a commit.
    ///
    /// # Errors
    /// If that fails.
    pub fn link(&self, commit: &str, name: &str, etag: &str) -> io::Result<()> {
        let place = self.snapshot(commit).join(name);
        let target: PathBuf = ["../.."].into_iter().chain(name.split('/').skip(1).map(|_| "..")).collect();
        let target = target.join("blobs").join(etag);
        if fs::read_link(&place).is_ok_and(|now| now == target) {
            return Ok(());
        }
        fs::create_dir_all(place.parent().unwrap_or(&place))?;
        let _ = fs::remove_file(&place);
        symlink(&target, &place).or_else(|e| match e.kind() {
            // Another process made it at the same time.
            io::ErrorKind::AlreadyExists => Ok(()),
            // Without links the snapshot holds the files themselves.
            _ => fs::rename(self.blob(etag), &place),
        })
    }

    /// Holds the lock of a blob until the file is dropped; `wait` is called if another process has it.
    ///
    /// # Errors
    /// If the file cannot be made. Where files cannot be locked, nothing protects from a second process.
    pub fn lock(&self, etag: &str, wait: impl FnOnce()) -> io::Result<File> {
        fs::create_dir_all(self.locks())?;
        let path = self.locks().join(format!("{etag}.lock"));
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
        let mut wait = Some(wait);
        while let Err(TryLockError::WouldBlock) = file.try_lock() {
            wait.take().map_or_else(|| thread::sleep(Duration::from_millis(100)), |wait| wait());
        }
        Ok(file)
    }
}

/// What a snapshot lacks for running: of one `file`, that one. A GGUF file that is the only model needs no name.
pub fn missing(snapshot: &Path, file: Option<&str>) -> Vec<String> {
    let is_there = |name: &str| snapshot.join(name).is_file();
    let only = only_gguf(snapshot).filter(|_| file.is_none());
    let file = file.or(only.as_deref());
    let mut wanted = match file {
        Some(file) => parts(file),
        None if is_there(SINGLE) => Vec::new(),
        None if is_there(INDEX) => shards(&snapshot.join(INDEX)).unwrap_or_else(|| vec![SINGLE.into()]),
        None => vec![SINGLE.into()],
    };
    if !file.is_some_and(is_gguf) {
        wanted.insert(0, "config.json".into());
    }
    wanted.retain(|name| !is_there(name));
    wanted
}

/// The GGUF file of a snapshot that has no other weights.
pub fn only_gguf(snapshot: &Path) -> Option<String> {
    let held = files(snapshot);
    let mut models = held.iter().filter(|f| is_model(f));
    let only = models.next().filter(|_| models.next().is_none())?;
    (!held.iter().any(|f| f.ends_with(".safetensors") || f == INDEX)).then(|| only.clone())
}

/// Whether a file is a GGUF model, or the first of a split one. Encoders of images lie beside models of text.
pub fn is_model(name: &str) -> bool {
    let file = name.rsplit('/').next().unwrap_or(name);
    is_gguf(name) && !file.starts_with("mmproj") && parts(name).first().is_some_and(|first| first == name)
}

/// Whether a file of this name has its configuration and vocabulary inside.
pub fn is_gguf(file: &str) -> bool {
    file.to_ascii_lowercase().ends_with(".gguf")
}

/// The files of which `file` is one: of a split model, `NAME-00001-of-00003.gguf` and its like, all of them.
pub fn parts(file: &str) -> Vec<String> {
    let split = || {
        let (rest, count) = file.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let all: usize = count.parse().ok().filter(|_| count.len() == 5 && number.len() == 5)?;
        (1..=MOST_PARTS).contains(&all).then(|| (1..=all).map(|i| format!("{stem}-{i:05}-of-{count}.gguf")).collect())
    };
    split().unwrap_or_else(|| vec![file.to_owned()])
}

/// The files that an index names, each once; `None` if it is no index or names something that is no file beside it.
pub fn shards(index: &Path) -> Option<Vec<String>> {
    if fs::metadata(index).ok()?.len() > LONGEST_INDEX {
        return None;
    }
    let index: Value = serde_json::from_slice(&fs::read(index).ok()?).ok()?;
    let files = index.get("weight_map")?.as_object()?.values().map(|v| v.as_str().filter(|f| is_plain_file_name(f)));
    let mut files = files.map(|f| f.map(str::to_owned)).collect::<Option<Vec<_>>>()?;
    files.sort();
    files.dedup();
    Some(files)
}

/// The names in a folder that are text, in their order; none if there is no folder.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// The files in a folder and those below it, with `/` between folders. Links are files.
pub fn files(folder: &Path) -> Vec<String> {
    let mut all = Vec::new();
    for name in names(folder) {
        let is_folder = fs::symlink_metadata(folder.join(&name)).is_ok_and(|m| m.is_dir());
        match is_folder {
            true => all.extend(files(&folder.join(&name)).into_iter().map(|below| format!("{name}/{below}"))),
            false => all.push(name),
        }
    }
    all
}

#[cfg(unix)]
fn symlink(target: &Path, place: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, place)
}

#[cfg(windows)]
fn symlink(target: &Path, place: &Path) -> io::Result<()> {
    std::os::windows::fs::symlink_file(target, place)
}

#[cfg(not(any(unix, windows)))]
fn symlink(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
