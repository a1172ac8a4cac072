//! Rendering: a template and messages become text.
//!
//! Templates are programs from an untrusted file. Bounds here: the source (`source.rs`), the steps, the output and the
//! depth of printed values; a panic of the template engine becomes an error. The engine gives no way to bound the
//! memory of one value (doubling a string forty times takes a hundred steps), the time of one step on such a value, and
//! the stack for comparing or converting deeply nested values. A [`Renderer`] in a separate process bounds those too:
//! the binary has one, with a memory limit (where the system has one: not on macOS and Windows) and a deadline. In a
//! browser's worker the module traps, and the page starts another worker. A program that uses this crate renders [in
//! its own process](InProcess) unless it brings a renderer.

use std::{
    borrow::Cow,
    io,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use minijinja::{
    Environment, ErrorKind, Value, context,
    syntax::SyntaxConfig,
    value::{Serde, merge_maps},
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};

use super::{Message, json::to_json, print::print, python, source, time::strftime};

/// Steps that a template may take for a chat, and again for all beginnings of it. The longest published ones take some
/// thousands per message.
const FUEL: u64 = 20_000_000;
/// Most bytes that a template may print.
const MAX_OUTPUT: usize = 16 << 20;
/// Boundaries are looked for at the ends of this many messages, the newest ones, besides the first.
const MAX_BOUNDARIES: usize = 32;
/// Longest text of an error in characters: templates write their own.
const MAX_ERROR: usize = 500;
/// Stack of the thread that a template runs on, in bytes.
#[cfg(not(target_arch = "wasm32"))]
const STACK: usize = 64 << 20;

const TEMPLATE: &str = "chat_template";

/// Input of a rendering.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job<'a> {
    /// The template.
    pub source: Cow<'a, str>,
    /// Seconds since 1970 (UTC).
    pub now: u64,
    /// `bos_token` and the like with their texts.
    pub names: Cow<'a, [(String, String)]>,
    /// The chat, at least one message.
    pub messages: Cow<'a, [Message]>,
    /// Definitions of tools; the template sees `None` if there are none.
    pub tools: Cow<'a, [Json]>,
    /// More values by name.
    pub values: Cow<'a, Map<String, Json>>,
    /// Whether the text ends where the assistant's answer begins.
    pub add_generation_prompt: bool,
}

/// Result of a rendering.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rendered {
    /// The prompt.
    pub text: String,
    /// Bytes that `text` has in common with the rendered chat of its first n messages, for n = 1 and the largest n, if
    /// the template renders that chat.
    pub ends: Vec<usize>,
}

/// Where templates are rendered.
pub trait Renderer: Send + Sync {
    /// Renders. May take as long as its own limits allow; several threads may call it concurrently.
    ///
    /// # Errors
    /// The reason, as a sentence about the chat template.
    fn render(&self, job: &Job<'_>) -> Result<Rendered, String>;
}

/// Renders in this process, on a separate thread where there are threads. The template is compiled once and kept.
///
/// It has the bounds of the module's documentation. A hostile template can still use up this process's memory or, with
/// values that contain themselves, the stack, which ends the process.
#[derive(Default)]
pub struct InProcess {
    compiled: Mutex<Option<Arc<Compiled>>>,
}

/// A compiled template, or the reason why it cannot be compiled.
struct Compiled {
    source: String,
    environment: Result<Environment<'static>, String>,
    /// Read by `strftime_now`.
    now: Arc<AtomicU64>,
}

impl Renderer for InProcess {
    fn render(&self, job: &Job<'_>) -> Result<Rendered, String> {
        on_own_stack(|| {
            let compiled = self.compiled(&job.source);
            compiled.now.store(job.now, Ordering::Relaxed);
            let environment = compiled.environment.as_ref().map_err(|why| unusable(why))?;
            render(environment, job)
        })
    }
}

impl InProcess {
    fn compiled(&self, source: &str) -> Arc<Compiled> {
        let kept = self.compiled.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(kept) = kept.filter(|kept| kept.source == source) {
            return kept;
        }
        let now = Arc::new(AtomicU64::new(0));
        let environment = environment(source, now.clone());
        let compiled = Arc::new(Compiled { source: source.into(), environment, now });
        *self.compiled.lock().unwrap_or_else(PoisonError::into_inner) = Some(compiled.clone());
        compiled
    }
}

/// A sentence about a template that no chat can use.
pub fn unusable(why: &str) -> String {
    format!("the chat template cannot be used: {why}; correct it, or use the prompt as it is (raw)")
}

/// Runs `render` on a stack for deep recursion; a panic becomes an error.
#[cfg(not(target_arch = "wasm32"))]
fn on_own_stack<T: Send>(render: impl FnOnce() -> Result<T, String> + Send) -> Result<T, String> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("template".into()).stack_size(STACK);
        let thread = thread.spawn_scoped(scope, || crate::survive::survived(render));
        let thread = thread.map_err(|e| format!("a thread for the chat template could not be started: {e}; free memory, or use the prompt as it is (raw)"))?;
        thread.join().ok().flatten().unwrap_or_else(|| Err(unusable("the template engine fails on it")))
    })
}

