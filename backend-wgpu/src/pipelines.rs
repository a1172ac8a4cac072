//! Caches pipelines by their [`Spec`], bind groups by their buffers and parameter blocks by content, so that recording a step
//! again creates none of them.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;

use selkie_core::backend::Handle;
use selkie_core::error::{Error, Result};

use crate::buffer::Buf;
use crate::cache_file::CacheFile;
use crate::device::Gpu;
use crate::kernel::{Kernel, PARAM_BYTES, Spec};

/// Parameter blocks per uniform buffer.
const ARENA_BLOCKS: usize = 1024;

/// One dispatch, ready to be encoded.
#[derive(Clone)]
pub struct Dispatch {
    pipeline: wgpu::ComputePipeline,
    bindings: wgpu::BindGroup,
    params: u32,
    grid: [u32; 3],
}

impl Dispatch {
    /// Adds the dispatch to a pass.
    pub fn encode(&self, pass: &mut wgpu::ComputePass<'_>) {
        pass.set_pipeline(&self.pipeline);
        pass.set_bind_group(0, &self.bindings, &[self.params]);
        pass.dispatch_workgroups(self.grid[0], self.grid[1], self.grid[2]);
    }
}

struct Pipeline {
    pipeline: wgpu::ComputePipeline,
    layout: Rc<Layout>,
}

struct Layout {
    group: wgpu::BindGroupLayout,
    pipeline: wgpu::PipelineLayout,
    /// Unique number.
    id: usize,
}

#[derive(PartialEq, Eq, Hash)]
struct GroupKey {
    layout: usize,
    arena: usize,
    /// Buffer, first byte, bytes.
    buffers: Vec<(usize, u64, u64)>,
}

/// The caches of one device.
pub struct Pipelines {
    gpu: Arc<Gpu>,
    cache: CacheFile,
    layouts: HashMap<Vec<bool>, Rc<Layout>>,
    pipelines: HashMap<Spec, Rc<Pipeline>>,
    groups: HashMap<GroupKey, wgpu::BindGroup>,
    arenas: Vec<wgpu::Buffer>,
    /// Arena and offset of a block with this content.
    blocks: HashMap<Vec<u32>, (usize, u32)>,
    stride: usize,
    gone: Rc<RefCell<Vec<usize>>>,
    /// Time spent on compiling.
    #[cfg(not(target_arch = "wasm32"))]
    pub(crate) compiling: std::time::Duration,
}

impl Pipelines {
    /// Empty caches. `gone` receives the ids of dropped buffers, whose bind groups are then removed.
    pub fn new(gpu: &Arc<Gpu>, cache: CacheFile, gone: &Rc<RefCell<Vec<usize>>>) -> Self {
        let align = gpu.device.limits().min_uniform_buffer_offset_alignment as usize;
        Self {
            gpu: gpu.clone(),
            cache,
            layouts: HashMap::new(),
            pipelines: HashMap::new(),
            groups: HashMap::new(),
            arenas: vec![],
            blocks: HashMap::new(),
            stride: PARAM_BYTES.next_multiple_of(align.max(1)),
            gone: gone.clone(),
            #[cfg(not(target_arch = "wasm32"))]
            compiling: Default::default(),
        }
    }

