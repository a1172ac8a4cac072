//! Models by name, through the real binary and a server that speaks the hub's protocol.

mod binary;
#[path = "hub/server.rs"]
mod server;
#[path = "hub/world.rs"]
mod world;

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use binary::*;
use serde_json::Value;
use server::*;
use world::*;

#[test]
fn a_model_by_name_is_fetched_and_answers() {
    let world = World::new("end_to_end", Behaviour { storage: true, ..demo() });
    let out = world.run(&["-m", DEMO, QUESTION, "--yes", "--backend", "cpu"]);
    let said = stderr(&out);
    assert_eq!(stdout(out), "17 + 25 = 42.\n");
    for part in
        [&*world.server.host(), &world.server.storage_host(), "15.0", "MiB to fetch", "5 files", world.home.dir()]
    {
        assert!(said.contains(part), "no {part:?} in {said}");
    }
    // Only what the model needs, and nothing twice.
    let seen = world.server.take();
    for file in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        assert_eq!(seen.iter().filter(|s| s.path.ends_with(&format!("/{file}"))).count(), 1, "{file}");
    }
    assert!(!seen.iter().any(|s| s.path.contains("README") || s.path.contains("pytorch")), "{seen:?}");
    // The weights come in ranges, which together are the file.
    let mut ranges: Vec<_> = seen.iter().filter(|s| s.at_storage).map(|s| s.range.clone().unwrap()).collect();
    ranges.sort_by_key(|r| r.start);
    assert!(ranges.len() > 1 && ranges[0].start == 0, "{ranges:?}");
    assert!(ranges.windows(2).all(|w| w[0].end == w[1].start), "{ranges:?}");
    // The layout of Python's tools.
    let (snapshot, commit) = (world.snapshot(DEMO, "main"), world.commit(DEMO, "main"));
    assert_eq!(fs::read_to_string(world.repo(DEMO).join("refs/main")).unwrap(), commit);
    let file = world.server.set().files[&(DEMO.to_owned(), "main".to_owned(), WEIGHTS.to_owned())].clone();
    if cfg!(unix) {
        let link = fs::read_link(snapshot.join(WEIGHTS)).unwrap();
        assert_eq!(link, Path::new("../../blobs").join(etag(&file)));
    }
    assert_eq!(fs::read(snapshot.join(WEIGHTS)).unwrap(), file.bytes);
    // From now on no request is needed.
    let mut offline = world.command(&["-m", DEMO, QUESTION, "--backend", "cpu"]);
    assert_eq!(stdout(offline.env("HF_HUB_OFFLINE", "1").output().unwrap()), "17 + 25 = 42.\n");
    assert_eq!(stdout(world.run(&["-m", "owner/demo@main", QUESTION, "--backend", "cpu"])), "17 + 25 = 42.\n");
    assert_eq!(world.server.take().len(), 0);
}

#[test]
fn without_a_terminal_and_without_yes_nothing_is_requested() {
    let world = World::new("refuses", demo());
    let how = ["there is no directory owner/demo", "selkie pull owner/demo", "--yes", &world.server.host()];
    world.refused(&["-m", DEMO, QUESTION], &how);
    world.refused(&["chat", "-m", "ibm-granite/granite-4.0-h-350m"], &["selkie pull ibm-granite/granite-4.0-h-350m"]);
    assert_eq!(world.server.take().len(), 0);
}

#[test]
fn a_local_directory_wins() {
    let world = World::new("local", demo());
    let dir = copy_of("models/demo", "hub_local_model");
    fs::create_dir_all(world.home.path("work/owner")).unwrap();
    fs::rename(dir.dir(), world.home.path("work/owner/demo")).unwrap();
    let run = |args: &[&str]| world.command(args).current_dir(world.home.path("work")).output().unwrap();
    assert_eq!(stdout(run(&["-m", DEMO, QUESTION, "--backend", "cpu"])), "17 + 25 = 42.\n");
    // A folder of that owner makes a wrong path likelier than a name.
    let out = run(&["-m", "owner/dmeo", QUESTION]);
    assert!(stderr(&out).contains("no owner/dmeo in this directory"), "{}", stderr(&out));
    assert_eq!(world.server.take().len(), 0);
}

