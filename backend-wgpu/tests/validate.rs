//! Every shader variant of the op cases, at every size, is valid WGSL and stays within WebGPU's default limits. No device.

use std::collections::{HashMap, HashSet};

use naga::proc::Layouter;
use naga::valid::{Capabilities, ValidationFlags, Validator};
use naga::{AddressSpace, StorageAccess};
use selkie_core::cases;
use selkie_wgpu::kernel::Spec;
use selkie_wgpu::lower::{Facts, lower};

/// WebGPU's defaults.
const STORAGE_BUFFERS: usize = 8;
const WORKGROUP_BYTES: u32 = 16 << 10;
const INVOCATIONS: u32 = 256;
const FACTS: Facts = Facts { max_binding: 1 << 30 };

/// The variants of all cases, with a case that needs each.
fn variants() -> HashMap<Spec, String> {
    let mut all = HashMap::new();
    for case in cases::all() {
        let kernels = lower(&case.plain_op(), &FACTS).unwrap_or_else(|e| panic!("{}: {e}", case.id()));
        for k in kernels {
            assert!(k.grid.iter().all(|n| (1..=65535).contains(n)), "{}: grid {:?}", case.id(), k.grid);
            all.entry(k.spec).or_insert_with(|| case.id());
        }
    }
    all
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
        Validator::new(ValidationFlags::all(), Capabilities::SHADER_FLOAT16_IN_FLOAT32)
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
        assert!(workgroup <= WORKGROUP_BYTES, "{} ({case}): {workgroup} bytes of workgroup memory", spec.label());
        assert!(storage.len() <= STORAGE_BUFFERS, "{} ({case}): {} storage buffers", spec.label(), storage.len());
        assert_eq!(storage, spec.layout(), "{}", spec.label());
        let entry = &module.entry_points[0];
        assert_eq!(entry.name, "main");
        let size: u32 = entry.workgroup_size.iter().product();
        assert!(size <= INVOCATIONS, "{} ({case}): {size} invocations", spec.label());
    }
    let files = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../shaders")).expect("the folder of shaders");
    let files: HashSet<String> = files
        .filter_map(|f| f.ok()?.path().file_stem()?.to_str().map(str::to_owned))
        .filter(|stem| stem != "common")
        .collect();
    let stems: HashSet<String> = stems.into_iter().map(str::to_owned).collect();
    assert_eq!(files, stems, "every file is a variant of some case");
    println!("{} variants", variants.len());
}
