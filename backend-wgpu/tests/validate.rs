//! Every shader variant of the op cases is valid WGSL and stays within WebGPU's default limits. Needs no device.

use std::collections::{HashMap, HashSet};

use naga::proc::Layouter;
use naga::valid::{Capabilities, ShaderStages, SubgroupOperationSet, ValidationFlags, Validator};
use naga::{AddressSpace, StorageAccess};
use selkie_cases as cases;
use selkie_core::backend::Handle;
use selkie_core::ops::Feature;
use selkie_core::tensor::{DType, Tensor};
use selkie_wgpu::kernel::Spec;
use selkie_wgpu::lower::{Facts, lower, lower_step, read_probe};

/// WebGPU's defaults.
const STORAGE_BUFFERS: usize = 8;
const WORKGROUP_BYTES: u32 = 16 << 10;
const INVOCATIONS: u32 = 256;
/// Subgroup sizes: none, and the sizes of devices that were run.
const SUBGROUPS: [Option<usize>; 3] = [None, Some(8), Some(32)];
/// Workgroup memory that the variants with cooperative matrices need.
const COOPERATIVE_WORKGROUP_BYTES: u32 = 48 << 10;

/// The variants of all cases and of fused ops, each with a case that uses it.
fn variants() -> HashMap<Spec, String> {
    let mut all = HashMap::new();
    // Cooperative matrices need subgroups of 32.
    let facts = |subgroup| Facts {
        max_binding: 1 << 30,
        subgroup,
        cooperative: subgroup == Some(32),
        precise: false,
        dots: true,
        few_barriers: false,
    };
    let all_facts = SUBGROUPS.map(facts);
    let few_barriers = Facts { few_barriers: true, dots: false, ..facts(None) };
    let precise = Facts { precise: true, dots: false, ..facts(Some(32)) };
    // There are no shaders for sums over ranks.
    for case in cases::all().into_iter().filter(|case| case.feature() != Some(Feature::Ranks)) {
        let op = case.plain_op();
        for facts in all_facts.iter().chain([&few_barriers, &precise]) {
            for k in lower(&op, facts).unwrap_or_else(|e| panic!("{}: {e}", case.id())) {
                assert!(k.grid.iter().all(|n| (1..=65535).contains(n)), "{}: grid {:?}", case.id(), k.grid);
                all.entry(k.spec).or_insert_with(|| case.id());
            }
        }
    }
    for chain in cases::chains() {
        let ops = chain.plain_ops();
        for facts in &all_facts {
            let kernels = lower_step(&ops, facts).expect("supported shapes");
            // Products of integers read what the norm before them rounds, or without subgroups a dispatch of its own.
            let integers = kernels.iter().any(|k| k.spec.label().contains(".dots"));
            let want = if integers { 2 + usize::from(facts.subgroup.is_none()) } else { 1 };
            assert!(kernels.len() == want, "{}: {} dispatches, not {want}", chain.name, kernels.len());
            all.extend(kernels.into_iter().map(|k| (k.spec, chain.name.clone())));
        }
    }
    let (src, out) = (Tensor::new(Plain(0), DType::U32, &[1 << 18]), Tensor::new(Plain(1), DType::U32, &[1]));
    all.insert(read_probe(&src, &out, 1 << 30).spec, "read probe".into());
    all
}

/// A buffer by number.
#[derive(Clone)]
struct Plain(usize);

impl Handle for Plain {
    fn id(&self) -> usize {
        self.0
    }

    fn bytes(&self) -> u64 {
        1 << 20
    }
}

#[test]
fn every_variant_is_valid_and_within_the_default_limits() {
    let variants = variants();
    let mut stems = HashSet::new();
    for (spec, case) in &variants {
        stems.insert(spec.stem());
        let source = spec.source();
        let module = naga::front::wgsl::parse_str(&source)
            .unwrap_or_else(|e| panic!("{} ({case}): {}", spec.label(), e.emit_to_string(&source)));
        let cooperative = spec.stem() == "matmul_coop";
        let plain = Capabilities::SHADER_FLOAT16_IN_FLOAT32 | Capabilities::SUBGROUP;
        let (capabilities, workgroup_bytes) = if cooperative {
            (plain | Capabilities::COOPERATIVE_MATRIX | Capabilities::SHADER_FLOAT16, COOPERATIVE_WORKGROUP_BYTES)
        } else {
            (plain, WORKGROUP_BYTES)
        };
        Validator::new(ValidationFlags::all(), capabilities)
            .subgroup_stages(ShaderStages::COMPUTE)
            .subgroup_operations(SubgroupOperationSet::all())
            .validate(&module)
            .unwrap_or_else(|e| panic!("{} ({case}): {}", spec.label(), e.emit_to_string(&source)));
        let mut layouter = Layouter::default();
        layouter.update(module.to_ctx()).expect("a valid module");
        let mut workgroup = 0;
        let mut storage = vec![];
        for (_, v) in module.global_variables.iter() {
            match v.space {
                AddressSpace::WorkGroup => workgroup += layouter[v.ty].size.next_multiple_of(16),
                AddressSpace::Storage { access } => storage.push(access.contains(StorageAccess::STORE)),
                _ => {}
            }
        }
        assert!(workgroup <= workgroup_bytes, "{} ({case}): {workgroup} bytes of workgroup memory", spec.label());
        assert!(storage.len() <= STORAGE_BUFFERS, "{} ({case}): {} storage buffers", spec.label(), storage.len());
        assert_eq!(storage, spec.layout(), "{}", spec.label());
        let entry = &module.entry_points[0];
        assert_eq!(entry.name, "main");
        let size: u32 = entry.workgroup_size.iter().product();
        assert!(size <= INVOCATIONS, "{} ({case}): {size} invocations", spec.label());
    }
    let files: HashSet<&str> = selkie_shaders::FILES
        .iter()
        .filter_map(|(name, _)| name.strip_suffix(".wgsl"))
        .filter(|s| *s != "common")
        .collect();
    assert_eq!(files, stems, "every file is a variant of some case");
    println!("{} variants", variants.len());
}
