//! `batch`: answers survive the end of a run, however it ends, and outputs destroy nothing.

use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::binary::*;

/// Time limit for anything, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn batch(args: &[&str]) -> Command {
    let mut command = selkie();
    command.arg("batch").args(args).args(["--backend", "cpu"]);
    command
}

/// A file of `n` requests with ids, of which those in `long` take long.
fn requests(dir: &TempDir, n: usize, long: impl Fn(usize) -> bool) -> String {
    let line = |i| {
        let tokens = if long(i) { 4000 } else { 2 };
        // Without a stop the demo model continues to the limit.
        format!("{}\n", json!({"id": format!("r{i}"), "prompt_ids": [1, 3, 45 + i], "max_tokens": tokens}))
    };
    dir.write("in.jsonl", (0..n).map(line).collect::<String>())
}

fn answers(path: impl AsRef<Path>) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'), "{text}");
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Waits until `path` has `lines` lines.
fn wait_for(path: &Path, lines: usize) {
    let start = Instant::now();
    while fs::read_to_string(path).unwrap_or_default().lines().count() < lines {
        assert!(start.elapsed() < PATIENCE, "{} has no {lines} lines", path.display());
        thread::sleep(Duration::from_millis(5));
    }
}

fn signal(child: &Child, name: &str) {
    assert!(Command::new("kill").args([&format!("-{name}"), &child.id().to_string()]).status().unwrap().success());
}

