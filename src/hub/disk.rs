//! Free space on the disk.

use std::path::Path;

/// Bytes that this user can still write where `path` is or will be; `None` where the system does not tell.
#[cfg(unix)]
pub fn free(path: &Path) -> Option<u64> {
    let path = std::path::absolute(path).ok()?;
    let there = path.ancestors().find(|p| p.exists())?;
    let disk = rustix::fs::statvfs(there).ok()?;
    Some(disk.f_bavail.saturating_mul(disk.f_frsize))
}

/// Bytes that this user can still write where `path` is or will be; `None` where the system does not tell.
#[cfg(not(unix))]
pub fn free(_: &Path) -> Option<u64> {
    None
}
