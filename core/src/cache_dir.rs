//! Small files under the user's cache directory that save work at the next start. A driver trusts their contents, so
//! they are used only from a directory that no other user can write, and each carries a checksum.

use std::{
    env,
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
};

/// The directory `selkie` under the user's cache directory, or `part` in it, created if necessary. `None` if there is
/// no cache directory, or if another user owns it or can write it; the log says so.
pub fn open(part: &str) -> Option<PathBuf> {
    let base = user_cache(|name| env::var_os(name))?.join("selkie");
    let dir = if part.is_empty() { base.clone() } else { base.join(part) };
    for dir in [&base, &dir] {
        if let Err(e) = make_private(dir) {
            tracing::warn!("nothing is cached in {}: {e}", dir.display());
            return None;
        }
    }
    Some(dir)
}

/// Where the user's programs keep caches. The XDG specification says that a relative path is ignored.
fn user_cache(var: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let var = |name| var(name).map(PathBuf::from).filter(|path| path.is_absolute());
    if cfg!(windows) {
        var("LOCALAPPDATA")
    } else if cfg!(target_os = "macos") {
        var("HOME").map(|home| home.join("Library/Caches"))
    } else {
        var("XDG_CACHE_HOME").or_else(|| var("HOME").map(|home| home.join(".cache")))
    }
}

/// Creates a directory for this user alone, or checks that an existing one is private.
///
/// # Errors
/// Those of the file system; a directory of another user, or one that others can write.
pub fn make_private(dir: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(dir)?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let meta = fs::metadata(dir)?;
        if meta.uid() != rustix::process::geteuid().as_raw() {
            return Err(io::Error::other("the directory belongs to another user"));
        }
        if meta.mode() & 0o022 != 0 {
            return Err(io::Error::other("other users can write it; `chmod go-w` makes it usable"));
        }
    }
    Ok(())
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

/// Replaces a file atomically: readers see the old bytes or the new ones.
///
/// # Errors
/// Those of the file system; the partly written file is removed.
pub fn replace(file: &Path, parts: &[&[u8]]) -> io::Result<()> {
    let aside = file.with_extension(format!("{}.new", std::process::id()));
    let written = fs::write(&aside, parts.concat()).and_then(|()| fs::rename(&aside, file));
    if written.is_err() {
        let _ = fs::remove_file(&aside);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn relative_and_empty_paths_are_ignored() {
        let cache = |xdg: Option<&str>, home: Option<&str>| {
            user_cache(|name| if name == "HOME" { home } else { xdg }.map(OsString::from))
        };
        assert_eq!(cache(Some("/x"), Some("/h")), Some("/x".into()));
        for xdg in [None, Some(""), Some("x"), Some("../x")] {
            assert_eq!(cache(xdg, Some("/h")), Some("/h/.cache".into()), "{xdg:?}");
        }
        assert_eq!(cache(None, Some("h")), None);
    }

    #[cfg(unix)]
    #[test]
    fn a_directory_that_others_can_write_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let dir = env::temp_dir().join(format!("selkie-cache-{}", std::process::id()));
        let mode = |dir: &Path| fs::metadata(dir).unwrap().permissions().mode() & 0o777;
        make_private(&dir.join("a")).unwrap();
        assert_eq!((mode(&dir), mode(&dir.join("a"))), (0o700, 0o700));
        for (mode, fine) in [(0o755, true), (0o775, false), (0o702, false)] {
            fs::set_permissions(&dir, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(make_private(&dir).is_ok(), fine, "{mode:o}");
        }
        replace(&dir.join("a/file"), &[b"x", b"y"]).unwrap();
        assert_eq!(fs::read(dir.join("a/file")).unwrap(), b"xy");
        assert!(make_private(&dir.join("a/file")).is_err());
        fs::remove_dir_all(&dir).unwrap();
        // The root directory belongs to another user, unless the tests run as root.
        if rustix::process::geteuid().as_raw() != 0 {
            assert!(make_private(Path::new("/")).is_err());
        }
    }
}
