//! States of prompts as files, for programs: the bundles of `selkie bundle`.

use std::path::Path;

use selkie_core::{
    Error, Result,
    bundle::Identity,
    engine::{Exported, Imported},
    model_dir::ModelFiles,
    session::{Model, Prompt},
    state::Realm,
};

use crate::{
    bundle::{self, STATES},
    failure::Failure,
};

/// Computes a prompt, unless the cache has it, and writes its states and pages as a bundle (docs/bundle.md). Of a conversation
/// that is everything up to the end of its last message. The file appears complete or not at all, and only its owner can read it.
/// The first call reads all weights, for their checksum.
///
/// # Errors
/// Those of [`Model::submit`]; [`Error::Io`] for a file that cannot be written.
pub fn save_state(model: &Model, files: &ModelFiles, prompt: Prompt, path: impl AsRef<Path>) -> Result<Exported> {
    let prompt = match prompt {
        Prompt::Messages(messages) => bundle::whole(messages),
        other => other,
    };
    let encoded = bundle::compute(model, prompt).map_err(plain)?;
    let identity = identity(files)?;
    let what = bundle::export(identity, files.name.clone(), encoded, None, Realm::default(), STATES);
    bundle::write(model, path.as_ref(), what).map_err(plain)
}

/// Puts a bundle of the same model and numerics into the prefix cache, so that what it holds need not be computed.
///
/// # Errors
/// [`Error::BadRequest`] for another model or other numerics; [`Error::BadModel`] for a file that is damaged; [`Error::Io`].
pub fn load_state(model: &Model, files: &ModelFiles, path: impl AsRef<Path>) -> Result<Imported> {
    let saved = bundle::open(path.as_ref()).map_err(plain)?;
    bundle::read(model, identity(files)?, saved, true).map_err(plain)
}

/// Digests of the model's files; the first call reads all weights.
fn identity(files: &ModelFiles) -> Result<Identity> {
    pollster::block_on(files.identity(&mut |_| {}))
}

fn plain(failure: Failure) -> Error {
    match failure {
        Failure::Engine(e) => e,
        Failure::Shared(e) => Error::BadRequest(e.to_string()),
        other => Error::BadRequest(other.message().unwrap_or_default()),
    }
}
