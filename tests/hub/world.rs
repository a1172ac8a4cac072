//! A home of Hugging Face's tools with a server, and repositories for it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use serde_json::Value;

use crate::{binary::*, server::*};

pub const DEMO: &str = "owner/demo";
pub const WEIGHTS: &str = "model.safetensors";
pub const QUESTION: &str = "What is 17 + 25?";

/// Variables that would lead a test to the caller's cache or to the network.
const SETTINGS: [&str; 16] = [
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "XDG_CACHE_HOME",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "HF_TOKEN_PATH",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "SELKIE_MODEL",
];

/// A home of Hugging Face's tools, and a server.
pub struct World {
    pub server: Server,
    pub home: TempDir,
}

impl World {
    pub fn new(name: &str, behaviour: Behaviour) -> Self {
        Self { server: Server::start(behaviour), home: TempDir::new(&format!("hub_{name}")) }
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = selkie();
        for variable in SETTINGS {
            command.env_remove(variable);
        }
        command.env("HF_HOME", self.home.dir()).env("HF_ENDPOINT", self.server.endpoint());
        command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    pub fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// What a run that must fail says; it names every one of `parts`.
    pub fn refused(&self, args: &[&str], parts: &[&str]) -> String {
        let out = self.run(args);
        let said = stderr(&out);
        assert!(!out.status.success(), "{args:?} succeeded: {said}");
        for part in parts {
            assert!(said.contains(part), "{args:?}: no {part:?} in {said}");
        }
        said
    }

    /// What a run that must succeed says on standard error.
    pub fn says(&self, args: &[&str]) -> String {
        let out = self.run(args);
        assert!(out.status.success(), "{args:?}: {}", stderr(&out));
        stderr(&out)
    }

    pub fn repo(&self, name: &str) -> PathBuf {
        self.home.path("hub").join(format!("models--{}", name.replace('/', "--")))
    }

    pub fn commit(&self, name: &str, revision: &str) -> String {
        commit(&self.server.set(), name, revision).unwrap()
    }

    pub fn snapshot(&self, name: &str, revision: &str) -> PathBuf {
        self.repo(name).join("snapshots").join(self.commit(name, revision))
    }

    pub fn blobs(&self, name: &str) -> Vec<String> {
        names(&self.repo(name).join("blobs"))
    }

    pub fn list(&self) -> Vec<Value> {
        let listed = stdout(self.run(&["list", "--json"]));
        serde_json::from_str::<Value>(&listed).unwrap().as_array().unwrap().clone()
    }
}

pub fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).into_iter().flatten().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

pub fn put(behaviour: &mut Behaviour, name: &str, revision: &str, path: &str, bytes: Vec<u8>) {
    let large = path.ends_with(".safetensors") || path.ends_with(".gguf") || path.ends_with(".bin");
    behaviour.files.insert((name.into(), revision.into(), path.into()), File { bytes, large });
}

/// The demo model as a repository, with files that nobody needs.
pub fn demo() -> Behaviour {
    let mut b = Behaviour::default();
    for file in WORDS {
        put(&mut b, DEMO, "main", file, fs::read(repository("models/demo").join(file)).unwrap());
    }
    put(&mut b, DEMO, "main", WEIGHTS, demo_safetensors());
    put(&mut b, DEMO, "main", "README.md", b"# Demo".to_vec());
    put(&mut b, DEMO, "main", "pytorch_model.bin", vec![7; 1000]);
    b
}

/// A repository of the demo's configuration and weights that no engine reads, which is enough for `pull`.
pub fn made_up(weights: Vec<u8>) -> Behaviour {
    let mut b = Behaviour::default();
    put(&mut b, DEMO, "main", "config.json", fs::read(repository("models/demo/config.json")).unwrap());
    put(&mut b, DEMO, "main", WEIGHTS, weights);
    b
}

/// Bytes that differ from place to place.
pub fn bytes(count: usize, seed: u64) -> Vec<u8> {
    (0..count as u64).map(|i| ((i ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8).collect()
}

pub fn weights_of(seen: &[Seen]) -> Vec<&Seen> {
    seen.iter().filter(|s| s.path.contains(WEIGHTS)).collect()
}
