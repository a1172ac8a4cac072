//! States of prompts as bundles: out of the page's engine, and into it.

use std::io::{self, BufWriter, Write};

use js_sys::Uint8Array;
use selkie_core::{
    bundle::{self, Identity, Reader},
    chat::{Conversation, End},
    engine::{Export, Import},
    session::{Ask, Encoded, Local, Prompt, WhenFull},
    state::Realm,
};
use serde_json::json;
use wasm_bindgen::prelude::*;

use crate::{
    engine::{WasmEngine, busy},
    error,
    files::ModelFile,
    js, model,
    request::{LoadStateOptions, SaveRequest},
};

/// Bytes of a bundle that are written at a time.
const PIECE: usize = 1 << 20;
/// States of a chat that are saved, as the command line does: the ends of its last messages are among them.
const STATES: usize = 8;

#[wasm_bindgen]
extern "C" {
    /// `{ name: string, size: number, read(offset: number, length: number): Uint8Array }`
    pub type StateFile;

    #[wasm_bindgen(method, getter)]
    fn name(this: &StateFile) -> String;

    #[wasm_bindgen(method, getter)]
    fn size(this: &StateFile) -> f64;

    #[wasm_bindgen(method, catch)]
    fn read(this: &StateFile, offset: f64, length: f64) -> Result<Uint8Array, JsValue>;

    /// `{ write(bytes: Uint8Array): void }`
    pub type StateSink;

    #[wasm_bindgen(method, catch)]
    fn write(this: &StateSink, bytes: &Uint8Array) -> Result<(), JsValue>;
}

#[wasm_bindgen]
impl WasmEngine {
    /// Computes the digests that bundles need from the files that the model was loaded from. All weights are read.
    pub async fn identify(&self, files: Vec<ModelFile>) -> Result<(), JsValue> {
        let (source, files) = model::open(files, None).await?;
        let loaded = self.with(|s| s.model().facts().fingerprint)?;
        if files.fingerprint().await.map_err(|e| source.error(&e))? != loaded {
            return Err(error::error(
                "storage",
                "the files of the model have changed since it was loaded: load it again",
            ));
        }
        let identity = files.identity(&mut |_| {}).await.map_err(|e| source.error(&e))?;
        self.identity.replace(Some(identity));
        Ok(())
    }

    /// Whether [`identify`](Self::identify) was called.
    #[wasm_bindgen(js_name = isIdentified)]
    pub fn is_identified(&self) -> bool {
        self.identity.borrow().is_some()
    }

    /// Queues the computation of what [`saveState`](Self::save_state) will save, and returns its number; its answer means nothing.
    #[wasm_bindgen(js_name = computeState)]
    pub fn compute_state(&self, request: JsValue) -> Result<f64, JsValue> {
        let mut request: SaveRequest = parsed(&request)?;
        self.with(|s| {
            let (prompt, _) = whole(s, &mut request)?;
            let prompt = Prompt::Encoded(prompt);
            let SaveRequest { namespace, origin, .. } = request;
            s.submit(Ask { prompt, max_tokens: Some(1), namespace, origin, ..Ask::default() }).map(|id| id.0 as f64)
        })?
        .map_err(|e| error::from_core(&e))
    }

