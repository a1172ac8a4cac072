//! `selkie bundle`, and the bundles of other commands: states of prefixes as files.

use std::{
    fs::{File, Permissions},
    io::{self, BufWriter, Write},
    path::Path,
    sync::{
        Arc,
        mpsc::{SyncSender, sync_channel},
    },
    thread,
};

use selkie_core::{
    bundle::{Head, Identity, Reader},
    chat::{Conversation, End, Message},
    engine::{AnyEngine, EngineOptions, Export, Exported, Import, Imported},
    model_dir::ModelFiles,
    models,
    session::{Ask, Encoded, Model, Prompt, WhenFull},
    state::Realm,
    tier::ColdDtype,
    tokenizer::MAX_TEXT_BYTES,
    units::{size, thousands},
    weights::Progress,
};
use serde_json::{Value, json};

use crate::{
    args::{BundleArgs, BundleCommand, InspectBundleArgs, MakeArgs, VerifyArgs},
    failure::{Failure, Outcome},
    input_file, model,
    output_file::{self, OutputFile},
    terminal::{self, Output},
};

/// States of a chat that are kept: the ends of its last messages are among them.
pub const STATES: usize = 8;
/// Bytes that are gathered before they are passed on to be written.
const GATHERED: usize = 1 << 20;
/// Pieces of a bundle that wait to be written at most.
const WAITING: usize = 4;

/// Runs the subcommand.
pub fn run(args: &BundleArgs) -> Outcome {
    match &args.what {
        BundleCommand::Make(args) => make(args),
        BundleCommand::Inspect(args) => inspect(args),
        BundleCommand::Verify(args) => verify(args),
    }
}

fn make(args: &MakeArgs) -> Outcome {
    let typed = match args.prompt.as_deref() {
        Some("-") => Some(stdin()?),
        typed => typed.map(str::to_owned),
    };
    let system = args.system.iter().map(|text| Message::new("system", text.as_str()));
    let prompt = match typed {
        None if args.system.is_none() => {
            return Err(Failure::Usage(
                "there is nothing to compute: give --system, a prompt, or both; see --help".into(),
            ));
        }
        Some(text) if args.raw => Prompt::Text(text),
        user => whole(system.chain(user.map(|text| Message::new("user", text))).collect()),
    };
    let files = model::open(&args.model)?;
    let model = model::load(&args.model.backend, &files, &model::engine_options(&args.pool, 1))?;
    let encoded = compute(&model, prompt)?;
    let saved = save(&model, &files, &args.output, encoded, None, String::new(), args.states)?;
    terminal::dim_note(saved_line(&saved, &args.output));
    Ok(())
}

fn stdin() -> Outcome<String> {
    let bytes = input_file::read(io::stdin().lock(), MAX_TEXT_BYTES as u64);
    let bytes = bytes.map_err(|e| Failure::Other(format!("standard input: {e}")))?;
    String::from_utf8(bytes).map_err(|_| Failure::Other("standard input: not UTF-8".into()))
}

/// Has a prompt computed, so that the cache has it.
pub fn compute(model: &Model, prompt: Prompt) -> Outcome<Encoded> {
    let encoded = model.encode(prompt, WhenFull::Error, Some(1))?;
    let ask = Ask { prompt: Prompt::Encoded(encoded.clone()), max_tokens: Some(1), ..Ask::default() };
    match model.submit(ask)?.finish().end.error {
        Some(e) => Err(e.into()),
        None => Ok(encoded),
    }
}

/// The prompt of a conversation up to the end of its last message.
pub fn whole(messages: Vec<Message>) -> Prompt {
    Prompt::Conversation(Conversation { end: End::Messages, ..Conversation::new(messages) })
}

/// What was saved, in a line.
pub fn saved_line(saved: &Exported, file: &Path) -> String {
    let states = if saved.states == 1 { "state" } else { "states" };
    format!(
        "{}: {} tokens, {} {states}, {}",
        file.display(),
        thousands(saved.tokens),
        thousands(saved.states),
        size(saved.bytes)
    )
}

