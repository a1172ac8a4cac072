//! The way in for programs: a model's files, where to run them, and the loaded model.

use std::{path::Path, sync::Arc};

use selkie_core::{
    Error, Result,
    chat::system_clock,
    engine::{EngineOptions, Speculate},
    format::Products,
    model_dir::ModelFiles,
    session::{Facts, Model, Text},
    source::Source,
    weights::Progress,
};

use crate::{
    backend::{self, Place, on},
    embedded, hub, logits,
};

/// Where a model runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// CUDA if there is a usable device, else a GPU through wgpu, else the CPU.
    #[default]
    Auto,
    /// An NVIDIA GPU, or an error.
    Cuda,
    /// Vulkan, Metal or DX12, or an error.
    Wgpu,
    /// This machine's processor.
    Cpu,
}

/// Opens a model: a directory as published on Hugging Face, a GGUF file, or a name (`owner/name[@revision][:file]`) of a model
/// that is complete in the cache of Hugging Face's tools. Nothing is fetched; `selkie pull` does that.
///
/// # Errors
/// [`Error::BadModel`] naming what is missing or wrong, [`Error::Io`] for a file that cannot be read.
pub fn open(path: impl AsRef<Path>) -> Result<Opener> {
    let path = path.as_ref();
    let absent =
        "there is no such directory, and no complete model of that name in the cache; `selkie pull` fetches one";
    let found = hub::here(path).map_err(|why| Error::BadRequest(why.message().unwrap_or_default()))?;
    let found = found.ok_or_else(|| Error::model(path.display().to_string(), absent))?;
    read(found.source()?)
}

/// The demo model, which is part of the library.
///
/// # Errors
/// None, unless the library was built with damaged files.
pub fn demo() -> Result<Opener> {
    read(Arc::new(embedded::DEMO))
}

fn read(source: Arc<dyn Source>) -> Result<Opener> {
    let files = pollster::block_on(ModelFiles::open(source, system_clock))?;
    Ok(Opener::of(Arc::new(files)))
}

/// A model that is not loaded yet: its text files and the headers of its weights were read.
pub struct Opener {
    files: Arc<ModelFiles>,
    place: Place,
    options: EngineOptions,
    progress: Box<dyn FnMut(Progress) + Send>,
}

impl Opener {
    /// The model with these files.
    pub fn of(files: Arc<ModelFiles>) -> Self {
        let options = EngineOptions { speculate: Speculate::Auto, ..EngineOptions::default() };
        Self { files, place: Place::default(), options, progress: Box::new(|_| {}) }
    }

    /// Where it is to run.
    #[must_use]
    pub fn device(mut self, device: Device) -> Self {
        self.place.device = device;
        self
    }

    /// The adapter of wgpu: its number in `selkie devices`, or a part of its name.
    #[must_use]
    pub fn adapter(mut self, name: impl Into<String>) -> Self {
        self.place.adapter = Some(name.into());
        self
    }

    /// Whether recurrent states are stored in bf16, which takes half the memory and time (CUDA only).
    #[must_use]
    pub fn bf16_state(mut self, on: bool) -> Self {
        self.place.bf16_state = on;
        self
    }

    /// KV pages in 8 bits: a quarter of the memory of f32, rounded.
    #[must_use]
    pub fn kv8(mut self, on: bool) -> Self {
        self.place.kv8 = on;
        self
    }

    /// How activations enter products with quantised weights.
    #[must_use]
    pub fn products(mut self, products: Products) -> Self {
        self.place.products = products;
        self
    }

    /// Ranks that share the model, each with a part of the weights (CPU only).
    #[must_use]
    pub fn ranks(mut self, ranks: usize) -> Self {
        self.place.ranks = ranks;
        self
    }

    /// CUDA devices, by number, that share the model, each with a part of the weights; one alone is the device to use.
    #[must_use]
    pub fn gpus(mut self, gpus: impl Into<Vec<usize>>) -> Self {
        self.place.gpus = gpus.into();
        self
    }

    pub(crate) fn place(self, place: Place) -> Self {
        Self { place, ..self }
    }

    /// Memory and scheduling.
    #[must_use]
    pub fn options(self, options: EngineOptions) -> Self {
        Self { options, ..self }
    }

    /// Calls `report` while the weights are loaded, on the engine's thread.
    #[must_use]
    pub fn progress(self, report: impl FnMut(Progress) + Send + 'static) -> Self {
        Self { progress: Box::new(report), ..self }
    }

    /// The model's files.
    pub fn files(&self) -> &Arc<ModelFiles> {
        &self.files
    }

    /// Loads it, on the thread on which its engine will run.
    ///
    /// # Errors
    /// A bad or unsupported checkpoint, too little memory, with the bytes requested and free, or no device.
    pub fn load(self) -> Result<Model> {
        let Self { files, place, options, mut progress } = self;
        let text = Text::new(&files)?;
        Model::spawn(text, move || {
            let backend = backend::open(&place)?;
            let engine = backend::load(backend, &files, &options, &mut *progress)?;
            let facts = pollster::block_on(Facts::new(&files, &*engine))?;
            Ok((facts, engine))
        })
    }

    /// Loads the model and computes the logits of every token of a prompt, `[T, V]`, to compare with other engines. Nothing
    /// else of it is kept.
    ///
    /// # Errors
    /// Those of [`Opener::load`]; [`Error::BadRequest`] for ids that are out of range or too many, [`Error::NotFinite`].
    pub fn logits(self, ids: &[u32]) -> Result<Vec<f32>> {
        let Self { files, place, progress, .. } = self;
        let backend = backend::open(&place)?;
        let trace = on!(&backend, b => pollster::block_on(logits::trace(b, &files, ids, 0, progress)))?;
        Ok(trace.logits)
    }
}
