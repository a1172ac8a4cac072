//! Address, cache and token of the hub, from the environment variables of Hugging Face's own tools.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use crate::{
    failure::{Failure, Outcome},
    hub::address,
};

const ENDPOINT: &str = "https://huggingface.co";
/// The longest file that can be a token, in bytes.
const LONGEST_TOKEN: u64 = 4096;

/// Settings from the environment.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The folder of all cached repositories.
    pub cache: PathBuf,
    /// The server, without a slash at the end.
    pub endpoint: String,
    /// Whether no request may be made.
    pub offline: bool,
    home: PathBuf,
}

impl Settings {
    /// Reads `HF_HUB_CACHE`, `HF_HOME`, `XDG_CACHE_HOME`, `HF_ENDPOINT` and `HF_HUB_OFFLINE`.
    ///
    /// # Errors
    /// If no variable names the cache and there is no home directory, or `HF_ENDPOINT` is not the address of a server.
    pub fn read() -> Outcome<Self> {
        let home = match path("HF_HOME") {
            Some(home) => home,
            None => path("XDG_CACHE_HOME")
                .or_else(|| Some(env::home_dir()?.join(".cache")))
                .ok_or_else(|| Failure::Other("there is no home directory; HF_HOME=DIR says where models go".into()))?
                .join("huggingface"),
        };
        let cache = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE")).unwrap_or_else(|| home.join("hub"));
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.into());
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        if address::host(&endpoint).is_none() {
            let why = format!("HF_ENDPOINT is {endpoint:?}; it has to be an address like {ENDPOINT}");
            return Err(Failure::Other(why));
        }
        Ok(Self { cache, endpoint, offline: is_on("HF_HUB_OFFLINE") || is_on("TRANSFORMERS_OFFLINE"), home })
    }

    /// The server's name, with its port if it has one.
    pub fn host(&self) -> &str {
        address::host(&self.endpoint).unwrap_or(&self.endpoint)
    }

    /// The file that holds the token, if no variable does.
    pub fn token_file(&self) -> PathBuf {
        path("HF_TOKEN_PATH").unwrap_or_else(|| self.home.join("token"))
    }

    /// The token from `HF_TOKEN`, or else from the file; `None` if there is none, or if it must not be sent by default.
    pub fn token(&self) -> Option<String> {
        if is_on("HF_HUB_DISABLE_IMPLICIT_TOKEN") {
            return None;
        }
        let token =
            text("HF_TOKEN").or_else(|| text("HUGGING_FACE_HUB_TOKEN")).or_else(|| from_file(&self.token_file()))?;
        // Anything else cannot be part of a header.
        let good = token.chars().all(|c| c.is_ascii_graphic());
        if !good {
            tracing::warn!("the Hugging Face token has characters that no token has; it is not used");
        }
        good.then_some(token)
    }
}

fn from_file(file: &Path) -> Option<String> {
    let small = fs::metadata(file).is_ok_and(|meta| meta.is_file() && meta.len() <= LONGEST_TOKEN);
    let token = small.then(|| fs::read_to_string(file).ok())??;
    let token = token.trim();
    (!token.is_empty()).then(|| token.to_owned())
}

/// The trimmed value of a variable that is set and not empty.
fn text(variable: &str) -> Option<String> {
    let value = env::var(variable).ok()?;
    let value = value.trim();
    (!value.is_empty()).then(|| value.to_owned())
}

/// A variable that names a folder; `~` is the home directory.
fn path(variable: &str) -> Option<PathBuf> {
    let value = PathBuf::from(env::var_os(variable).filter(|v| !v.is_empty())?);
    match value.strip_prefix("~") {
        Ok(rest) => Some(env::home_dir()?.join(rest)),
        Err(_) => Some(value),
    }
}

/// Whether a switch is on, by the rule of Hugging Face's tools.
fn is_on(variable: &str) -> bool {
    text(variable).is_some_and(|v| ["1", "ON", "YES", "TRUE"].contains(&&*v.to_uppercase()))
}
