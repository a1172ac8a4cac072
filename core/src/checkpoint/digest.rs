//! A digest of all weights, for files that only make sense with them.

use std::{collections::BTreeSet, ops::Range, sync::Arc};

#[cfg(not(target_arch = "wasm32"))]
use super::kept;
use super::{Checkpoint, Kind, TensorInfo};
use crate::{
    Result,
    digest::{Digest, Hasher},
};

impl Checkpoint {
    /// A digest of all weights: of the name, dtype and shape of every tensor and of all bytes that it is made of. The files that they
    /// are in do not matter. `report` gets the bytes read so far, now and then; nothing is read of files that have not changed since
    /// their digest was kept in the user's cache directory.
    ///
    /// # Errors
    /// Those of the source.
    pub async fn digest(&self, report: &mut dyn FnMut(u64)) -> Result<Digest> {
        #[cfg(not(target_arch = "wasm32"))]
        if let Kind::Files { source, tensors, .. } = &self.kind
            && self.bytes() >= kept::FROM
            && let Some(dir) = crate::cache_dir::open("digests")
        {
            let outline = self.hash(None).await?;
            let files: BTreeSet<String> =
                tensors.values().flat_map(TensorInfo::sources).map(|i| source.path(&i.file)).collect();
            return kept::or(&dir, outline, &files, self.hash(Some(report))).await;
        }
        self.hash(Some(report)).await
    }

    /// The digest; without `report` that of everything but the bytes, which are not read.
    async fn hash(&self, mut report: Option<&mut dyn FnMut(u64)>) -> Result<Digest> {
        /// Bytes read at a time.
        const PIECE: u64 = 16 << 20;
        let mut hasher = Hasher::default();
        let (source, tensors) = match &self.kind {
            Kind::Files { source, tensors, .. } => (source, tensors),
            Kind::Random { seed, recipe } => {
                hasher.update(format!("random {seed} {recipe:?}").as_bytes());
                return Ok(hasher.finish());
            }
        };
        let (mut seen, mut done) = (BTreeSet::new(), 0);
        for (name, info) in tensors.iter() {
            hasher.update(format!("{name} {} {:?}\n", info.dtype, info.shape).as_bytes());
            if info.joined.is_some() || info.less_one {
                hasher.update(format!("{} parts, less {}\n", info.sources().len(), info.less_one).as_bytes());
            }
            let mut stored = Vec::new();
            for source in info.sources() {
                stored.extend(outline(&mut hasher, source));
            }
            for (file, range) in stored {
                // A stored tensor may be a part of several.
                let first = seen.insert((file.clone(), range.start));
                hasher.update(format!("{} bytes {first}\n", range.end - range.start).as_bytes());
                let mut at = if first && report.is_some() { range.start } else { range.end };
                while at < range.end {
                    let end = range.end.min(at + PIECE);
                    hasher.update(&source.read(file, at..end).await?);
                    (done, at) = (done + end - at, end);
                    if let Some(report) = &mut report {
                        report(done);
                    }
                }
            }
        }
        Ok(hasher.finish())
    }
}

/// The stored bytes of a tensor that is not joined; takes in how they make it.
fn outline<'a>(hasher: &mut Hasher, info: &'a TensorInfo) -> Vec<(&'a Arc<str>, &'a Range<u64>)> {
    let mut stored = vec![(&info.file, &info.range)];
    if let Some(made) = &info.made {
        hasher.update(format!("{:?}\n", made.change).as_bytes());
        for run in &made.rows {
            hasher.update(format!("{} {} {}\n", run.first, run.step, run.count).as_bytes());
        }
        stored = made.rows.iter().map(|run| &run.from).chain(&made.factor).map(|s| (&s.file, &s.range)).collect();
    }
    if let Some(scaled) = &info.scaled {
        hasher.update(format!("{}\n", scaled.rule()).as_bytes());
        stored.extend(scaled.tensors().map(|t| (&t.file, &t.range)));
    }
    stored
}
