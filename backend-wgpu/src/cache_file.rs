//! Saves the driver's compiled pipelines in a file, if the device supports it, so that later starts compile nothing.

#[cfg(not(target_arch = "wasm32"))]
pub use native::CacheFile;

#[cfg(not(target_arch = "wasm32"))]
mod native {
    use std::cell::Cell;
    use std::path::PathBuf;

    use selkie_core::cache_dir;

    const MAGIC: &[u8; 16] = b"selkie pipes  1\n";

    /// A pipeline cache and its file.
    pub struct CacheFile {
        cache: Option<(wgpu::PipelineCache, PathBuf)>,
        /// Whether the file existed and was ours.
        warm: bool,
        changed: Cell<bool>,
    }

    impl CacheFile {
        /// The cache of an adapter, under the user's cache directory; empty without one or without the feature.
        pub fn open(device: &wgpu::Device, info: &wgpu::AdapterInfo) -> Self {
            let name = wgpu::util::pipeline_cache_key(info);
            let name = name.filter(|_| device.features().contains(wgpu::Features::PIPELINE_CACHE));
            let path = name.and_then(|name| Some(cache_dir::open("")?.join(name)));
            let data = path.as_ref().and_then(|path| unpack(&std::fs::read(path).ok()?).map(<[u8]>::to_vec));
            let cache = path.map(|path| {
                let desc =
                    wgpu::PipelineCacheDescriptor { label: Some("selkie"), data: data.as_deref(), fallback: true };
                // SAFETY: the data must come from `get_data` of a cache for the same adapter. `drop` below wrote it under the
                // adapter's key, to a directory that only this user can write, and the checksum says that these are the
                // bytes. A process of this user that forges all that can also change this program. An updated driver refuses
                // old data by its header, and with `fallback` the cache starts empty.
                (unsafe { device.create_pipeline_cache(&desc) }, path)
            });
            Self { cache, warm: data.is_some(), changed: Cell::new(false) }
        }

        /// Whether the file of an earlier run was read.
        pub fn warm(&self) -> bool {
            self.warm
        }

        /// The cache to compile pipelines with.
        pub fn get(&self) -> Option<&wgpu::PipelineCache> {
            self.cache.as_ref().map(|(cache, _)| cache)
        }

        /// Call after pipelines were compiled: the file is then written on drop.
        pub fn changed(&self) {
            self.changed.set(true);
        }
    }

    impl Drop for CacheFile {
        fn drop(&mut self) {
            let Some((cache, path)) = self.cache.as_ref().filter(|_| self.changed.get()) else { return };
            let Some(data) = cache.get_data() else { return };
            if let Err(e) = cache_dir::replace(path, &[MAGIC, &cache_dir::hash(&[&data]).to_le_bytes(), &data]) {
                tracing::debug!("pipeline cache {}: {e}", path.display());
            }
        }
    }

    /// The data of a file that [`CacheFile`] wrote; `None` if it is damaged or anything else.
    fn unpack(file: &[u8]) -> Option<&[u8]> {
        let (sum, data) = file.strip_prefix(MAGIC)?.split_at_checked(16)?;
        (sum == cache_dir::hash(&[data]).to_le_bytes()).then_some(data)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn only_whole_files_of_ours_are_taken() {
            let good = [&MAGIC[..], &cache_dir::hash(&[b"data"]).to_le_bytes(), b"data"].concat();
            assert_eq!(unpack(&good), Some(&b"data"[..]));
            for i in 0..good.len() {
                let mut bad = good.clone();
                bad[i] ^= 1;
                assert_eq!(unpack(&bad), None, "byte {i}");
                assert_eq!(unpack(&good[..i]), None, "{i} bytes");
            }
            assert_eq!(unpack(b"data"), None);
        }
    }
}

/// Browsers cache compiled shaders themselves.
#[cfg(target_arch = "wasm32")]
pub struct CacheFile;

#[cfg(target_arch = "wasm32")]
impl CacheFile {
    /// No cache.
    pub fn open(_: &wgpu::Device, _: &wgpu::AdapterInfo) -> Self {
        Self
    }

    /// None.
    pub fn get(&self) -> Option<&wgpu::PipelineCache> {
        None
    }

    /// Nothing to do.
    pub fn changed(&self) {}
}