/// Digests of the model's files; all weights are read.
pub fn identity(files: &ModelFiles) -> Outcome<Identity> {
    let total = files.checkpoint.bytes();
    let mut bar = model::LoadingBar::of("reading the weights for their checksum");
    Ok(pollster::block_on(files.identity(&mut |done| bar.update(&Progress { done, total })))?)
}

/// Writes what the cache holds of `encoded`. The file appears complete or not at all, with mode 0600.
pub fn save(
    model: &Model,
    files: &ModelFiles,
    path: &Path,
    encoded: Encoded,
    messages: Option<String>,
    origin: String,
    states: usize,
) -> Outcome<Exported> {
    let realm = Realm { origin, ..Realm::default() };
    write(model, path, export(identity(files)?, files.name.clone(), encoded, messages, realm, states))
}

/// What a bundle of a prompt holds.
pub fn export(
    model: Identity,
    name: String,
    encoded: Encoded,
    messages: Option<String>,
    realm: Realm,
    states: usize,
) -> Export {
    let mut ends: Vec<u32> = encoded.boundaries.iter().map(|end| *end as u32).collect();
    ends.sort_unstable();
    Export { model, name, tokens: encoded.ids, ends, messages, realm, states, from: 0 }
}

/// Writes a bundle.
pub fn write(model: &Model, path: &Path, what: Export) -> Outcome<Exported> {
    let mut out = private(path)?;
    let name = path.display().to_string();
    let work = model.with(move |engine| {
        let saved = export_to(engine, what, &name, &mut out);
        saved.and_then(|saved| out.commit().map(|()| saved))
    });
    Ok(work.wait()??)
}

/// Has the engine write a bundle, while another thread writes what it gives to `out`; `name` is the bundle's in messages.
///
/// # Errors
/// Those of the engine and of `out`.
pub fn export_to(
    engine: &dyn AnyEngine,
    what: Export,
    name: &str,
    out: &mut (dyn Write + Send),
) -> selkie_core::Result<Exported> {
    let io = |e| selkie_core::Error::io(name, e);
    thread::scope(|scope| {
        let (pieces, arriving) = sync_channel::<Vec<u8>>(WAITING);
        let write = move || arriving.iter().try_for_each(|piece| out.write_all(&piece)).and_then(|()| out.flush());
        let writer = thread::Builder::new().name("selkie-write".into()).spawn_scoped(scope, write).map_err(io)?;
        let mut pieces = BufWriter::with_capacity(GATHERED, Pieces(pieces));
        let saved = pollster::block_on(engine.export(what, name, &mut pieces));
        drop(pieces);
        let written = writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        // What went wrong with `out` is why the engine could not go on.
        written.map_err(io).and(saved)
    })
}

/// Passes what is written on to another thread.
struct Pieces(SyncSender<Vec<u8>>);

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.send(bytes.to_vec()).map_err(|_| io::ErrorKind::BrokenPipe)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A file that only its owner can read: a bundle is a conversation.
fn private(path: &Path) -> Outcome<OutputFile> {
    let target = output_file::resolve(path)?;
    if output_file::is_special(&target) {
        return Ok(OutputFile::create(&target)?);
    }
    output_file::mode(&target)?;
    Ok(OutputFile::beside(target, owners_mode())?)
}

#[cfg(unix)]
fn owners_mode() -> Option<Permissions> {
    use std::os::unix::fs::PermissionsExt;
    Some(Permissions::from_mode(0o600))
}

#[cfg(not(unix))]
fn owners_mode() -> Option<Permissions> {
    None
}

/// Opens a bundle and checks its head.
pub fn open(path: &Path) -> Outcome<Reader<'static>> {
    let name = path.display().to_string();
    let io = |e| selkie_core::Error::io(path, e);
    let file = File::open(path).map_err(io)?;
    if !file.metadata().map_err(io)?.is_file() {
        return Err(Failure::Other(format!("{name}: a bundle is a regular file")));
    }
    Ok(Reader::open(file, &name)?)
}

/// Refuses converted values of lower tiers to somebody who wants exact ones only.
pub fn check_exact(exact_only: bool, options: &EngineOptions) -> Outcome {
    match exact_only && options.tiers.cold != ColdDtype::Exact {
        true => Err(Failure::Usage(
            "--exact-only refuses converted values, and --cold-dtype int8 makes some; leave one of them out".into(),
        )),
        false => Ok(()),
    }
}

