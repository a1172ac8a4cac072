//! `selkie inspect`: a model's layers and sizes, and the memory per sequence.

use selkie_core::{
    cpu::CpuBackend,
    engine::{EngineOptions, Sizes},
    model_dir::ModelFiles,
    models::{self, Architecture, Limits, ModelSpec, Program},
    state::StateShape,
    step::PAGE,
    weights::Loader,
};
use serde_json::{Value, json};

use crate::{
    args::{InspectArgs, ModelArgs},
    backend::{self, Opened},
    failure::{Failure, Outcome},
    hub::preview::{self, Preview},
    model,
    terminal::{Output, size, thousands},
};

use self::fit::Fit;

mod fit;

/// The letters of the layer map.
const LETTERS: [(char, &str); 9] = [
    ('M', "Mamba-2"),
    ('S', "Mamba-1"),
    ('G', "Gated DeltaNet"),
    ('K', "Kimi Delta Attention"),
    ('C', "short convolution"),
    ('*', "attention"),
    ('-', "MLP"),
    ('L', "linear layer"),
    ('E', "mixture of experts"),
];

/// Prints the facts; only small weights are read.
pub fn run(args: &InspectArgs) -> Outcome {
    let named = ModelArgs { model: args.what.clone().or_else(|| args.model.model.clone()), ..args.model.clone() };
    let options = model::engine_options(&args.pool, model::DEFAULT_MAX_BATCH);
    let preview = match &named.model {
        Some(given) => preview::look(given)?,
        None => None,
    };
    let job = match preview {
        Some(preview) => Inspect::of_preview(&preview, options)?,
        None => Inspect::of_files(&*model::open(&named)?, options)?,
    };
    if args.model.backend.divided() {
        return Err(Failure::Usage("inspect shows a whole model: leave --ranks and --gpus out".into()));
    }
    let facts = job.on(&backend::open(&args.model.backend.place()?)?)?;
    let mut out = Output::new();
    if args.json { out.json(&facts.json()) } else { out.text(&facts.text()) }
}

/// Loads the model where the weights lie, which copies no matrix.
///
/// # Errors
/// Why the weights are not those of the configuration.
async fn contradiction(files: &ModelFiles, architecture: &Architecture) -> selkie_core::Result<()> {
    let (backend, mut report) = (CpuBackend::new(), |_| {});
    let mut loader = Loader::new(&backend, &files.checkpoint, &mut report);
    models::build(architecture, &mut loader, Limits { max_tokens: 1, max_outputs: 1 }).await?;
    model::warn_of_ignored(files);
    Ok(())
}

struct Inspect {
    model: String,
    /// Those of the model, without its head.
    layers: usize,
    spec: ModelSpec,
    /// Weights of the head for drafts, where one is stored.
    head: Option<u64>,
    program: Vec<Program>,
    weight_bytes: u64,
    /// Types of stored weights, their bytes, and whether they are brought into another form.
    stored: Vec<(String, u64, bool)>,
    /// Their recipe rounds activations to 8 bits.
    rounds: bool,
    options: EngineOptions,
    fault: Option<String>,
    /// The formats of weights that are not here, and their bytes; first the one of `weight_bytes`.
    absent: Vec<(String, u64)>,
}

impl Inspect {
    fn of_files(files: &ModelFiles, options: EngineOptions) -> Outcome<Self> {
        let architecture = models::read(&files.config)?;
        let head = architecture.head_parameters(&files.checkpoint);
        let architecture = options.speculate.architecture(&architecture, &files.checkpoint)?;
        let fault = pollster::block_on(contradiction(files, &architecture)).err().map(|e| e.to_string());
        let bytes = files.checkpoint.bytes();
        let formats = files.checkpoint.formats().into_iter();
        let stored = formats.map(|(name, (bytes, repacked))| (name.to_owned(), bytes, repacked)).collect();
        let rounds = files.checkpoint.rounds_activations();
        Ok(Self { fault, stored, rounds, head, ..Self::new(files.label(), &architecture, bytes, options) })
    }

