//! A device that fails while streams run, seen over HTTP. The server is a process of its own: its exit code counts.

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
    model_dir::ModelFiles,
    session::{Facts, Model, Text, load},
};

use super::{
    app::{App, Limits},
    live, runtime,
};
use crate::{args::ServeArgs, embedded, interrupt::Interrupt};

#[path = "../../core/tests/all/wrapped.rs"]
mod wrapped;

/// The device fails as soon as the file that this names exists.
const FAULT: &str = "SELKIE_TEST_FAULT";
const ENDLESS: &str = r#""max_tokens": 8000, "ignore_eos": true"#;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: ServeArgs,
}

fn broken(fault: PathBuf) -> selkie_core::Result<Model> {
    let files = pollster::block_on(ModelFiles::open(Arc::new(embedded::DEMO), || 0))?;
    let text = Text::new(&files)?;
    Model::spawn(text, move || {
        let fails = move || match fault.exists() {
            true => Err(Error::Device { op: "matmul".into(), why: "the device was lost".into() }),
            false => Ok(()),
        };
        let inner = CpuBackend::new();
        let caps = inner.caps().clone();
        let backend = wrapped::Wrapped { inner, caps, polls: 0, before: Box::new(fails) };
        pollster::block_on(async {
            let engine = load(backend, &files, &EngineOptions::default(), &mut |_| {}).await?;
            Ok((Facts::new(&files, &engine).await?, Box::new(engine) as Box<dyn AnyEngine>))
        })
    })
}

#[test]
#[ignore = "it is the server of the test below"]
fn server() {
    let Some(fault) = env::var_os(FAULT) else { return };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    println!("\nhttp://{}", listener.local_addr().unwrap());
    let limits = Limits { body: 1 << 20, state: 1 << 20, answer: Duration::from_secs(60) };
    let app = Arc::new(App::new(vec!["demo".into()], 16, limits));
    let line = Line::parse_from(["serve"]);
    let interrupt = Interrupt::listen().unwrap();
    let load = move || Ok(broken(fault.into())?);
    let ended = runtime().unwrap().block_on(live(app, listener, &line.args, interrupt, load));
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
    fn start(fault: &Path) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
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
    let mut server = Server::start(&fault);
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