#[test]
fn the_token_goes_to_the_hub_and_nowhere_else() {
    let world = World::new("redirects", Behaviour { storage: true, ..made_up(bytes(3000, 1)) });
    world.server.set().renamed.insert("old/name".into(), DEMO.into());
    fs::write(world.home.path("token"), "hf_secret\n").unwrap();
    world.says(&["pull", "old/name"]);
    let seen = world.server.take();
    let (storage, hub): (Vec<_>, Vec<_>) = seen.iter().partition(|s| s.at_storage);
    assert!(!storage.is_empty() && storage.iter().all(|s| s.token.is_none()), "{storage:?}");
    assert!(hub.iter().all(|s| s.token.as_deref() == Some("Bearer hf_secret")), "{hub:?}");
    assert!(world.repo("old/name").is_dir());
    // The environment comes first, and implicit tokens can be turned off.
    let pull = |variable: &str, value: &str| {
        let out = world.command(&["pull", DEMO]).env(variable, value).output().unwrap();
        assert!(out.status.success(), "{}", stderr(&out));
        world.server.take()[0].token.clone()
    };
    assert_eq!(pull("HF_TOKEN", "hf_other").as_deref(), Some("Bearer hf_other"));
    assert_eq!(pull("HF_TOKEN_PATH", "/nonexistent"), None);
    assert_eq!(pull("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1"), None);
}

#[test]
fn refusals_say_what_to_do() {
    let world = World::new("refusals", made_up(bytes(1000, 2)));
    let token_file = world.home.arg("token");
    let private = ["no public model owner/nothing", "401", "token is needed", "HF_TOKEN", &token_file];
    world.refused(&["pull", "owner/nothing"], &private);
    world.refused(&["pull", "owner/demo@v9"], &["no revision \"v9\"", "/owner/demo/refs"]);
    world.refused(&["pull", "demo"], &["not the name of a model", "owner/name"]);
    world.server.set().token = Some(("hf_good".into(), 403, "GatedRepo"));
    world.refused(&["pull", DEMO], &["owner/demo is gated", "accept its terms", "/settings/tokens", &token_file]);
    fs::write(&token_file, "hf_bad").unwrap();
    world.refused(&["pull", DEMO], &["gated", "no access"]);
    world.server.set().token = Some(("hf_good".into(), 401, ""));
    world.refused(&["pull", DEMO], &["the token is not valid"]);
    fs::write(&token_file, "hf_good").unwrap();
    world.says(&["pull", DEMO]);
    // Now there is something in the cache that may have been meant.
    world.server.set().token = None;
    world.refused(&["pull", "owner/dmeo"], &["the cache holds owner/demo"]);
    world.refused(&["-m", "owner/dmeo", "Hello!"], &["the cache holds owner/demo"]);
}

#[test]
fn a_busy_server_is_asked_again_and_a_missing_one_is_not() {
    let world = World::new("busy", Behaviour { busy: 2, ..made_up(bytes(1000, 3)) });
    world.says(&["pull", DEMO]);
    let mut gone = world.command(&["pull", "owner/other"]);
    let out = gone.env("HF_ENDPOINT", "http://127.0.0.1:1").output().unwrap();
    let said = stderr(&out);
    assert!(said.contains("127.0.0.1:1 cannot be reached") && said.contains("HF_ENDPOINT"), "{said}");
    let out = world.command(&["pull", DEMO]).env("HF_ENDPOINT", "hub.example").output().unwrap();
    assert!(stderr(&out).contains("HF_ENDPOINT is \"hub.example\""), "{}", stderr(&out));
}

#[test]
fn a_broken_connection_goes_on_where_it_broke() {
    let weights = bytes(20_000_000, 4);
    let world = World::new("cuts", Behaviour { cuts: (3, 1_000_000), ..made_up(weights.clone()) });
    world.says(&["pull", DEMO]);
    assert_eq!(fs::read(world.snapshot(DEMO, "main").join(WEIGHTS)).unwrap(), weights);
    let seen = world.server.take();
    let starts: Vec<usize> = weights_of(&seen).iter().map(|s| s.range.clone().unwrap().start).collect();
    // Three ranges of at most 8 MiB, and one more request for each cut, which begins where it was.
    assert_eq!(starts.len(), 6, "{starts:?}");
    assert_eq!(starts.iter().filter(|s| **s % (8 << 20) != 0).count(), 3, "{starts:?}");
}

