//! `selkie bench prefix --bundle N`: how fast the pages and states of a prompt are saved to a bundle and loaded from it, compared
//! with how fast the folder for temporary files takes and gives the same bytes.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    thread,
    time::Instant,
};

use selkie_core::{
    Error, Result,
    bundle::{Identity, Reader},
    digest::Digest,
    engine::{AnyEngine, EngineOptions, Export, Import},
    state::Realm,
    step::PAGE,
};
use serde_json::{Value, json};

use super::{
    Random, SEED,
    overhead::{first_token, median},
    restore::Folder,
};
use crate::{
    args::BenchPrefixArgs,
    bundle,
    failure::Outcome,
    model,
    terminal::{Output, thousands},
};

/// Measurements of each, after one that is not counted.
const ROUNDS: usize = 5;
/// Bytes that are written or read at a time, as by the server.
const PIECE: usize = 1 << 20;

/// What is measured, in the order of its rows.
const ROWS: [(&str, &str); 5] = [
    ("folder_written", "written to the folder, without the device"),
    ("folder_read", "read there, without the device"),
    ("saved", "saved: from the device into a bundle there"),
    ("loaded", "loaded: checked, and back onto the device"),
    ("handed_over", "from the device through a local connection and the folder onto it"),
];

/// A prompt's bundle, and where it is saved.
struct Bench<'a> {
    engine: Box<dyn AnyEngine>,
    what: Export,
    folder: &'a Path,
    /// Every import is one of a new tenant.
    imports: usize,
}

/// Measures and prints the table for a prompt of `tokens` tokens.
pub fn run(args: &BenchPrefixArgs, tokens: usize) -> Outcome {
    super::check_prompt(tokens, "--bundle")?;
    let files = super::open(&args.target)?;
    // The prompt and all imports stay.
    let copies = 2 + 2 * (ROUNDS + 1);
    let (slots, kv_pages) = (Some(2 * copies), Some((tokens / PAGE + 2) * copies));
    let options = EngineOptions { max_batch: 1, slots, kv_pages, ..EngineOptions::default() };
    let mut engine = model::load_engine(model::backend(&args.target.model.backend)?, &files, &options)?;
    let tokens = Random(SEED).ids(tokens, engine.spec().vocab);
    pollster::block_on(first_token(&mut *engine, tokens.clone()))?;
    // The weights are random, and nobody else reads the bundle.
    let none = || Digest::of(&[]);
    let model = Identity { weights: none(), config: none(), tokenizer: none() };
    let name = "bench".to_owned();
    let what =
        Export { model, name, tokens, ends: vec![], messages: None, realm: Realm::default(), states: 1, from: 0 };
    let folder = Folder::create()?;
    let mut bench = Bench { engine, what, folder: folder.path(), imports: 0 };
    let mut rates = ROWS.map(|_| Vec::new());
    let mut bytes = 0;
    for round in 0..=ROUNDS {
        let seconds;
        (bytes, seconds) = bench.round()?;
        if round > 0 {
            rates.iter_mut().zip(seconds).for_each(|(all, s)| all.push(bytes as f64 / s / 1e9));
        }
    }
    let rates = rates.map(median);
    let mut out = Output::new();
    if args.target.json { out.json(&json(bytes, &rates)) } else { out.text(&text(bytes, &rates)) }
}

impl Bench<'_> {
    /// Bytes of the bundle, and the seconds of each row.
    fn round(&mut self) -> Result<(u64, [f64; ROWS.len()])> {
        let io = |e| Error::io(self.folder.display().to_string(), e);
        let (plain, saved) = (self.folder.join("plain"), self.folder.join("saved"));
        let start = Instant::now();
        self.save(&mut File::create(&saved).map_err(io)?)?;
        let saving = start.elapsed().as_secs_f64();
        let values = fs::read(&saved).map_err(io)?;
        let (writing, reading) = write_and_read(&plain, &values).map_err(io)?;
        let start = Instant::now();
        self.load(&saved)?;
        let loading = start.elapsed().as_secs_f64();
        let start = Instant::now();
        self.hand_over()?;
        let handing = start.elapsed().as_secs_f64();
        // The next round makes its files anew.
        fs::remove_file(&plain).and_then(|()| fs::remove_file(&saved)).map_err(io)?;
        Ok((values.len() as u64, [writing, reading, saving, loading, handing]))
    }

    fn save(&self, out: &mut (dyn Write + Send)) -> Result<()> {
        bundle::export_to(&*self.engine, self.what.clone(), "the bundle", out).map(drop)
    }

    fn load(&mut self, file: &Path) -> Result<()> {
        let file = File::open(file).map_err(|e| Error::io("the bundle", e))?;
        let mut bundle = Reader::open(file, "the bundle")?;
        self.imports += 1;
        let into = Import {
            model: self.what.model.clone(),
            namespace: format!("tenant {}", self.imports),
            exact_only: true,
            pieces: false,
        };
        self.engine.import(&mut bundle, &into)?;
        Ok(())
    }

    /// As one server does for another: what arrives is written to a file, which is checked before anything enters a cache.
    fn hand_over(&mut self) -> Result<()> {
        let arrived = self.folder.join("arrived");
        let io = |e| Error::io("the local connection", e);
        let (mut to, from, file) = line(&arrived).map_err(io)?;
        thread::scope(|scope| {
            let receiver = scope.spawn(|| receive(from, file));
            let sent = self.save(&mut to);
            drop(to);
            let received = receiver.join().expect("it does not panic");
            sent.and_then(|()| received.map_err(io))
        })?;
        self.load(&arrived)?;
        fs::remove_file(&arrived).map_err(io)
    }
}

/// Seconds that the folder takes for these bytes.
fn write_and_read(path: &Path, values: &[u8]) -> io::Result<(f64, f64)> {
    let start = Instant::now();
    let mut file = File::create(path)?;
    values.chunks(PIECE).try_for_each(|piece| file.write_all(piece))?;
    let writing = start.elapsed().as_secs_f64();
    let start = Instant::now();
    let (mut file, mut piece) = (File::open(path)?, vec![0; PIECE]);
    while file.read(&mut piece)? > 0 {}
    Ok((writing, start.elapsed().as_secs_f64()))
}

/// Both ends of a local connection, and a new file.
fn line(arrived: &Path) -> io::Result<(TcpStream, TcpStream, File)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let to = TcpStream::connect(listener.local_addr()?)?;
    Ok((to, listener.accept()?.0, File::create(arrived)?))
}

fn receive(mut from: TcpStream, mut file: File) -> io::Result<()> {
    let mut piece = vec![0; PIECE];
    loop {
        match from.read(&mut piece)? {
            0 => return Ok(()),
            bytes => file.write_all(&piece[..bytes])?,
        }
    }
}

fn text(bytes: u64, rates: &[f64]) -> String {
    let megabytes = thousands(bytes as f64 / 1e6);
    let mut lines = vec![format!("a bundle of {megabytes} MB, GB/s, median of {ROUNDS}:")];
    lines.extend(ROWS.iter().zip(rates).map(|((_, what), rate)| format!("{what:<66} {rate:>7.2}")));
    lines.join("\n") + "\n"
}

fn json(bytes: u64, rates: &[f64]) -> Value {
    let rates: serde_json::Map<_, _> =
        ROWS.iter().zip(rates).map(|((key, _), rate)| ((*key).into(), json!(rate))).collect();
    json!({ "bytes": bytes, "gb_per_s": rates })
}
