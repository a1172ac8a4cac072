//! Brings what a model needs into the cache.

use std::{cell::Cell, fs, path::PathBuf};

use selkie_core::{Error, config::Config, models};

use crate::{
    failure::{Failure, Outcome},
    hub::{
        api::{Listing, Remote},
        cache::{INDEX, Repo, SINGLE, is_gguf, shards},
        consent::{self, Consent},
        disk,
        download::Download,
        explain::explain,
        fault::Fault,
        http::Client,
        name::Name,
        select,
        settings::Settings,
    },
    terminal::{self, size},
};

/// A repository that is asked.
pub struct Fetch<'a> {
    /// What the environment says.
    pub settings: &'a Settings,
    /// What is wanted.
    pub name: &'a Name,
    /// Where it goes.
    pub repo: Repo,
    /// Who asks.
    pub client: Client,
}

/// Why a download stopped: on the way, or by our own decision.
pub enum Stop {
    /// On the way.
    Fault(Fault),
    /// Here.
    Failure(Failure),
}

impl From<Fault> for Stop {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::Failure(failure)
    }
}

impl<'a> Fetch<'a> {
    /// Makes no request yet, and none at all if the environment says so.
    ///
    /// # Errors
    /// In that case.
    pub fn new(settings: &'a Settings, name: &'a Name) -> Outcome<Self> {
        if settings.offline {
            let why = format!(
                "{name} is not complete in {}, and HF_HUB_OFFLINE forbids to fetch it; `selkie list` shows what is there",
                settings.cache.display()
            );
            return Err(Failure::Other(why));
        }
        Ok(Self { settings, name, repo: Repo::new(&settings.cache, name), client: Client::new(settings) })
    }

    /// Fetches all that the model needs and is not there; the snapshot.
    ///
    /// # Errors
    /// What the hub refuses, what the person at the terminal does, and what does not fit on the disk. Parts stay.
    pub fn all(&self, consent: Consent) -> Outcome<PathBuf> {
        terminal::note(format_args!(
            "asking {} what {} holds (revision {})",
            self.settings.host(),
            self.name.repo(),
            self.name.revision()
        ));
        let consent = Cell::new(consent);
        match self.attempt(&consent) {
            Err(Stop::Fault(Fault::Changed(why))) => {
                terminal::note(format_args!("{why}; starting again with what the hub has now"));
                self.attempt(&consent)
            }
            outcome => outcome,
        }
        .map_err(|stop| self.explain(stop))
    }

    /// The failure to report.
    pub fn explain(&self, stop: Stop) -> Failure {
        match stop {
            Stop::Fault(fault) => explain(fault, &self.client, self.settings, self.name),
            Stop::Failure(failure) => failure,
        }
    }

    /// The list of files.
    ///
    /// # Errors
    /// Those of the request.
    pub fn listing(&self) -> Result<Listing, Stop> {
        Ok(Listing::request(&self.client, self.settings, self.name)?)
    }

    /// The files that the model needs, of known sizes; its small files are fetched for that where they decide.
    ///
    /// # Errors
    /// If there is nothing that the engine runs.
    pub fn needed(&self, listing: &Listing) -> Result<Vec<Remote>, Stop> {
        let indexed = self.name.file.is_none() && listing.file(SINGLE).is_none();
        let shards = match listing.file(INDEX).filter(|_| indexed) {
            Some(index) => Some(self.shards(listing, index)?),
            None => None,
        };
        let weights = select::weights(listing, self.name, shards)?;
        let mut needed = Vec::new();
        for file in select::small(listing).into_iter().chain(weights) {
            let mut file = listing.file(&file).expect("it was found in the list").clone();
            file.look_up(&self.client, self.settings, self.name, &listing.commit)?;
            needed.push(file);
        }
        Ok(needed)
    }

    fn shards(&self, listing: &Listing, index: &Remote) -> Result<Vec<String>, Stop> {
        let path = self.one(listing, index)?;
        let bad = || Failure::Engine(Error::model(path.display().to_string(), "this is no index of safetensors files"));
        Ok(shards(&path).ok_or_else(bad)?)
    }

    /// The configuration, which is small, in the cache; `None` if there is none.
    ///
    /// # Errors
    /// Those of the request, and a file that is no configuration.
    pub fn config(&self, listing: &Listing) -> Result<Option<(PathBuf, Config)>, Stop> {
        let Some(file) = listing.file("config.json") else { return Ok(None) };
        let path = self.one(listing, file)?;
        let read = || Config::parse(&path.display().to_string(), &fs::read(&path).map_err(|e| Error::io(&path, e))?);
        let config = read().map_err(Failure::Engine)?;
        Ok(Some((path, config)))
    }

