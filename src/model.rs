//! Opening and loading the model that the arguments name.

use std::{
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use selkie_core::{
    Error,
    backend::Backend,
    checkpoint::Checkpoint,
    engine::EngineOptions,
    model_dir::ModelFiles,
    models,
    session::Session,
    source::{Dir, Source},
    state::CapturePolicy,
    weights::Progress,
};

use crate::{
    args::{ModelArgs, Policy, PoolArgs},
    embedded,
    failure::Outcome,
    render::Processes,
};

/// Default number of sequences that run at once, for commands with many requests.
pub const DEFAULT_MAX_BATCH: usize = 16;
/// A loading bar appears after this time.
const PATIENCE: Duration = Duration::from_millis(500);

/// Opens the files of the model that the arguments name.
pub fn open(args: &ModelArgs) -> Outcome<Rc<ModelFiles>> {
    let source: Rc<dyn Source> = match &args.model {
        Some(dir) => Rc::new(Dir::open(dir)?),
        None => Rc::new(embedded::DEMO),
    };
    let mut files = pollster::block_on(ModelFiles::open(source, unix_time))?;
    files.render_with(Arc::new(Processes::default()));
    Ok(Rc::new(files))
}

/// Seconds since 1970, for chat templates that print the date.
pub fn unix_time() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs())
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
        ..EngineOptions::default()
    }
}

/// Loads the model; shows a progress bar if that takes long.
pub fn load<B: Backend>(backend: B, files: &Rc<ModelFiles>, options: &EngineOptions) -> Outcome<Session<B>> {
    let started = Instant::now();
    if files.checkpoint.is_random() && backend.caps().backend == "cpu" {
        // Weights of a file are mapped. Random weights take memory, at least two bytes each.
        let asked = models::read(&files.config)?.spec().parameters.saturating_mul(2);
        if let Some(free) = backend.free_memory().filter(|free| asked > *free) {
            return Err(Error::OutOfMemory { what: "random weights".into(), asked, free }.into());
        }
    }
    let mut bar = LoadingBar::start();
    let session = pollster::block_on(Session::load(backend, files.clone(), options, &mut |p| bar.update(&p)))?;
    drop(bar);
    warn_of_ignored(&files.checkpoint);
    let caps = session.engine().caps();
    tracing::info!(
        "{} loaded on {} ({}) in {:.3} s",
        files.label(),
        caps.backend,
        caps.device,
        started.elapsed().as_secs_f64()
    );
    Ok(session)
}

/// After loading, warns of stored tensors that were not used.
pub fn warn_of_ignored(checkpoint: &Checkpoint) {
    let names = checkpoint.passed_over();
    if let Some(first) = names.first() {
        let more = if names.len() > 1 { format!(" and {} more", names.len() - 1) } else { String::new() };
        tracing::warn!("stored but not part of what config.json describes, and ignored: `{first}`{more}");
    }
    let skipped = checkpoint.skipped();
    if !skipped.is_empty() {
        let (tensors, bytes) = skipped.values().fold((0, 0), |(n, size), (m, more)| (n + m, size + more));
        let modules: Vec<_> = skipped.keys().map(|module| format!("`{module}`")).collect();
        tracing::warn!(
            "parts of the checkpoint that selkie does not run are skipped: {} ({tensors} tensors, {})",
            modules.join(", "),
            crate::terminal::size(bytes)
        );
    }
}

/// A progress bar that appears only if loading takes long, and is removed on drop.
pub struct LoadingBar {
    started: Instant,
    bar: Option<ProgressBar>,
}

impl LoadingBar {
    /// Call when loading begins.
    pub fn start() -> Self {
        Self { started: Instant::now(), bar: None }
    }

    /// Call on progress.
    pub fn update(&mut self, progress: &Progress) {
        if self.bar.is_none() && self.started.elapsed() < PATIENCE {
            return;
        }
        let bar = self.bar.get_or_insert_with(|| {
            let style = "loading {bar:30} {binary_bytes} of {binary_total_bytes}, {eta} left";
            let bar = ProgressBar::with_draw_target(Some(progress.total), ProgressDrawTarget::stderr());
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
