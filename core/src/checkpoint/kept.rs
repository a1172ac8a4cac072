//! Digests of weights that were computed before, so that a start need not read all of them: small files in the user's cache
//! directory, keyed by path, size and time of change of every file of the model.

use std::{
    collections::BTreeSet,
    fs,
    path::Path,
    time::{Duration, SystemTime},
};

use crate::{
    Result, cache_dir,
    digest::{Digest, Hasher},
};

/// Bytes of weights from which a digest is kept: fewer are read in no time.
pub const FROM: u64 = 64 << 20;
/// A file that changed within this time before may change again without another time of change.
const SETTLED: Duration = Duration::from_secs(2);

/// The digest kept for these files, or a computed one, which is then kept. `outline` names everything about the weights but their
/// bytes.
///
/// # Errors
/// Those of `compute`.
pub async fn or(
    dir: &Path,
    outline: Digest,
    files: &BTreeSet<String>,
    compute: impl Future<Output = Result<Digest>>,
) -> Result<Digest> {
    // Without files to look at, as in the executable.
    let Some(key) = key(outline, files) else { return compute.await };
    let path = dir.join(key.to_string());
    if let Some(known) = fs::read(&path).ok().and_then(|bytes| parse(key, &bytes)) {
        return Ok(known);
    }
    let digest = compute.await?;
    // A file that was written meanwhile is another one.
    if self::key(outline, files) == Some(key)
        && let Err(e) = cache_dir::replace(&path, &[&digest.0, &check(key, digest)])
    {
        tracing::debug!("{}: {e}; the digest of the weights is not kept", path.display());
    }
    Ok(digest)
}

/// Names the present contents of files by what the system says about them.
fn key(outline: Digest, files: &BTreeSet<String>) -> Option<Digest> {
    let mut hasher = Hasher::default();
    hasher.update(b"selkie weights 1");
    hasher.update(&outline.0);
    for file in files {
        let path = fs::canonicalize(file).ok()?;
        let meta = fs::metadata(&path).ok()?;
        let changed = meta.modified().ok()?;
        if changed.elapsed().is_ok_and(|age| age < SETTLED) {
            return None;
        }
        let since = changed.duration_since(SystemTime::UNIX_EPOCH).ok()?;
        let name = path.as_os_str().as_encoded_bytes();
        for part in [name, &meta.len().to_le_bytes(), &since.as_nanos().to_le_bytes()] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
    }
    Some(hasher.finish())
}

/// Finds damage, and a file under the name of another.
fn check(key: Digest, digest: Digest) -> [u8; 16] {
    cache_dir::hash(&[&key.0, &digest.0]).to_le_bytes()
}

fn parse(key: Digest, bytes: &[u8]) -> Option<Digest> {
    let digest = Digest(bytes.get(..32)?.try_into().ok()?);
    (bytes[32..] == check(key, digest)).then_some(digest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pollster::block_on;

    #[test]
    fn a_digest_is_computed_again_when_a_file_has_changed() {
        let dir = std::env::temp_dir().join(format!("selkie-digests-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let file = dir.join("model.safetensors");
        let write = |text: &str, seconds: u64| {
            fs::write(&file, text).unwrap();
            let time = SystemTime::now() - Duration::from_secs(seconds);
            fs::File::options().write(true).open(&file).unwrap().set_modified(time).unwrap();
        };
        let files = BTreeSet::from([file.display().to_string()]);
        // The digest that is used if `computed` is what would be computed.
        let ask = |outline: u8, computed: u8| {
            let compute = async { Ok(Digest([computed; 32])) };
            block_on(or(&dir, Digest([outline; 32]), &files, compute)).unwrap().0[0]
        };
        write("one", 100);
        assert_eq!((ask(1, 7), ask(1, 8)), (7, 7));
        assert_eq!(ask(2, 9), 9, "tensors of other names");
        write("two", 90);
        assert_eq!((ask(1, 8), ask(1, 9)), (8, 8), "another time");
        write("three", 90);
        assert_eq!(ask(1, 9), 9, "another size");
        write("three", 0);
        assert_eq!((ask(1, 1), ask(1, 2)), (1, 2), "a file that may still be written");
        write("one", 100);
        for kept in fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).filter(|path| *path != file) {
            let mut bytes = fs::read(&kept).unwrap();
            bytes[0] ^= 1;
            fs::write(kept, bytes).unwrap();
        }
        assert_eq!(ask(1, 5), 5, "a damaged record");
        fs::remove_dir_all(&dir).unwrap();
    }
}