#[test]
fn a_killed_download_is_resumed_by_the_next_run() {
    let weights = bytes(20_000_000, 5);
    let world = World::new("killed", Behaviour { stall: Some(3_000_000), ..made_up(weights.clone()) });
    let mut child = world.command(&["pull", DEMO]).spawn().unwrap();
    let part = world
        .repo(DEMO)
        .join("blobs")
        .join(format!("{}.incomplete", etag(&File { bytes: weights.clone(), large: true })));
    let deadline = Instant::now() + Duration::from_secs(10);
    while fs::metadata(&part).map_or(0, |m| m.len()) < 3_000_000 && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let kept = fs::read(&part).unwrap();
    assert!(kept.len() == 3_000_000 && weights.starts_with(&kept), "{} bytes were kept", kept.len());
    let entry = &world.list()[0];
    assert_eq!((&entry["complete"], &entry["incomplete_bytes"]), (&false.into(), &3_000_000.into()));
    world.server.set().stall = None;
    world.server.take();
    let said = world.says(&["pull", DEMO]);
    assert!(said.contains("16.2 MiB of 19.1 MiB to fetch"), "{said}");
    assert_eq!(fs::read(world.snapshot(DEMO, "main").join(WEIGHTS)).unwrap(), weights);
    let seen = world.server.take();
    let first = weights_of(&seen).iter().map(|s| s.range.clone().unwrap().start).min();
    assert_eq!(first, Some(3_000_000));
    assert!(!part.exists());
}

#[test]
fn a_file_that_changes_starts_again() {
    let (old, new) = (bytes(5_000_000, 6), bytes(5_000_000, 7));
    // Between two runs: the part of the old content is not a start of the new one.
    let world = World::new("changes", made_up(old.clone()));
    let blobs = world.repo(DEMO).join("blobs");
    fs::create_dir_all(&blobs).unwrap();
    let part = format!("{}.incomplete", etag(&File { bytes: old.clone(), large: true }));
    fs::write(blobs.join(&part), &old[..1_000_000]).unwrap();
    put(&mut world.server.set(), DEMO, "main", WEIGHTS, new.clone());
    world.says(&["pull", DEMO]);
    assert_eq!(fs::read(world.snapshot(DEMO, "main").join(WEIGHTS)).unwrap(), new);
    // Between the list and the download.
    let world = World::new("changes_late", Behaviour { changes: Some(new.clone()), any_commit: true, ..made_up(old) });
    let said = world.says(&["pull", DEMO]);
    assert!(said.contains("no longer the one that was listed") && said.contains("starting again"), "{said}");
    assert_eq!(fs::read(world.snapshot(DEMO, "main").join(WEIGHTS)).unwrap(), new);
}

#[test]
fn a_newer_commit_comes_with_pull_and_shares_what_is_equal() {
    let world = World::new("newer", made_up(bytes(1000, 8)));
    world.says(&["pull", DEMO]);
    let old = world.commit(DEMO, "main");
    put(&mut world.server.set(), DEMO, "main", WEIGHTS, bytes(1000, 9));
    world.server.take();
    world.says(&["pull", DEMO]);
    assert!(!world.server.take().iter().any(|s| s.path.ends_with("config.json")));
    let listed = world.list();
    assert_eq!(listed.len(), 2);
    let of = |name: &str| listed.iter().find(|e| e["name"] == name).unwrap_or_else(|| panic!("{listed:?}")).clone();
    assert_eq!(of(DEMO)["commit"], world.commit(DEMO, "main"));
    assert_eq!(of(&format!("{DEMO}@{old}"))["complete"], true);
    // The old commit goes, and its weights; the configuration is needed by the new one.
    assert_eq!(world.blobs(DEMO).len(), 3);
    world.says(&["rm", &format!("{DEMO}@{old}"), "--yes"]);
    assert_eq!((world.blobs(DEMO).len(), world.list().len()), (2, 1));
    assert_eq!(world.list()[0]["complete"], true);
}

