//! Bundles: the state of a prefix as a file that other processes, machines and backends can read.
//!
//! A bundle is a safetensors file with token ids, the ends of messages, KV pages and, at named positions, recurrent states;
//! `docs/bundle.md` has the format. It holds no names of tree nodes: readers compute them from the tokens. Every byte is covered
//! by a checksum (BLAKE3), which finds damage; it does not prove who wrote the file.
//!
//! * [`Head`]: everything but the values: the model, its numerics, tokens and the list of [`Part`]s.
//! * [`Writer`] writes in one pass with memory for one piece; [`Reader`] checks everything before it hands out values, row by row.
//!
//! A reader allocates no more than the file has bytes, and a few rows of a part at a time. No engine appears here.

mod header;
mod part;
mod read;
mod threads;
mod write;

use crate::{
    backend::Caps,
    digest::Digest,
    error::{Error, Result},
    state::GRID,
    tensor::DType,
};

pub use part::{Dtypes, Kind, Part, Places, convert, parts};
pub use read::{Input, Reader};
pub use write::Writer;

/// Version of the format. Kinds of state have names, so a new kind is no new version.
pub const VERSION: u32 = 1;

/// Revision of the numbers that a backend computes. A change of any op that can change a bit of a state raises it.
pub const NUMERICS: u32 = 4;

/// Bytes that are read from a device, hashed and written at a time: enough to occupy several threads with a checksum. A page has
/// one thread and less memory.
pub(crate) const PIECE: usize = if cfg!(target_arch = "wasm32") { 1 << 20 } else { 4 << 20 };

/// Most bytes of the description of where values came from.
const MOST_NUMERICS: usize = 4096;

/// Between the entries of a lineage.
const THEN: &str = " > ";

/// What states depend on besides tokens and numerics: digests of the model's files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// All bytes of all weights, with their names and shapes.
    pub weights: Digest,
    /// The configuration.
    pub config: Digest,
    /// The tokenizer; that of nothing if there is none.
    pub tokenizer: Digest,
}

/// What a bundle says about its values.
#[derive(Clone, Debug, PartialEq)]
pub struct Head {
    /// Name of the model, for people.
    pub name: String,
    /// The model that computed the values.
    pub model: Identity,
    /// Where they were computed, see [`numerics`] and [`lineage`].
    pub numerics: String,
    /// Token ids from the start of the text, at least as many as the values cover.
    pub tokens: Vec<u32>,
    /// Positions in tokens where messages end, ascending.
    pub ends: Vec<u32>,
    /// The conversation that the tokens are, as a JSON array of messages, if they are one.
    pub messages: Option<String>,
    /// Tokens whose pages are left out, a multiple of [`GRID`], because the reader has them. 0 in every bundle that is kept.
    pub from: usize,
    /// The values in the order of the file.
    pub parts: Vec<Part>,
}

impl Head {
    /// Whole pages of [`GRID`] tokens that the parts hold; 0 without attention.
    pub fn pages(&self) -> usize {
        self.parts.iter().filter(|p| p.kind.is_paged()).map(|p| p.shape[0]).max().unwrap_or(0)
    }

    /// Positions of the states, ascending.
    pub fn positions(&self) -> Vec<usize> {
        let mut all: Vec<usize> =
            self.parts.iter().filter(|p| !p.kind.is_paged()).map(|p| p.position as usize).collect();
        all.dedup();
        all
    }

    /// Tokens from which a request can be continued without computing them.
    pub fn depth(&self) -> usize {
        self.positions().last().copied().unwrap_or(self.from.saturating_add(self.pages() * GRID))
    }

