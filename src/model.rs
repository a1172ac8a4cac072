//! Opening and loading the model that the arguments name.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use selkie_core::{
    chat::system_clock, checkpoint::Checkpoint, engine::EngineOptions, model_dir::ModelFiles, models, session::Model,
    source::Source, state::CapturePolicy, weights::Progress,
};

use crate::{
    args::{BackendArgs, ModelArgs, Policy, PoolArgs},
    backend::{self, Loaded, Opened, Place},
    embedded,
    failure::Outcome,
    hub,
    interrupt::Interrupt,
    open::Opener,
    render::Processes,
    terminal,
};

/// Default number of sequences that run at a time, for commands with many requests.
pub const DEFAULT_MAX_BATCH: usize = 16;
/// A loading bar appears after this time.
const PATIENCE: Duration = Duration::from_millis(500);

/// Opens the files of the model that the arguments name.
pub fn open(args: &ModelArgs) -> Outcome<Arc<ModelFiles>> {
    let source: Arc<dyn Source> = match &args.model {
        Some(given) => hub::find(given, args.yes)?.source()?,
        None => Arc::new(embedded::DEMO),
    };
    let mut files = pollster::block_on(ModelFiles::open(source, system_clock))?;
    if let Some(processes) = Processes::new() {
        files.render_with(Arc::new(processes));
    }
    Ok(Arc::new(files))
}

/// Engine options from the command line, for a run that is long enough to measure what drafts cost.
pub fn engine_options_of_long_runs(args: &PoolArgs, default_max_batch: usize) -> EngineOptions {
    EngineOptions { measure_costs: true, ..engine_options(args, default_max_batch) }
}

/// Engine options from the command line.
pub fn engine_options(args: &PoolArgs, default_max_batch: usize) -> EngineOptions {
    EngineOptions {
        memory: args.memory,
        slots: args.slots,
        kv_pages: args.kv_pages,
        max_batch: args.max_batch.unwrap_or(default_max_batch),
        step_tokens: args.step_tokens,
        context: args.context,
        prefix_cache: !args.no_prefix_cache,
        policy: match args.capture_policy {
            Policy::Default => CapturePolicy::Default,
            Policy::OnePerPrefill => CapturePolicy::OnePerPrefill,
        },
        speculate: args.speculate.how.into(),
        drafts: args.speculate.drafts,
        tiers: args.tiers.options(),
        ..EngineOptions::default()
    }
}

/// Loads the model onto an engine's own thread; shows a progress bar if that takes long.
pub fn load(args: &BackendArgs, files: &Arc<ModelFiles>, options: &EngineOptions) -> Outcome<Model> {
    load_at(args.place()?, files, options)
}

/// Loads the model onto several engines, which divide the CPU or have a CUDA device each.
pub fn load_replicas(
    args: &BackendArgs,
    files: &Arc<ModelFiles>,
    options: &EngineOptions,
    replicas: usize,
) -> Outcome<Vec<Model>> {
    let options = EngineOptions { engines: replicas, ..options.clone() };
    let load = |replica| load_at(Place { replica, replicas, ..args.place()? }, files, &options);
    (0..replicas).map(load).collect()
}

fn load_at(place: Place, files: &Arc<ModelFiles>, options: &EngineOptions) -> Outcome<Model> {
    let started = Instant::now();
    let mut bar = LoadingBar::start();
    let opener = Opener::of(files.clone()).place(place).options(options.clone());
    let model = opener.progress(move |p| bar.update(&p)).load()?;
    loaded(files, model.facts().backend, &model.facts().device, started);
    Ok(model)
}

/// Opens the backend that the arguments name, for the model in `files`.
pub fn backend(args: &BackendArgs) -> Outcome<Opened> {
    Ok(backend::open(&args.place()?)?)
}

