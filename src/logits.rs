//! `selkie logits`: writes logits and states of a prompt, for comparison with other engines.

use std::{collections::HashMap, io::Write};

use safetensors::{Dtype, tensor::TensorView};
use selkie_core::{
    Error,
    backend::Backend,
    engine::direct::{Direct, Sequence},
    layer::LayerState,
    model_dir::ModelFiles,
    models::{self, Limits},
    step::PAGE,
    tokenizer::check_ids,
    weights::Loader,
};

use crate::{
    args::LogitsArgs,
    backend::{self, Job},
    failure::{self, Failure, Outcome},
    input_file,
    model::{self, LoadingBar},
    output_file::{self, OutputFile},
};

/// Maximum size of the ids file, in bytes.
const MAX_IDS_BYTES: u64 = 1 << 28;

/// Writes logits, greedy tokens and states to the output file.
pub fn run(args: &LogitsArgs) -> Outcome {
    if output_file::collide(&args.ids, &args.out) {
        let why = "both --ids and --out; give each a file of its own";
        return Err(Failure::Usage(format!("{}: this is {why}", args.out.display())));
    }
    let ids = read_ids(args)?;
    let files = model::open(&args.model)?;
    let out = OutputFile::create(&args.out)?;
    backend::run(&args.model.backend, Logits { args, files: &files, ids, out })
}

fn read_ids(args: &LogitsArgs) -> Outcome<Vec<u32>> {
    let bytes = input_file::load(&args.ids, MAX_IDS_BYTES)?;
    serde_json::from_slice(&bytes).map_err(|e| {
        let why = format!("not a JSON array of token ids: {}", failure::json_error(&e));
        Error::model(args.ids.display().to_string(), why).into()
    })
}

struct Logits<'a> {
    args: &'a LogitsArgs,
    files: &'a ModelFiles,
    ids: Vec<u32>,
    out: OutputFile,
}

/// A tensor of the output: name, dims, little-endian bytes of f32 or i32.
struct Stored {
    name: String,
    dtype: Dtype,
    dims: Vec<usize>,
    bytes: Vec<u8>,
}

impl Stored {
    fn floats(name: impl Into<String>, dims: &[usize], values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        Self { name: name.into(), dtype: Dtype::F32, dims: dims.to_vec(), bytes }
    }
}

impl Job for Logits<'_> {
    type Out = ();

    fn run<B: Backend>(mut self, backend: B) -> Outcome {
        let tensors = pollster::block_on(self.compute(&backend))?;
        let caps = backend.caps();
        let metadata = HashMap::from([
            ("backend".to_owned(), caps.backend.to_owned()),
            ("device".to_owned(), caps.device.clone()),
            ("version".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        ]);
        let views = tensors.iter().map(|t| {
            let view = TensorView::new(t.dtype, t.dims.clone(), &t.bytes).expect("a tensor has the bytes of its dims");
            (t.name.as_str(), view)
        });
        let bytes = safetensors::serialize(views, Some(metadata)).map_err(|e| Failure::Other(e.to_string()))?;
        self.out.write_all(&bytes).map_err(|e| self.out.error(e))?;
        Ok(self.out.commit()?)
    }
}

impl Logits<'_> {
    async fn compute<B: Backend>(&self, backend: &B) -> Result<Vec<Stored>, Error> {
        let architecture = models::read(&self.files.config)?;
        let spec = architecture.spec();
        check_ids(&self.ids, spec.vocab)?;
        let (tokens, steps) = (self.ids.len(), self.args.steps);
        let total = tokens.saturating_add(steps);
        if total > spec.context {
            return Err(Error::BadRequest(format!(
                "{tokens} prompt tokens and {steps} steps are {total} tokens, the context holds {}",
                spec.context
            )));
        }
        let limits = Limits { max_tokens: PAGE, max_outputs: PAGE };
        let mut bar = LoadingBar::start();
        let mut report = |p| bar.update(&p);
        let mut loader = Loader::new(backend, &self.files.checkpoint, &mut report);
        let model = models::build(&architecture, &mut loader, limits).await?;
        drop(bar);
        model::warn_of_ignored(&self.files.checkpoint);
        // Two slots: a step of several chunks reads one and writes the other.
        let mut direct = Direct::new(backend, &*model, limits, 2, total.div_ceil(PAGE))?;
        let mut sequence = Sequence::default();
        let logits = direct.prompt(&mut sequence, &self.ids, &[]).await?;
        if !logits.iter().all(|x| x.is_finite()) {
            return Err(Error::NotFinite);
        }
        let states = direct.states(&sequence).await?;
        let last = &logits[(tokens - 1) * spec.vocab..];
        let (greedy_ids, greedy_logits) = direct.greedy(&mut sequence, last, steps).await?;
        if !greedy_logits.iter().all(|x| x.is_finite()) {
            return Err(Error::NotFinite);
        }

        let mut stored = vec![
            Stored::floats("logits", &[tokens, spec.vocab], &logits),
            Stored {
                name: "greedy_ids".into(),
                dtype: Dtype::I32,
                dims: vec![steps],
                bytes: greedy_ids.iter().flat_map(|id| id.to_le_bytes()).collect(),
            },
            Stored::floats("greedy_logits", &[steps, spec.vocab], &greedy_logits),
        ];
        for (i, (values, LayerState { conv, recurrent, .. })) in states.iter().zip(&spec.layers).enumerate() {
            if let (Some(values), Some([channels, taps])) = (&values.conv, conv) {
                stored.push(Stored::floats(format!("state.layer{i}.conv"), &[1, *channels, *taps], values));
            }
            if let (Some(values), Some([h, p, n])) = (&values.recurrent, recurrent) {
                stored.push(Stored::floats(format!("state.layer{i}.recurrent"), &[1, *h, *p, *n], values));
            }
        }
        Ok(stored)
    }
}
