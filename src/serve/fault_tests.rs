//! A device that fails while streams run, or a rank, seen over HTTP. The server is a process of its own: its exit code counts.

use std::{
    env, fs,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use clap::Parser;
use selkie_core::{
    Error,
    backend::Backend,
    cpu::CpuBackend,
    engine::{AnyEngine, EngineOptions},
    format::Products,
    model_dir::ModelFiles,
    ranks::Ranks,
    session::{Facts, Model, Text, load},
};

use super::{
    Sockets,
    app::{App, Limits},
    live, runtime,
};
use crate::{args::ServeArgs, embedded, interrupt::Interrupt};

#[path = "../../tests/engine/all/wrapped.rs"]
mod wrapped;

/// The device fails as soon as the file that this names exists.
const FAULT: &str = "SELKIE_TEST_FAULT";
/// Set if the device is two ranks, of which the second one panics then.
const RANKS: &str = "SELKIE_TEST_RANKS";
const ENDLESS: &str = r#""max_tokens": 8000, "ignore_eos": true"#;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: ServeArgs,
}

/// The demo model on a device that `fails` before a step.
fn on<B: Backend<Read: Unpin> + 'static>(
    open: impl FnOnce() -> selkie_core::Result<B> + Send + 'static,
    fails: impl FnOnce() -> wrapped::Before<B> + Send + 'static,
) -> selkie_core::Result<Model> {
    let files = pollster::block_on(ModelFiles::open(Arc::new(embedded::DEMO), || 0))?;
    let text = Text::new(&files)?;
    Model::spawn(text, move || {
        let inner = open()?;
        let caps = inner.caps().clone();
        let backend = wrapped::Wrapped { inner, caps, polls: 0, before: fails() };
        pollster::block_on(async {
            let engine = load(backend, &files, &EngineOptions::default(), &mut |_| {}).await?;
            Ok((Facts::new(&files, &engine).await?, Box::new(engine) as Box<dyn AnyEngine>))
        })
    })
}

fn broken(fault: PathBuf) -> selkie_core::Result<Model> {
    let fails = move |_: &CpuBackend| match fault.exists() {
        true => Err(Error::Device { op: "matmul".into(), why: "the device was lost".into() }),
        false => Ok(()),
    };
    on(|| Ok(CpuBackend::new()), || Box::new(fails))
}

fn broken_rank(fault: PathBuf) -> selkie_core::Result<Model> {
    let fails = move || -> wrapped::Before<Ranks> {
        // A buffer of other ranks, with a number that these ones never have: the one that is told to write there panics.
        let others = Ranks::open(1, Products::default()).unwrap();
        let foreign = (0..20_000).map(|_| others.alloc("other", 1).unwrap()).last().unwrap();
        Box::new(move |ranks| if fault.exists() { ranks.write_on(1, &foreign, 0, &[0]) } else { Ok(()) })
    };
    on(|| Ranks::open(2, Products::default()), fails)
}

#[test]
#[ignore = "it is the server of the test below"]
fn server() {
    let Some(fault) = env::var_os(FAULT) else { return };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    println!("\nhttp://{}", listener.local_addr().unwrap());
    let minute = Duration::from_secs(60);
    let limits = Limits { body: 1 << 20, state: 1 << 20, answer: minute, handover: minute };
    let app = Arc::new(App::new(vec!["demo".into()], 16, limits));
    let line = Line::parse_from(["serve"]);
    let interrupt = Interrupt::listen().unwrap();
    let ranks = env::var_os(RANKS).is_some();
    let load = move || Ok(vec![if ranks { broken_rank(fault.into())? } else { broken(fault.into())? }]);
    let ended =
        runtime().unwrap().block_on(live(app, Sockets { http: listener, handover: None }, &line.args, interrupt, load));
    std::process::exit(ended.map_or_else(|failure| failure.exit_code(), |()| 0).into());
}

