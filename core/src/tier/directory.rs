//! Values as files of a directory that several processes may share.
//!
//! `DIR/MODEL/KEY.page`, `DIR/MODEL/KEY.state` and, in int8, `DIR/MODEL/KEY.int8`: one value each. A file is written under another name and renamed when it is
//! complete, so that a kill leaves it whole or absent. After a loss of power it may be neither; its checksum finds that. So nothing is
//! synced, and no process holds a lock: each accepts that a file is gone. A file's time of modification is that of its last use.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use super::{
    Content, Name,
    record::bad,
    storage::{Found, Storage, Stored},
};
use crate::{cache_dir, digest::Digest, state::PrefixKey};

/// A partly written file of this age was left by a process that ended.
const ABANDONED: Duration = Duration::from_secs(600);

/// A directory of values.
#[derive(Debug)]
pub struct Directory {
    dir: PathBuf,
    /// The folder of this model.
    own: PathBuf,
    /// Distinguishes the files that this process writes.
    next: AtomicU64,
}

impl Directory {
    /// Creates the directory and the folder in it for this user alone, unless they exist.
    ///
    /// # Errors
    /// Those of the file system, and if others can write it.
    pub fn open(dir: &Path, folder: &str) -> io::Result<Self> {
        let own = dir.join(folder);
        cache_dir::make_private(dir)?;
        cache_dir::make_private(&own)?;
        Ok(Self { dir: dir.into(), own, next: AtomicU64::new(0) })
    }

    fn path(&self, name: &Name) -> PathBuf {
        self.own.join(file_name(name))
    }

    /// Creates a file for this user alone.
    fn create(path: &Path, pieces: [&[u8]; 3]) -> io::Result<()> {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let mut file = options.open(path)?;
        pieces.into_iter().try_for_each(|piece| file.write_all(piece))
    }

    /// What a folder holds. Deletes what processes left that ended while they wrote.
    fn list_folder(&self, folder: &Path, found: &mut Vec<Found>) {
        // Another process may delete it, or files in it.
        let (Ok(entries), Some(name)) = (fs::read_dir(folder), folder.file_name().and_then(|name| name.to_str()))
        else {
            return;
        };
        let other: Option<Arc<str>> = (folder != self.own).then(|| name.into());
        for entry in entries.flatten() {
            let path = entry.path();
            let Some(meta) = fs::symlink_metadata(&path).ok().filter(fs::Metadata::is_file) else { continue };
            let Ok(used) = meta.modified() else { continue };
            let age = age(used);
            if path.extension().is_some_and(|e| e == "new") {
                if age > ABANDONED {
                    let _ = fs::remove_file(&path);
                }
            } else if let Some(name) = parse(&path) {
                found.push(Found { file: Stored { folder: other.clone(), name }, bytes: meta.len(), age });
            }
        }
    }
}

impl Storage for Directory {
    fn list(&self) -> io::Result<Vec<Found>> {
        let mut found = Vec::new();
        for folder in fs::read_dir(&self.dir)? {
            let folder = folder?;
            if folder.file_type()?.is_dir() {
                self.list_folder(&folder.path(), &mut found);
            }
        }
        Ok(found)
    }

    fn write(&self, name: &Name, pieces: [&[u8]; 3]) -> io::Result<()> {
        let path = self.path(name);
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let aside = path.with_extension(format!("{}-{number}.new", std::process::id()));
        let written = Self::create(&aside, pieces).and_then(|()| fs::rename(&aside, &path));
        if written.is_err() {
            let _ = fs::remove_file(&aside);
        }
        written
    }

    fn read(&self, name: &Name, pieces: [&mut [u8]; 3], ttl: Duration) -> io::Result<bool> {
        let mut file = File::open(self.path(name))?;
        let meta = file.metadata()?;
        if age(meta.modified()?) > ttl {
            return Ok(false);
        }
        if meta.len() != pieces.iter().map(|piece| piece.len() as u64).sum::<u64>() {
            return Err(bad("it has another length than values of this model"));
        }
        for piece in pieces {
            file.read_exact(piece).map_err(|_| bad("it is cut"))?;
        }
        // If that cannot be said, it is deleted earlier.
        let _ = file.set_modified(SystemTime::now());
        Ok(true)
    }

    fn remove(&self, file: &Stored) -> io::Result<()> {
        let folder = file.folder.as_ref().map_or_else(|| self.own.clone(), |folder| self.dir.join(&**folder));
        fs::remove_file(folder.join(file_name(&file.name)))
    }

    fn label(&self, name: &Name) -> String {
        self.path(name).display().to_string()
    }
}

fn age(used: SystemTime) -> Duration {
    used.elapsed().unwrap_or_default()
}

fn extension(content: Content) -> &'static str {
    match content {
        Content::Page => "page",
        Content::State => "state",
        Content::Int8 => "int8",
    }
}

fn file_name(name: &Name) -> String {
    format!("{}.{}", name.key.0, extension(name.content))
}

/// The value whose file this is; `None` for other files, which are left alone.
fn parse(path: &Path) -> Option<Name> {
    let key = PrefixKey(Digest::parse(path.file_stem()?.to_str()?)?);
    let kind = path.extension()?;
    let content = [Content::Page, Content::State, Content::Int8].into_iter().find(|c| kind == extension(*c))?;
    Some(Name { key, content })
}
