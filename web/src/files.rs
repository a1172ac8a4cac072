//! A model's files from JavaScript: objects with a name, a size and a method `read`.

use std::{cell::RefCell, io::ErrorKind, ops::Range};

use js_sys::Uint8Array;
use selkie_core::{
    Error, Result,
    source::{Bytes, LocalFuture, Source, only_gguf},
};
use selkie_wgpu::Queue;
use wasm_bindgen::prelude::*;

use crate::error::error;

/// Bytes per call of `read`: small compared with the weights, large enough to hide the cost of a call.
const PIECE: u64 = 4 << 20;
/// Bytes uploaded between two signals of the GPU. Twice as many may be in flight; the browser itself would buffer any amount.
const WINDOW: u64 = 32 << 20;

#[wasm_bindgen]
extern "C" {
    /// `{ name: string, size: number, read(offset: number, length: number): Promise<Uint8Array> }`
    pub type ModelFile;

    #[wasm_bindgen(method, getter)]
    fn name(this: &ModelFile) -> String;

    #[wasm_bindgen(method, getter)]
    fn size(this: &ModelFile) -> f64;

    #[wasm_bindgen(method, catch)]
    async fn read(this: &ModelFile, offset: f64, length: f64) -> std::result::Result<JsValue, JsValue>;
}

/// What was uploaded lately.
#[derive(Default)]
struct InFlight {
    /// Bytes since the last signal.
    bytes: u64,
    /// Comes when the bytes before it have arrived.
    signal: Option<LocalFuture<'static, ()>>,
}

/// The files of a model.
pub struct Files {
    label: String,
    files: Vec<ModelFile>,
    /// The queue to which read bytes are uploaded.
    queue: RefCell<Option<Queue>>,
    in_flight: RefCell<InFlight>,
    /// The error of a failed `read`, which is returned to the caller unchanged.
    failed: RefCell<Option<JsValue>>,
    /// A requested shard that is missing.
    missing: RefCell<Option<String>>,
}

impl Files {
    /// The files under the name `label`.
    pub fn new(label: String, files: Vec<ModelFile>) -> Self {
        Self {
            label,
            files,
            queue: RefCell::default(),
            in_flight: RefCell::default(),
            failed: RefCell::default(),
            missing: RefCell::default(),
        }
    }

    /// Sets the queue to which read bytes are uploaded; reading then waits for it.
    pub fn feed(&self, queue: Queue) {
        self.queue.replace(Some(queue));
    }

    /// Converts an error of core for JavaScript; returns the underlying cause if there is one.
    pub fn error(&self, e: &Error) -> JsValue {
        if let Some(cause) = self.failed.take() {
            return cause;
        }
        match self.missing.take() {
            Some(name) if matches!(e, Error::BadModel { .. }) => {
                let why = format!("{name} is missing, although the model's index names it: the download is incomplete");
                error("missing_file", &why)
            }
            _ => crate::error::from_core(e),
        }
    }

    /// Checks that the required files are present.
    pub fn complete(&self) -> std::result::Result<(), JsValue> {
        let has = |name| self.find(name).is_some();
        let gguf = self.files.iter().any(|f| f.name().ends_with(".gguf"));
        let weights = has("model.safetensors") || has("model.safetensors.index.json") || gguf;
        for (there, what) in [
            (has("config.json"), "config.json"),
            (weights, "model.safetensors (or model.safetensors.index.json and its parts, or a GGUF file)"),
            (has("tokenizer.json"), "tokenizer.json"),
        ] {
            if !there {
                let why = format!(
                    "{}: {what} is missing. A model is a folder as published on Hugging Face, with config.json, \
                     tokenizer.json and weights",
                    self.label
                );
                return Err(error("missing_file", &why));
            }
        }
        Ok(())
    }

    fn find(&self, name: &str) -> Option<&ModelFile> {
        self.files.iter().find(|f| f.name() == name)
    }

    async fn piece(&self, file: &ModelFile, at: u64, len: u64) -> std::result::Result<Uint8Array, JsValue> {
        self.make_room(len).await;
        file.read(at as f64, len as f64).await?.dyn_into()
    }

    /// Waits until `len` more bytes may be uploaded.
    async fn make_room(&self, len: u64) {
        let Some(queue) = self.queue.borrow().clone() else { return };
        let earlier = {
            let mut now = self.in_flight.borrow_mut();
            now.bytes += len;
            if now.bytes <= WINDOW {
                return;
            }
            now.bytes = len;
            now.signal.replace(Box::pin(queue.done()))
        };
        if let Some(earlier) = earlier {
            earlier.await;
        }
    }
}

impl Source for Files {
    fn label(&self) -> String {
        self.label.clone()
    }

    fn gguf(&self) -> Result<Option<String>> {
        let names: Vec<String> = self.files.iter().map(ModelFile::name).collect();
        only_gguf(&self.label, &names)
    }

    fn size<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<Option<u64>>> {
        let size = self.find(name).map(|f| f.size() as u64);
        if size.is_none() && name.ends_with(".safetensors") && name != "model.safetensors" {
            self.missing.replace(Some(name.to_owned()));
        }
        Box::pin(std::future::ready(Ok(size)))
    }

    fn read<'a>(&'a self, name: &'a str, range: Range<u64>) -> LocalFuture<'a, Result<Bytes>> {
        Box::pin(async move {
            let io = |kind: ErrorKind| Error::io(self.path(name), kind.into());
            let file = self.find(name).ok_or_else(|| io(ErrorKind::NotFound))?;
            let len = range.end - range.start;
            let mut bytes = Vec::new();
            let room = usize::try_from(len).is_ok_and(|len| bytes.try_reserve_exact(len).is_ok());
            if !room {
                return Err(Error::OutOfMemory { what: self.path(name), asked: len, free: 0 });
            }
            for at in range.clone().step_by(PIECE as usize) {
                let want = PIECE.min(range.end - at);
                let piece = self.piece(file, at, want).await.map_err(|cause| {
                    self.failed.replace(Some(cause));
                    io(ErrorKind::Other)
                })?;
                if u64::from(piece.length()) != want {
                    let why = format!(
                        "{} bytes came instead of bytes {at}..{} of {}: the file is truncated",
                        piece.length(),
                        at + want,
                        file.size()
                    );
                    return Err(Error::model(self.path(name), why));
                }
                let start = bytes.len();
                bytes.resize(start + want as usize, 0);
                piece.copy_to(&mut bytes[start..]);
            }
            Ok(bytes.into())
        })
    }
}