struct Server {
    child: Child,
    address: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    fn start(fault: &Path, ranks: bool) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .envs(ranks.then_some((RANKS, "2")))
            .args(["serve::fault_tests::server", "--exact", "--ignored", "--nocapture"])
            .env(FAULT, fault)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let address = lines.map_while(Result::ok).find_map(|line| line.strip_prefix("http://").map(str::to_owned));
        let server = Self { child, address: address.expect("the server has an address") };
        server.wait("GET /health", "HTTP/1.1 200");
        server
    }

    /// Asks again until the answer contains `wanted`.
    fn wait(&self, head: &str, wanted: &str) {
        let end = Instant::now() + Duration::from_secs(60);
        while !rest(self.open(head, "")).contains(wanted) {
            assert!(Instant::now() < end, "{head} does not answer {wanted} within a minute");
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn open(&self, head: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let length = body.len();
        let head =
            format!("{head} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Length: {length}\r\n", self.address);
        stream.write_all(format!("{head}Content-Type: application/json\r\n\r\n{body}").as_bytes()).unwrap();
        stream
    }

    fn health(&self) -> String {
        rest(self.open("GET /health", ""))
    }
}

fn rest(mut stream: TcpStream) -> String {
    let mut text = String::new();
    let _ = stream.read_to_string(&mut text);
    text
}

#[test]
fn a_lost_device_ends_every_stream_with_its_reason() {
    let fault = env::temp_dir().join(format!("selkie-fault-{}", std::process::id()));
    let _ = fs::remove_file(&fault);
    let mut server = Server::start(&fault, false);
    let messages = r#""messages": [{"role": "user", "content": "Tell me a story."}]"#;
    let mut streams = [
        ("/v1/completions", format!(r#"{{"prompt": "Once", "stream": true, {ENDLESS}}}"#)),
        ("/v1/chat/completions", format!(r#"{{{messages}, "stream": true, {ENDLESS}}}"#)),
        ("/v1/messages", format!(r#"{{{messages}, "stream": true, {ENDLESS}}}"#)),
        ("/v1/responses", r#"{"input": "Tell me", "stream": true, "ignore_eos": true}"#.to_owned()),
    ]
    .map(|(path, body)| (path, server.open(&format!("POST {path}"), &body)));
    for (_, stream) in &mut streams {
        stream.read_exact(&mut [0; 300]).unwrap();
    }
    let whole = server.open("POST /v1/completions", &format!(r#"{{"prompt": "Once", {ENDLESS}}}"#));
    server.wait("GET /metrics", "num_requests_running{model_name=\"demo\",engine=\"0\"} 5\n");
    fs::write(&fault, "").unwrap();
    for (path, stream) in streams {
        let text = rest(stream);
        assert!(text.contains("device error in matmul: the device was lost"), "{path}: {text}");
    }
    let text = rest(whole);
    assert!(text.starts_with("HTTP/1.1 500") && text.contains("the device was lost"), "{text}");
    let text = server.health();
    assert!(text.starts_with("HTTP/1.1 503") && text.contains("the device was lost"), "{text}");
    let text = rest(server.open("POST /v1/completions", r#"{"prompt": "Once"}"#));
    assert!(text.starts_with("HTTP/1.1 503"), "{text}");
    assert_eq!(server.child.wait().unwrap().code(), Some(1));
    fs::remove_file(&fault).unwrap();
}

#[test]
fn a_rank_that_panics_ends_the_service() {
    let fault = env::temp_dir().join(format!("selkie-rank-fault-{}", std::process::id()));
    let _ = fs::remove_file(&fault);
    let mut server = Server::start(&fault, true);
    let mut stream =
        server.open("POST /v1/completions", &format!(r#"{{"prompt": "Once", "stream": true, {ENDLESS}}}"#));
    stream.read_exact(&mut [0; 300]).unwrap();
    let whole = server.open("POST /v1/completions", &format!(r#"{{"prompt": "Once", {ENDLESS}}}"#));
    server.wait("GET /metrics", "num_requests_running{model_name=\"demo\",engine=\"0\"} 2\n");
    fs::write(&fault, "").unwrap();
    let start = Instant::now();
    for stream in [stream, whole] {
        let text = rest(stream);
        assert!(text.contains("rank 1: it panicked"), "{text}");
    }
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    for text in [server.health(), rest(server.open("POST /v1/completions", r#"{"prompt": "Once"}"#))] {
        assert!(text.starts_with("HTTP/1.1 503") && text.contains("rank 1: it panicked"), "{text}");
    }
    assert_eq!(server.child.wait().unwrap().code(), Some(1));
    // Probes are told for 4 s why, then the process ends.
    assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
    fs::remove_file(&fault).unwrap();
}