/// Complete answers are kept, whatever stops the run, and the next run computes only the missing ones.
#[cfg(unix)]
#[test]
fn a_stopped_run_keeps_its_answers_and_is_resumed() {
    for (name, code) in [("INT", Some(130)), ("TERM", Some(143)), ("KILL", None)] {
        let dir = TempDir::new(&format!("attack_stop_{name}"));
        // The first request finishes late, so the others cannot be written in order.
        let input = requests(&dir, 40, |i| i == 0 || i > 20);
        let (out, partial) = (dir.arg("out.jsonl"), dir.path(".out.jsonl.partial"));
        let mut child = batch(&[&input, "-o", &out]).stderr(Stdio::piped()).spawn().unwrap();
        wait_for(&partial, 10);
        signal(&child, name);
        let message = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
        assert_eq!(child.wait().unwrap().code(), code, "{message}");
        assert_eq!(dir.names(), [".out.jsonl.partial", "in.jsonl"]);
        let kept = answers(&partial).len();
        assert!((10..40).contains(&kept));
        if code.is_some() {
            assert!(message.contains(&format!("interrupted; {kept} of 40 requests are answered")), "{message}");
            assert!(message.contains(".out.jsonl.partial; --resume goes on"), "{message}");
        }

        // A new run would lose them.
        let again = batch(&[&input, "-o", &out]).output().unwrap();
        assert_eq!(again.status.code(), Some(2));
        assert!(stderr(&again).contains(&format!("{kept} answers of a run")), "{}", stderr(&again));

        // A line that was being written at a power failure does not count.
        let mut torn = fs::read(&partial).unwrap();
        torn.extend(br#"{"id":"r39","text":"half a"#);
        fs::write(&partial, torn).unwrap();
        let input = requests(&dir, 40, |_| false);
        let resumed = batch(&[&input, "-o", &out, "--resume"]).output().unwrap();
        assert!(stderr(&resumed).contains(&format!("{kept} answered before")), "{}", stderr(&resumed));
        assert_eq!(dir.names(), ["in.jsonl", "out.jsonl"]);
        let ids: Vec<Value> = answers(&out).iter().map(|a| a["id"].clone()).collect();
        assert_eq!(ids, (0..40).map(|i| json!(format!("r{i}"))).collect::<Vec<_>>());
    }
}

#[cfg(unix)]
#[test]
fn a_second_signal_ends_at_once() {
    let dir = TempDir::new("attack_second");
    // Text that takes seconds to encode, in one call that checks no flag.
    let long = "Hello <| world. ".repeat(1 << 19);
    let input = dir.write("in.jsonl", format!("{}\n", json!({"messages": [{"role": "user", "content": long}]})));
    let mut child = batch(&[&input, "-o", &dir.arg("out.jsonl")]).stderr(Stdio::null()).spawn().unwrap();
    let start = Instant::now();
    while !dir.path(".out.jsonl.partial").exists() && child.try_wait().unwrap().is_none() {
        assert!(start.elapsed() < PATIENCE);
        thread::sleep(Duration::from_millis(5));
    }
    signal(&child, "INT");
    thread::sleep(Duration::from_millis(200));
    let second = Instant::now();
    if child.try_wait().unwrap().is_none() {
        signal(&child, "INT");
    }
    let status = child.wait().unwrap();
    assert!(second.elapsed() < Duration::from_secs(2), "{:?}", second.elapsed());
    // If all lines are refused immediately, there is nothing to interrupt.
    assert!(matches!(status.code(), Some(130 | 1)), "{status}");
}

#[test]
fn failed_lines_are_told_and_tried_again() {
    let dir = TempDir::new("attack_retry");
    let good = json!({"prompt": "Hello", "max_tokens": 2});
    let bad = "{\"id\": 7, \"prompt\": 5}\n".repeat(5);
    let input = dir.write("in.jsonl", format!("{good}\n\n{bad}{good}\n"));
    let out = dir.arg("out.jsonl");
    let first = batch(&[&input, "-o", &out]).output().unwrap();
    let message = stderr(&first);
    assert_eq!(first.status.code(), Some(1));
    for part in ["\nline 3: ", "\nline 4: ", "\nline 5: ", "\nand 2 more, see "] {
        assert!(format!("\n{message}").contains(part), "{part:?} in {message}");
    }
    assert!(!message.contains("line 6"), "{message}");
    // Lines without an id, or with equal ids, are identified by number and content.
    let input = dir.write(
        "in.jsonl",
        format!("{good}\n\n{}{good}\n", "{\"id\": 7, \"prompt\": \"a\", \"max_tokens\": 1}\n".repeat(5)),
    );
    let second = batch(&[&input, "-o", &out, "--resume"]).output().unwrap();
    assert!(stderr(&second).contains("7 requests · 2 answered before · 0 failed"), "{}", stderr(&second));
    let lines: Vec<u64> = answers(&out).iter().map(|a| a["line"].as_u64().unwrap()).collect();
    assert_eq!(lines, [1, 3, 4, 5, 6, 7, 8]);
    let third = batch(&[&input, "-o", &out, "--resume"]).output().unwrap();
    assert!(stderr(&third).contains("all 7 requests are answered"), "{}", stderr(&third));
    // Another line in the place of one that was answered.
    let input = dir.write("in.jsonl", format!("{}\n", json!({"prompt": "Hi", "max_tokens": 2})));
    let other = batch(&[&input, "-o", &out, "--resume"]).output().unwrap();
    assert_eq!(other.status.code(), Some(2));
    assert!(stderr(&other).contains("other requests"), "{}", stderr(&other));
    assert_eq!(answers(&out).len(), 7);
}

#[test]
fn answers_in_the_order_of_completion() {
    let dir = TempDir::new("attack_unordered");
    let input = requests(&dir, 4, |i| i == 0);
    let input = dir.write("in.jsonl", fs::read_to_string(input).unwrap().replace("4000", "60"));
    for (more, first) in [(&["--unordered"][..], "r1"), (&[], "r0")] {
        for out in [dir.arg("out.jsonl"), "-".into()] {
            let args: Vec<&str> = [&input, "-o", &out].into_iter().chain(more.iter().copied()).collect();
            let done = batch(&args).output().unwrap();
            let text = if out == "-" { stdout(done) } else { fs::read_to_string(&out).unwrap() };
            let ids: Vec<Value> =
                text.lines().map(|l| serde_json::from_str::<Value>(l).unwrap()["id"].clone()).collect();
            assert_eq!((ids.len(), &ids[0]), (4, &json!(first)), "{more:?} {out}");
        }
    }
}

#[cfg(target_os = "linux")]
#[test]
fn statistics_that_cannot_be_written_cost_no_answers() {
    let dir = TempDir::new("attack_stats");
    let input = requests(&dir, 2, |_| false);
    let out = batch(&[&input, "-o", &dir.arg("out.jsonl"), "--stats", "/dev/full"]).output().unwrap();
    assert_eq!(out.status.code(), Some(1));
    assert!(stderr(&out).contains("/dev/full"), "{}", stderr(&out));
    assert_eq!(answers(dir.path("out.jsonl")).len(), 2);
}

/// A file system with no room left is a limit on the size of files here.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_keeps_whole_answers() {
    let dir = TempDir::new("attack_full");
    let input = requests(&dir, 20, |_| false);
    let script = "ulimit -f 4; trap '' XFSZ; exec \"$0\" batch \"$1\" -o \"$2\" --backend cpu";
    let args = ["-c", script, env!("CARGO_BIN_EXE_selkie"), &input, &dir.arg("out.jsonl")];
    let out = Command::new("bash").args(args).output().unwrap();
    let message = stderr(&out);
    assert_eq!(out.status.code(), Some(1), "{message}");
    let kept = answers(dir.path(".out.jsonl.partial")).len();
    assert!(kept > 0 && message.contains(&format!("{kept} of 20 requests are answered")), "{message}");
    let out = batch(&[&input, "-o", &dir.arg("out.jsonl"), "--resume"]).output().unwrap();
    assert!(out.status.success(), "{}", stderr(&out));
    assert_eq!(answers(dir.path("out.jsonl")).len(), 20);
}

