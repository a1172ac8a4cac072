//! Products through cuBLASLt: one workspace, and an algorithm per shape that is measured once and remembered on disk.

use std::{cell::RefCell, collections::HashMap, ffi::c_void, rc::Rc};

use cudarc::cublaslt::{result, sys};
use selkie_core::{Error, Result, tensor::DType};

use crate::{
    cache,
    driver::{Context, Event, Stream},
    group::Seat,
    launch::{Address, Gemm},
    memory::Buf,
};

const WORKSPACE_BYTES: u64 = 64 << 20;
/// Candidates of the library's heuristic that are measured.
const CANDIDATES: usize = 8;
const MAGIC: &[u8; 16] = b"selkie gemm   1\n";

/// Why cuBLASLt cannot be used, if it cannot.
pub fn missing() -> Option<String> {
    // SAFETY: only opens a library.
    match unsafe { sys::is_culib_present() } {
        true => None,
        false => Some("cuBLASLt (libcublasLt, part of the CUDA toolkit, 12 or 13) was not found by the loader".into()),
    }
}

fn device(call: &str, e: result::CublasError) -> Error {
    Error::Device { op: "matmul".into(), why: format!("{call}: {:?}", e.0) }
}

/// The properties that decide an algorithm. Row counts above 64 share one with the next power of two.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    mnk: [usize; 3],
    strides: [usize; 3],
    f32_out: bool,
    accumulate: bool,
    codes: bool,
}

impl Key {
    fn of(g: &Gemm) -> Self {
        let [m, n, k] = g.mnk;
        let m = if m <= 64 { m } else { m.next_power_of_two() };
        let (f32_out, codes) = (g.out == DType::F32, g.scales.is_some());
        Self { mnk: [m, n, k], strides: g.strides, f32_out, accumulate: g.accumulate, codes }
    }
}

/// The library with its workspace.
pub struct Blas {
    handle: sys::cublasLtHandle_t,
    workspace: Buf,
    device: String,
    chosen: RefCell<HashMap<Key, sys::cublasLtMatmulAlgo_t>>,
}

/// Descriptors of one product.
struct Problem {
    op: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
}

impl Problem {
    /// Row-major `out = x wᵀ` is column-major `outᵀ = w xᵀ`: w transposed as A, x as B.
    fn new(g: &Gemm) -> Result<Self> {
        let [m, n, k] = g.mnk.map(|v| v as u64);
        let fail = |e| device("descriptor", e);
        let (bf16, f32) = (sys::cudaDataType_t::CUDA_R_16BF, sys::cudaDataType_t::CUDA_R_32F);
        let out = if g.out == DType::F32 { f32 } else { bf16 };
        let op = result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, f32).map_err(fail)?;
        let transpose = 1i32;
        let what = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        // SAFETY: the attribute takes an i32.
        unsafe { result::set_matmul_desc_attribute(op, what, (&raw const transpose).cast(), 4) }.map_err(fail)?;
        if let Some([x, w]) = g.scales {
            use sys::{
                cublasLtMatmulDescAttributes_t::{
                    CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
                    CUBLASLT_MATMUL_DESC_B_SCALE_MODE, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER,
                },
                cublasLtMatmulMatrixScale_t::{
                    CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F, CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
                },
            };
            for (what, value) in [
                (CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F as i32),
                (CUBLASLT_MATMUL_DESC_B_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F as i32),
            ] {
                // SAFETY: the attribute takes an i32.
                unsafe { result::set_matmul_desc_attribute(op, what, (&raw const value).cast(), 4) }.map_err(fail)?;
            }
            for (what, at) in [(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, w), (CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, x)] {
                // SAFETY: the attribute takes a pointer.
                unsafe { result::set_matmul_desc_attribute(op, what, (&raw const at).cast(), 8) }.map_err(fail)?;
            }
        }
        let factors = if g.scales.is_some() { sys::cudaDataType_t::CUDA_R_8F_E4M3 } else { bf16 };
        let layout = |t, rows, cols, ld: usize| result::create_matrix_layout(t, rows, cols, ld as i64).map_err(fail);
        // A one-row matrix may come with any stride, a leading dimension must cover the column.
        let ld = |i: usize, least: u64| g.strides[i].max(least as usize);
        let layouts =
            [layout(factors, k, n, ld(1, k))?, layout(factors, k, m, ld(0, k))?, layout(out, n, m, ld(2, n))?];
        Ok(Self { op, layouts })
    }
}

