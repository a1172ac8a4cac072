//! Runs the real binary.

#![allow(dead_code, reason = "every test binary uses a part of this")]

use std::{
    fs,
    io::{BufRead, BufReader, ErrorKind, Write},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::Arc,
};

use selkie_core::{checkpoint::Checkpoint, source::Dir};
use serde_json::{Map, Value, json};

/// The binary, on the CPU and without the caller's settings.
pub fn selkie() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_selkie"));
    command.env_remove("SELKIE_LOG").env_remove("SELKIE_MODEL").env_remove("RUST_BACKTRACE").stdin(Stdio::null());
    command.env("XDG_CONFIG_HOME", Path::new(env!("CARGO_TARGET_TMPDIR")).join("no-settings"));
    command
}

/// Runs it with `args`.
pub fn run(args: &[&str]) -> Output {
    selkie().args(args).output().unwrap()
}

/// Runs it with `args` and a text on standard input.
pub fn run_with_input(args: &[&str], input: &str) -> Output {
    let mut command = selkie();
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let written = child.stdin.take().unwrap().write_all(input.as_bytes());
    // A program that refuses its arguments may end before it reads anything.
    assert!(written.is_ok() || written.is_err_and(|e| e.kind() == ErrorKind::BrokenPipe));
    child.wait_with_output().unwrap()
}

/// Starts a server, which prints its address first.
pub fn listening(command: &mut Command) -> (Child, SocketAddr) {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim().strip_prefix("http://").and_then(|l| l.strip_suffix('/')).unwrap().parse().unwrap();
    (child, address)
}

/// Standard output of a run that must succeed.
pub fn stdout(out: Output) -> String {
    assert!(out.status.success(), "{}\n{}", out.status, String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

/// Standard error of a run.
pub fn stderr(out: &Output) -> String {
    String::from_utf8(out.stderr.clone()).unwrap()
}

/// A file of the repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// JSON from a file of the repository.
pub fn json(path: impl AsRef<Path>) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// An empty directory of this test, removed when it is dropped.
pub struct TempDir(PathBuf);

impl TempDir {
    /// `name` must be unique among the tests of a binary.
    pub fn new(name: &str) -> Self {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }

    /// A path in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// A path in it as an argument.
    pub fn arg(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    /// The directory itself as an argument.
    pub fn dir(&self) -> &str {
        self.0.to_str().unwrap()
    }

    /// Writes a file.
    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        fs::write(self.path(name), content).unwrap();
        self.arg(name)
    }

    /// The names of its files.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(&self.0).unwrap().map(|f| f.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The files of a model that have its configuration and its words.
pub const WORDS: [&str; 4] = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"];

/// The weights of the demo model as a safetensors file: matrices in bf16, the rest in f32.
pub fn demo_safetensors() -> Vec<u8> {
    let dir = Arc::new(Dir::open(repository("models/demo")).unwrap());
    let checkpoint = pollster::block_on(Checkpoint::open(dir)).unwrap();
    let (mut header, mut data) = (Map::new(), Vec::new());
    for name in checkpoint.names() {
        let shape = &checkpoint.info(name).unwrap().shape;
        let raw = pollster::block_on(checkpoint.get(name, shape)).unwrap();
        let (start, values) = (data.len(), raw.dtype.to_f32(&raw.bytes));
        let dtype = if shape.len() > 1 { "BF16" } else { "F32" };
        match dtype {
            "F32" => values.iter().for_each(|x| data.extend(x.to_le_bytes())),
            _ => values.iter().for_each(|x| data.extend(half::bf16::from_f32(*x).to_le_bytes())),
        }
        header.insert(name.into(), json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]}));
    }
    let header = Value::from(header).to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}

/// A copy of a model directory of the repository, to be damaged.
pub fn copy_of(model: &str, name: &str) -> TempDir {
    let dir = TempDir::new(name);
    for file in WORDS.into_iter().chain(["model.safetensors", "model.gguf"]) {
        let from = repository(model).join(file);
        if from.exists() {
            fs::copy(from, dir.path(file)).unwrap();
        }
    }
    dir
}

/// Changes a JSON file.
pub fn edit_json(dir: &TempDir, file: &str, edit: impl FnOnce(&mut Value)) {
    let mut value = json(dir.path(file));
    edit(&mut value);
    dir.write(file, value.to_string());
}

/// Changes the header of a safetensors file; its data stays.
pub fn edit_header(dir: &TempDir, edit: impl FnOnce(&mut Value)) {
    let bytes = fs::read(dir.path("model.safetensors")).unwrap();
    let (length, rest) = bytes.split_at(8);
    let length = u64::from_le_bytes(length.try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&rest[..length]).unwrap();
    edit(&mut header);
    let header = header.to_string();
    let mut changed = (header.len() as u64).to_le_bytes().to_vec();
    changed.extend(header.as_bytes());
    changed.extend(&rest[length..]);
    dir.write("model.safetensors", changed);
}
