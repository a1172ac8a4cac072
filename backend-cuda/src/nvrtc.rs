//! Compiling kernels: NVRTC for one architecture, and the images on disk.

use std::{
    ffi::{CStr, CString},
    fs,
    path::PathBuf,
};

use cudarc::nvrtc::{result, sys};
use selkie_core::{Error, Result};

use crate::spec::Spec;

/// Why NVRTC cannot be used, if it cannot. Must be asked before the first call: a missing library would be a panic.
pub fn missing() -> Option<String> {
    // SAFETY: only opens a library.
    match unsafe { sys::is_culib_present() } {
        true => None,
        false => Some("NVRTC (libnvrtc, part of the CUDA toolkit, 12 or 13) was not found by the loader".into()),
    }
}

/// Version of the loaded NVRTC.
pub fn version() -> Result<(i32, i32)> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both pointers are valid for the call.
    unsafe { sys::nvrtcVersion(&mut major, &mut minor) }.result().map_err(|e| device("nvrtcVersion", e))?;
    Ok((major, minor))
}

fn device(call: &str, e: result::NvrtcError) -> Error {
    Error::Device { op: call.into(), why: format!("{:?}", e.0) }
}

/// A compiled image and the compiler's log (registers, spills, warnings).
#[derive(Clone, Debug)]
pub struct Image {
    /// The CUBIN.
    pub bytes: Vec<u8>,
    /// The log.
    pub log: String,
}

/// Compiles `spec` for a real architecture such as `sm_90a`.
///
/// # Errors
/// [`Error::Compile`] with file, variant and the compiler's log.
pub fn compile(spec: &Spec, arch: &str) -> Result<Image> {
    let text = CString::new(spec.text()).expect("kernel sources hold no zero byte");
    let name = CString::new(format!("{}.cu", spec.file().stem())).expect("file names hold no zero byte");
    let program = Program(result::create_program(&text, Some(&name)).map_err(|e| device("nvrtcCreateProgram", e))?);
    let options =
        [&format!("--gpu-architecture={arch}"), "--std=c++17", "-lineinfo", "--ptxas-options=-v", "-default-device"];
    // SAFETY: the program lives until the end of this function.
    let done = unsafe { result::compile_program(program.0, &options.map(String::from)) };
    // SAFETY: as above.
    let raw = unsafe { result::get_program_log(program.0) }.unwrap_or_default();
    let bytes: Vec<u8> = raw.iter().map(|c| *c as u8).collect();
    let log = CStr::from_bytes_until_nul(&bytes).map(|c| c.to_string_lossy().into_owned()).unwrap_or_default();
    if let Err(e) = done {
        return Err(Error::Compile { label: format!("{spec} for {arch}"), log: format!("{:?}\n{log}", e.0) });
    }
    let mut n = 0;
    // SAFETY: `n` is valid for the call.
    unsafe { sys::nvrtcGetCUBINSize(program.0, &mut n) }.result().map_err(|e| device("nvrtcGetCUBINSize", e))?;
    let mut bytes = vec![0u8; n];
    // SAFETY: the buffer has the size that NVRTC asked for.
    unsafe { sys::nvrtcGetCUBIN(program.0, bytes.as_mut_ptr().cast()) }
        .result()
        .map_err(|e| device("nvrtcGetCUBIN", e))?;
    Ok(Image { bytes, log })
}

struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created by `create_program`, destroyed once.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

/// Images on disk, one file a variant. Whatever is not an image of ours is ignored and written anew.
#[derive(Clone, Debug)]
pub struct DiskCache {
    dir: Option<PathBuf>,
    tag: String,
}

const MAGIC: &[u8; 16] = b"selkie image  1\n";

impl DiskCache {
    /// The cache for an architecture and a compiler version under the user's cache directory; off if there is none.
    pub fn open(arch: &str, compiler: (i32, i32)) -> Self {
        Self::at(crate::cache::dir(), arch, compiler)
    }

    fn at(dir: Option<PathBuf>, arch: &str, (major, minor): (i32, i32)) -> Self {
        Self { dir, tag: format!("{arch} nvrtc {major}.{minor}") }
    }

    fn key(&self, spec: &Spec) -> u128 {
        crate::cache::hash(&[self.tag.as_bytes(), spec.text().as_bytes()])
    }

    fn file(&self, key: u128) -> Option<PathBuf> {
        self.dir.as_ref().map(|d| d.join(format!("{key:032x}.cubin")))
    }

    /// The stored image of a variant.
    pub fn load(&self, spec: &Spec) -> Option<Vec<u8>> {
        let key = self.key(spec);
        let bytes = fs::read(self.file(key)?).ok()?;
        let body = bytes.strip_prefix(MAGIC)?.strip_prefix(&key.to_le_bytes())?;
        let (sum, image) = body.split_at_checked(16)?;
        (sum == crate::cache::hash(&[image]).to_le_bytes()).then(|| image.to_vec())
    }

    /// Stores an image. Failure only costs the next start a compilation.
    pub fn store(&self, spec: &Spec, image: &[u8]) {
        let key = self.key(spec);
        let Some(file) = self.file(key) else { return };
        let sum = crate::cache::hash(&[image]).to_le_bytes();
        crate::cache::replace(&file, &[MAGIC, &key.to_le_bytes(), &sum, image]);
    }
}

/// The architecture to compile for, from a compute capability; the `a` targets have wgmma and the like.
pub fn arch(major: i32, minor: i32) -> String {
    let suffix = if major >= 9 { "a" } else { "" };
    format!("sm_{major}{minor}{suffix}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::File;

    fn scratch_dir(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("selkie-cuda-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        dir
    }

    #[test]
    fn images_come_back_and_foreign_files_do_not() {
        let dir = scratch_dir("cache");
        fs::create_dir_all(&dir).unwrap();
        let cache = DiskCache::at(Some(dir.clone()), "sm_90a", (13, 0));
        let spec = Spec::new(File::Sample).int("V", 32);
        assert_eq!(cache.load(&spec), None);
        cache.store(&spec, b"image");
        assert_eq!(cache.load(&spec).as_deref(), Some(&b"image"[..]));
        assert_eq!(cache.load(&Spec::new(File::Sample).int("V", 33)), None);
        assert_eq!(DiskCache::at(Some(dir.clone()), "sm_90a", (13, 1)).load(&spec), None);
        let file = cache.file(cache.key(&spec)).unwrap();
        let good = fs::read(&file).unwrap();
        for bad in [&good[..good.len() - 1], b"garbage", b"", &[&good[..], b"x"].concat()] {
            fs::write(&file, bad).unwrap();
            assert_eq!(cache.load(&spec), None);
        }
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn targets() {
        assert_eq!(arch(9, 0), "sm_90a");
        assert_eq!(arch(8, 6), "sm_86");
        assert_eq!(arch(12, 0), "sm_120a");
    }
}