impl Drop for Problem {
    fn drop(&mut self) {
        // SAFETY: all were created in `new` and are destroyed once.
        unsafe {
            let _ = result::destroy_matmul_desc(self.op);
            for l in self.layouts {
                let _ = result::destroy_matrix_layout(l);
            }
        }
    }
}

impl Blas {
    /// Opens the library.
    pub fn open(context: &Rc<Context>, stream: &Stream, device_name: &str) -> Result<Self> {
        let workspace = Buf::alloc(context, stream, "the workspace of cuBLASLt", WORKSPACE_BYTES)?;
        let handle = result::create_handle().map_err(|e| device("cublasLtCreate", e))?;
        // SAFETY: no argument.
        let version = unsafe { sys::cublasLtGetVersion() };
        let device = format!("{device_name}, cuBLASLt {version}");
        Ok(Self { handle, workspace, device, chosen: RefCell::new(HashMap::new()) })
    }

    /// Whether it multiplies codes with scales, which depends on its version and on the device.
    pub fn takes_codes(&self) -> bool {
        let at = self.workspace.address();
        let example = Gemm {
            mnk: [256; 3],
            at: [at; 3],
            strides: [256; 3],
            out: DType::Bf16,
            scale: 1.0,
            accumulate: false,
            scales: Some([at; 2]),
        };
        Problem::new(&example).and_then(|p| self.candidates(&p)).is_ok_and(|found| !found.is_empty())
    }

    /// Whether the algorithm of a product is chosen.
    pub fn has_chosen(&self, g: &Gemm) -> bool {
        self.chosen.borrow().contains_key(&Key::of(g))
    }

    /// Chooses the algorithm of a product, on several ranks the one that rank 0 chooses. Never within a capture.
    pub fn choose(&self, context: &Rc<Context>, stream: &Stream, g: &Gemm, seat: Option<&Seat>) -> Result<()> {
        let key = Key::of(g);
        if self.chosen.borrow().contains_key(&key) {
            return Ok(());
        }
        let choose = || self.choice(context, stream, g, &key);
        let algo = match seat {
            Some(seat) => seat.algorithm(&key, choose)?,
            None => choose()?,
        };
        self.chosen.borrow_mut().insert(key, algo);
        Ok(())
    }

    /// From disk, or by running the library's candidates. `out` would receive garbage unless the product overwrites it, so
    /// a fresh buffer is used.
    fn choice(&self, context: &Rc<Context>, stream: &Stream, g: &Gemm, key: &Key) -> Result<sys::cublasLtMatmulAlgo_t> {
        let file = self.file(key);
        let problem = Problem::new(g)?;
        let stored = file.as_ref().and_then(|f| std::fs::read(f).ok()).and_then(|b| parse(&b));
        if let Some(algo) = stored
            && self.check(&problem, &algo)
        {
            return Ok(algo);
        }
        let bytes = (g.mnk[0] * g.strides[2].max(g.mnk[1]) * g.out.bytes()) as u64;
        let out = Buf::alloc(context, stream, "measuring a matrix product", bytes)?;
        let trial = Gemm { at: [g.at[0], g.at[1], out.address()], ..g.clone() };
        let (start, end) = (Event::new(true)?, Event::new(true)?);
        let mut best: Option<(f32, sys::cublasLtMatmulAlgo_t)> = None;
        for algo in self.candidates(&problem)? {
            if self.launch(&problem, &trial, &algo, stream).is_err() {
                continue;
            }
            let mut times = [0.0; 3];
            for t in &mut times {
                start.record(stream)?;
                for _ in 0..3 {
                    self.launch(&problem, &trial, &algo, stream)?;
                }
                end.record(stream)?;
                end.wait("matmul")?;
                *t = end.since(&start)?;
            }
            times.sort_by(f32::total_cmp);
            if best.as_ref().is_none_or(|(t, _)| times[1] < *t) {
                best = Some((times[1], algo));
            }
        }
        let Some((_, algo)) = best else {
            return Err(Error::Device {
                op: "matmul".into(),
                why: format!("cuBLASLt has no algorithm for {:?} with strides {:?}", g.mnk, g.strides),
            });
        };
        if let Some(file) = file {
            let bytes: Vec<u8> = algo.data.iter().flat_map(|w| w.to_le_bytes()).collect();
            cache::replace(&file, &[MAGIC, &cache::hash(&[&bytes]).to_le_bytes(), &bytes]);
        }
        Ok(algo)
    }

