//! The op cases in a browser: every shader that a page may pick, run by WebGPU and compared with the f64 references in wasm.
//!
//! Not part of the page: `web/build --ops` makes `web/dist-ops/selkie_ops.js`, which the browser tests load.

#[cfg(target_arch = "wasm32")]
mod ops {
    use selkie_cases::{self as cases, Case, Size};
    use selkie_core::{
        backend::Backend,
        cpu::{CpuBackend, simd, simd::bits::everything},
        ops::Feature,
    };
    use selkie_wgpu::{
        Options, WgpuBackend,
        lower::{Facts, lower},
    };
    use serde_json::{Value, json};
    use wasm_bindgen::prelude::*;

    #[wasm_bindgen]
    extern "C" {
        #[wasm_bindgen(js_namespace = console, js_name = error)]
        fn console_error(message: &str);
    }

    #[wasm_bindgen(start)]
    fn start() {
        std::panic::set_hook(Box::new(|info| console_error(&info.to_string())));
    }

    /// The cases that finish on a software device within minutes, as JSON by number: `["matmul/base", ...]`.
    #[wasm_bindgen]
    pub fn list() -> String {
        Value::from(small().iter().map(Case::id).collect::<Vec<_>>()).to_string()
    }

    fn small() -> Vec<Case> {
        // A page has one rank.
        let takes = |c: &Case| c.size == Size::Small && c.feature() != Some(Feature::Ranks);
        cases::all().into_iter().filter(takes).collect()
    }

    /// The cases on one backend.
    #[wasm_bindgen]
    pub struct Ops {
        cases: Vec<Case>,
        gpu: Option<WgpuBackend>,
        /// What decides about the shaders of `wgpu`, where this is `wgpu-hardware`.
        wgpu: Option<Facts>,
    }

    #[wasm_bindgen]
    impl Ops {
        /// Opens `wgpu`, `wgpu-hardware` (shaders for hardware, with WebGPU's default limits) or `cpu`.
        pub async fn open(backend: String) -> Result<Ops, JsError> {
            let hardware = backend == "wgpu-hardware";
            let wgpu = match hardware {
                true => Some(WgpuBackend::open(None, Options::default()).await?.facts()),
                false => None,
            };
            let options = Options {
                force_default_limits: hardware,
                few_barriers: hardware.then_some(false),
                ..Options::default()
            };
            let gpu = match backend.as_str() {
                "cpu" => None,
                _ => Some(WgpuBackend::open(None, options).await?),
            };
            Ok(Self { cases: small(), gpu, wgpu })
        }

        /// Whether this is `wgpu-hardware` and dispatches for a case what `wgpu` does, whose run then counts for both.
        pub fn same(&self, case: usize) -> bool {
            let (Some(gpu), Some(wgpu), Some(case)) = (&self.gpu, &self.wgpu, self.cases.get(case)) else {
                return false;
            };
            let op = case.plain_op();
            let dispatches = |facts: &Facts| {
                let kernels = lower(&op, facts).ok()?.into_iter();
                Some(kernels.map(|kernel| (kernel.spec, kernel.params, kernel.grid)).collect::<Vec<_>>())
            };
            dispatches(wgpu).is_some_and(|same| dispatches(&gpu.facts()) == Some(same))
        }

        /// Names of the shaders that a case runs.
        pub fn shaders(&self, case: usize) -> Vec<String> {
            let (Some(gpu), Some(case)) = (&self.gpu, self.cases.get(case)) else {
                return Vec::new();
            };
            let kernels = lower(&case.plain_op(), &gpu.facts()).unwrap_or_default();
            kernels.into_iter().map(|kernel| format!("{:?}", kernel.spec)).collect()
        }

        /// Runs a case: `{ id, ok, worst, failures, pipelines }` as JSON. `worst` is the largest error in units of its limit,
        /// `pipelines` the number of shaders compiled so far. A device error fails the case.
        pub async fn run(&self, case: usize) -> Result<String, JsError> {
            let case = self.cases.get(case).ok_or_else(|| JsError::new("no such case"))?;
            let report = match &self.gpu {
                Some(gpu) => on(gpu, case).await,
                None => on(&CpuBackend::new(), case).await,
            };
            let pipelines = self.gpu.as_ref().map_or(0, WgpuBackend::pipelines);
            let (ok, worst, failures) = report;
            let report =
                json!({ "id": case.id(), "ok": ok, "worst": worst, "failures": failures, "pipelines": pipelines });
            Ok(report.to_string())
        }

        /// Compares fusible ops with the same ops run separately: `{ id, ok, failures }` of each as JSON.
        pub async fn chains(&self) -> Result<String, JsError> {
            let mut reports = Vec::new();
            for chain in cases::chains() {
                let difference = match &self.gpu {
                    Some(gpu) => chain.difference(gpu).await,
                    None => chain.difference(&CpuBackend::new()).await,
                };
                let failures: Vec<String> = difference.unwrap_or_else(|e| Some(e.to_string())).into_iter().collect();
                let id = format!("chain/{}", chain.name);
                reports.push(json!({ "id": id, "ok": failures.is_empty(), "failures": failures }));
            }
            Ok(Value::from(reports).to_string())
        }

        /// Waits until the browser has validated every shader compiled so far; returns its message if it rejected one.
        pub async fn settle(&self) -> Result<(), JsError> {
            match &self.gpu {
                Some(gpu) => Ok(gpu.settle(&mut |_, _| {}).await?),
                None => Ok(()),
            }
        }
    }

    async fn on<B: Backend>(backend: &B, case: &Case) -> (bool, Option<f64>, Vec<String>) {
        match cases::run(backend, case).await {
            Ok(report) => (report.ok(), Some(report.worst()), report.failures),
            Err(e) => (false, None, vec![e.to_string()]),
        }
    }

    /// The first number in which SIMD and plain code differ in this browser, if any.
    #[wasm_bindgen(js_name = simdDifference)]
    pub fn simd_difference() -> Option<String> {
        let want = everything(simd::Plain);
        let got = dispatched();
        let at = (0..want.len()).find(|&i| got[i] != want[i])?;
        Some(format!("number {at} is {:08x}, not {:08x}", got[at], want[at]))
    }

    #[cfg(target_feature = "simd128")]
    fn dispatched() -> Vec<u32> {
        everything(simd::Wasm128)
    }

    #[cfg(not(target_feature = "simd128"))]
    fn dispatched() -> Vec<u32> {
        everything(simd::Plain)
    }

    /// The instruction set that this module computes with.
    #[wasm_bindgen]
    pub fn isas() -> String {
        simd::Isa::best().name().to_owned()
    }
}
