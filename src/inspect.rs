//! `selkie inspect`: a model's layers and sizes, and the memory per sequence.

use selkie_core::{
    backend::Backend,
    cpu::CpuBackend,
    engine::{EngineOptions, Sizes},
    model_dir::ModelFiles,
    models::{self, Limits, ModelSpec, Program},
    state::StateShape,
    step::PAGE,
    weights::Loader,
};
use serde_json::{Value, json};

use crate::{
    args::InspectArgs,
    backend::{self, Job},
    failure::Outcome,
    model,
    terminal::{Output, size, thousands},
};

/// The letters of the layer map.
const LETTERS: [(char, &str); 7] = [
    ('M', "Mamba-2"),
    ('S', "Mamba-1"),
    ('G', "Gated DeltaNet"),
    ('C', "short convolution"),
    ('*', "attention"),
    ('-', "MLP"),
    ('E', "mixture of experts"),
];

/// Prints the facts; of the weights, only what is small is read.
pub fn run(args: &InspectArgs) -> Outcome {
    let files = model::open(&args.model)?;
    let architecture = models::read(&files.config)?;
    let (spec, program) = (architecture.spec(), architecture.program());
    let fault = pollster::block_on(contradiction(&files)).err().map(|e| e.to_string());
    let options = model::engine_options(&args.pool, model::DEFAULT_MAX_BATCH);
    let facts = backend::run(&args.model.backend, Inspect { files: &files, spec, program, options, fault })?;
    let mut out = Output::new();
    if args.json { out.json(&facts.json()) } else { out.text(&facts.text()) }
}

/// Loads the model where the weights lie, which copies no matrix.
///
/// # Errors
/// Why the weights are not those of the configuration.
async fn contradiction(files: &ModelFiles) -> selkie_core::Result<()> {
    let architecture = models::read(&files.config)?;
    let (backend, mut report) = (CpuBackend::new(), |_| {});
    let mut loader = Loader::new(&backend, &files.checkpoint, &mut report);
    models::build(&architecture, &mut loader, Limits { max_tokens: 1, max_outputs: 1 }).await?;
    model::warn_of_ignored(&files.checkpoint);
    Ok(())
}

struct Inspect<'a> {
    files: &'a ModelFiles,
    spec: ModelSpec,
    program: Vec<Program>,
    options: EngineOptions,
    fault: Option<String>,
}

struct Facts {
    model: String,
    spec: ModelSpec,
    program: Vec<Program>,
    weight_bytes: u64,
    sizes: Sizes,
    backend: &'static str,
    device: String,
    /// Why the model cannot be loaded.
    fault: Option<String>,
}

impl Job for Inspect<'_> {
    type Out = Facts;

    fn run<B: Backend>(self, backend: B) -> Outcome<Facts> {
        let caps = backend.caps();
        Ok(Facts {
            model: self.files.label().to_owned(),
            weight_bytes: self.files.checkpoint.bytes(),
            sizes: self.options.sizes(&self.spec, caps, backend.free_memory())?,
            backend: caps.backend,
            device: caps.device.clone(),
            spec: self.spec,
            fault: self.fault,
            program: self.program,
        })
    }
}

impl Facts {
    fn shape(&self) -> &StateShape {
        &self.sizes.shape
    }

    /// The lengths for which the table has rows: each four times the previous one, and the whole context.
    fn lengths(&self) -> Vec<usize> {
        let context = self.shape().context;
        let mut lengths: Vec<usize> =
            std::iter::successors(Some(1024), |n: &usize| n.checked_mul(4)).take_while(|n| *n < context).collect();
        lengths.push(context);
        lengths
    }

    /// Bytes of state of one sequence of `tokens` tokens.
    fn sequence_bytes(&self, tokens: usize) -> u64 {
        self.shape().slot_bytes + tokens.div_ceil(PAGE) as u64 * self.shape().page_bytes
    }

