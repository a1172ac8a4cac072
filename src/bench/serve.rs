//! `selkie bench serve`: what HTTP, idle connections and structured output cost, against the same requests without them.
//!
//! One process has the model, the server and a load generator. The cases take turns, each round with the same requests and an
//! empty prefix cache, so their rates can be compared. The generator is one thread, whose processor time is reported apart.

use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use selkie_core::{model_dir::ModelFiles, session::Model};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use self::client::{Connection, Told, direct};
use super::{Random, SEED};
use crate::{
    args::BenchServeArgs,
    failure::{Failure, Outcome},
    model,
    serve::Local,
    terminal::{Output, Stage, size, thousands},
};

mod client;
mod report;
mod words;

/// Connections that the server takes besides those of clients and idle ones.
const SPARE: usize = 16;
/// How long the server has to see that idle connections are closed.
const CLOSING: Duration = Duration::from_millis(300);

/// Measures and prints.
pub fn run(args: &BenchServeArgs) -> Outcome {
    let requests = args.requests.unwrap_or(if args.schema { args.clients } else { 4 * args.clients });
    let prompts = requests.saturating_mul(args.shared_tokens.saturating_add(args.own_tokens));
    let tokens = prompts.saturating_add(requests.saturating_mul(args.decode_tokens));
    super::check_tokens(tokens, "--requests, --shared-tokens, --own-tokens and --decode-tokens")?;
    let mut files = super::open(&args.target)?;
    let invented = give_words(&mut files)?;
    let options = model::engine_options(&args.pool, args.clients);
    let model = model::load(&args.target.model.backend, &files, &options)?;
    // The process has both ends of each.
    let connections = 2 * (args.clients + args.idle_connections) + SPARE;
    let server = Local::start(model.clone(), requests, connections)?;
    let load = Arc::new(Load::new(args, requests, model.facts().vocab, server.address));
    let cases = measure(args, &model, &load)?;
    let report = report::Report { args, requests, files: &files, invented, facts: model.facts(), cases };
    let mut out = Output::new();
    if args.target.json { out.json(&report.json()) } else { out.text(&report.text()) }
}

/// Gives a model without a tokenizer a made-up one; whether it did.
fn give_words(files: &mut Arc<ModelFiles>) -> Outcome<bool> {
    if files.tokenizer.is_some() {
        return Ok(false);
    }
    let vocab = files.config.usize("vocab_size")?;
    let Some(own) = Arc::get_mut(files) else { return Ok(false) };
    own.tokenizer = Some(Arc::new(words::made_up(vocab)?));
    Ok(true)
}

/// How a round's requests are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    /// Straight to the model, without HTTP.
    Direct,
    Http,
    /// Over HTTP beside idle connections.
    Idle,
    /// Over HTTP, each answer held to a schema.
    Schema,
}

/// What one way gave, in all rounds but the first.
struct Case {
    way: Way,
    rounds: Vec<Round>,
    /// Of idle connections: resident bytes of the process for each, the most of any round.
    bytes: Option<u64>,
}

/// One round.
struct Round {
    seconds: f64,
    /// Processor time of the load generator.
    generator: Option<f64>,
    /// The answers, with the time of their requests.
    told: Vec<(Instant, Told)>,
}

/// The requests of a round.
struct Load {
    prompts: Vec<Vec<u32>>,
    /// The same as bytes for a connection.
    plain: Vec<Vec<u8>>,
    /// And with a schema.
    structured: Vec<Vec<u8>>,
    clients: usize,
    tokens: usize,
    address: SocketAddr,
}

impl Load {
    fn new(args: &BenchServeArgs, requests: usize, vocab: usize, address: SocketAddr) -> Self {
        let mut random = Random(SEED);
        let shared = random.ids(args.shared_tokens, vocab);
        let mut prompt = |_| [&shared[..], &random.ids(args.own_tokens, vocab)].concat();
        let prompts: Vec<Vec<u32>> = (0..requests).map(&mut prompt).collect();
        let bytes = |prompt: &Vec<u32>, format: Value| {
            let body = json!({ "prompt": prompt, "max_tokens": args.decode_tokens, "temperature": 0, "ignore_eos": true,
                "stream": !args.no_stream, "return_token_ids": true, "response_format": format });
            let body = body.to_string();
            let head =
                format!("POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n");
            format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
        };
        let plain = prompts.iter().map(|prompt| bytes(prompt, json!({ "type": "text" }))).collect();
        let structured = prompts.iter().filter(|_| args.schema).map(|prompt| bytes(prompt, schema())).collect();
        Self { prompts, plain, structured, clients: args.clients, tokens: args.decode_tokens, address }
    }