#[test]
fn wrong_bytes_are_not_kept() {
    let weights = bytes(100_000, 10);
    let world = World::new("checksum", Behaviour { corrupt: true, ..made_up(weights.clone()) });
    world.refused(&["pull", DEMO], &["sha256", "it was removed", WEIGHTS]);
    assert!(!world.snapshot(DEMO, "main").join(WEIGHTS).exists());
    assert_eq!(world.blobs(DEMO).len(), 1);
    // A damaged part is found out, and the whole is fetched.
    let part = world
        .repo(DEMO)
        .join("blobs")
        .join(format!("{}.incomplete", etag(&File { bytes: weights.clone(), large: true })));
    fs::write(&part, vec![0; 50_000]).unwrap();
    world.server.set().corrupt = false;
    let said = world.says(&["pull", DEMO]);
    assert!(said.contains("is damaged; starting again"), "{said}");
    assert_eq!(fs::read(world.snapshot(DEMO, "main").join(WEIGHTS)).unwrap(), weights);
}

#[test]
fn offline_nothing_is_requested() {
    let world = World::new("offline", demo());
    for args in [&["-m", DEMO, QUESTION, "--yes"][..], &["pull", DEMO], &["inspect", DEMO]] {
        let out = world.command(args).env("HF_HUB_OFFLINE", "1").output().unwrap();
        assert!(!out.status.success() && stderr(&out).contains("HF_HUB_OFFLINE"), "{args:?}: {}", stderr(&out));
    }
    assert_eq!(world.server.take().len(), 0);
}

#[test]
fn one_file_is_fetched_alone_and_runs() {
    let mut behaviour = demo();
    let weights = behaviour.files.remove(&(DEMO.to_owned(), "main".to_owned(), WEIGHTS.to_owned())).unwrap();
    put(&mut behaviour, DEMO, "main", "bf16/demo.safetensors", weights.bytes);
    put(&mut behaviour, DEMO, "main", "demo-q8.gguf", vec![1; 500]);
    put(&mut behaviour, DEMO, "main", "demo-q4.gguf", vec![1; 400]);
    let world = World::new("one_file", behaviour);
    let name = "owner/demo:bf16/demo.safetensors";
    assert_eq!(stdout(world.run(&["-m", name, QUESTION, "--yes", "--backend", "cpu"])), "17 + 25 = 42.\n");
    assert!(!world.server.take().iter().any(|s| s.path.contains("gguf")));
    assert_eq!(stdout(world.run(&["-m", name, QUESTION, "--backend", "cpu"])), "17 + 25 = 42.\n");
    assert_eq!(world.server.take().len(), 0);
    world.refused(&["pull", "owner/demo:demo-q9.gguf"], &["no file demo-q9.gguf", "demo-q8.gguf"]);
    // Several files of weights: the list, with a name to type.
    world.refused(&["pull", DEMO], &["owner/demo:demo-q4.gguf", "demo-q8.gguf", "500 B"]);
    world.says(&["pull", "owner/demo:demo-q8.gguf"]);
    // All files of a split model.
    for i in 1..=2 {
        put(&mut world.server.set(), DEMO, "main", &format!("demo-0000{i}-of-00002.gguf"), vec![1; 300 + i]);
    }
    world.refused(&["pull", "owner/demo:demo-00001-of-00003.gguf"], &["no file demo-00001-of-00003.gguf"]);
    world.says(&["pull", "owner/demo:demo-00001-of-00002.gguf"]);
    assert!(world.snapshot(DEMO, "main").join("demo-00002-of-00002.gguf").is_file());
    let listed = world.list();
    let split = listed.iter().find(|e| e["name"] == "owner/demo:demo-00001-of-00002.gguf").unwrap();
    assert_eq!((&split["bytes"], &split["complete"]), (&603.into(), &true.into()));
    world.says(&["pull", "owner/demo:demo-q8.gguf"]);
    let snapshot = world.snapshot(DEMO, "main");
    assert!(snapshot.join("demo-q8.gguf").is_file() && !snapshot.join("demo-q4.gguf").exists());
    assert_eq!(world.list().iter().filter(|e| e["name"] == "owner/demo:demo-q8.gguf").count(), 1);
}