    /// Bytes of all values.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|p| p.bytes().unwrap_or(0)).sum()
    }

    /// What every bundle must satisfy, whatever its model. The error says what is wrong.
    fn check(&self) -> Result<(), String> {
        if self.numerics.is_empty() || self.numerics.len() > MOST_NUMERICS {
            return Err(format!("`numerics` has {} bytes, 1 to {MOST_NUMERICS} are possible", self.numerics.len()));
        }
        let tokens = self.tokens.len();
        if !self.ends.is_sorted() || self.ends.last().is_some_and(|end| *end as usize > tokens) {
            return Err(format!("`ends` must be ascending and at most {tokens}, the number of tokens"));
        }
        self.parts.iter().try_for_each(Part::check)?;
        let pages = self.pages();
        for part in &self.parts {
            let position = part.position as usize;
            if part.kind.is_paged() && part.shape[0] != pages {
                return Err(format!("tensor `{}` has {} pages, another one {pages}", part.name(), part.shape[0]));
            }
            if !part.kind.is_paged() && (position == 0 || !position.is_multiple_of(GRID) || position > tokens) {
                return Err(format!(
                    "tensor `{}`: a state's position is a multiple of {GRID} and at most {tokens}, the number of tokens",
                    part.name()
                ));
            }
        }
        // From here on positions are known to be ascending, because the order of parts is one.
        if !self.parts.is_sorted_by(|a, b| a.order() < b.order()) {
            return Err("the tensors of the state are not in the order of the format, or one occurs twice".into());
        }
        let depth = self.depth();
        if self.parts.is_empty() || depth == 0 {
            return Err(format!("it holds no state; a bundle covers at least {GRID} tokens"));
        }
        if depth > tokens || pages != 0 && self.from.checked_add(pages * GRID) != Some(depth) {
            return Err(format!("{pages} pages and states up to {depth} do not belong to {tokens} tokens"));
        }
        if !self.from.is_multiple_of(GRID) || self.from != 0 && pages == 0 {
            return Err(format!("`from` is {}; pages can be left out up to a multiple of {GRID}", self.from));
        }
        Ok(())
    }

    /// Bytes of its whole bundle.
    pub fn file_bytes(&self) -> u64 {
        let messages = self.messages.as_ref().map(|text| messages_bytes(text));
        let small = 4 * (self.tokens.len() + self.ends.len()) + messages.unwrap_or(0);
        let sums = 32 * (1 + header::summed(messages.is_some(), self.parts.len()));
        (header::write(self, messages).len() + small + sums) as u64 + self.bytes()
    }

    /// Refuses a bundle of another model.
    ///
    /// # Errors
    /// [`Error::BadModel`] naming what differs.
    pub fn check_model(&self, file: &str, model: &Identity) -> Result<()> {
        let all = [
            ("weights", self.model.weights, model.weights),
            ("config", self.model.config, model.config),
            ("tokenizer", self.model.tokenizer, model.tokenizer),
        ];
        for (what, theirs, ours) in all {
            if theirs != ours {
                let why = format!(
                    "this bundle is of another model (`{}`): its {what} digest begins with {}, this model's with {}",
                    self.name,
                    &theirs.to_string()[..16],
                    &ours.to_string()[..16]
                );
                return Err(Error::model(file, why));
            }
        }
        Ok(())
    }

    /// Refuses parts that are not exactly those that a model with `layers` has for these pages and positions; dtypes may differ.
    ///
    /// # Errors
    /// [`Error::BadModel`] naming the tensor.
    pub fn check_parts(&self, file: &str, layers: &[crate::layer::LayerState]) -> Result<()> {
        let positions = self.positions();
        let pages = (self.depth() - self.from) / GRID;
        // Shapes of pages depend on their dtype.
        let kv = self.parts.iter().find(|part| part.kind.is_paged()).map_or(DType::F32, |part| part.dtype);
        let want = parts(layers, Dtypes { kv, ..Dtypes::default() }, pages, &positions);
        let hint = if self.layers() == layers_of(&want) {
            ""
        } else {
            "; states with the model's head for drafts need `--speculate auto`, those without it `--speculate off`"
        };
        for (i, want) in want.iter().enumerate() {
            let found = self.parts.get(i).filter(|p| p.order() == want.order());
            let Some(found) = found else {
                return Err(Error::model(file, format!("tensor `{}` of this model is missing{hint}", want.name())));
            };
            if found.shape != want.shape {
                let why =
                    format!("tensor `{}` has shape {:?}, this model's has {:?}", found.name(), found.shape, want.shape);
                return Err(Error::model(file, why));
            }
        }
        match self.parts.get(want.len()) {
            Some(more) => Err(Error::model(file, format!("this model has no tensor `{}`{hint}", more.name()))),
            None => Ok(()),
        }
    }

    /// The layers that it has values of, up to the last one. A head for drafts is the last layer of a model that is loaded with it.
    pub fn layers(&self) -> usize {
        layers_of(&self.parts)
    }
}

/// Bytes of messages with the white space after them, so that all values lie at multiples of 4 bytes.
fn messages_bytes(text: &str) -> usize {
    text.len().next_multiple_of(4)
}

fn layers_of(parts: &[Part]) -> usize {
    parts.iter().map(|part| part.layer as usize + 1).max().unwrap_or(0)
}

/// Names what decides the bits of a state besides model and tokens: backend, dtypes, the device of a GPU, [`NUMERICS`]. Of a GPU
/// the name counts: kernels are chosen by its number of units too. Bits of the CPU backend do not depend on the CPU, but the
/// sines of rotary positions are those of the system's library.
pub fn numerics(caps: &Caps) -> String {
    let Caps { backend, device, act, products, int8, rounds, kv, conv, state, ranks, .. } = caps;
    let int8 = int8.word();
    let dtypes = format!(
        "act={act:?} products={products:?} int8={int8} rounds={rounds} kv={kv:?} conv={conv:?} state={state:?}"
    );
    let place = match *backend {
        "cpu" => format!("target={}-{}{}", std::env::consts::ARCH, std::env::consts::OS, LIBRARY),
        _ => format!("device={device}"),
    };
    // Sums over ranks have another order.
    let ranks = if *ranks > 1 { format!(" ranks={ranks}") } else { String::new() };
    format!("{backend} {dtypes} revision={NUMERICS} {place}{ranks}")
}

/// The C library, where a system has several.
const LIBRARY: &str = if cfg!(target_env = "musl") {
    "-musl"
} else if cfg!(target_env = "gnu") {
    "-gnu"
} else {
    ""
};

/// The numerics of values that were computed with `own` from others of `origin`, which is empty for values computed from the
/// start. An entry that `origin` has is not added again.
pub fn lineage(origin: &str, own: &str) -> String {
    match origin {
        "" => own.to_owned(),
        _ if origin.contains(THEN) && origin.split(THEN).any(|entry| entry == own) => origin.to_owned(),
        _ => format!("{origin}{THEN}{own}"),
    }
}
