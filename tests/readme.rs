//! README's commands, as typed and in order. The network is a server that speaks the hub's protocol and has the demo
//! model under the name that README uses. Cargo is a script that starts the program under test.

#![cfg(unix)]

mod binary;
#[path = "hub/server.rs"]
#[allow(dead_code, reason = "the tests of the hub use all of it")]
mod server;

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    process::Command,
};

use binary::*;
use server::{Behaviour, File, Server};

/// Lines that are not run, with the reason. Each must be in README.
const LEFT_OUT: [(&str, &str); 5] = [
    ("cargo test --release", "this test is a part of it"),
    ("rustup target add wasm32-unknown-unknown", "changes the machine"),
    ("web/build", "takes minutes; CI runs it by itself"),
    ("selkie serve", "serves until it is ended; tests/serve.rs tries it, and tests/clients the lines of Python"),
    ("selkie web", "serves until it is ended; tests/web.rs tries it"),
];
/// The model that README fetches.
const MODEL: &str = "ibm-granite/granite-4.0-h-350m";
/// A substitute for `cargo run` and `cargo install`. Anything else fails.
const CARGO: &str = r#"#!/bin/sh
case "$*" in
  "install --path .") exit 0 ;;
  "run --release -- "*) shift 3; exec selkie "$@" ;;
esac
echo "the test does not know: cargo $*" >&2
exit 1
"#;

/// The lines of the blocks for a shell, without comments.
fn commands(text: &str) -> Vec<String> {
    let blocks = text.split("```sh\n").skip(1).map(|block| block.split("```").next().unwrap());
    let code = |line: &str| line.split("  #").next().unwrap().trim().to_owned();
    blocks.flat_map(str::lines).map(code).filter(|line| !line.is_empty()).collect()
}

fn hub() -> Server {
    let mut behaviour = Behaviour::default();
    let words = WORDS.map(|file| (file, fs::read(repository("models/demo").join(file)).unwrap()));
    for (file, bytes) in words.into_iter().chain([("model.safetensors", demo_safetensors())]) {
        let large = file.ends_with(".safetensors");
        behaviour.files.insert((MODEL.into(), "main".into(), file.into()), File { bytes, large });
    }
    Server::start(behaviour)
}

#[test]
fn the_commands_of_the_readme_run_as_typed() {
    let (home, server) = (TempDir::new("readme"), hub());
    fs::create_dir(home.path("bin")).unwrap();
    symlink(env!("CARGO_BIN_EXE_selkie"), home.path("bin/selkie")).unwrap();
    let cargo = home.write("bin/cargo", CARGO);
    fs::set_permissions(cargo, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", home.arg("bin"), std::env::var("PATH").unwrap());

    let lines = commands(&fs::read_to_string(repository("README.md")).unwrap());
    for (line, why) in LEFT_OUT {
        assert!(lines.iter().any(|l| l == line), "README has no line `{line}` any more ({why})");
    }
    let run: Vec<&String> = lines.iter().filter(|line| !LEFT_OUT.iter().any(|(left, _)| left == line)).collect();
    assert!(run.len() >= 10, "{run:?}");
    for line in run {
        let out = Command::new("bash")
            .args(["-c", line])
            .current_dir(home.dir())
            .env_clear()
            .envs([("PATH", &*path), ("HOME", home.dir()), ("HF_ENDPOINT", &server.endpoint())])
            // A repository for the line that reads its log.
            .env("GIT_DIR", repository(".git"))
            .stdin(std::process::Stdio::null())
            .output()
            .unwrap();
        assert!(out.status.success(), "{line}\n{}{}", String::from_utf8_lossy(&out.stdout), stderr(&out));
        if line.contains("What is 17 + 25?") {
            assert_eq!(String::from_utf8_lossy(&out.stdout), "17 + 25 = 42.\n", "{line}");
        }
    }
    assert_eq!(json(home.path("answers.jsonl"))["finish_reason"], "length");
}

#[test]
fn the_examples_of_the_guide_are_accepted() {
    let guide = fs::read_to_string(repository("docs/guide.md")).unwrap();
    let blocks: Vec<&str> = guide.split("```json\n").skip(1).map(|b| b.split("```").next().unwrap()).collect();
    let [own, openai, settings] = blocks[..] else { panic!("{} blocks of JSON", blocks.len()) };
    let out = run_with_input(&["batch", "-", "--backend", "cpu"], &format!("{own}{openai}"));
    let answers = stdout(out);
    assert_eq!(answers.lines().count(), 4, "{answers}");
    let dir = TempDir::new("guide");
    fs::create_dir(dir.path("selkie")).unwrap();
    dir.write("selkie/config.json", settings);
    let shown = stdout(selkie().arg("config").env("XDG_CONFIG_HOME", dir.dir()).output().unwrap());
    assert!(shown.contains("granite-4.0-h-350m") && shown.contains("8GiB"), "{shown}");
}