#[test]
fn a_gguf_file_that_is_the_only_model_needs_no_name() {
    let mut behaviour = Behaviour::default();
    for (file, size) in [("demo-q8.gguf", 700), ("mmproj-demo.gguf", 90), ("README.md", 10)] {
        put(&mut behaviour, DEMO, "main", file, bytes(size, 20));
    }
    let world = World::new("only_gguf", behaviour);
    world.says(&["pull", DEMO]);
    assert!(world.server.take().iter().all(|s| s.path.contains("/api/") || s.path.ends_with("demo-q8.gguf")));
    let entry = &world.list()[0];
    assert_eq!((&entry["name"], &entry["complete"]), (&"owner/demo:demo-q8.gguf".into(), &true.into()));
    // It is found without a request; that it is no model is the loader's message.
    world.refused(&["-m", DEMO, QUESTION, "--backend", "cpu"], &["demo-q8.gguf"]);
    assert_eq!(world.server.take().len(), 0);
}

#[test]
fn revisions_are_kept_apart() {
    let mut behaviour = made_up(bytes(1000, 11));
    put(&mut behaviour, DEMO, "refs/pr/1", "config.json", fs::read(repository("models/demo/config.json")).unwrap());
    put(&mut behaviour, DEMO, "refs/pr/1", WEIGHTS, bytes(2000, 12));
    let world = World::new("revisions", behaviour);
    world.says(&["pull", DEMO]);
    world.says(&["pull", "owner/demo@refs/pr/1"]);
    let commit = world.commit(DEMO, "refs/pr/1");
    assert_eq!(fs::read_to_string(world.repo(DEMO).join("refs/refs/pr/1")).unwrap(), commit);
    assert_eq!(fs::metadata(world.snapshot(DEMO, "main").join(WEIGHTS)).unwrap().len(), 1000);
    assert_eq!(fs::metadata(world.snapshot(DEMO, "refs/pr/1").join(WEIGHTS)).unwrap().len(), 2000);
    let listed = world.list();
    let other = listed.iter().find(|e| e["name"] == "owner/demo@refs/pr/1").unwrap();
    assert_eq!((&other["commit"], &other["revisions"][0]), (&Value::from(commit), &"refs/pr/1".into()));
}

#[test]
fn shards_are_those_that_the_index_names() {
    let mut behaviour = made_up(Vec::new());
    behaviour.files.remove(&(DEMO.to_owned(), "main".to_owned(), WEIGHTS.to_owned()));
    let index = r#"{"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors", "c": "model-1-of-2.safetensors"}}"#;
    put(&mut behaviour, DEMO, "main", "model.safetensors.index.json", index.into());
    for (i, file) in ["model-1-of-2", "model-2-of-2", "consolidated"].iter().enumerate() {
        put(&mut behaviour, DEMO, "main", &format!("{file}.safetensors"), bytes(1000 + i, 13));
    }
    let world = World::new("shards", behaviour);
    world.says(&["pull", DEMO]);
    let snapshot = world.snapshot(DEMO, "main");
    assert!(snapshot.join("model-2-of-2.safetensors").is_file() && !snapshot.join("consolidated.safetensors").exists());
    assert_eq!(world.list()[0]["complete"], true);
    fs::remove_file(snapshot.join("model-2-of-2.safetensors")).unwrap();
    assert_eq!(world.list()[0]["missing"][0], "model-2-of-2.safetensors");
    world.server.take();
    world.says(&["pull", DEMO]);
    assert_eq!(world.list()[0]["complete"], true);
    assert!(!world.server.take().iter().any(|s| s.path.contains("of-2")), "the blob was there");
}

