//! Facts about the build for the program: the commit, and the page of `selkie web` if `web/build` has made one.

use std::{
    env,
    fmt::Write,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

fn main() {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-env=SELKIE_COMMIT={}", commit(&root).unwrap_or_else(|| "unknown".into()));
    let page = page(&root.join("web/dist"));
    println!("cargo::rustc-env=SELKIE_PAGE={}", if page.is_some() { "included" } else { "not included" });
    let list = format!("&[{}]", page.unwrap_or_default());
    fs::write(out.join("page.rs"), list).expect("OUT_DIR can be written");
}

/// The commit of these sources: from the unpacked package, or from the repository with this root.
fn commit(root: &Path) -> Option<String> {
    if let Ok(info) = fs::read_to_string(root.join(".cargo_vcs_info.json")) {
        let (_, rest) = info.split_once("\"sha1\"")?;
        return rest.split('"').nth(1).and_then(|sha| sha.get(..12)).map(str::to_owned);
    }
    if !root.join(".git").exists() {
        return None;
    }
    let git = |args: &[&str]| {
        let out = Command::new("git").current_dir(root).args(args).output().ok().filter(|out| out.status.success())?;
        String::from_utf8(out.stdout).ok().map(|text| text.trim().to_owned())
    };
    // The log changes with every commit and every checkout. A missing path would run this script every time.
    for path in ["HEAD", "logs/HEAD"] {
        let path = git(&["rev-parse", "--git-path", path]).map(|p| root.join(p)).filter(|p| p.exists());
        path.iter().for_each(|p| println!("cargo::rerun-if-changed={}", p.display()));
    }
    git(&["rev-parse", "--short=12", "HEAD"])
}

/// Name, hash and bytes of every file of the page as elements of a Rust array; the demo model is in the program already.
fn page(dist: &Path) -> Option<String> {
    if !dist.join("index.html").is_file() {
        return None;
    }
    println!("cargo::rerun-if-changed={}", dist.display());
    let (mut folders, mut files) = (vec![dist.to_path_buf()], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).ok()?.flatten() {
            let path = entry.path();
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    files.sort();
    let mut list = String::new();
    for file in files {
        let name = file.strip_prefix(dist).ok()?.to_str()?.replace('\\', "/");
        if name.starts_with("models/demo/") {
            continue;
        }
        let hash = fs::read(&file)
            .ok()?
            .iter()
            .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3));
        let path = file.to_str()?;
        write!(list, "({name:?}, {hash}, include_bytes!({path:?})),").expect("a string can be written");
    }
    Some(list)
}