    /// Whether compiled pipelines of an earlier run were found.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn warm(&self) -> bool {
        self.cache.warm()
    }

    /// Number of pipelines.
    pub fn len(&self) -> usize {
        self.pipelines.len()
    }

    fn layout(&mut self, writable: Vec<bool>) -> Rc<Layout> {
        if let Some(l) = self.layouts.get(&writable) {
            return l.clone();
        }
        let entry = |binding: usize, ty: wgpu::BufferBindingType| wgpu::BindGroupLayoutEntry {
            binding: binding as u32,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer {
                ty,
                has_dynamic_offset: ty == wgpu::BufferBindingType::Uniform,
                min_binding_size: None,
            },
            count: None,
        };
        let mut entries = vec![entry(0, wgpu::BufferBindingType::Uniform)];
        entries.extend(
            writable.iter().enumerate().map(|(i, w)| entry(i + 1, wgpu::BufferBindingType::Storage { read_only: !w })),
        );
        let device = &self.gpu.device;
        let group =
            device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: Some("op"), entries: &entries });
        let pipeline = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some("op"),
            bind_group_layouts: &[Some(&group)],
            immediate_size: 0,
        });
        let layout = Rc::new(Layout { group, pipeline, id: self.layouts.len() });
        self.layouts.insert(writable, layout.clone());
        layout
    }

    /// Compiles the missing pipelines; natively on several threads.
    ///
    /// # Errors
    /// [`Error::Compile`] with the shader's name and the compiler's log.
    pub fn compile<'s>(&mut self, specs: impl IntoIterator<Item = &'s Spec>) -> Result<()> {
        let mut seen = HashSet::new();
        let missing: Vec<&Spec> =
            specs.into_iter().filter(|s| !self.pipelines.contains_key(s) && seen.insert(*s)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let layouts: Vec<Rc<Layout>> = missing.iter().map(|s| self.layout(s.layout())).collect();
        let jobs: Vec<(&Spec, &wgpu::PipelineLayout)> =
            missing.iter().copied().zip(layouts.iter().map(|l| &l.pipeline)).collect();
        #[cfg(not(target_arch = "wasm32"))]
        let start = std::time::Instant::now();
        let compiled = compile_all(&self.gpu, self.cache.get(), &jobs);
        #[cfg(not(target_arch = "wasm32"))]
        {
            self.compiling += start.elapsed();
        }
        for ((spec, layout), compiled) in missing.iter().zip(&layouts).zip(compiled) {
            let pipeline = Pipeline { pipeline: compiled?, layout: layout.clone() };
            self.pipelines.insert((*spec).clone(), Rc::new(pipeline));
        }
        self.cache.changed();
        Ok(())
    }

    /// Arena and offset of a parameter block.
    fn block(&mut self, params: &[u32]) -> (usize, u32) {
        if let Some(at) = self.blocks.get(params) {
            return *at;
        }
        let n = self.blocks.len();
        if n.is_multiple_of(ARENA_BLOCKS) {
            self.arenas.push(self.gpu.device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("parameters"),
                size: (ARENA_BLOCKS * self.stride) as u64,
                usage: wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            }));
        }
        let (arena, offset) = (self.arenas.len() - 1, n % ARENA_BLOCKS * self.stride);
        self.gpu.upload(&self.arenas[arena], offset as u64, bytemuck::cast_slice(params));
        self.blocks.insert(params.to_vec(), (arena, offset as u32));
        (arena, offset as u32)
    }

    /// The dispatches of `kernels`, with `scratch` as the arena.
    ///
    /// # Errors
    /// Those of [`Pipelines::compile`].
    pub fn dispatches(&mut self, kernels: &[Kernel<Buf>], scratch: Option<&Buf>) -> Result<Vec<Dispatch>> {
        self.forget();
        self.compile(kernels.iter().map(|k| &k.spec))?;
        let dispatch = |k: &Kernel<Buf>| {
            let compiled = self.pipelines[&k.spec].clone();
            let (arena, params) = self.block(&k.params);
            let buffers = k.buffers.iter().map(|(b, at, bytes)| (bound(b, scratch).id(), *at, *bytes)).collect();
            let key = GroupKey { layout: compiled.layout.id, arena, buffers };
            let bindings = match self.groups.get(&key) {
                Some(group) => group.clone(),
                None => {
                    let group = self.group(&compiled.layout, arena, k, scratch);
                    self.groups.insert(key, group.clone());
                    group
                }
            };
            Dispatch { pipeline: compiled.pipeline.clone(), bindings, params, grid: k.grid }
        };
        Ok(kernels.iter().map(dispatch).collect())
    }

    fn group(&self, layout: &Layout, arena: usize, k: &Kernel<Buf>, scratch: Option<&Buf>) -> wgpu::BindGroup {
        let entry = |binding: usize, buffer, offset, bytes| wgpu::BindGroupEntry {
            binding: binding as u32,
            resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                buffer,
                offset,
                size: std::num::NonZeroU64::new(bytes),
            }),
        };
        let mut entries = vec![entry(0, &self.arenas[arena], 0, PARAM_BYTES as u64)];
        let buffers = k.buffers.iter().map(|(b, from, n)| (bound(b, scratch).buffer(), *from, *n));
        entries.extend(buffers.enumerate().map(|(i, (b, from, n))| entry(i + 1, b, from, n)));
        let label = k.spec.label();
        self.gpu.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some(&label),
            layout: &layout.group,
            entries: &entries,
        })
    }

    /// Removes the bind groups of dropped buffers.
    fn forget(&mut self) {
        let gone: HashSet<usize> = self.gone.borrow_mut().drain(..).collect();
        if !gone.is_empty() {
            self.groups.retain(|key, _| key.buffers.iter().all(|(id, ..)| !gone.contains(id)));
        }
    }
}