/// There is only one stack. The program that loaded this module sees that it trapped.
#[cfg(target_arch = "wasm32")]
fn on_own_stack<T>(render: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    render()
}

/// The environment that transformers gives to templates.
fn environment(source: &str, now: Arc<AtomicU64>) -> Result<Environment<'static>, String> {
    let source = source::prepared(source)?;
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    env.set_syntax(syntax.map_err(|e| describe(&e))?);
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_formatter(print);
    env.set_unknown_method_callback(python::method);
    python::correct(&mut env);
    env.set_fuel(Some(FUEL));
    env.add_filter("tojson", to_json);
    // Jinja does not have it, and it prints thousands of characters about the engine itself.
    env.remove_global("debug");
    env.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
    env.add_function("strftime_now", move |format: String| strftime(&format, now.load(Ordering::Relaxed)));
    env.add_template_owned(TEMPLATE, source).map_err(|e| describe(&e))?;
    Ok(env)
}

fn render(env: &Environment<'_>, job: &Job<'_>) -> Result<Rendered, String> {
    let (text, _) =
        render_one(env, job, job.messages.len(), job.add_generation_prompt).map_err(|e| match e.kind() {
            ErrorKind::OutOfFuel => unusable("it does not come to an end"),
            ErrorKind::WriteFailure => unusable(&format!("it prints more than {MAX_OUTPUT} bytes for these messages")),
            _ => {
                let why = describe(&e);
                format!(
                    "the chat template refused these messages: {why}; change them, or use the prompt as it is (raw)"
                )
            }
        })?;
    let all = job.messages.len();
    let mut ends = Vec::new();
    let mut fuel = FUEL;
    for n in (1..=all).filter(|n| *n == 1 || *n + MAX_BOUNDARIES > all) {
        // A template may refuse a part of a chat; then its end is unknown.
        let Ok((part, used)) = render_one(env, job, n, false) else { continue };
        ends.push(part.bytes().zip(text.bytes()).take_while(|(a, b)| a == b).count());
        fuel = fuel.saturating_sub(used);
        if fuel == 0 {
            break;
        }
    }
    Ok(Rendered { text, ends })
}

/// The text of the first `n` messages, and the steps that it took.
fn render_one(
    env: &Environment<'_>,
    job: &Job<'_>,
    n: usize,
    add_generation_prompt: bool,
) -> Result<(String, u64), minijinja::Error> {
    let names = Value::from_pairs(job.names.iter().map(|(name, text)| (name.as_str(), Value::from(text.as_str()))));
    let tools = if job.tools.is_empty() { Value::from(()) } else { Value::from(Serde(&*job.tools)) };
    let values = context! {
        messages => Value::from(Serde(&job.messages[..n])),
        add_generation_prompt,
        tools,
        // The later ones win.
        ..merge_maps([context! { documents => () }, Value::from(Serde(&*job.values)), names])
    };
    let mut out = Bounded(Vec::new());
    let rendered = env.get_template(TEMPLATE)?.render_captured_to(values, &mut out)?;
    let used = rendered.state().fuel_levels().map_or(0, |(used, _)| used);
    drop(rendered);
    Ok((String::from_utf8(out.0).expect("the engine prints strings"), used))
}

/// Takes up to [`MAX_OUTPUT`] bytes.
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_OUTPUT {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The fault and its line.
fn describe(e: &minijinja::Error) -> String {
    let what = e.detail().map_or_else(|| e.kind().to_string(), str::to_owned);
    let what: String = what.chars().take(MAX_ERROR).collect();
    e.line().map_or(what.clone(), |line| format!("{what} (line {line} of the template)"))
}
