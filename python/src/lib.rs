//! The compiled part of the Python package `selkie`: the crate's front door with Python's types. The interpreter's lock is released
//! wherever this waits or computes.

mod wake;

use std::{
    ffi::OsString,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use pyo3::{
    create_exception,
    exceptions::{PyException, PyMemoryError, PyOSError, PyValueError},
    prelude::*,
    types::{PyBytes, PyDict},
};
use selkie::{
    Ask, Device, EngineOptions, Error, FinishReason, Message, ModelFiles, Overrides, Prompt, Speculate, Update,
    WhenFull,
};

use wake::Wake;

create_exception!(
    _selkie,
    SelkieError,
    PyException,
    "A model, a device or a request failed; the text says what to do."
);

/// How long a wait lasts before signals such as Ctrl-C are looked at.
const SIGNALS: Duration = Duration::from_millis(50);

fn raised(e: &Error) -> PyErr {
    let text = e.to_string();
    match e {
        Error::BadRequest(_) | Error::TooLong { .. } => PyValueError::new_err(text),
        Error::OutOfMemory { .. } => PyMemoryError::new_err(text),
        Error::Io { .. } => PyOSError::new_err(text),
        _ => SelkieError::new_err(text),
    }
}

/// A name out of a few.
fn one_of<T: Copy>(what: &str, given: &str, names: &[(&str, T)]) -> PyResult<T> {
    let known: Vec<_> = names.iter().map(|(name, _)| format!("\"{name}\"")).collect();
    names
        .iter()
        .find_map(|(name, value)| (*name == given).then_some(*value))
        .ok_or_else(|| PyValueError::new_err(format!("{what} is \"{given}\"; it must be one of {}", known.join(", "))))
}

fn device_of(name: &str) -> PyResult<Device> {
    let names = [("auto", Device::Auto), ("cuda", Device::Cuda), ("wgpu", Device::Wgpu), ("cpu", Device::Cpu)];
    one_of("device", name, &names)
}

fn speculate_of(how: &str) -> PyResult<Speculate> {
    let names =
        [("auto", Speculate::Auto), ("off", Speculate::Off), ("ngram", Speculate::Ngram), ("mtp", Speculate::Mtp)];
    one_of("speculate", how, &names)
}

/// A prompt out of exactly one of its forms.
fn prompt_of(text: Option<String>, ids: Option<Vec<u32>>, messages: Option<Vec<(String, String)>>) -> PyResult<Prompt> {
    match (text, ids, messages) {
        (Some(text), None, None) => Ok(Prompt::Text(text)),
        (None, Some(ids), None) => Ok(Prompt::Ids(ids)),
        (None, None, Some(turns)) => {
            Ok(Prompt::Messages(turns.into_iter().map(|(role, content)| Message::new(&role, content)).collect()))
        }
        _ => Err(PyValueError::new_err("a request has exactly one of text, ids and messages")),
    }
}

/// A loaded model.
#[pyclass(frozen, module = "selkie._selkie")]
struct Model {
    inner: selkie::Model,
    files: Arc<ModelFiles>,
}

/// Loads the model at `path`, or the demo model.
#[pyfunction]
#[pyo3(signature = (path, *, device, adapter, memory, slots, kv_pages, max_batch, step_tokens, context, prefix_cache, speculate, drafts, progress))]
#[expect(clippy::too_many_arguments, reason = "they are Python's keyword arguments")]
fn load(
    py: Python<'_>,
    path: Option<PathBuf>,
    device: &str,
    adapter: Option<String>,
    memory: Option<u64>,
    slots: Option<usize>,
    kv_pages: Option<usize>,
    max_batch: Option<usize>,
    step_tokens: Option<usize>,
    context: Option<usize>,
    prefix_cache: bool,
    speculate: &str,
    drafts: Option<usize>,
    progress: Option<Py<PyAny>>,
) -> PyResult<Model> {
    let device = device_of(device)?;
    let standard = EngineOptions::default();
    let options = EngineOptions {
        memory,
        slots,
        kv_pages,
        max_batch: max_batch.unwrap_or(standard.max_batch),
        step_tokens: step_tokens.unwrap_or(standard.step_tokens),
        context,
        prefix_cache,
        speculate: speculate_of(speculate)?,
        drafts: drafts.unwrap_or(standard.drafts),
        ..standard
    };
    py.detach(|| {
        let mut opener = path.map_or_else(selkie::demo, selkie::open)?.device(device).options(options);
        if let Some(name) = adapter {
            opener = opener.adapter(name);
        }
        if let Some(report) = progress {
            opener = opener.progress(move |p| {
                // An error in the caller's function must not stop the load.
                Python::attach(|py| drop(report.call1(py, (p.done, p.total))));
            });
        }
        let files = opener.files().clone();
        Ok(Model { inner: opener.load()?, files })
    })
    .map_err(|e: Error| raised(&e))
}

#[pymethods]
impl Model {
    /// Queues a request: exactly one of `text`, `ids` and `messages`.
    #[pyo3(signature = (*, text=None, ids=None, messages=None, max_tokens=None, stop=Vec::new(), namespace=String::new(), when_full="error",
        temperature=None, top_k=None, top_p=None, min_p=None, repetition_penalty=None, seed=None))]
    #[expect(clippy::too_many_arguments, reason = "they are Python's keyword arguments")]
    fn submit(
        &self,
        py: Python<'_>,
        text: Option<String>,
        ids: Option<Vec<u32>>,
        messages: Option<Vec<(String, String)>>,
        max_tokens: Option<usize>,
        stop: Vec<String>,
        namespace: String,
        when_full: &str,
        temperature: Option<f32>,
        top_k: Option<u32>,
        top_p: Option<f32>,
        min_p: Option<f32>,
        repetition_penalty: Option<f32>,
        seed: Option<u64>,
    ) -> PyResult<Answer> {
        let prompt = prompt_of(text, ids, messages)?;
        let policies = [("error", WhenFull::Error), ("drop-oldest", WhenFull::DropOldest)];
        let when_full = one_of("when_full", when_full, &policies)?;
        let sampling = Overrides { temperature, top_k, top_p, min_p, repetition_penalty, seed };
        let ask = Ask { prompt, sampling, max_tokens, stop, namespace, when_full, ..Ask::default() };
        let answer = py.detach(|| self.inner.submit(ask)).map_err(|e| raised(&e))?;
        Ok(Answer { inner: Mutex::new(answer) })
    }

    /// Writes the state after a prompt, which is given as to `submit`: the numbers of tokens, states and bytes.
    #[pyo3(signature = (path, *, text=None, ids=None, messages=None))]
    fn save_state(
        &self,
        py: Python<'_>,
        path: PathBuf,
        text: Option<String>,
        ids: Option<Vec<u32>>,
        messages: Option<Vec<(String, String)>>,
    ) -> PyResult<(usize, usize, u64)> {
        let prompt = prompt_of(text, ids, messages)?;
        let saved = py.detach(|| selkie::save_state(&self.inner, &self.files, prompt, path)).map_err(|e| raised(&e))?;
        Ok((saved.tokens, saved.states, saved.bytes))
    }

    /// Puts such a file into the prefix cache: the tokens that need not be computed.
    fn load_state(&self, py: Python<'_>, path: PathBuf) -> PyResult<usize> {
        let loaded = py.detach(|| selkie::load_state(&self.inner, &self.files, path)).map_err(|e| raised(&e))?;
        Ok(loaded.tokens)
    }

    /// Whether conversations can be given.
    #[getter]
    fn has_chat(&self) -> bool {
        self.inner.text().has_chat()
    }

    fn facts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let facts = self.inner.facts();
        let out = PyDict::new(py);
        out.set_item("name", &facts.name)?;
        out.set_item("family", &facts.family)?;
        out.set_item("backend", facts.backend)?;
        out.set_item("device", &facts.device)?;
        out.set_item("context", facts.context)?;
        out.set_item("vocab", facts.vocab)?;
        out.set_item("parameters", facts.parameters)?;
        out.set_item("slots", facts.slots)?;
        out.set_item("pages", facts.pages)?;
        out.set_item("block", facts.block)?;
        Ok(out)
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.inner.stats();
        let counters = &stats.counters;
        let out = PyDict::new(py);
        out.set_item("running", stats.running)?;
        out.set_item("waiting", stats.waiting)?;
        out.set_item("slots_used", stats.slots_used)?;
        out.set_item("slots_cached", stats.slots_cached)?;
        out.set_item("pages_used", stats.pages_used)?;
        out.set_item("pages_cached", stats.pages_cached)?;
        out.set_item("steps", counters.steps)?;
        out.set_item("tokens_prefilled", counters.tokens_prefilled)?;
        out.set_item("tokens_reused", counters.tokens_reused)?;
        out.set_item("tokens_generated", counters.tokens_generated)?;
        Ok(out)
    }

    /// Token ids of a text; special tokens in it are recognised.
    fn tokenize(&self, py: Python<'_>, text: String) -> PyResult<Vec<u32>> {
        py.detach(|| self.inner.text().tokenizer()?.encode(&text)).map_err(|e| raised(&e))
    }

    /// Text of token ids.
    fn detokenize(&self, py: Python<'_>, ids: Vec<u32>) -> PyResult<String> {
        py.detach(|| self.inner.text().tokenizer()?.decode(&ids)).map_err(|e| raised(&e))
    }
}