/// Whether this process is a rank that follows rank 0 rather than one that answers: it does so until rank 0 ends.
///
/// # Errors
/// As [`BackendArgs::place`]; those of the device and of rank 0.
pub fn follow(args: &BackendArgs) -> Outcome<bool> {
    let place = args.place()?;
    let Some(at) = &place.process else { return Ok(false) };
    if at.rank == 0 {
        terminal::note(format_args!("rank 0 of {}: the others are to come to {}", at.ranks, at.address));
        return Ok(false);
    }
    // Signals go to all ranks. Rank 0 decides what the first one means.
    let _listening = Interrupt::listen()?;
    terminal::note(format_args!("rank {} of {}: follows rank 0 at {}", at.rank, at.ranks, at.address));
    backend::follow(&place, at)?;
    Ok(true)
}

/// Loads the engine alone, on this thread: for measurements.
pub fn load_engine(backend: Opened, files: &Arc<ModelFiles>, options: &EngineOptions) -> Outcome<Box<dyn Loaded>> {
    let started = Instant::now();
    let mut bar = LoadingBar::start();
    let engine = backend::load(backend, files, options, &mut |p| bar.update(&p))?;
    drop(bar);
    loaded(files, engine.caps().backend, &engine.caps().device, started);
    Ok(engine)
}

fn loaded(files: &ModelFiles, backend: &str, device: &str, started: Instant) {
    warn_of_ignored(files);
    let seconds = started.elapsed().as_secs_f64();
    tracing::info!("{} loaded on {backend} ({device}) in {seconds:.3} s", files.label());
}

/// After loading, warns of stored tensors that were not used, apart from those of a head for drafts that an option would load.
pub fn warn_of_ignored(files: &ModelFiles) {
    let head = models::read(&files.config).is_ok_and(|a| a.head_parameters(&files.checkpoint).is_some());
    warn_of_unused(&files.checkpoint, head);
}

/// Warns of stored tensors that were not used; `head`: a head for drafts may be one of them.
pub fn warn_of_unused(checkpoint: &Checkpoint, head: bool) {
    let names = checkpoint.passed_over();
    if let Some(first) = names.first() {
        let more = if names.len() > 1 { format!(" and {} more", names.len() - 1) } else { String::new() };
        tracing::warn!("stored but not part of what config.json describes, and ignored: `{first}`{more}");
    }
    let mut skipped = checkpoint.skipped();
    if head {
        skipped.remove("mtp");
    }
    if !skipped.is_empty() {
        let (tensors, bytes) = skipped.values().fold((0, 0), |(n, size), (m, more)| (n + m, size + more));
        let modules: Vec<_> = skipped.keys().map(|module| format!("`{module}`")).collect();
        tracing::warn!(
            "parts of the checkpoint that selkie does not run are skipped: {} ({tensors} tensors, {})",
            modules.join(", "),
            terminal::size(bytes)
        );
    }
}

/// A progress bar that appears only if loading takes long, and is removed on drop.
pub struct LoadingBar {
    what: &'static str,
    started: Instant,
    bar: Option<ProgressBar>,
}

impl LoadingBar {
    /// Call when loading begins.
    pub fn start() -> Self {
        Self::of("loading")
    }

    /// The same for other work on all bytes of the weights.
    pub fn of(what: &'static str) -> Self {
        Self { what, started: Instant::now(), bar: None }
    }

    /// Call on progress.
    pub fn update(&mut self, progress: &Progress) {
        if self.bar.is_none() && self.started.elapsed() < PATIENCE {
            return;
        }
        let bar = self.bar.get_or_insert_with(|| {
            let style = "{prefix} {bar:30} {binary_bytes} of {binary_total_bytes}, {eta} left";
            let bar = ProgressBar::with_draw_target(Some(progress.total), ProgressDrawTarget::stderr());
            bar.set_prefix(self.what);
            bar.with_style(ProgressStyle::with_template(style).expect("the template is valid"))
        });
        bar.set_position(progress.done);
    }
}

impl Drop for LoadingBar {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