    /// Asks and reads the requests that are left, one after another.
    async fn client(self: Arc<Self>, model: Model, way: Way, next: Arc<AtomicUsize>) -> Result<Answers, String> {
        let mut connection = match way {
            Way::Direct => None,
            _ => Some(Connection::open(self.address).await?),
        };
        let mut all = Vec::new();
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(prompt) = self.prompts.get(i) else { return Ok(all) };
            let asked = Instant::now();
            let told = match &mut connection {
                None => direct(&model, prompt, self.tokens).await?,
                Some(connection) if way == Way::Schema => connection.ask(&self.structured[i]).await?,
                Some(connection) => connection.ask(&self.plain[i]).await?,
            };
            if told.ids.len() != self.tokens {
                return Err(format!("an answer has {} tokens instead of {}", told.ids.len(), self.tokens));
            }
            all.push((i, asked, told));
        }
    }

    /// Runs all clients on this thread, and returns when the last answer is complete.
    fn round(self: &Arc<Self>, model: &Model, way: Way) -> Result<Round, String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
        let runtime = runtime.map_err(|e| format!("the load generator: {e}"))?;
        let (before, start) = (processor_time(), Instant::now());
        let all = runtime.block_on(async {
            let (mut clients, next) = (JoinSet::new(), Arc::new(AtomicUsize::new(0)));
            (0..self.clients).for_each(|_| {
                clients.spawn(self.clone().client(model.clone(), way, next.clone()));
            });
            let mut all = Vec::new();
            while let Some(answers) = clients.join_next().await {
                all.extend(answers.map_err(|e| format!("the load generator: {e}"))??);
            }
            Ok::<_, String>(all)
        });
        let mut all: Answers = all?;
        let seconds = start.elapsed().as_secs_f64();
        let generator = before.zip(processor_time()).map(|(before, after)| (after - before).as_secs_f64());
        all.sort_by_key(|(i, ..)| *i);
        Ok(Round { seconds, generator, told: all.into_iter().map(|(_, asked, told)| (asked, told)).collect() })
    }
}

/// Answers, with the numbers and the times of their requests.
type Answers = Vec<(usize, Instant, Told)>;

/// A structure that no answer of a benchmark completes.
fn schema() -> Value {
    let person = json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "maxLength": 40 },
            "age": { "type": "integer", "minimum": 0, "maximum": 130 },
            "kind": { "enum": ["adult", "child", "unknown"] },
            "tags": { "type": "array", "items": { "type": "string", "maxLength": 20 }, "maxItems": 4 },
        },
        "required": ["name", "age", "kind", "tags"],
        "additionalProperties": false,
    });
    let people = json!({ "type": "array", "items": person, "minItems": 100_000 });
    json!({ "type": "json_schema", "json_schema": { "name": "people", "schema": people } })
}

fn measure(args: &BenchServeArgs, model: &Model, load: &Arc<Load>) -> Outcome<Vec<Case>> {
    let wanted = [
        (Way::Direct, true),
        (Way::Http, !args.no_http),
        (Way::Idle, args.idle_connections > 0),
        (Way::Schema, args.schema),
    ];
    let case = |(way, _)| Case { way, rounds: Vec::new(), bytes: None };
    let mut cases: Vec<Case> = wanted.into_iter().filter(|(_, wanted)| *wanted).map(case).collect();
    // The first round is a warm-up.
    for round in 0..=args.runs {
        let _stage = Stage::begin(format!("round {round} of {}", args.runs));
        // So that no case is always the first.
        cases.rotate_left(1);
        for case in &mut cases {
            model.with(|engine| engine.clear_cache()).wait().map_err(Failure::Shared)?;
            let before = resident();
            let idle = (case.way == Way::Idle).then(|| idle(load.address, args.idle_connections)).transpose()?;
            let held = resident().zip(before).filter(|_| idle.is_some());
            let held = held.map(|(after, before)| after.saturating_sub(before) / args.idle_connections as u64);
            let done = in_generator(|| load.round(model, case.way))?;
            case.bytes = case.bytes.max(held);
            if idle.is_some() {
                drop(idle);
                thread::sleep(CLOSING);
            }
            if round > 0 {
                case.rounds.push(done);
            }
        }
    }
    cases.sort_by_key(|case| case.way);
    if model.facts().backend == "cpu" {
        check(&cases)?;
    }
    Ok(cases)
}

/// On the CPU, answers do not depend on the way to them.
fn check(cases: &[Case]) -> Outcome {
    let free = || cases.iter().filter(|case| case.way != Way::Schema).flat_map(|case| &case.rounds);
    let ids = |round: &'_ Round| -> Vec<Vec<u32>> { round.told.iter().map(|(_, told)| told.ids.clone()).collect() };
    let first = free().next().map(ids);
    match free().all(|round| Some(ids(round)) == first) {
        true => Ok(()),
        false => Err(Failure::Other("an answer over HTTP differs from the one without".into())),
    }
}

/// Runs the load generator on a thread of its own.
fn in_generator(work: impl FnOnce() -> Result<Round, String> + Send) -> Outcome<Round> {
    let done = thread::scope(|scope| {
        let thread = thread::Builder::new().name("load".into()).spawn_scoped(scope, work);
        thread.map_err(|e| e.to_string())?.join().unwrap_or_else(|_| Err("it met a fault of the program".into()))
    });
    done.map_err(|why| Failure::Other(format!("the load generator: {why}")))
}

/// Connections that have had a request and are silent.
fn idle(address: SocketAddr, count: usize) -> Outcome<Vec<TcpStream>> {
    let open = || {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        stream.write_all(format!("GET /version HTTP/1.1\r\nHost: {address}\r\n\r\n").as_bytes())?;
        let read = stream.read(&mut [0; 1024])?;
        if read > 0 { Ok(stream) } else { Err(std::io::ErrorKind::UnexpectedEof.into()) }
    };
    let all: std::io::Result<Vec<TcpStream>> = (0..count).map(|_| open()).collect();
    all.map_err(|e| Failure::Other(format!("idle connections: {e}; `ulimit -n` may limit them, each needs two")))
}

/// Resident memory of this process in bytes, where the system tells.
fn resident() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let kib: u64 =
        status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}

/// Processor time of this thread, where the system tells. It counts in hundredths of a second.
fn processor_time() -> Option<Duration> {
    let stat = fs::read_to_string("/proc/thread-self/stat").ok()?;
    // The name before this may have spaces.
    let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
    let ticks = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    Some(Duration::from_millis(10 * ticks))
}
