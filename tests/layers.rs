//! No module imports one above it: the layers of ARCHITECTURE.md, checked in the sources.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The modules of selkie-core, lowest first, and what each may import. `backend` and `ops` are one layer, the boundary.
const CORE: [(&str, &str); 41] = [
    ("fnv", ""),
    ("zeroed", ""),
    ("cache_dir", ""),
    ("digest", ""),
    ("units", ""),
    ("error", "units"),
    ("survive", ""),
    ("tensor", ""),
    ("format", ""),
    ("source", "error"),
    ("config", "error"),
    ("step", "tensor"),
    ("kv8", "step tensor"),
    ("saved", "error source"),
    ("backend", "error format ops saved source tensor"),
    ("ops", "backend format kv8 step tensor"),
    ("timer", "backend error tensor"),
    ("sample", "error ops step"),
    ("controls", "error ops sample"),
    ("cpu", "backend error format kv8 ops sample source step tensor timer zeroed"),
    ("ranks", "backend cpu error format ops saved source survive tensor timer"),
    ("gguf", "config error format source"),
    ("checkpoint", "cache_dir digest error format gguf source tensor zeroed"),
    ("rope", "config error"),
    ("generation", "config error sample"),
    ("stop", "error"),
    ("layer", "kv8 ops tensor"),
    ("weights", "backend checkpoint error format ops tensor"),
    ("state", "digest error step units"),
    ("bundle", "backend digest error kv8 layer source state tensor"),
    ("tier", "cache_dir digest error saved source state tensor"),
    ("blocks", "backend config error layer ops rope step tensor weights"),
    ("models", "backend blocks checkpoint config error layer ops rope step tensor weights"),
    (
        "engine",
        "backend bundle checkpoint controls error kv8 layer models ops sample saved source state step tensor tier units weights",
    ),
    ("tokenizer", "config error survive"),
    ("reply", ""),
    ("chat", "error survive tokenizer units"),
    ("grammar", "controls error reply survive tokenizer"),
    ("model_dir", "bundle chat checkpoint config digest error fnv generation gguf source tokenizer"),
    ("convert", "blocks checkpoint config cpu error format gguf model_dir models ops rope tensor weights"),
    (
        "session",
        "backend chat controls engine error generation model_dir models sample state stop survive tokenizer units weights",
    ),
];

/// The crates that implement `Backend` know no model and no policy.
const BACKENDS: [&str; 2] = ["backend-cuda/src", "backend-wgpu/src"];
const BOUNDARY: &str = "backend cache_dir error format kv8 ops ranks saved source step tensor timer zeroed";

#[test]
fn no_module_imports_one_above_it() {
    let src = root().join("core/src");
    let mut wrong = Vec::new();
    for (module, allowed) in CORE {
        let files = files_of(&src, module);
        assert!(!files.is_empty(), "the table names {module}, which is not in core/src");
        for file in files {
            let text = code(&file);
            let outside: Vec<String> =
                imports(&text, "crate").into_iter().filter(|m| m != module && !has(allowed, m)).collect();
            wrong.extend(outside.iter().map(|m| format!("{}: {module} may not import {m}", file.display())));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn backends_import_the_boundary_only() {
    let mut wrong = Vec::new();
    for folder in BACKENDS {
        let files = rust_files(&root().join(folder));
        assert!(files.len() > 5, "{folder} has {} files", files.len());
        for file in files {
            let outside = imports(&code(&file), "selkie_core").into_iter().filter(|m| !has(BOUNDARY, m));
            wrong.extend(outside.map(|m| format!("{}: a backend may not import {m}", file.display())));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_table_names_every_module_and_points_downwards() {
    let lib = fs::read_to_string(root().join("core/src/lib.rs")).unwrap();
    let module =
        |l: &'_ str| Some(l.strip_prefix("pub ").unwrap_or(l).strip_prefix("mod ")?.strip_suffix(';')?.to_owned());
    let modules: BTreeSet<String> = lib.lines().filter_map(module).collect();
    assert_eq!(modules, CORE.map(|(module, _)| module.to_owned()).into());
    for (i, (module, allowed)) in CORE.iter().enumerate() {
        for import in allowed.split_whitespace() {
            let below = CORE[..i].iter().any(|(m, _)| *m == import);
            assert!(
                below || (*module, import) == ("backend", "ops"),
                "{module} may import {import}, which is above it"
            );
        }
    }
}

#[test]
fn imports_are_found_in_every_form() {
    let text = "use crate::{\n    Error, Result,\n    ops::{Act, Op},\n    step,\n};\nuse crate::models::Spec;\nlet x = crate::cpu::par::n();";
    assert_eq!(imports(text, "crate"), ["cpu", "error", "models", "ops", "step"].map(String::from).into());
    assert_eq!(imports("use selkie_core::tensor::DType;", "selkie_core"), ["tensor".to_owned()].into());
    assert_eq!(without_tests("a\n#[cfg(test)]\nmod tests {\n    b\n}\n"), "a\n");
    assert_eq!(without_tests("a\n#[cfg(test)]\nmod tests;\nb\n"), "a\n#[cfg(test)]\nmod tests;\nb\n");
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn has(list: &str, module: &str) -> bool {
    list.split_whitespace().any(|m| m == module)
}

/// The sources of a module: its file, its folder, or both. Tests may import anything.
fn files_of(src: &Path, module: &str) -> Vec<PathBuf> {
    let mut files = rust_files(&src.join(module));
    files.extend(Some(src.join(format!("{module}.rs"))).filter(|f| f.exists()));
    files
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|e| e == "rs") && name != "tests" && !name.ends_with("_tests") {
            files.push(path);
        }
    }
    files
}

/// The lines of a file that are neither comments nor its tests.
fn code(file: &Path) -> String {
    let text = fs::read_to_string(file).unwrap();
    let lines = without_tests(&text).lines().filter(|l| !l.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

/// The text of a file without its inline tests, which are its last item.
fn without_tests(text: &str) -> &str {
    let tests = text.find("#[cfg(test)]\nmod ").filter(|at| {
        let line = text[*at..].lines().nth(1).unwrap_or_default();
        line.ends_with('{')
    });
    &text[..tests.unwrap_or(text.len())]
}

/// The modules that `text` names below `name::`, with those of the crate root's own items as `error`.
fn imports(text: &str, name: &str) -> BTreeSet<String> {
    let start = format!("{name}::");
    let mut found = BTreeSet::new();
    for (at, _) in text.match_indices(&start) {
        let rest = &text[at + start.len()..];
        if let Some(list) = rest.strip_prefix('{') {
            found.extend(entries(list).into_iter().map(module));
        } else {
            found.insert(module(rest));
        }
    }
    found
}

/// The entries of a braced list, without its opening brace.
fn entries(list: &str) -> Vec<&str> {
    let (mut depth, mut from, mut all) = (0, 0, Vec::new());
    for (i, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => {
                all.push(&list[from..i]);
                break;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                all.push(&list[from..i]);
                from = i + 1;
            }
            _ => {}
        }
    }
    all.into_iter().map(str::trim).filter(|e| !e.is_empty()).collect()
}

/// The first name of a path; `Error` and `Result` belong to the module `error`.
fn module(path: &str) -> String {
    let name: String = path.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    if name.starts_with(char::is_uppercase) { "error".into() } else { name }
}