    /// The number of sequences of that length that the pools hold at a time.
    fn sequences(&self, tokens: usize) -> usize {
        self.sizes.split.sequences(self.shape(), tokens)
    }

    fn text(&self) -> String {
        let (spec, shape, split) = (&self.spec, self.shape(), &self.sizes.split);
        let legend = LETTERS.iter().filter(|(letter, _)| spec.layer_map.contains(*letter));
        let legend: Vec<String> = legend.map(|(letter, name)| format!("{letter} {name}")).collect();
        let mut lines = vec![
            format!("model        {}", self.model),
            format!("family       {}", spec.family),
            format!("layers       {}   ({})", spec.layer_map, legend.join(", ")),
            format!("width        {}", spec.width),
            format!("vocabulary   {}", thousands(spec.vocab as f64)),
            format!("context      {} tokens", thousands(shape.context as f64)),
            format!("parameters   {}", thousands(spec.parameters as f64)),
            format!("weights      {}", size(self.weight_bytes)),
        ];
        lines.extend(self.fault.iter().map(|why| format!("fault        the weights do not fit: {why}")));
        lines.push(match shape.slot_bytes {
            0 => "state slot   none: no recurrent layer".into(),
            bytes => format!("state slot   {} for a sequence of any length", size(bytes)),
        });
        lines.push(match shape.page_bytes {
            0 => "KV page      none: no attention layer".into(),
            bytes => format!("KV page      {} for every {PAGE} tokens", size(bytes)),
        });
        lines.push(format!(
            "pools        {} on {} ({}): {} slots, {} KV pages",
            size(split.bytes(shape)),
            self.backend,
            self.device,
            thousands(split.slots as f64),
            thousands(split.pages as f64)
        ));
        for kind in &self.program {
            lines.extend([String::new(), format!("layers {}", kind.layers)]);
            let width = kind.steps.iter().map(|(formula, _)| formula.len()).max().unwrap_or(0);
            lines.extend(kind.steps.iter().map(|(formula, sizes)| format!("  {formula:<width$}   {sizes}")));
        }
        lines.push(String::new());
        lines.push("tokens of a sequence       its state   fit into the pools".into());
        for tokens in self.lengths() {
            lines.push(format!(
                "{:>20}  {:>14}  {:>19}",
                thousands(tokens as f64),
                size(self.sequence_bytes(tokens)),
                thousands(self.sequences(tokens) as f64)
            ));
        }
        lines.join("\n") + "\n"
    }

    fn json(&self) -> Value {
        let (spec, shape, split) = (&self.spec, self.shape(), &self.sizes.split);
        let lengths = self.lengths().into_iter().map(|tokens| {
            json!({ "tokens": tokens, "state_bytes": self.sequence_bytes(tokens), "fit": self.sequences(tokens) })
        });
        let program = self.program.iter().map(|kind| {
            let steps = kind.steps.iter().map(|(formula, sizes)| json!({ "step": formula, "sizes": sizes }));
            json!({ "layers": kind.layers, "steps": steps.collect::<Vec<_>>() })
        });
        json!({
            "model": self.model,
            "family": spec.family,
            "layer_map": spec.layer_map,
            "layers": spec.layers.len(),
            "program": program.collect::<Vec<_>>(),
            "width": spec.width,
            "vocab": spec.vocab,
            "context": shape.context,
            "parameters": spec.parameters,
            "weight_bytes": self.weight_bytes,
            "fault": self.fault,
            "slot_bytes": shape.slot_bytes,
            "page_bytes": shape.page_bytes,
            "page_tokens": PAGE,
            "backend": self.backend,
            "device": self.device,
            "pools": {
                "budget_bytes": self.sizes.budget,
                "bytes": split.bytes(shape),
                "slots": split.slots,
                "kv_pages": split.pages,
            },
            "sequences": lengths.collect::<Vec<_>>(),
        })
    }
}
