//! The disk tier of a page: files of the browser, which JavaScript opens and core fills.

use std::{fmt, io, sync::Arc, time::Duration};

use selkie_core::{
    backend::Caps,
    bundle::{Identity, numerics},
    digest::Digest,
    engine::EngineOptions,
    model_dir::ModelFiles,
    tier::{DiskOptions, Flat, Flats, TierOptions, Where, folder},
};
use serde::{Deserialize, Serialize};
use wasm_bindgen::prelude::*;

use crate::{js, state::thrown};

#[wasm_bindgen]
extern "C" {
    /// `{ digests, ttl, learn(digests): void, open(name): Promise<{ pages, states, bytes }> }`
    pub type StateFolder;

    /// What [`learn`](Self::learn) was told of this model before; else null.
    #[wasm_bindgen(method, getter)]
    fn digests(this: &StateFolder) -> JsValue;

    /// Milliseconds after which unused values are deleted.
    #[wasm_bindgen(method, getter)]
    fn ttl(this: &StateFolder) -> f64;

    #[wasm_bindgen(method, catch)]
    fn learn(this: &StateFolder, digests: &JsValue) -> Result<(), JsValue>;

    #[wasm_bindgen(method, catch)]
    async fn open(this: &StateFolder, name: &str) -> Result<JsValue, JsValue>;

    /// The files of a model.
    type Opened;

    #[wasm_bindgen(method, getter)]
    fn pages(this: &Opened) -> FlatFile;

    #[wasm_bindgen(method, getter)]
    fn states(this: &Opened) -> FlatFile;

    /// Most bytes of both.
    #[wasm_bindgen(method, getter)]
    fn bytes(this: &Opened) -> f64;

    /// `{ size(), resize(bytes), read(at, into: Uint8Array), write(at, bytes: Uint8Array) }`
    type FlatFile;

    #[wasm_bindgen(method, catch)]
    fn size(this: &FlatFile) -> Result<f64, JsValue>;

    #[wasm_bindgen(method, catch)]
    fn resize(this: &FlatFile, bytes: f64) -> Result<(), JsValue>;

    #[wasm_bindgen(method, catch)]
    fn read(this: &FlatFile, at: f64, into: &mut [u8]) -> Result<(), JsValue>;

    #[wasm_bindgen(method, catch)]
    fn write(this: &FlatFile, at: f64, bytes: &[u8]) -> Result<(), JsValue>;
}

/// A file of the worker.
struct File(FlatFile);

impl fmt::Debug for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a file of the browser")
    }
}

impl Flat for File {
    fn size(&self) -> io::Result<u64> {
        self.0.size().map(|bytes| bytes as u64).map_err(|e| thrown(&e))
    }

    fn resize(&self, bytes: u64) -> io::Result<()> {
        self.0.resize(bytes as f64).map_err(|e| thrown(&e))
    }

    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.0.read(at as f64, into).map_err(|e| thrown(&e))
    }

    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write(at as f64, bytes).map_err(|e| thrown(&e))
    }
}

/// A disk tier, and the digests of its model.
type Tier = (DiskOptions, Identity);

/// The digests of a model as text.
#[derive(Default, Deserialize, Serialize)]
struct Digests {
    weights: String,
    config: String,
    tokenizer: String,
}

/// The disk tier of a model that is loaded onto a device with these capabilities, if there are files for it. All weights are read if
/// their digest is not known. An error is a sentence.
pub async fn open(from: Option<&StateFolder>, files: &ModelFiles, caps: &Caps) -> Result<Option<Tier>, String> {
    let Some(from) = from else { return Ok(None) };
    let identity = match known(&js::parse(&from.digests())?) {
        Some(identity) => identity,
        None => {
            let identity = files.identity(&mut |_| {}).await.map_err(|e| e.to_string())?;
            from.learn(&told(&identity)).map_err(|e| thrown(&e).to_string())?;
            identity
        }
    };
    let named = [identity.weights.0, identity.config.0].concat();
    let opened = from.open(&folder(&named, &numerics(caps))).await.map_err(|e| thrown(&e).to_string())?;
    let opened: Opened = opened.unchecked_into();
    let now = || js_sys::Date::now() as u64;
    let flats = Flats { pages: Arc::new(File(opened.pages())), states: Arc::new(File(opened.states())), now };
    let disk = DiskOptions {
        place: Where::Flat(flats),
        bytes: opened.bytes() as u64,
        ttl: Duration::from_millis(from.ttl() as u64),
        identity: named,
    };
    Ok(Some((disk, identity)))
}

/// These options with a disk tier, if it could be had.
pub fn with(options: EngineOptions, disk: &Result<Option<Tier>, String>) -> EngineOptions {
    let disk = disk.as_ref().ok().and_then(|disk| Some(disk.as_ref()?.0.clone()));
    EngineOptions { tiers: TierOptions { disk, ..TierOptions::default() }, ..options }
}

fn known(digests: &Digests) -> Option<Identity> {
    let Digests { weights, config, tokenizer } = digests;
    Some(Identity {
        weights: Digest::parse(weights)?,
        config: Digest::parse(config)?,
        tokenizer: Digest::parse(tokenizer)?,
    })
}

fn told(identity: &Identity) -> JsValue {
    let Identity { weights, config, tokenizer } = identity;
    let text = |digest: &Digest| digest.to_string();
    let digests = Digests { weights: text(weights), config: text(config), tokenizer: text(tokenizer) };
    js::object(&serde_json::to_value(digests).unwrap_or_default())
}
