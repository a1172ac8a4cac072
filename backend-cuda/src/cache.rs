//! Small files under the user's cache directory.

use std::{
    path::{Path, PathBuf},
    sync::OnceLock,
};

use selkie_core::cache_dir;
pub use selkie_core::cache_dir::hash;

/// `selkie/cuda` under the user's cache directory, if there is one that no other user can write.
pub fn dir() -> Option<PathBuf> {
    static DIR: OnceLock<Option<PathBuf>> = OnceLock::new();
    DIR.get_or_init(|| cache_dir::open("cuda")).clone()
}

/// Replaces a file atomically: readers see the old bytes or the new ones. Errors are ignored: the file only saves time.
pub fn replace(file: &Path, parts: &[&[u8]]) {
    let _ = cache_dir::replace(file, parts);
}
