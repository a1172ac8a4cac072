//! Small files under the user's cache directory.

use std::{env, fs, path::Path, path::PathBuf};

/// `selkie/cuda` under the user's cache directory, if there is one.
pub fn dir() -> Option<PathBuf> {
    let var = |name| env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let base = if cfg!(windows) {
        var("LOCALAPPDATA")?
    } else if cfg!(target_os = "macos") {
        var("HOME")?.join("Library/Caches")
    } else {
        var("XDG_CACHE_HOME").or_else(|| Some(var("HOME")?.join(".cache")))?
    };
    Some(base.join("selkie").join("cuda"))
}

/// FNV-1a over the parts and their lengths, 128 bits. Guards against accidents, not against attackers.
pub fn hash(parts: &[&[u8]]) -> u128 {
    let mut h: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    let mut eat = |bytes: &[u8]| {
        for b in bytes {
            h = (h ^ u128::from(*b)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
    };
    for p in parts {
        eat(&(p.len() as u64).to_le_bytes());
        eat(p);
    }
    h
}

/// Writes a file at once: readers see the old bytes or the new ones. Errors are ignored, the caller can do without.
pub fn replace(file: &Path, parts: &[&[u8]]) {
    let write = || {
        fs::create_dir_all(file.parent()?).ok()?;
        let temporary = file.with_extension(format!("{}.new", std::process::id()));
        fs::write(&temporary, parts.concat()).ok()?;
        fs::rename(&temporary, file).ok()
    };
    let _ = write();
}