    /// Of a model without weights; their size is the one on the hub, or else follows from the configuration.
    fn of_preview(preview: &Preview, options: EngineOptions) -> Outcome<Self> {
        let architecture = models::read(&preview.config)?;
        let format = fit::published(&preview.config);
        let parameters = architecture.spec().parameters;
        let bytes = preview.weight_bytes.unwrap_or_else(|| fit::bytes(parameters, format));
        let absent = [(format.to_owned(), bytes)].into_iter().chain(preview.others.iter().cloned()).collect();
        Ok(Self { absent, ..Self::new(&preview.label, &architecture, bytes, options) })
    }

    fn new(label: &str, architecture: &Architecture, weight_bytes: u64, options: EngineOptions) -> Self {
        let (spec, program) = (architecture.spec(), architecture.program());
        let (layers, stored, absent) = (architecture.layers.len(), Vec::new(), Vec::new());
        Self {
            model: label.into(),
            layers,
            spec,
            head: None,
            program,
            weight_bytes,
            stored,
            rounds: false,
            options,
            fault: None,
            absent,
        }
    }
}

struct Facts {
    model: String,
    layers: usize,
    spec: ModelSpec,
    head: Option<u64>,
    program: Vec<Program>,
    weight_bytes: u64,
    stored: Vec<(String, u64, bool)>,
    rounds: bool,
    sizes: Sizes,
    backend: &'static str,
    device: String,
    /// Why the model cannot be loaded.
    fault: Option<String>,
    /// Whether weights that are not here would fit.
    fit: Option<Fit>,
}

impl Inspect {
    fn on(self, backend: &Opened) -> Outcome<Facts> {
        let (caps, free) = (backend.caps(), backend.free_memory());
        let mut formats = self.absent;
        if formats.len() == 1 {
            formats.extend(fit::coded(self.spec.parameters));
        }
        let fit = Fit::new(&self.spec, &formats, &self.options, caps, free);
        // States get the memory that the weights leave.
        let left =
            if fit.as_ref().is_some_and(Fit::fits) { free.map(|f| f.saturating_sub(self.weight_bytes)) } else { free };
        Ok(Facts {
            sizes: self.options.sizes(&self.spec, caps, left)?,
            backend: caps.backend,
            device: caps.device.clone(),
            model: self.model,
            layers: self.layers,
            weight_bytes: self.weight_bytes,
            stored: self.stored,
            rounds: self.rounds,
            spec: self.spec,
            head: self.head,
            fault: self.fault,
            program: self.program,
            fit,
        })
    }
}

impl Facts {
    /// The types of stored weights, and where a host uses them.
    fn stored_as(&self) -> String {
        let of = |(name, bytes, repacked): &(String, u64, bool)| {
            let place = match (self.backend, repacked) {
                ("cpu", false) => ", mapped",
                (_, false) => "",
                (_, true) => ", repacked with its scales",
            };
            format!("{name} ({}{place})", size(*bytes))
        };
        let rounds = if self.rounds { "; activations rounded to 8 bits, unless --products exact" } else { "" };
        self.stored.iter().map(of).collect::<Vec<_>>().join(", ") + rounds
    }

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
            format!("weights      {}{}", size(self.weight_bytes), if self.fit.is_some() { ", not here" } else { "" }),
        ];
        if let Some(head) = self.head {
            lines.push(format!("MTP head     {} more parameters, for guesses (--speculate)", thousands(head as f64)));
        }
        if !self.stored.is_empty() {
            lines.push(format!("stored as    {}", self.stored_as()));
        }
        lines.extend(self.fit.iter().map(|fit| format!("fits here    {}", fit.verdict(self.backend))));
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
        lines.extend(self.fit.iter().flat_map(Fit::table));
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
            "layers": self.layers,
            "program": program.collect::<Vec<_>>(),
            "width": spec.width,
            "vocab": spec.vocab,
            "context": shape.context,
            "parameters": spec.parameters,
            "head_parameters": self.head,
            "weight_bytes": self.weight_bytes,
            "weights_here": self.fit.is_none(),
            "rounds_activations": self.fit.is_none().then_some(self.rounds),
            "stored": self.stored.iter().map(|(name, bytes, repacked)| {
                json!({ "type": name, "bytes": bytes, "repacked": repacked })
            }).collect::<Vec<_>>(),
            "fit": self.fit.as_ref().map(Fit::json),
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
