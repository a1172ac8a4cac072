//! `selkie list`: the models in the cache.

use std::{fs, path::Path};

use selkie_core::{config::Config, models};
use serde_json::{Value, json};

use crate::{
    args::ListArgs,
    failure::Outcome,
    hub::{
        cache::{INDEX, Repo, SINGLE, files, is_model, missing, names, parts},
        settings::Settings,
    },
    terminal::{self, Output, size},
};

/// The longest configuration that is read, in bytes.
const LONGEST_CONFIG: u64 = 16 << 20;

/// A model of the cache at one commit.
struct Entry {
    /// As `-m` takes it.
    name: String,
    /// The branches and tags that mean this commit.
    revisions: Vec<String>,
    commit: String,
    /// Size of its files, and of the parts of files that are on their way.
    bytes: u64,
    parts: u64,
    missing: Vec<String>,
    /// What kind of model it is, or why that is unknown.
    family: Result<String, String>,
    /// Whether this program runs it; unknown of a file that has to be opened for that.
    runs: Option<bool>,
    path: String,
}

/// Prints them; no request is made.
pub fn run(args: &ListArgs) -> Outcome {
    let settings = Settings::read()?;
    let entries: Vec<Entry> = Repo::all(&settings.cache).iter().flat_map(|(name, repo)| entries(name, repo)).collect();
    let mut out = Output::new();
    if args.json {
        return out.json(&entries.iter().map(Entry::json).collect());
    }
    if entries.is_empty() {
        let place = settings.cache.display();
        terminal::note(format_args!("there are no models in {place}; `selkie pull owner/name` fetches one"));
        return Ok(());
    }
    out.text(&table(&entries))
}

fn entries(name: &str, repo: &Repo) -> Vec<Entry> {
    let refs = repo.refs();
    // A part whose blob is there was left by a tool that did not use it.
    let is_open = |part: &String| part.split('.').next().is_none_or(|etag| !repo.blob(etag).exists());
    let on_the_way = names(&repo.blobs()).into_iter().filter(|blob| blob.ends_with(".incomplete")).filter(is_open);
    let on_the_way = on_the_way.filter_map(|part| Some(fs::metadata(repo.blobs().join(part)).ok()?.len())).sum();
    let mut commits = repo.commits();
    if commits.is_empty() {
        // A download that was stopped before its first file was complete.
        commits.push(String::new());
    }
    let of_commit = |commit: String| {
        let revisions: Vec<String> = refs.iter().filter(|(_, c)| *c == commit).map(|(name, _)| name.clone()).collect();
        let snapshot = repo.snapshot(&commit);
        let held = if commit.is_empty() { Vec::new() } else { files(&snapshot) };
        let ggufs: Vec<&String> = held.iter().filter(|f| is_model(f)).collect();
        let one = |file: Option<&str>, held: &[String]| {
            let revision = if revisions.iter().any(|r| r == "main") { String::new() } else { at(&revisions, &commit) };
            let file_part = file.map_or(String::new(), |f| format!(":{f}"));
            let (family, runs) = if file.is_some() { (Ok("GGUF".into()), None) } else { family(&snapshot) };
            Entry {
                name: format!("{name}{revision}{file_part}"),
                revisions: revisions.clone(),
                bytes: held.iter().filter_map(|f| Some(fs::metadata(snapshot.join(f)).ok()?.len())).sum(),
                parts: on_the_way,
                missing: missing(&snapshot, file),
                family,
                runs,
                path: snapshot.display().to_string(),
                commit: commit.clone(),
            }
        };
        let has_weights = [SINGLE, INDEX].iter().any(|w| held.iter().any(|f| f == w));
        match has_weights || ggufs.is_empty() {
            true => vec![one(None, &held)],
            false => ggufs.iter().map(|f| one(Some(f), &parts(f))).collect(),
        }
    };
    commits.into_iter().flat_map(of_commit).collect()
}

/// The revision that a name needs if it does not mean the main branch.
fn at(revisions: &[String], commit: &str) -> String {
    match revisions.first().map(String::as_str).unwrap_or(commit) {
        "" => String::new(),
        revision => format!("@{revision}"),
    }
}

fn family(snapshot: &Path) -> (Result<String, String>, Option<bool>) {
    let path = snapshot.join("config.json");
    let small = fs::metadata(&path).is_ok_and(|m| m.len() <= LONGEST_CONFIG);
    let Some(bytes) = small.then(|| fs::read(&path).ok()).flatten() else {
        return (Err("there is no config.json".into()), None);
    };
    let config = Config::parse(&path.display().to_string(), &bytes);
    match config.map(|config| (models::read(&config), config)) {
        Ok((Ok(model), _)) => (Ok(model.spec().family), Some(true)),
        Ok((Err(why), config)) => (config.model_type().map(str::to_owned).map_err(|_| why.to_string()), Some(false)),
        Err(why) => (Err(why.to_string()), Some(false)),
    }
}

impl Entry {
    fn is_complete(&self) -> bool {
        self.missing.is_empty()
    }

    fn json(&self) -> Value {
        json!({
            "name": self.name,
            "revisions": self.revisions,
            "commit": self.commit,
            "bytes": self.bytes,
            "incomplete_bytes": self.parts,
            "complete": self.is_complete(),
            "missing": self.missing,
            "family": self.family.as_ref().ok(),
            "runs": self.runs,
            "path": self.path,
        })
    }

    fn cells(&self) -> [String; 5] {
        let revision = match &*self.revisions {
            [] => format!("{:.7}", self.commit),
            names => names.join(", "),
        };
        let state = match &*self.missing {
            [] => "complete".to_owned(),
            _ if self.parts > 0 => format!("incomplete, {} on their way", size(self.parts)),
            [one] => format!("lacks {one}"),
            [first, ..] => format!("lacks {first} and {} more", self.missing.len() - 1),
        };
        let family = match (&self.family, self.runs) {
            (Ok(family), Some(false)) => format!("{family}: selkie does not run it"),
            (Ok(family), _) => family.clone(),
            (Err(_), _) => "unknown".to_owned(),
        };
        [self.name.clone(), revision, size(self.bytes), state, family]
    }
}

fn table(entries: &[Entry]) -> String {
    let heads = ["model", "revision", "size", "state", "family"].map(str::to_owned);
    let rows: Vec<[String; 5]> = [heads].into_iter().chain(entries.iter().map(Entry::cells)).collect();
    let width = |i: usize| rows.iter().map(|row| row[i].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..5).map(width).collect();
    let line = |row: &[String; 5]| {
        let [name, revision, bytes, state, family] = row;
        let line = format!(
            "{name:<a$}  {revision:<b$}  {bytes:>c$}  {state:<d$}  {family}",
            a = widths[0],
            b = widths[1],
            c = widths[2],
            d = widths[3]
        );
        format!("{}\n", line.trim_end())
    };
    rows.iter().map(line).collect()
}