/// A request's answer; dropping it cancels the request.
#[pyclass(frozen, module = "selkie._selkie")]
struct Answer {
    inner: Mutex<selkie::Answer>,
}

#[pymethods]
impl Answer {
    /// The next update: a text, or the completion as a dict, after which there is `None`.
    fn wait<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        loop {
            let (update, ended) = py.detach(|| {
                let mut answer = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
                let update = answer.wait(SIGNALS);
                (update, answer.is_ended())
            });
            match update {
                Some(update) => return converted(py, update).map(Some),
                None if ended => return Ok(None),
                None => py.check_signals()?,
            }
        }
    }

    /// As `wait`, but returns `False` if there is nothing yet; then `wake` is called, from another thread, when there is.
    fn poll<'py>(&self, py: Python<'py>, wake: Py<PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let waker = Wake::waker(wake);
        let update = py.detach(|| {
            let mut answer = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
            answer.poll_next(&mut Context::from_waker(&waker))
        });
        match update {
            Poll::Ready(Some(update)) => converted(py, update),
            Poll::Ready(None) => Ok(py.None().into_bound(py)),
            Poll::Pending => Ok(false.into_pyobject(py)?.to_owned().into_any()),
        }
    }

    /// Ends the request; its completion has `finish == "cancelled"`.
    fn cancel(&self, py: Python<'_>) {
        py.detach(|| self.inner.lock().unwrap_or_else(PoisonError::into_inner).cancel());
    }

    #[getter]
    fn prompt_tokens(&self) -> usize {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).prompt_tokens()
    }
}