    /// Writes what the cache holds of a prompt into `out`, and returns `{ tokens, states, bytes }`.
    #[wasm_bindgen(js_name = saveState)]
    pub async fn save_state(&self, request: JsValue, out: StateSink) -> Result<JsValue, JsValue> {
        let mut request: SaveRequest = parsed(&request)?;
        let model = self.known()?;
        let what = self
            .with(|s| {
                let (encoded, messages) = whole(s, &mut request)?;
                let mut ends: Vec<u32> = encoded.boundaries.iter().map(|end| *end as u32).collect();
                ends.sort_unstable();
                Ok(Export {
                    model,
                    name: s.model().facts().name.clone(),
                    tokens: encoded.ids,
                    ends,
                    messages,
                    realm: Realm { namespace: request.namespace, origin: request.origin },
                    states: request.states.unwrap_or(STATES),
                    from: 0,
                })
            })?
            .map_err(|e: selkie_core::Error| error::from_core(&e))?;
        let mut out = BufWriter::with_capacity(PIECE, Sink(out));
        let session = self.session.take().ok_or_else(busy)?;
        let saved = session.engine().export(what, "the bundle", &mut out).await;
        self.session.replace(Some(session));
        let saved = saved.map_err(|e| error::from_core(&e))?;
        Ok(js::object(&json!({ "tokens": saved.tokens, "states": saved.states, "bytes": saved.bytes })))
    }

    /// Puts a bundle into the prefix cache, and returns what it holds. The file is read in pieces, twice.
    #[wasm_bindgen(js_name = loadState)]
    pub fn load_state(&self, file: StateFile, options: JsValue) -> Result<JsValue, JsValue> {
        let LoadStateOptions { namespace, exact_only } = parsed(&options)?;
        let name = file.name();
        let fail = |e: selkie_core::Error| error::from_core(&e);
        let mut bundle = Reader::open(Input(file), &name).map_err(fail)?;
        // What cannot be shown should not be in the cache either.
        let said = bundle.head().messages.as_deref().map(serde_json::from_str::<serde_json::Value>).transpose();
        let messages = said.map_err(|e| fail(selkie_core::Error::model(&name, format!("its conversation: {e}"))))?;
        let into = Import { model: self.known()?, namespace, exact_only, pieces: false };
        let imported = self.with(|s| s.engine_mut().import(&mut bundle, &into))?.map_err(fail)?;
        let head = bundle.head();
        Ok(js::object(&json!({
            "tokens": imported.tokens,
            "ofTokens": head.tokens.len(),
            "states": imported.states,
            "pages": imported.pages,
            "origin": imported.origin,
            "converted": !imported.origin.is_empty(),
            "numerics": head.numerics,
            "messages": messages,
        })))
    }
}

impl WasmEngine {
    fn known(&self) -> Result<Identity, JsValue> {
        let known = self.identity.borrow().clone();
        known.ok_or_else(|| error::error("internal", "the digests of the model are not known yet"))
    }
}

fn parsed<T: serde::de::DeserializeOwned + Default>(value: &JsValue) -> Result<T, JsValue> {
    js::parse(value).map_err(|e| error::error("bad_request", &e))
}

/// The prompt of a request up to the end of its last message, and the messages as JSON. It is taken out of the request.
fn whole(s: &Local, request: &mut SaveRequest) -> selkie_core::Result<(Encoded, Option<String>)> {
    let (prompt, messages) = match request.messages() {
        Some(messages) => {
            let text = serde_json::to_string(&messages).ok();
            (Prompt::Conversation(Conversation { end: End::Messages, ..Conversation::new(messages) }), text)
        }
        None => (Prompt::Text(request.text()), None),
    };
    Ok((s.model().encode(prompt, WhenFull::Error, Some(1))?, messages))
}

/// A file of JavaScript that is read where the reader is.
struct Input(StateFile);

impl bundle::Input for Input {
    fn size(&self) -> io::Result<u64> {
        Ok(self.0.size() as u64)
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let bytes = self.0.read(at as f64, into.len() as f64).map_err(|e| thrown(&e))?;
        if bytes.length() as usize != into.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        bytes.copy_to(into);
        Ok(())
    }
}

/// Hands on what is written.
struct Sink(StateSink);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(&Uint8Array::from(bytes)).map_err(|e| thrown(&e))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

pub(crate) fn thrown(e: &JsValue) -> io::Error {
    let message = js::get(e, "message").and_then(|m| m.as_string());
    io::Error::other(message.unwrap_or_else(|| "the browser refused it".into()))
}