    /// Runs a product whose algorithm is known.
    pub fn run(&self, stream: &Stream, g: &Gemm) -> Result<()> {
        let algo = *self.chosen.borrow().get(&Key::of(g)).expect("an algorithm is chosen before a product runs");
        let problem = Problem::new(g)?;
        if self.launch(&problem, g, &algo, stream).is_ok() {
            return Ok(());
        }
        // An algorithm chosen for another number of rows may not take this one.
        let first = self.candidates(&problem)?;
        let Some(algo) = first.first() else {
            return Err(Error::Device { op: "matmul".into(), why: format!("no algorithm for {:?}", g.mnk) });
        };
        self.launch(&problem, g, algo, stream)
    }

    fn launch(&self, p: &Problem, g: &Gemm, algo: &sys::cublasLtMatmulAlgo_t, stream: &Stream) -> Result<()> {
        let beta = if g.accumulate { 1.0f32 } else { 0.0 };
        let [a, b, c] = p.layouts;
        let [x, w, out] = g.at.map(|at| at as *mut c_void);
        // SAFETY: descriptors are alive, addresses and strides come from checked tensors, the workspace is ours and its
        // users are ordered by the one stream.
        unsafe {
            result::matmul(
                self.handle,
                p.op,
                (&raw const g.scale).cast(),
                (&raw const beta).cast(),
                w,
                a,
                x,
                b,
                out,
                c,
                out,
                c,
                algo,
                self.workspace.address() as *mut c_void,
                WORKSPACE_BYTES as usize,
                stream.raw.cast(),
            )
        }
        .map_err(|e| device("cublasLtMatmul", e))
    }

    fn candidates(&self, p: &Problem) -> Result<Vec<sys::cublasLtMatmulAlgo_t>> {
        let fail = |e| device("heuristic", e);
        let preference = result::create_matmul_pref().map_err(fail)?;
        let bytes = WORKSPACE_BYTES;
        let what = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let [a, b, c] = p.layouts;
        // SAFETY: an all-zero result is a valid place to write to.
        let mut found: [sys::cublasLtMatmulHeuristicResult_t; CANDIDATES] = unsafe { std::mem::zeroed() };
        let mut count = 0;
        // SAFETY: the attribute takes a u64; `found` has CANDIDATES entries; the preference is destroyed once.
        let done = unsafe {
            let set = result::set_matmul_pref_attribute(preference, what, (&raw const bytes).cast(), 8);
            let done = set.and_then(|()| {
                sys::cublasLtMatmulAlgoGetHeuristic(
                    self.handle,
                    p.op,
                    a,
                    b,
                    c,
                    c,
                    preference,
                    CANDIDATES as i32,
                    found.as_mut_ptr(),
                    &mut count,
                )
                .result()
            });
            let _ = result::destroy_matmul_pref(preference);
            done
        };
        done.map_err(fail)?;
        let ok = sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS;
        Ok(found[..count as usize].iter().filter(|r| r.state == ok).map(|r| r.algo).collect())
    }

    fn check(&self, p: &Problem, algo: &sys::cublasLtMatmulAlgo_t) -> bool {
        let [a, b, c] = p.layouts;
        // SAFETY: an all-zero result is a valid place to write to; descriptors are alive.
        unsafe {
            let mut r: sys::cublasLtMatmulHeuristicResult_t = std::mem::zeroed();
            let done = sys::cublasLtMatmulAlgoCheck(self.handle, p.op, a, b, c, c, algo, &mut r);
            done.result().is_ok() && r.workspaceSize <= WORKSPACE_BYTES as usize
        }
    }

    fn file(&self, key: &Key) -> Option<std::path::PathBuf> {
        let name = cache::hash(&[self.device.as_bytes(), format!("{key:?}").as_bytes()]);
        cache::dir().map(|d| d.join(format!("{name:032x}.gemm")))
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: created in `open`, destroyed once.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

fn parse(bytes: &[u8]) -> Option<sys::cublasLtMatmulAlgo_t> {
    let (sum, body) = bytes.strip_prefix(MAGIC)?.split_at_checked(16)?;
    if sum != cache::hash(&[body]).to_le_bytes() || body.len() != 64 {
        return None;
    }
    let mut data = [0u64; 8];
    for (word, bytes) in data.iter_mut().zip(body.chunks_exact(8)) {
        *word = u64::from_le_bytes(bytes.try_into().ok()?);
    }
    Some(sys::cublasLtMatmulAlgo_t { data })
}
