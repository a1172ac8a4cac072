//! Facts about a model without its weights, for `selkie inspect`.

use std::path::{Path, PathBuf};

use selkie_core::config::Config;

use crate::{
    failure::{Failure, Outcome},
    hub::{
        Settings,
        cache::{Repo, is_gguf, is_model, names, parts},
        fetch::Fetch,
        hub_name,
        name::Name,
    },
    input_file, terminal,
};

/// The longest configuration that is read, in bytes.
const LONGEST_CONFIG: u64 = 16 << 20;
/// The endings of the names of weights.
const WEIGHTS: [&str; 5] = [".safetensors", ".gguf", ".bin", ".pt", ".pth"];

/// A model whose weights are not on this machine.
pub struct Preview {
    /// The name that the user gave.
    pub label: String,
    /// Its configuration.
    pub config: Config,
    /// Bytes of its weights, if the hub says so.
    pub weight_bytes: Option<u64>,
    /// GGUF models that are published with it, and their sizes.
    pub others: Vec<(String, u64)>,
}

/// Looks at what `given` names; `None` if its weights are here. Of a model of the hub the list of files and the configuration
/// are fetched, after saying so.
///
/// # Errors
/// If there is no configuration, and what the hub refuses.
pub fn look(given: &Path) -> Outcome<Option<Preview>> {
    if let Some(config) = bare(given) {
        let label = given.display().to_string();
        return Ok(Some(Preview { label, config: parse(&config)?, weight_bytes: None, others: Vec::new() }));
    }
    let Some(name) = hub_name(given) else { return Ok(None) };
    let settings = Settings::read()?;
    if Repo::new(&settings.cache, &name).complete(&name).is_some() || name.file.as_deref().is_some_and(is_gguf) {
        return Ok(None);
    }
    ask(&settings, &name).map(Some)
}

/// The configuration that `given` is, or that is all a directory has of a model.
fn bare(given: &Path) -> Option<PathBuf> {
    if given.is_file() && given.extension().is_some_and(|e| e == "json") {
        return Some(given.into());
    }
    let config = given.join("config.json");
    let weights = names(given).iter().any(|name| WEIGHTS.iter().any(|end| name.ends_with(end)));
    (config.is_file() && !weights && !given.join("model.safetensors.index.json").exists()).then_some(config)
}

fn parse(path: &Path) -> Outcome<Config> {
    Ok(Config::parse(&path.display().to_string(), &input_file::load_regular(path, LONGEST_CONFIG)?)?)
}

fn ask(settings: &Settings, name: &Name) -> Outcome<Preview> {
    // An interrupted download may have the configuration, but not the size.
    let fetch = Fetch::new(settings, name)?;
    let (host, repo) = (settings.host(), name.repo());
    terminal::note(format_args!("asking {host} for the list of files and config.json of {repo}, not for weights"));
    let look = || {
        let listing = fetch.listing()?;
        let config = fetch.config(&listing)?;
        let files = fetch.needed(&listing)?;
        Ok((listing, config, files))
    };
    let (listing, config, files) = look().map_err(|stop| fetch.explain(stop))?;
    let Some((path, config)) = config else {
        return Err(Failure::Other(format!("{repo} has no config.json")));
    };
    // A name that means another commit already keeps doing so until all of the new one is here.
    let known = fetch.repo.commit(name.revision()).is_some();
    if !known && let Err(e) = fetch.repo.write_ref(name.revision(), &listing.commit) {
        tracing::warn!("{}: {e}", path.display());
    }
    let is_weights = |f: &str| WEIGHTS.iter().any(|end| f.ends_with(end));
    let weight_bytes = files.iter().filter(|f| is_weights(&f.name)).map(|f| f.size).sum();
    let size = |file: &String| parts(file).iter().filter_map(|part| Some(listing.file(part)?.size)).sum();
    let models = listing.files.iter().map(|f| &f.name).filter(|f| is_model(f));
    let others = models.map(|file| (file.clone(), size(file))).collect();
    Ok(Preview { label: name.to_string(), config, weight_bytes: Some(weight_bytes), others })
}
