//! Which files of a repository a model needs, and how much of them is missing.

use std::fs;

use crate::{
    failure::{Failure, Outcome},
    hub::{
        api::{Listing, Remote},
        cache::{INDEX, Repo, SINGLE, is_model, parts},
        name::{Name, nearest},
    },
    terminal::size,
};

/// The files beside the weights that the engine reads, where there are such.
pub const SMALL: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// The names of the files of weights, of which `shards` are those that the index names.
///
/// # Errors
/// If there are none that the engine can read; says which ones there are instead.
pub fn weights(listing: &Listing, name: &Name, shards: Option<Vec<String>>) -> Outcome<Vec<String>> {
    let fail = |why: String| Err(Failure::Other(format!("{}: {why}", name.repo())));
    let all = || listing.files.iter().map(|f| &*f.name);
    if let Some(file) = &name.file {
        let parts = parts(file);
        let Some(file) = parts.iter().find(|part| listing.file(part).is_none()) else { return Ok(parts) };
        let near = nearest(file, all());
        let hint = if near.is_empty() { String::new() } else { format!("; near to that are {}", near.join(", ")) };
        return fail(format!("there is no file {file} in revision {}{hint}", name.revision()));
    }
    if listing.file(SINGLE).is_some() {
        return Ok(vec![SINGLE.into()]);
    }
    if let Some(shards) = shards {
        if let Some(gone) = shards.iter().find(|s| listing.file(s).is_none()) {
            return fail(format!("{INDEX} names {gone}, which is not there"));
        }
        return Ok([INDEX.to_owned()].into_iter().chain(shards).collect());
    }
    let ggufs: Vec<&Remote> = listing.files.iter().filter(|f| is_model(&f.name)).collect();
    if let [only] = &*ggufs {
        return Ok(parts(&only.name));
    }
    if let Some(first) = ggufs.first() {
        let list: Vec<String> = ggufs.iter().map(|f| format!("\n  {}  {}", f.name, size(f.size))).collect();
        return fail(format!(
            "its weights are GGUF files; name one, for example {name}:{}{}",
            first.name,
            list.concat()
        ));
    }
    let found = all().filter(|n| [".safetensors", ".bin", ".pt", ".pth"].iter().any(|end| n.ends_with(end)));
    let found: Vec<&str> = found.take(8).collect();
    let found = if found.is_empty() { "no weights at all".to_owned() } else { format!("only {}", found.join(", ")) };
    fail(format!("there is neither {SINGLE} nor {INDEX} but {found}"))
}

/// The small files of a listing, which come before the weights: a snapshot that has its weights has all.
pub fn small(listing: &Listing) -> Vec<String> {
    SMALL.iter().filter(|s| listing.file(s).is_some()).map(|s| (*s).to_owned()).collect()
}

/// Bytes of `files` that have to come: without what is there, whole or in part.
pub fn to_fetch(repo: &Repo, commit: &str, files: &[Remote]) -> u64 {
    let mut etags: Vec<&str> = Vec::new();
    let mut bytes = 0;
    for file in files.iter().filter(|f| !is_here(repo, commit, f)) {
        // Two names of one content are one blob.
        if !etags.contains(&&*file.etag) {
            etags.push(&file.etag);
            let part = fs::metadata(repo.part(&file.etag)).map_or(0, |m| m.len());
            bytes += if part > file.size { file.size } else { file.size - part };
        }
    }
    bytes
}

/// Whether a file's content is in the cache: as a blob, or in the snapshot itself where there are no links.
pub fn is_here(repo: &Repo, commit: &str, file: &Remote) -> bool {
    let of_size = |m: fs::Metadata| m.is_file() && m.len() == file.size;
    let in_snapshot = repo.snapshot(commit).join(&file.name);
    fs::metadata(repo.blob(&file.etag)).is_ok_and(of_size) || fs::symlink_metadata(in_snapshot).is_ok_and(of_size)
}