/// Reads a bundle, whose head was read, into the empty namespace of the model with this identity.
pub fn read(model: &Model, identity: Identity, mut bundle: Reader<'static>, exact_only: bool) -> Outcome<Imported> {
    let into = Import { model: identity, namespace: String::new(), exact_only, pieces: false };
    let work = model.with(move |engine| engine.import(&mut bundle, &into));
    Ok(work.wait()??)
}

/// [`read`] for a loaded model; says on stderr what came of it.
pub fn insert(model: &Model, files: &Arc<ModelFiles>, bundle: Reader<'static>, exact_only: bool) -> Outcome<Imported> {
    let (file, tokens) = (bundle.file().to_owned(), bundle.head().tokens.len());
    let imported = read(model, identity(files)?, bundle, exact_only)?;
    let kind = match imported.origin.as_str() {
        "" => "exact".to_owned(),
        origin => format!("converted from `{origin}`"),
    };
    let [kept, tokens] = [imported.tokens, tokens].map(thousands);
    terminal::dim_note(format_args!("{file}: {kept} of {tokens} tokens need not be computed, {kind}"));
    Ok(imported)
}

fn inspect(args: &InspectBundleArgs) -> Outcome {
    let bundle = open(&args.file)?;
    let head = bundle.head();
    if args.json {
        return Output::new().json(&facts(head));
    }
    let ends: Vec<String> = head.ends.iter().map(u32::to_string).collect();
    let positions: Vec<String> = head.positions().iter().map(usize::to_string).collect();
    let none = |list: Vec<String>| if list.is_empty() { "none".to_owned() } else { list.join(" ") };
    let lines = [
        ("model", head.name.clone()),
        ("weights", head.model.weights.to_string()),
        ("config", head.model.config.to_string()),
        ("tokenizer", head.model.tokenizer.to_string()),
        ("numerics", head.numerics.clone()),
        (
            "tokens",
            format!("{}, {} of them need not be computed", thousands(head.tokens.len()), thousands(head.depth())),
        ),
        ("message ends", none(ends)),
        ("KV pages", thousands(head.pages())),
        ("states at", none(positions)),
        ("conversation", if head.messages.is_some() { "yes".into() } else { "no".into() }),
        ("values", format!("{} in {} tensors", size(head.bytes()), thousands(head.parts.len()))),
    ];
    let text: String = lines.iter().map(|(key, value)| format!("{key:<13} {}\n", terminal::visible(value))).collect();
    Output::new().text(&text)
}

fn facts(head: &Head) -> Value {
    let tensor = |p: &selkie_core::bundle::Part| json!({ "name": p.name(), "dtype": format!("{:?}", p.dtype), "shape": p.shape });
    json!({
        "model": head.name,
        "weights": head.model.weights.to_string(),
        "config": head.model.config.to_string(),
        "tokenizer": head.model.tokenizer.to_string(),
        "numerics": head.numerics,
        "tokens": head.tokens.len(),
        "covered_tokens": head.depth(),
        "message_ends": head.ends,
        "pages": head.pages(),
        "positions": head.positions(),
        "has_conversation": head.messages.is_some(),
        "bytes": head.bytes(),
        "tensors": head.parts.iter().map(tensor).collect::<Vec<_>>(),
    })
}

fn verify(args: &VerifyArgs) -> Outcome {
    let mut bundle = open(&args.file)?;
    let mut checked = "all checksums are right".to_owned();
    if args.model.model.is_some() {
        let files = model::open(&args.model)?;
        let mut architecture = models::read(&files.config)?;
        // One saved with the model's head has its state too.
        architecture.drafts = architecture.spec().layers.len() < bundle.head().layers();
        bundle.head().check_model(bundle.file(), &identity(&files)?)?;
        bundle.head().check_parts(bundle.file(), &architecture.spec().layers)?;
        checked = format!("{checked}, and it is of the model {}", files.name);
    }
    bundle.verify()?;
    Output::new().text(&format!("{}: {checked}\n", bundle.file()))
}