/// A text, or a completion as a dict; an answer that failed is an error.
fn converted(py: Python<'_>, update: Update) -> PyResult<Bound<'_, PyAny>> {
    let completion = match update {
        Update::Text { text, .. } => return Ok(text.into_pyobject(py)?.into_any()),
        Update::Done(completion) => completion,
    };
    if let Some(e) = completion.error() {
        return Err(raised(e));
    }
    let out = PyDict::new(py);
    out.set_item("text", completion.text.clone())?;
    out.set_item("ids", &completion.ids)?;
    let finish = match completion.finish {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Cancelled => "cancelled",
        FinishReason::Failed => "failed",
    };
    out.set_item("finish", finish)?;
    out.set_item("prompt_tokens", completion.end.prompt_tokens)?;
    out.set_item("reused", completion.reused())?;
    out.set_item("reason", completion.end.cache.map(|cache| cache.reason.name()))?;
    out.set_item("dropped", completion.dropped)?;
    Ok(out.into_any())
}

/// Logits of a prompt, `[T, V]` f32, as bytes and its number of columns.
#[pyfunction]
fn logits<'py>(
    py: Python<'py>,
    path: Option<PathBuf>,
    device: &str,
    ids: Vec<u32>,
) -> PyResult<(Bound<'py, PyBytes>, usize)> {
    let device = device_of(device)?;
    let rows = ids.len();
    let values = py
        .detach(|| path.map_or_else(selkie::demo, selkie::open)?.device(device).logits(&ids))
        .map_err(|e| raised(&e))?;
    let columns = values.len() / rows;
    let bytes = PyBytes::new_with(py, 4 * values.len(), |out| {
        for (out, x) in out.chunks_exact_mut(4).zip(&values) {
            out.copy_from_slice(&x.to_ne_bytes());
        }
        Ok(())
    })?;
    Ok((bytes, columns))
}

/// Runs the command line; `args[0]` is the program's name.
#[pyfunction]
fn cli(py: Python<'_>, args: Vec<OsString>) -> u8 {
    py.detach(|| selkie::cli::run_within(args))
}

#[pymodule]
fn _selkie(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("SelkieError", m.py().get_type::<SelkieError>())?;
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    m.add_class::<Model>()?;
    m.add_class::<Answer>()?;
    m.add_function(wrap_pyfunction!(load, m)?)?;
    m.add_function(wrap_pyfunction!(logits, m)?)?;
    m.add_function(wrap_pyfunction!(cli, m)?)
}
