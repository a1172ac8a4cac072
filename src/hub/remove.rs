//! `selkie rm`: removes a model from the cache.

use std::{
    collections::BTreeSet,
    fs::{self, File, TryLockError},
    io,
    path::Path,
};

use selkie_core::Error;

use crate::{
    args::RemoveArgs,
    failure::{Failure, Outcome},
    hub::{
        cache::{Repo, files, names},
        consent::{self, Consent},
        name::{Name, nearest},
        pull,
        settings::Settings,
    },
    terminal::{self, size},
};

/// Asks, then removes snapshots and the blobs that no other snapshot shows.
pub fn run(args: &RemoveArgs) -> Outcome {
    let name = pull::parse(&args.name)?;
    if let Some(file) = &name.file {
        return Err(Failure::Usage(format!("`selkie rm` removes whole models; leave out :{file}")));
    }
    let settings = Settings::read()?;
    let repo = Repo::new(&settings.cache, &name);
    let plan = Plan::new(&settings, &repo, &name)?;
    terminal::note(format_args!("{name}: {}, {} in {}", plan.what(), size(plan.bytes), repo.path().display()));
    if !args.yes && !consent::can_ask() {
        return Err(Failure::Other("nothing was removed: there is no terminal to ask on; --yes removes it".into()));
    }
    consent::get(if args.yes { Consent::Given } else { Consent::Ask })?;
    if let Some(busy) = busy(&repo) {
        return Err(Failure::Other(format!("nothing was removed: another process fetches a file of it ({busy})")));
    }
    plan.run(&repo).map_err(|e| Error::io(repo.path(), e))?;
    terminal::note(format_args!("{} are free", size(plan.bytes)));
    Ok(())
}

/// The files to remove.
struct Plan {
    /// Commits; all of them if `all`.
    commits: Vec<String>,
    all: bool,
    refs: Vec<String>,
    blobs: Vec<String>,
    bytes: u64,
}

impl Plan {
    fn new(settings: &Settings, repo: &Repo, name: &Name) -> Outcome<Self> {
        if !repo.path().is_dir() {
            let cached = Repo::all(&settings.cache);
            let near = nearest(&name.repo(), cached.iter().map(|(name, _)| &**name));
            let near = if near.is_empty() {
                "`selkie list` shows what is there".into()
            } else {
                format!("it holds {}", near.join(", "))
            };
            return Err(Failure::Other(format!("{name} is not in {}; {near}", settings.cache.display())));
        }
        let there = repo.commits();
        let commits = match &name.revision {
            None => there.clone(),
            Some(revision) => {
                let known: Vec<String> = repo.refs().into_iter().map(|(name, _)| name).collect();
                let why = || {
                    format!(
                        "{name}: that revision is not here; there are {}",
                        [known, there.clone()].concat().join(", ")
                    )
                };
                vec![repo.commit(revision).filter(|c| there.contains(c)).ok_or_else(|| Failure::Other(why()))?]
            }
        };
        let all = commits.len() == there.len();
        let kept = there.iter().filter(|c| !commits.contains(c));
        let kept: BTreeSet<String> = kept.flat_map(|c| shown(&repo.snapshot(c))).collect();
        let blobs: Vec<String> = names(&repo.blobs()).into_iter().filter(|blob| all || !kept.contains(blob)).collect();
        let refs = repo.refs().into_iter().filter(|(_, c)| commits.contains(c)).map(|(name, _)| name).collect();
        // On systems without links, the snapshots hold the files themselves.
        let inside =
            commits.iter().map(|c| repo.snapshot(c)).flat_map(|s| files(&s).into_iter().map(move |f| s.join(f)));
        let paths = inside.chain(blobs.iter().map(|blob| repo.blob(blob)));
        let bytes = paths.filter_map(|p| fs::symlink_metadata(p).ok()).filter(|m| m.is_file()).map(|m| m.len()).sum();
        Ok(Self { commits, all, refs, blobs, bytes })
    }

    fn what(&self) -> String {
        match (self.all, self.commits.len()) {
            (true, 0) => "what was fetched of it".into(),
            (true, 1) => "all of it".into(),
            (true, n) => format!("all {n} revisions"),
            (false, _) => format!("commit {:.7}", self.commits.concat()),
        }
    }

    /// References first, so that an incomplete removal is not found as a model.
    fn run(&self, repo: &Repo) -> io::Result<()> {
        for name in &self.refs {
            fs::remove_file(repo.path().join("refs").join(name))?;
        }
        for commit in &self.commits {
            fs::remove_dir_all(repo.snapshot(commit))?;
        }
        for blob in &self.blobs {
            fs::remove_file(repo.blob(blob))?;
        }
        if self.all {
            fs::remove_dir_all(repo.path())?;
            let locks = repo.locks();
            if locks.is_dir() {
                fs::remove_dir_all(locks)?;
            }
        }
        Ok(())
    }
}

/// The blobs that a snapshot links to.
fn shown(snapshot: &Path) -> Vec<String> {
    let blob = |file: String| fs::read_link(snapshot.join(file)).ok()?.file_name()?.to_str().map(str::to_owned);
    files(snapshot).into_iter().filter_map(blob).collect()
}

/// A lock that another process holds.
fn busy(repo: &Repo) -> Option<String> {
    let is_held = |lock: &String| {
        let file = File::open(repo.locks().join(lock));
        file.is_ok_and(|file| matches!(file.try_lock(), Err(TryLockError::WouldBlock)))
    };
    names(&repo.locks()).into_iter().find(is_held)
}