/// The buffer of a binding: the kernel's own, or the scratch arena. An arena exists if any kernel uses it.
fn bound<'a>(own: &'a Option<Buf>, scratch: Option<&'a Buf>) -> &'a Buf {
    own.as_ref().or(scratch).expect("scratch is reserved before it is used")
}

fn compile_one(
    gpu: &Gpu,
    cache: Option<&wgpu::PipelineCache>,
    spec: &Spec,
    layout: &wgpu::PipelineLayout,
) -> Result<wgpu::ComputePipeline> {
    let label = spec.label();
    let create = || {
        let source = wgpu::ShaderSource::Wgsl(spec.source().into());
        let desc = wgpu::ShaderModuleDescriptor { label: Some(&label), source };
        // SAFETY: the shaders are part of the binary and index only within the bindings that the op's checked shapes give.
        // The op tests run every variant that their device can run, with guard words after the outputs; a software device
        // cannot run those for cooperative matrices and for other subgroup sizes. All loops have fixed bounds.
        let module = unsafe { gpu.device.create_shader_module_trusted(desc, wgpu::ShaderRuntimeChecks::unchecked()) };
        gpu.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(&label),
            layout: Some(layout),
            module: &module,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions {
                // Every shader writes workgroup memory before it reads it.
                zero_initialize_workgroup_memory: false,
                ..Default::default()
            },
            cache,
        })
    };
    let name = label.clone();
    let error = move |log| Error::Compile { label: name.clone(), log };
    gpu.scoped(&[wgpu::ErrorFilter::Internal, wgpu::ErrorFilter::Validation], create, error)
}

#[cfg(target_arch = "wasm32")]
fn compile_all(
    gpu: &Gpu,
    cache: Option<&wgpu::PipelineCache>,
    jobs: &[(&Spec, &wgpu::PipelineLayout)],
) -> Vec<Result<wgpu::ComputePipeline>> {
    jobs.iter().map(|(spec, layout)| compile_one(gpu, cache, spec, layout)).collect()
}

#[cfg(not(target_arch = "wasm32"))]
fn compile_all(
    gpu: &Gpu,
    cache: Option<&wgpu::PipelineCache>,
    jobs: &[(&Spec, &wgpu::PipelineLayout)],
) -> Vec<Result<wgpu::ComputePipeline>> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8).min(jobs.len());
    let next = std::sync::atomic::AtomicUsize::new(0);
    let work = || {
        let mut done = vec![];
        loop {
            let i = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let Some((spec, layout)) = jobs.get(i) else { return done };
            done.push((i, compile_one(gpu, cache, spec, layout)));
        }
    };
    let mut all: Vec<(usize, Result<wgpu::ComputePipeline>)> = std::thread::scope(|s| {
        let helpers: Vec<_> = (1..threads).map(|_| s.spawn(work)).collect();
        let mut all = work();
        for helper in helpers {
            all.extend(helper.join().expect("the compiler's thread does not panic"));
        }
        all
    });
    all.sort_by_key(|(i, _)| *i);
    all.into_iter().map(|(_, p)| p).collect()
}