    /// One small file, in the cache.
    fn one(&self, listing: &Listing, file: &Remote) -> Result<PathBuf, Stop> {
        let mut file = file.clone();
        file.look_up(&self.client, self.settings, self.name, &listing.commit)?;
        self.store(&listing.commit, &file)?;
        Ok(self.repo.snapshot(&listing.commit).join(&file.name))
    }

    fn attempt(&self, consent: &Cell<Consent>) -> Result<PathBuf, Stop> {
        let listing = self.listing()?;
        let snapshot = self.repo.snapshot(&listing.commit);
        self.runs(&listing)?;
        let files = self.needed(&listing)?;
        let bytes = select::to_fetch(&self.repo, &listing.commit, &files);
        if bytes > 0 {
            let free = disk::free(&self.settings.cache);
            self.announce(&listing, &files, bytes, free);
            if let Some(free) = free.filter(|free| *free < bytes) {
                let why = format!("{} do not fit into {} free ones on the disk", size(bytes), size(free));
                let how = format!("HF_HOME=DIR chooses another place than {}", self.settings.cache.display());
                return Err(Failure::Other(format!("{why}; {how}, `selkie rm` makes room")).into());
            }
            consent::get(consent.get())?;
            consent.set(Consent::Given);
        }
        self.client.progress.begin(bytes);
        for file in &files {
            self.client.progress.file(&file.name);
            self.store(&listing.commit, file)?;
        }
        self.client.progress.end();
        let known = self.repo.write_ref(self.name.revision(), &listing.commit);
        known.map_err(|e| Fault::Local(Error::io(self.repo.path(), e)))?;
        let what =
            if bytes > 0 { format!("{} are here", self.name) } else { format!("{} was here already", self.name) };
        terminal::note(format_args!("{what}: {}", snapshot.display()));
        Ok(snapshot)
    }

    /// Refuses a model that this program does not run, before its weights are fetched.
    fn runs(&self, listing: &Listing) -> Result<(), Stop> {
        if self.name.file.as_deref().is_some_and(is_gguf) {
            return Ok(());
        }
        let Some((_, config)) = self.config(listing)? else {
            // A repository of GGUF files needs none; if it has several, the list of those files is the better answer.
            if select::weights(listing, self.name, None)?.iter().all(|file| is_gguf(file)) {
                return Ok(());
            }
            let why = format!("{} has no config.json, so selkie cannot know what it is", self.name.repo());
            return Err(Failure::Other(why).into());
        };
        let read = models::read(&config);
        Ok(read.map(drop).map_err(|e| Failure::Other(format!("{e}; nothing else was fetched")))?)
    }

    fn announce(&self, listing: &Listing, files: &[Remote], bytes: u64, free: Option<u64>) {
        let all: u64 = files.iter().map(|f| f.size).sum();
        let kept = if size(bytes) == size(all) { String::new() } else { format!(" of {}", size(all)) };
        let free = free.map_or(String::new(), |free| format!(", {} are free", size(free)));
        terminal::note(format_args!(
            "{} at commit {:.7}: {}{kept} to fetch from {} in {} files, into {}{free}",
            self.name,
            listing.commit,
            size(bytes),
            self.settings.host(),
            files.len(),
            self.settings.cache.display()
        ));
    }

    /// Brings a file into the snapshot; only one process at a time does so.
    fn store(&self, commit: &str, file: &Remote) -> Result<(), Stop> {
        let local = |e| Fault::Local(Error::io(self.repo.path(), e));
        if !select::is_here(&self.repo, commit, file) {
            fs::create_dir_all(self.repo.blobs()).map_err(local)?;
            let progress = &self.client.progress;
            let wait = || progress.say(format_args!("waiting for another process that fetches {}", file.name));
            let _lock = self.repo.lock(&file.etag, wait).map_err(local)?;
            if select::is_here(&self.repo, commit, file) {
                progress.add(file.size as i64);
            } else {
                let (part, blob) = (self.repo.part(&file.etag), self.repo.blob(&file.etag));
                let url = file.url(self.settings, self.name, commit);
                let download = Download {
                    client: &self.client,
                    url: &url,
                    etag: &file.etag,
                    hashed: file.hashed,
                    size: file.size,
                    part: &part,
                };
                download.run()?;
                fs::rename(part, blob).map_err(local)?;
            }
        }
        if self.repo.blob(&file.etag).exists() {
            self.repo.link(commit, &file.name, &file.etag).map_err(local)?;
        }
        Ok(())
    }
}
