//! Models by name: `owner/name[@revision][:file]`, from the cache of Hugging Face's tools or from the hub.
//!
//! The protocol is written here, over a small blocking HTTP client (`ureq` with rustls, ring and the system's certificates).
//! The crate `hf-hub` does not fit: its release 1.0 is asynchronous and brings tokio, reqwest and the Xet client, about 300
//! crates with a C library that needs cmake, for a program that otherwise has none of these; 0.5 has no parallel ranges in its
//! blocking form, no checksums and no offline mode. What is needed is four kinds of request: a list of files, a file's size, a file, and a part of one.
//! The roots that come with rustls are under a licence that deny.toml does not list, and a company's own are not among them.
//!
//! - A directory of that name wins over the hub. What is complete in the cache is used without a request; `selkie pull` looks
//!   for a newer commit.
//! - **Invariant:** no request is made before a line on stderr named the host, and no weights are fetched before somebody
//!   agreed. `HF_HUB_OFFLINE` forbids all requests. The token goes to the hub, not to where the hub sends a download.
//! - Files land where Python's tools look for them: see `cache`. A branch's ref moves when all its files are there.
//! - Ctrl-C needs no handler: a part is a prefix of its file at any time (`assemble`), under its etag, so that the next run goes
//!   on from there if the server still has this content, and starts again if it does not.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use selkie_core::source::{Dir, Source};

use crate::failure::{Failure, Outcome};

use self::{
    cache::{Repo, is_gguf, only_gguf},
    consent::Consent,
    fetch::Fetch,
    name::{Name, nearest},
    settings::Settings,
};

mod address;
mod api;
mod assemble;
mod cache;
mod consent;
mod disk;
mod download;
mod explain;
mod fault;
mod fetch;
mod http;
pub mod list;
mod name;
pub mod preview;
mod progress;
pub mod pull;
pub mod remove;
mod select;
mod settings;
mod source;

pub use source::Snapshot;

/// What `-m` names.
pub enum Found {
    /// A path of this machine, be it there or not.
    Path(PathBuf),
    /// A model of the cache.
    Model(Arc<Snapshot>),
}

impl Found {
    /// Its files.
    ///
    /// # Errors
    /// If a path is neither a folder nor a GGUF file.
    pub fn source(self) -> selkie_core::Result<Arc<dyn Source>> {
        Ok(match self {
            Self::Path(path) => Arc::new(Dir::open(path)?),
            Self::Model(snapshot) => snapshot,
        })
    }

    /// What of a complete snapshot is the model `name`.
    fn of(snapshot: PathBuf, name: &Name) -> Outcome<Self> {
        let file = name.file.clone().or_else(|| only_gguf(&snapshot));
        Ok(match file.filter(|file| is_gguf(file)) {
            Some(file) => Self::Path(snapshot.join(file)),
            None => Self::Model(Arc::new(Snapshot::open(snapshot, name)?)),
        })
    }
}

/// Finds the model that `given` names without asking the hub: a path, else in the cache.
///
/// # Errors
/// What stands in the way, and what to do.
pub fn here(given: &Path) -> Outcome<Option<Found>> {
    let Some(name) = hub_name(given) else { return Ok(Some(Found::Path(given.into()))) };
    let snapshot = Repo::new(&Settings::read()?.cache, &name).complete(&name);
    snapshot.map(|snapshot| Found::of(snapshot, &name)).transpose()
}

/// Finds the model that `given` names: a path, else in the cache, else on the hub, which is asked if `yes` or the person at the
/// terminal says so.
///
/// # Errors
/// What stands in the way, and what to do.
pub fn find(given: &Path, yes: bool) -> Outcome<Found> {
    let Some(name) = hub_name(given) else { return Ok(Found::Path(given.into())) };
    let settings = Settings::read()?;
    let snapshot = match Repo::new(&settings.cache, &name).complete(&name) {
        Some(snapshot) => snapshot,
        None => {
            let fetch = Fetch::new(&settings, &name)?;
            fetch.all(may_fetch(&settings, &name, yes)?)?
        }
    };
    Found::of(snapshot, &name)
}

/// The name that `given` is, unless something with this path is there.
fn hub_name(given: &Path) -> Option<Name> {
    if given.exists() { None } else { Name::parse(given.to_str()?) }
}

/// Whether the hub may be asked for a model that is not in the cache.
fn may_fetch(settings: &Settings, name: &Name, yes: bool) -> Outcome<Consent> {
    if yes {
        return Ok(Consent::Given);
    }
    let is_folder = Path::new(&name.owner).is_dir();
    if consent::can_ask() && !is_folder {
        return Ok(Consent::Ask);
    }
    let repo = name.repo();
    let cached = Repo::all(&settings.cache);
    let near = nearest(&repo, cached.iter().map(|(name, _)| &**name));
    let near = if near.is_empty() { String::new() } else { format!("; the cache holds {}", near.join(", ")) };
    // A wrong path is likelier than a name that happens to begin like one of the folders here.
    let local = match is_folder {
        true => format!("there is no {repo} in this directory, which has a folder {}", name.owner),
        false => format!("there is no directory {repo}"),
    };
    Err(Failure::Other(format!(
        "{local}, and {name} is not complete in the cache ({}){near}; `selkie pull {name}` fetches it from {}, and so does --yes \
         here",
        settings.cache.display(),
        settings.host()
    )))
}