#[test]
fn list_and_rm() {
    let mut behaviour = made_up(bytes(3 << 20, 14));
    put(&mut behaviour, "owner/strange", "main", "config.json", br#"{"model_type": "strange"}"#.to_vec());
    put(&mut behaviour, "owner/strange", "main", WEIGHTS, bytes(1000, 15));
    let world = World::new("list", behaviour);
    assert!(world.says(&["list"]).contains("no models in"));
    assert!(world.list().is_empty());
    // A model that cannot run is refused before its weights come.
    world.refused(&["pull", "owner/strange"], &["strange", "nothing else was fetched"]);
    world.says(&["pull", DEMO]);
    let table = stdout(world.run(&["list"]));
    let line = table.lines().find(|l| l.starts_with(DEMO)).unwrap();
    for part in ["main", "3.0 MiB", "complete"] {
        assert!(line.contains(part), "{table}");
    }
    assert!(table.contains("strange: selkie does not run it"), "{table}");
    let demo = world.list().into_iter().find(|e| e["name"] == DEMO).unwrap();
    assert_eq!((&demo["runs"], &demo["complete"], &demo["revisions"][0]), (&true.into(), &true.into(), &"main".into()));
    world.refused(&["rm", DEMO], &["3.0 MiB", "--yes"]);
    world.refused(&["rm", "owner/dem", "--yes"], &["owner/dem is not in", "it holds owner/demo"]);
    world.refused(&["rm", "owner/demo@v1", "--yes"], &["that revision is not here", "main"]);
    assert!(world.says(&["rm", DEMO, "--yes"]).contains("3.0 MiB are free"));
    assert!(!world.repo(DEMO).exists() && world.repo("owner/strange").exists());
    assert_eq!(world.list().len(), 1);
}

#[test]
fn inspect_needs_no_weights() {
    let world = World::new("inspect", demo());
    put(&mut world.server.set(), DEMO, "main", "demo-q8.gguf", bytes(700, 21));
    let out = world.run(&["inspect", DEMO, "--json", "--backend", "cpu"]);
    assert!(stderr(&out).contains(&world.server.host()), "{}", stderr(&out));
    let facts: Value = serde_json::from_str(&stdout(out)).unwrap();
    let seen = world.server.take();
    assert!(seen.len() == 2 && seen[1].path.ends_with("/config.json"), "{seen:?}");
    assert_eq!(facts["weights_here"], false);
    assert_eq!(facts["weight_bytes"], demo_safetensors().len());
    assert_eq!(facts["fit"]["fits"], true);
    assert!(facts["fit"]["formats"][0]["sequences"].as_u64().unwrap() > 0, "{facts}");
    let other = &facts["fit"]["formats"][1];
    assert_eq!((&other["format"], &other["weight_bytes"]), (&"demo-q8.gguf".into(), &700.into()));
    // A configuration alone, as a file or as the only file of a folder.
    let dir = TempDir::new("hub_config");
    let file = dir.write("config.json", fs::read(repository("models/demo/config.json")).unwrap());
    for given in [&*file, dir.dir()] {
        let text = stdout(world.run(&["inspect", given, "--backend", "cpu"]));
        for part in ["not here", "fits here    yes", "BF16   ", "Q8_0 (as GGUF)", "state slot"] {
            assert!(text.contains(part), "no {part:?} in {text}");
        }
    }
    // With the weights it says as much as before.
    world.says(&["pull", DEMO]);
    let facts: Value = serde_json::from_str(&stdout(world.run(&["inspect", "-m", DEMO, "--json"]))).unwrap();
    assert_eq!((&facts["model"], &facts["weights_here"], &facts["fault"]), (&DEMO.into(), &true.into(), &Value::Null));
}

#[test]
fn a_model_too_large_for_the_machine() {
    let dir = TempDir::new("hub_large");
    fs::copy(repository("models/configs/qwen3-next-80b-a3b.json"), dir.path("config.json")).unwrap();
    edit_json(&dir, "config.json", |config| config["num_hidden_layers"] = 960.into());
    let text = stdout(run(&["inspect", dir.dir(), "--backend", "cpu"]));
    for part in ["fits here    no", "does not fit"] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    let world = World::new("large", Behaviour { claims: Some(1 << 60), ..made_up(bytes(10, 16)) });
    world.refused(&["pull", DEMO], &["do not fit", "selkie rm", "HF_HOME"]);
    assert_eq!(weights_of(&world.server.take()).len(), 0);
}

#[test]
fn two_processes_fetch_a_file_once() {
    let weights = bytes(16_000_000, 17);
    let world = World::new("two", Behaviour { cuts: (4, 500_000), ..made_up(weights.clone()) });
    let children = [(); 2].map(|()| world.command(&["pull", DEMO]).spawn().unwrap());
    for child in children {
        let out = child.wait_with_output().unwrap();
        assert!(out.status.success(), "{}", stderr(&out));
    }
    assert_eq!(fs::read(world.snapshot(DEMO, "main").join(WEIGHTS)).unwrap(), weights);
    // Two ranges and four cuts.
    assert_eq!(weights_of(&world.server.take()).len(), 6);
}

#[test]
fn servers_without_ranges_or_sizes_do() {
    let weights = bytes(9_000_000, 18);
    for (name, behaviour) in [
        ("whole", Behaviour { whole: true, cuts: (1, 1_000_000), ..made_up(weights.clone()) }),
        ("bare", Behaviour { bare_list: true, storage: true, ..made_up(weights.clone()) }),
    ] {
        let world = World::new(name, behaviour);
        world.says(&["pull", DEMO]);
        assert_eq!(fs::read(world.snapshot(DEMO, "main").join(WEIGHTS)).unwrap(), weights, "{name}");
        let blob = etag(&File { bytes: weights.clone(), large: true });
        assert!(world.blobs(DEMO).contains(&blob), "{name}: {:?}", world.blobs(DEMO));
    }
}

/// Runs a command on a terminal of its own, which types `input`.
#[cfg(target_os = "linux")]
fn on_a_terminal(world: &World, args: &str, input: &str) -> (String, bool) {
    use std::io::Write;
    let line = format!("'{}' {args}", env!("CARGO_BIN_EXE_selkie"));
    let program = world.command(&[]);
    let mut script = Command::new("script");
    script.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
    for (variable, value) in program.get_envs() {
        match value {
            Some(value) => script.env(variable, value),
            None => script.env_remove(variable),
        };
    }
    let mut child =
        script.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("`script` of util-linux is there");
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let out = child.wait_with_output().unwrap();
    (String::from_utf8_lossy(&out.stdout).into_owned(), out.status.success())
}

#[test]
#[cfg(target_os = "linux")]
fn a_terminal_is_asked() {
    let world = World::new("terminal", demo());
    let question = format!("-m {DEMO} '{QUESTION}' --backend cpu");
    let (screen, answered) = on_a_terminal(&world, &question, "n\n");
    assert!(screen.contains("MiB to fetch from") && screen.contains("Go on? [y/N]"), "{screen}");
    assert!(!answered && screen.contains("the answer was not yes"), "{screen}");
    assert_eq!(weights_of(&world.server.take()).len(), 0);
    let (screen, answered) = on_a_terminal(&world, &question, "y\n");
    assert!(answered && screen.contains("17 + 25 = 42."), "{screen}");
    let (screen, removed) = on_a_terminal(&world, &format!("rm {DEMO}"), "yes\n");
    assert!(removed && screen.contains("are free") && world.list().is_empty(), "{screen}");
}

#[test]
fn the_cache_is_where_the_environment_says() {
    let world = World::new("places", made_up(bytes(1000, 19)));
    for (variable, value, place) in [
        ("HF_HUB_CACHE", "a", "a"),
        ("HUGGINGFACE_HUB_CACHE", "b", "b"),
        ("HF_HOME", "c", "c/hub"),
        ("XDG_CACHE_HOME", "d", "d/huggingface/hub"),
        ("HOME", "e", "e/.cache/huggingface/hub"),
    ] {
        let mut command = world.command(&["pull", DEMO]);
        if ["XDG_CACHE_HOME", "HOME"].contains(&variable) {
            command.env_remove("HF_HOME");
        }
        let out = command.env(variable, world.home.path(value)).output().unwrap();
        assert!(out.status.success(), "{variable}: {}", stderr(&out));
        assert!(world.home.path(place).join("models--owner--demo/refs/main").is_file(), "{variable}");
    }
}
