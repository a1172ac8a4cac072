//! `selkie logits`: writes logits and states of a prompt, for comparison with other engines.

use std::{collections::HashMap, io::Write};

use safetensors::{Dtype, tensor::TensorView};
use selkie_core::{
    Error,
    backend::Backend,
    engine::direct::{Direct, LayerValues, Sequence},
    layer::LayerState,
    model_dir::ModelFiles,
    models::{self, Limits, ModelSpec},
    step::PAGE,
    tokenizer::check_ids,
    units::{size, thousands},
    weights::{Loader, Progress},
};

use crate::{
    args::LogitsArgs,
    backend::on,
    failure::{self, Failure, Outcome},
    input_file,
    model::{self, LoadingBar},
    output_file::{self, OutputFile},
    terminal,
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
    let mut out = OutputFile::create(&args.out)?;
    let backend = model::backend(&args.model.backend)?;
    let mut bar = LoadingBar::start();
    let report = move |p| bar.update(&p);
    let traced = on!(&backend, b => pollster::block_on(trace(b, &files, &ids, args.steps, report)))?;
    model::warn_of_ignored(&files);
    let tensors = traced.tensors(&models::read(&files.config)?.spec());
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
    out.write_all(&bytes).map_err(|e| out.error(e))?;
    out.commit()?;
    terminal::dim_note(format_args!(
        "{}: logits of {} tokens, {} greedy steps, {} states · {} · {} ({})",
        args.out.display(),
        thousands(ids.len()),
        thousands(args.steps),
        tensors.iter().filter(|t| t.name.starts_with("state.")).count(),
        size(bytes.len() as u64),
        caps.backend,
        caps.device,
    ));
    Ok(())
}

fn read_ids(args: &LogitsArgs) -> Outcome<Vec<u32>> {
    let bytes = input_file::load(&args.ids, MAX_IDS_BYTES)?;
    serde_json::from_slice(&bytes).map_err(|e| {
        let why = format!("not a JSON array of token ids: {}", failure::json_error(&e));
        Error::model(args.ids.display().to_string(), why).into()
    })
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

/// What a model computes for a prompt.
pub struct Traced {
    /// `[T, V]` of the prompt's tokens.
    pub logits: Vec<f32>,
    greedy_ids: Vec<u32>,
    /// `[steps, V]`
    greedy_logits: Vec<f32>,
    /// After the prompt.
    states: Vec<LayerValues>,
}

/// Loads the model and runs the prompt and `steps` greedy tokens after it. `report` is dropped when the model is loaded.
///
/// # Errors
/// Those of loading; [`Error::BadRequest`] for ids that are out of range or too many; [`Error::NotFinite`].
pub async fn trace<B: Backend>(
    backend: &B,
    files: &ModelFiles,
    ids: &[u32],
    steps: usize,
    mut report: impl FnMut(Progress),
) -> Result<Traced, Error> {
    let architecture = models::read(&files.config)?;
    let spec = architecture.spec();
    check_ids(ids, spec.vocab)?;
    if backend.caps().ranks > 1 {
        let why = "the states of a model on several ranks are in parts, which are not joined yet: use one";
        return Err(Error::BadRequest(why.into()));
    }
    let total = ids.len().saturating_add(steps);
    if total > spec.context {
        return Err(Error::BadRequest(format!(
            "{} prompt tokens and {} steps are {} tokens, the context holds {} (key `max_position_embeddings` of the configuration)",
            thousands(ids.len()),
            thousands(steps),
            thousands(total),
            thousands(spec.context)
        )));
    }
    let limits = Limits { max_tokens: PAGE, max_outputs: PAGE };
    let mut loader = Loader::new(backend, &files.checkpoint, &mut report);
    let model = models::build(&architecture, &mut loader, limits).await?;
    drop(report);
    // Two slots: a step of several chunks reads one and writes the other.
    let mut direct = Direct::new(backend, &*model, limits, 2, total.div_ceil(PAGE))?;
    let mut sequence = Sequence::default();
    let logits = direct.prompt(&mut sequence, ids, &[]).await?;
    if !logits.iter().all(|x| x.is_finite()) {
        return Err(Error::NotFinite);
    }
    let states = direct.states(&sequence).await?;
    let last = &logits[(ids.len() - 1) * spec.vocab..];
    let (greedy_ids, greedy_logits) = direct.greedy(&mut sequence, last, steps).await?;
    if !greedy_logits.iter().all(|x| x.is_finite()) {
        return Err(Error::NotFinite);
    }
    Ok(Traced { logits, greedy_ids, greedy_logits, states })
}

impl Traced {
    fn tensors(&self, spec: &ModelSpec) -> Vec<Stored> {
        let steps = self.greedy_ids.len();
        let mut stored = vec![
            Stored::floats("logits", &[self.logits.len() / spec.vocab, spec.vocab], &self.logits),
            Stored {
                name: "greedy_ids".into(),
                dtype: Dtype::I32,
                dims: vec![steps],
                bytes: self.greedy_ids.iter().flat_map(|id| id.to_le_bytes()).collect(),
            },
            Stored::floats("greedy_logits", &[steps, spec.vocab], &self.greedy_logits),
        ];
        for (i, (values, LayerState { conv, recurrent, .. })) in self.states.iter().zip(&spec.layers).enumerate() {
            if let (Some(values), Some([channels, taps])) = (&values.conv, conv) {
                stored.push(Stored::floats(format!("state.layer{i}.conv"), &[1, *channels, *taps], values));
            }
            if let (Some(values), Some([h, p, n])) = (&values.recurrent, recurrent) {
                stored.push(Stored::floats(format!("state.layer{i}.recurrent"), &[1, *h, *p, *n], values));
            }
        }
        stored
    }
}
