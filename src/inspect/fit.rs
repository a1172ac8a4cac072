//! Whether a model that is not here would fit, in which format, and with how many sequences.

use selkie_core::{backend::Caps, config::Config, engine::EngineOptions, format::Format, models::ModelSpec};
use serde_json::{Value, json};

use crate::terminal::{size, thousands};

/// The sequences of the answer "how many": of this many tokens each, or of the whole context if that is shorter.
const TOKENS: usize = 4096;

/// The answer for each format.
pub struct Fit {
    /// Memory that is free; `None` if the device does not tell.
    free: Option<u64>,
    tokens: usize,
    rows: Vec<Row>,
}

struct Row {
    /// Of elements, or the name of a GGUF file.
    format: String,
    weight_bytes: u64,
    /// Sequences that fit beside the weights; 0 if the weights do not fit.
    sequences: usize,
}

/// The format that a configuration names: that of the weights unless they name another one.
pub fn published(config: &Config) -> &'static str {
    let named = ["dtype", "torch_dtype"].into_iter().find_map(|key| config.value(key)?.as_str());
    match named {
        Some("float32") => "F32",
        Some("float16") => "F16",
        _ => "BF16",
    }
}

/// Bytes of `parameters` weights.
pub fn bytes(parameters: u64, format: &str) -> u64 {
    parameters.saturating_mul(if format == "F32" { 4 } else { 2 })
}

/// The common formats of GGUF files, and what so many weights would take in them.
pub fn coded(parameters: u64) -> Vec<(String, u64)> {
    let size = |format: Format| {
        let (elements, bytes) = format.block()?;
        Some((format!("{} (as GGUF)", format.name()), (parameters as f64 / elements as f64 * bytes as f64) as u64))
    };
    [Format::Q8_0, Format::Q4K].into_iter().filter_map(size).collect()
}

impl Fit {
    /// The answer for each of `formats` with its bytes; `None` if there is none to ask for.
    pub fn new(
        spec: &ModelSpec,
        formats: &[(String, u64)],
        options: &EngineOptions,
        caps: &Caps,
        free: Option<u64>,
    ) -> Option<Self> {
        let tokens = TOKENS.min(options.context.unwrap_or(spec.context)).min(spec.context);
        let row = |(format, weight_bytes): &(String, u64)| {
            let left = free.map(|free| free.saturating_sub(*weight_bytes));
            let sizes = options.sizes(spec, caps, left).ok().filter(|_| left != Some(0));
            let sequences = sizes.map_or(0, |s| s.split.sequences(&s.shape, tokens));
            Row { format: format.clone(), weight_bytes: *weight_bytes, sequences }
        };
        let rows: Vec<Row> = formats.iter().map(row).collect();
        (!rows.is_empty()).then_some(Self { free, tokens, rows })
    }

    /// Whether the weights as published and a sequence fit.
    pub fn fits(&self) -> bool {
        self.rows[0].sequences > 0
    }

    /// One line.
    pub fn verdict(&self, backend: &str) -> String {
        let free = match self.free {
            Some(free) => format!("{} are free on {backend}", size(free)),
            None => format!("{backend} does not tell how much is free"),
        };
        format!("{}: {free}", if self.fits() { "yes" } else { "no" })
    }

    /// Lines with an answer per format.
    pub fn table(&self) -> Vec<String> {
        let many = format!("sequences of {} tokens", thousands(self.tokens as f64));
        let (first, right) =
            (self.rows.iter().map(|row| row.format.chars().count()).max().unwrap_or(0).max(21), many.len());
        let head = format!("{:<first$}  {:>10}  {many}", "format of the weights", "memory");
        let line = |row: &Row| {
            let fit = if row.sequences > 0 { thousands(row.sequences as f64) } else { "does not fit".into() };
            format!("{:<first$}  {:>10}  {fit:>right$}", row.format, size(row.weight_bytes))
        };
        [String::new(), head].into_iter().chain(self.rows.iter().map(line)).collect()
    }

    /// The same for programs.
    pub fn json(&self) -> Value {
        let rows = self.rows.iter().map(|row| {
            json!({
                "format": row.format,
                "weight_bytes": row.weight_bytes,
                "fits": row.sequences > 0,
                "sequences": row.sequences,
            })
        });
        json!({
            "fits": self.fits(),
            "free_bytes": self.free,
            "sequence_tokens": self.tokens,
            "formats": rows.collect::<Vec<_>>(),
        })
    }
}
