//! A snapshot of the cache as a model's files.

use std::{ops::Range, path::PathBuf};

use selkie_core::{
    Result,
    source::{Bytes, Dir, LocalFuture, Source},
};

use crate::hub::{
    cache::{INDEX, SINGLE},
    name::Name,
};

/// The files of a snapshot; its weights may be one file of another name.
pub struct Snapshot {
    dir: Dir,
    name: String,
    /// The folder and the name of the file that is used as the weights.
    weights: Option<(Dir, String)>,
}

impl Snapshot {
    /// The files of `name` in the folder `snapshot`.
    ///
    /// # Errors
    /// If that is not a folder.
    pub fn open(snapshot: PathBuf, name: &Name) -> Result<Self> {
        let weights = match &name.file {
            Some(file) => {
                let (folder, file) = file.rsplit_once('/').unwrap_or(("", file));
                Some((Dir::open(snapshot.join(folder))?, file.to_owned()))
            }
            None => None,
        };
        Ok(Self { dir: Dir::open(snapshot)?, name: name.to_string(), weights })
    }

    /// The real place of a file; `None` if it is hidden.
    fn place<'a>(&'a self, name: &'a str) -> Option<(&'a Dir, &'a str)> {
        match &self.weights {
            Some((dir, file)) if name == SINGLE => Some((dir, file)),
            Some(_) if name == INDEX => None,
            _ => Some((&self.dir, name)),
        }
    }
}

impl Source for Snapshot {
    fn label(&self) -> String {
        self.name.clone()
    }

    fn size<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<Option<u64>>> {
        match self.place(name) {
            Some((dir, name)) => dir.size(name),
            None => Box::pin(std::future::ready(Ok(None))),
        }
    }

    fn read<'a>(&'a self, name: &'a str, range: Range<u64>) -> LocalFuture<'a, Result<Bytes>> {
        let (dir, name) = self.place(name).unwrap_or((&self.dir, name));
        dir.read(name, range)
    }

    fn path(&self, name: &str) -> String {
        let (dir, name) = self.place(name).unwrap_or((&self.dir, name));
        dir.path(name)
    }
}
