//! Saves the driver's compiled pipelines in a file, if the device supports it, so that later starts compile nothing.

#[cfg(not(target_arch = "wasm32"))]
pub use native::CacheFile;

#[cfg(not(target_arch = "wasm32"))]
mod native {
    use std::cell::Cell;
    use std::path::PathBuf;

    /// A pipeline cache and its file.
    pub struct CacheFile {
        cache: Option<(wgpu::PipelineCache, PathBuf)>,
        /// Whether the file existed.
        warm: bool,
        changed: Cell<bool>,
    }

    impl CacheFile {
        /// The cache of an adapter, under the user's cache directory; empty without one or without the feature.
        pub fn open(device: &wgpu::Device, info: &wgpu::AdapterInfo) -> Self {
            let path = wgpu::util::pipeline_cache_key(info).zip(directory()).map(|(name, dir)| dir.join(name));
            let path = path.filter(|_| device.features().contains(wgpu::Features::PIPELINE_CACHE));
            let data = path.as_ref().and_then(|path| std::fs::read(path).ok());
            let cache = path.map(|path| {
                let desc =
                    wgpu::PipelineCacheDescriptor { label: Some("selkie"), data: data.as_deref(), fallback: true };
                // SAFETY: the data was written by `drop` below for an adapter with the same key; wgpu and the driver check
                // its header, and with `fallback` they start empty if it does not fit.
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
            // Written to a temporary file and renamed, so that other processes never read an incomplete file.
            let aside = path.with_extension(std::process::id().to_string());
            let dir = path.parent().map_or(Ok(()), std::fs::create_dir_all);
            let written = dir.and_then(|()| std::fs::write(&aside, data)).and_then(|()| std::fs::rename(&aside, path));
            if let Err(e) = written {
                tracing::debug!("pipeline cache {}: {e}", path.display());
            }
        }
    }

    fn directory() -> Option<PathBuf> {
        let var = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let base = if cfg!(windows) {
            var("LOCALAPPDATA")
        } else if cfg!(target_os = "macos") {
            var("HOME").map(|home| home.join("Library/Caches"))
        } else {
            var("XDG_CACHE_HOME").or_else(|| var("HOME").map(|home| home.join(".cache")))
        };
        base.map(|dir| dir.join("selkie"))
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