#[test]
fn outputs_never_land_on_an_input() {
    let dir = TempDir::new("attack_onto");
    let input = requests(&dir, 2, |_| false);
    let before = fs::read_to_string(&input).unwrap();
    #[cfg(unix)]
    std::os::unix::fs::symlink("in.jsonl", dir.path("link")).unwrap();
    #[cfg(not(unix))]
    fs::write(dir.path("link"), "").unwrap();
    let partial = dir.write(".x.partial", &before);
    for args in [
        vec![&*input, "-o", &input],
        #[cfg(unix)]
        vec![&input, "-o", &dir.arg("link")],
        vec![&input, "-o", &dir.arg("x"), "--stats", &input],
        vec![&input, "-o", &dir.arg("x"), "--stats", &partial],
        vec![&partial, "-o", &dir.arg("x")],
    ] {
        let out = batch(&args).output().unwrap();
        assert_eq!(out.status.code(), Some(2), "{args:?}: {}", stderr(&out));
        assert!(stderr(&out).contains("give each a file of its own"), "{}", stderr(&out));
    }
    #[cfg(target_os = "linux")]
    {
        let stdin = fs::File::open(&input).unwrap();
        let out = batch(&["-", "-o", &input]).stdin(stdin).output().unwrap();
        assert_eq!(out.status.code(), Some(2), "{}", stderr(&out));
    }
    let ids = dir.write("ids.json", "[1, 2]");
    assert_eq!(run(&["logits", "--ids", &ids, "--out", &ids]).status.code(), Some(2));
    assert_eq!((fs::read_to_string(&input).unwrap(), &*fs::read_to_string(&ids).unwrap()), (before, "[1, 2]"));
}

#[cfg(unix)]
#[test]
fn an_output_keeps_its_mode_and_its_links() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let dir = TempDir::new("attack_mode");
    let input = requests(&dir, 2, |i| i == 0);
    let input = dir.write("in.jsonl", fs::read_to_string(input).unwrap().replace("4000", "20"));
    let link = dir.arg("link");
    fs::create_dir(dir.path("there")).unwrap();
    symlink("there/out.jsonl", dir.path("link")).unwrap();
    for more in [&[][..], &["--unordered"]] {
        let private = dir.write("there/out.jsonl", "");
        fs::set_permissions(&private, fs::Permissions::from_mode(0o600)).unwrap();
        let args: Vec<&str> = [&input, "-o", &link].into_iter().chain(more.iter().copied()).collect();
        stdout(batch(&args).output().unwrap());
        assert_eq!(fs::metadata(&private).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(fs::symlink_metadata(dir.path("link")).unwrap().is_symlink());
        assert_eq!(answers(&private).len(), 2);
        // A link to a file that is not there yet.
        fs::remove_file(&private).unwrap();
        stdout(batch(&args).output().unwrap());
        assert_eq!(answers(&private).len(), 2);
    }
    assert_eq!(dir.names(), ["in.jsonl", "link", "there"]);
}

#[cfg(target_os = "linux")]
#[test]
fn inputs_that_never_end_are_refused() {
    let dir = TempDir::new("attack_endless");
    let zero = || fs::File::open("/dev/zero").unwrap();
    let out = batch(&["-", "-o", "-"]).stdin(zero()).output().unwrap();
    assert!(stderr(&out).contains("standard input: more than 1.0 GiB"), "{}", stderr(&out));
    assert!(Command::new("mkfifo").arg(dir.path("pipe")).status().unwrap().success());
    for config in ["/dev/zero", &dir.arg("pipe")] {
        let out = run(&["bench", "model", "--config", config]);
        assert_eq!(out.status.code(), Some(1));
        assert!(stderr(&out).contains(&format!("{config}: this is no regular file")), "{}", stderr(&out));
    }
    let input = dir.write("in.jsonl", b"{\"prompt\": \"a\xffb\"}\n");
    let out = batch(&[&input, "-o", "-"]).output().unwrap();
    assert!(stderr(&out).contains("line 1: not UTF-8 from byte 14 of the line on"), "{}", stderr(&out));
}
