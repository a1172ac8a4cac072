//! A dispatch as data: the shader with its constants, its views, its parameters and its grid.
//!
//! A buffer is bound whole (storage offsets need 256-byte alignment) and only once, even if an op has several views of it;
//! offsets and row strides are parameters. The WGSL declarations and the accessors of every view (`x_at(i)`, `x_v4(i)`,
//! `y_set(i, v)`, ...; `i` counts elements from the view's start) are generated here, so shaders name views, not bindings.
//! Everything is generic over [`Handle`], so tests build every kernel without a device.

use std::borrow::Cow;
use std::fmt::Write;
use std::path::Path;

use selkie_core::backend::Handle;
use selkie_core::format::Format;
use selkie_core::kv8;
use selkie_core::ops::{Access, RowBlock};
use selkie_core::step::{Bucket, PAGE, Step};
use selkie_core::tensor::{DType, Tensor};

use crate::codes;

/// Workgroups per grid axis that WebGPU guarantees.
const MAX_GROUPS: usize = 65535;
/// Bytes of a parameter block: the largest alignment that a device may require of dynamic offsets.
pub const PARAM_BYTES: usize = 256;

/// Name of the constant with the number of shuffle steps of a subgroup sum.
const SHUFFLES: &str = "SHUFFLES";

/// A shader file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shader {
    /// Stem of the file in `shaders/`.
    pub stem: &'static str,
    /// Its text, without comments.
    pub text: &'static str,
}

/// The shader `shaders/$stem.wgsl`.
macro_rules! shader {
    ($stem:literal) => {
        $crate::kernel::Shader { stem: $stem, text: include_str!(concat!(env!("OUT_DIR"), "/", $stem, ".wgsl")) }
    };
}
pub(crate) use shader;

/// A shader's text: the file in the folder `SELKIE_SHADERS` if it exists (for development), else the built-in text.
fn source_of(shader: Shader) -> Cow<'static, str> {
    let file = std::env::var_os("SELKIE_SHADERS").map(|dir| Path::new(&dir).join(format!("{}.wgsl", shader.stem)));
    file.and_then(|file| std::fs::read_to_string(file).ok()).map_or(shader.text.into(), Cow::Owned)
}

/// How a view's elements are stored in its binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Elem {
    F32,
    U32,
    Atomic,
    Bf16,
    F16,
    /// Coded rows, bound as words.
    Codes(Format),
    /// KV pages in 8 bits with rows of so many elements, bound as words.
    Kv8(usize),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ViewSpec {
    name: &'static str,
    elem: Elem,
    binding: usize,
    access: ViewAccess,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ViewAccess {
    Read,
    Write,
    Both,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct BindingSpec {
    elem: Elem,
    /// The array's elements are vectors of four words.
    wide: bool,
    writable: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Const {
    U32(u32),
    Bool(bool),
}

/// Everything that a pipeline is compiled from. Equal specs share one pipeline.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Spec {
    shader: Shader,
    consts: Vec<(&'static str, Const)>,
    params: Vec<(&'static str, &'static str)>,
    views: Vec<ViewSpec>,
    bindings: Vec<BindingSpec>,
}

impl Spec {
    /// A readable name: the stem and the constants.
    pub fn label(&self) -> String {
        let mut s = self.shader.stem.to_owned();
        for (name, value) in &self.consts {
            let _ = match value {
                Const::U32(v) => write!(s, ".{}{v}", name.to_lowercase()),
                Const::Bool(true) => write!(s, ".{}", name.to_lowercase()),
                Const::Bool(false) => Ok(()),
            };
        }
        s
    }

    /// Stem of the shader file.
    pub fn stem(&self) -> &'static str {
        self.shader.stem
    }

    /// Per storage binding, from binding 1 on: whether it is written.
    pub fn layout(&self) -> Vec<bool> {
        self.bindings.iter().map(|b| b.writable).collect()
    }

    /// The whole WGSL module.
    pub fn source(&self) -> String {
        let mut s = String::with_capacity(8192);
        if self.consts.contains(&("COOPERATIVE", Const::Bool(true))) {
            s.push_str("enable f16;\nenable wgpu_cooperative_matrix;\n");
        }
        for (name, value) in &self.consts {
            let _ = match value {
                Const::U32(v) => writeln!(s, "const {name}: u32 = {v}u;"),
                Const::Bool(v) => writeln!(s, "const {name}: bool = {v};"),
            };
        }
        s.push_str("struct Params {\n");
        for (name, ty) in &self.params {
            let _ = writeln!(s, "  {name}: {ty},");
        }
        for v in &self.views {
            let _ = writeln!(s, "  {0}_off: u32,\n  {0}_row: u32,", v.name);
        }
        s.push_str("}\n@group(0) @binding(0) var<uniform> P: Params;\n");
        for (i, b) in self.bindings.iter().enumerate() {
            let access = if b.writable { "read_write" } else { "read" };
            let elem = match b.elem {
                Elem::F32 => "f32",
                Elem::Atomic => "atomic<u32>",
                Elem::U32 | Elem::Bf16 | Elem::F16 | Elem::Codes(_) | Elem::Kv8(_) => "u32",
            };
            let elem = if b.wide { format!("vec4<{elem}>") } else { elem.into() };
            let _ = writeln!(s, "@group(0) @binding({}) var<storage, {access}> b{i}: array<{elem}>;", i + 1);
        }
        s.push_str(include_str!(concat!(env!("OUT_DIR"), "/common.wgsl")));
        self.views.iter().for_each(|v| v.accessors(&self.bindings[v.binding], &mut s));
        if self.consts.contains(&("COOPERATIVE", Const::Bool(true))) {
            self.views.iter().for_each(|v| v.matrix_accessor(&self.bindings[v.binding], &mut s));
        }
        if let Some(Const::U32(steps)) = self.consts.iter().find(|c| c.0 == SHUFFLES).map(|c| c.1) {
            let sum: String = (0..steps).map(|i| format!(" s += subgroupShuffleXor(s, {}u);", 1 << i)).collect();
            let _ = writeln!(s, "fn shuffled(x: f32) -> f32 {{ var s = x;{sum} return s; }}");
        }
        self.text(&mut s);
        s
    }

    /// The value of the integer constant `name`, for `#for`.
    fn count(&self, name: &str) -> usize {
        let value = self.consts.iter().find(|(n, _)| *n == name);
        let Some((_, Const::U32(n))) = value else { panic!("{}: no constant {name}", self.shader.stem) };
        *n as usize
    }

    /// Appends the file's text. Lines between `#if FLAG`, `#else` and `#endif` are kept as the flags say, so that skipped lines
    /// may name views that the op does not have. Lines between `#for i COUNT` and `#end` are repeated with `$i` as 0, 1, ..:
    /// unrolled loads are in flight together whether or not the driver unrolls loops.
    fn text(&self, s: &mut String) {
        let file = source_of(self.shader);
        let lines: Vec<&str> = file.lines().collect();
        let rest = self.block(&lines, &[], true, s);
        assert!(rest.is_empty(), "{}: {} without its beginning", self.shader.stem, rest[0].trim());
    }

    /// Appends the lines of a block if `keep`, and returns the rest, starting at the line that ends the block.
    fn block<'t>(&self, mut lines: &'t [&'t str], vars: &[(&str, usize)], keep: bool, s: &mut String) -> &'t [&'t str] {
        while let Some((line, rest)) = lines.split_first() {
            let here = lines;
            let mut words = line.split_whitespace();
            lines = rest;
            match words.next() {
                Some("#if") => {
                    let flag = words.next().unwrap_or_default();
                    let value = self.consts.iter().find(|(name, _)| *name == flag);
                    let on = match value {
                        Some((_, Const::Bool(on))) => *on,
                        // In a skipped block a flag may be undefined.
                        _ if !keep => false,
                        _ => panic!("{}: no flag {flag}", self.shader.stem),
                    };
                    lines = self.block(lines, vars, keep && on, s);
                    if lines.first().is_some_and(|l| l.trim() == "#else") {
                        lines = self.block(&lines[1..], vars, keep && !on, s);
                    }
                    assert!(!lines.is_empty(), "{}: #if without #endif", self.shader.stem);
                    lines = &lines[1..];
                }
                Some("#for") => {
                    let (var, count) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
                    let count = count.parse().unwrap_or_else(|_| if keep { self.count(count) } else { 1 });
                    let body = lines;
                    for i in 0..count.max(1) {
                        let inner = [vars, &[(var, i)]].concat();
                        lines = self.block(body, &inner, keep && count > 0, s);
                    }
                    assert!(!lines.is_empty(), "{}: #for without #end", self.shader.stem);
                    lines = &lines[1..];
                }
                // The caller handles the end of the block.
                Some("#else" | "#endif" | "#end") => return here,
                _ if keep => {
                    let mut line = (*line).to_owned();
                    for (var, i) in vars {
                        line = line.replace(&format!("${var}"), &i.to_string());
                    }
                    s.push_str(&line);
                    s.push('\n');
                }
                _ => {}
            }
        }
        lines
    }
}

impl ViewSpec {
    /// Writes the functions that read and write the view.
    fn accessors(&self, binding: &BindingSpec, s: &mut String) {
        let (n, b) = (self.name, self.binding);
        let at = format!("P.{n}_off + i");
        let mut f = |text: String| {
            s.push_str(&text);
            s.push('\n');
        };
        match self.elem {
            Elem::Atomic => {
                f(format!("fn {n}_at(i: u32) -> u32 {{ return atomicLoad(&b{b}[{at}]); }}"));
                f(format!("fn {n}_or(i: u32, v: u32) {{ atomicOr(&b{b}[{at}], v); }}"));
                return;
            }
            Elem::Bf16 | Elem::F16 => {
                let unpack = if self.elem == Elem::Bf16 { "bf16x4" } else { "f16x4" };
                let word =
                    if binding.wide { format!("b{b}[j >> 3u][(j >> 1u) & 3u]") } else { format!("b{b}[j >> 1u]") };
                f(format!(
                    "fn {n}_at(i: u32) -> f32 {{ let j = {at}; \
                     return {unpack}(vec2<u32>({word}, 0u))[j & 1u]; }}"
                ));
                f(format!(
                    "alias {n}_raw = vec4<u32>;\nfn {n}_unpack(w: {n}_raw) -> mat2x4<f32> {{ \
                     return mat2x4<f32>({unpack}(w.xy), {unpack}(w.zw)); }}"
                ));
                if binding.wide {
                    f(format!("fn {n}_raw8(i: u32) -> {n}_raw {{ return b{b}[({at}) >> 3u]; }}"));
                    f(format!(
                        "fn {n}_v8(i: u32) -> mat2x4<f32> {{ let w = b{b}[({at}) >> 3u]; \
                         return mat2x4<f32>({unpack}(w.xy), {unpack}(w.zw)); }}"
                    ));
                    f(format!(
                        "fn {n}_v4(i: u32) -> vec4<f32> {{ let w = b{b}[({at}) >> 3u]; \
                         return {unpack}(select(w.xy, w.zw, (({at}) & 4u) != 0u)); }}"
                    ));
                } else {
                    f(format!(
                        "fn {n}_raw8(i: u32) -> {n}_raw {{ let j = ({at}) >> 1u; \
                         return vec4<u32>(b{b}[j], b{b}[j + 1u], b{b}[j + 2u], b{b}[j + 3u]); }}"
                    ));
                    f(format!(
                        "fn {n}_v4(i: u32) -> vec4<f32> {{ let j = ({at}) >> 1u; \
                         return {unpack}(vec2<u32>(b{b}[j], b{b}[j + 1u])); }}"
                    ));
                    f(format!("fn {n}_v8(i: u32) -> mat2x4<f32> {{ return mat2x4<f32>({n}_v4(i), {n}_v4(i + 4u)); }}"));
                }
                return;
            }
            Elem::Codes(format) => return codes::accessors(n, b, format, binding.wide, s),
            Elem::Kv8(dim) => {
                // Places are bytes; a place within a head says which token's scale applies.
                let (span, codes) = (kv8::span(DType::I8, dim), PAGE * dim);
                let scale = format!("(i / {span}u * {span}u + {codes}u) / 4u + i % {span}u / {dim}u");
                if self.access == ViewAccess::Read {
                    f(format!(
                        "fn {n}_v4(i: u32) -> vec4<f32> {{ \
                         let scale = bitcast<f32>(b{b}[P.{n}_off / 4u + {scale}]); \
                         return scale * vec4<f32>(unpack4xI8(b{b}[({at}) / 4u])); }}"
                    ));
                } else {
                    // Of a row whose largest magnitude has these bits.
                    f(format!(
                        "fn {n}_set_codes(i: u32, v: vec4<f32>, bits: u32) {{ let most = bitcast<f32>(bits); \
                         let inverse = select(0.0, 127.0 / most, most > 1e-30); \
                         b{b}[({at}) / 4u] = pack4xI8(vec4<i32>(round(v * inverse))); }}"
                    ));
                    f(format!(
                        "fn {n}_set_scale(i: u32, bits: u32) {{ b{b}[P.{n}_off / 4u + {scale}] = \
                         select(bitcast<u32>(bitcast<f32>(bits) / 127.0), 0x7fc00000u, bits >= 0x7f800000u); }}"
                    ));
                }
                return;
            }
            Elem::F32 | Elem::U32 => {}
        }
        let t = if self.elem == Elem::F32 { "f32" } else { "u32" };
        if self.access != ViewAccess::Write {
            if binding.wide {
                f(format!("fn {n}_at(i: u32) -> {t} {{ let j = {at}; return b{b}[j >> 2u][j & 3u]; }}"));
                f(format!("fn {n}_v4(i: u32) -> vec4<{t}> {{ return b{b}[({at}) >> 2u]; }}"));
            } else {
                f(format!("fn {n}_at(i: u32) -> {t} {{ return b{b}[{at}]; }}"));
                f(format!(
                    "fn {n}_v4(i: u32) -> vec4<{t}> {{ let j = {at}; \
                     return vec4<{t}>(b{b}[j], b{b}[j + 1u], b{b}[j + 2u], b{b}[j + 3u]); }}"
                ));
            }
            if self.elem == Elem::F32 {
                f(format!("fn {n}_v8(i: u32) -> mat2x4<f32> {{ return mat2x4<f32>({n}_v4(i), {n}_v4(i + 4u)); }}"));
                f(format!(
                    "alias {n}_raw = mat2x4<f32>;\nfn {n}_raw8(i: u32) -> {n}_raw {{ return {n}_v8(i); }}\n\
                     fn {n}_unpack(w: {n}_raw) -> mat2x4<f32> {{ return w; }}"
                ));
            }
        }
        if self.access != ViewAccess::Read {
            if binding.wide {
                // No setter for single elements: another thread may own the rest of the vector.
                f(format!("fn {n}_set4(i: u32, v: vec4<{t}>) {{ b{b}[({at}) >> 2u] = v; }}"));
            } else {
                f(format!("fn {n}_set(i: u32, v: {t}) {{ b{b}[{at}] = v; }}"));
                f(format!(
                    "fn {n}_set4(i: u32, v: vec4<{t}>) {{ let j = {at}; \
                     b{b}[j] = v.x; b{b}[j + 1u] = v.y; b{b}[j + 2u] = v.z; b{b}[j + 3u] = v.w; }}"
                ));
            }
        }
    }

    /// Writes the function that stores a cooperative matrix of sums.
    fn matrix_accessor(&self, binding: &BindingSpec, s: &mut String) {
        let (n, b) = (self.name, self.binding);
        if self.elem == Elem::F32 && self.access == ViewAccess::Write && binding.wide {
            let _ = writeln!(
                s,
                "fn {n}_store(m: coop_mat16x16<f32, C>, i: u32) {{ let at = (P.{n}_off + i) >> 2u; \
                 let row = P.{n}_row >> 2u; coopStoreT(m, &b{b}[at], row); }}"
            );
        }
    }
}

/// One dispatch.
#[derive(Clone, Debug)]
pub struct Kernel<B> {
    /// The op it belongs to.
    pub op: &'static str,
    /// The pipeline's specification.
    pub spec: Spec,
    /// Buffers by binding, starting at binding 1 (`None` = the scratch arena): buffer, first byte bound, bytes bound.
    pub buffers: Vec<(Option<B>, u64, u64)>,
    /// The words of `Params`.
    pub params: Vec<u32>,
    /// Workgroups per axis.
    pub grid: [u32; 3],
}

impl<B> Kernel<B> {
    /// Bytes of the scratch arena that the kernel uses.
    pub fn scratch(&self) -> u64 {
        let end = |(buf, from, bytes): &(Option<B>, u64, u64)| if buf.is_none() { from + bytes } else { 0 };
        self.buffers.iter().map(end).max().unwrap_or(0)
    }
}

/// A binding: its type, the buffer's id, the buffer (`None` = the scratch arena), first byte and end byte used.
type Bound<B> = (BindingSpec, Option<usize>, Option<B>, u64, u64);

/// Builds a [`Kernel`].
pub struct Builder<B> {
    shader: Shader,
    consts: Vec<(&'static str, Const)>,
    params: Vec<(&'static str, &'static str, u32)>,
    views: Vec<View<B>>,
}

struct View<B> {
    name: &'static str,
    /// `None` = the scratch arena.
    tensor: Tensor<Option<B>>,
    access: Access,
    /// The shader only uses groups of four elements at multiples of four within a row.
    vector: bool,
    atomic: bool,
    /// What the bytes of a row are.
    format: Format,
}

impl<B: Handle> Builder<B> {
    /// A builder without constants, parameters or views.
    pub fn new(shader: Shader) -> Self {
        Self { shader, consts: vec![], params: vec![], views: vec![] }
    }

    /// `const NAME: u32`.
    pub fn constant(mut self, name: &'static str, value: usize) -> Self {
        self.consts.push((name, Const::U32(value as u32)));
        self
    }

    /// `const NAME: bool`.
    pub fn flag(mut self, name: &'static str, value: bool) -> Self {
        self.consts.push((name, Const::Bool(value)));
        self
    }

    /// Defines `SUBGROUP` and, with subgroups of `size` threads, `shuffled(x)`: the sum of x over `lanes` adjacent threads, or
    /// over the subgroup if it is smaller, returned to each of them.
    pub fn subgroup(self, size: Option<usize>, lanes: usize) -> Self {
        let b = self.flag("SUBGROUP", size.is_some());
        match size.map(|size| size.min(lanes)) {
            Some(size) => b.constant("SUBGROUP_SIZE", size).constant(SHUFFLES, size.ilog2() as usize),
            None => b,
        }
    }

    /// `P.name: u32`.
    pub fn param(mut self, name: &'static str, value: usize) -> Self {
        self.params.push((name, "u32", value as u32));
        self
    }

    /// `P.name: f32`.
    pub fn float(mut self, name: &'static str, value: f32) -> Self {
        self.params.push((name, "f32", value.to_bits()));
        self
    }

    /// The view `name`, accessed by single elements.
    pub fn view(self, name: &'static str, access: Access, tensor: &Tensor<B>) -> Self {
        self.push(name, access, tensor, false, false)
    }

    /// The view `name`, accessed in groups of four elements at multiples of four within a row; single elements are only read.
    pub fn vectors(self, name: &'static str, access: Access, tensor: &Tensor<B>) -> Self {
        self.push(name, access, tensor, true, false)
    }

    /// The view `name` of the rows of a weight, whose elements are accessed like [`Builder::vectors`] whatever their format.
    pub fn weight(mut self, name: &'static str, block: &RowBlock<B>) -> Self {
        self = self.push(name, Access::Read, &block.w, true, false);
        self.views.last_mut().expect("it was just pushed").format = block.format;
        self
    }

    /// The view `name` of words that several workgroups update atomically.
    pub fn atomics(self, name: &'static str, tensor: &Tensor<B>) -> Self {
        self.push(name, Access::InPlace, tensor, false, true)
    }

    /// The view `name` of `[rows, len]` words of the scratch arena, starting at word `offset`, accessed like
    /// [`Builder::vectors`].
    pub fn scratch(self, name: &'static str, access: Access, offset: usize, dims: [usize; 2]) -> Self {
        self.arena(name, access, offset, Tensor::new(None, DType::U32, &dims), true)
    }

    /// Like [`Builder::scratch`], accessed by single words.
    pub fn scratch_words(self, name: &'static str, access: Access, offset: usize, dims: [usize; 2]) -> Self {
        self.arena(name, access, offset, Tensor::new(None, DType::U32, &dims), false)
    }

    /// Like [`Builder::scratch`], of f32. All views of the arena have one type.
    pub fn scratch_floats(self, name: &'static str, access: Access, offset: usize, dims: [usize; 2]) -> Self {
        self.arena(name, access, offset, Tensor::new(None, DType::F32, &dims), true)
    }

    fn arena(
        mut self,
        name: &'static str,
        access: Access,
        offset: usize,
        mut tensor: Tensor<Option<B>>,
        vector: bool,
    ) -> Self {
        tensor.offset = offset;
        self.views.push(View { name, tensor, access, vector, atomic: false, format: Format::Plain });
        self
    }

    fn push(mut self, name: &'static str, access: Access, tensor: &Tensor<B>, vector: bool, atomic: bool) -> Self {
        let mut place = Tensor::new(Some(tensor.buf.clone()), tensor.dtype, tensor.dims());
        (place.offset, place.row_stride) = (tensor.offset, tensor.row_stride);
        self.views.push(View { name, tensor: place, access, vector, atomic, format: Format::Plain });
        self
    }

    /// The step's integers as the view `ints`, with the offsets of its sections as parameters.
    pub fn step(self, step: &Step<B>) -> Self {
        let b: &Bucket = &step.bucket;
        self.view("ints", Access::Read, &step.ints)
            .param("tokens", b.tokens)
            .param("rows", b.rows)
            .param("pages", b.pages)
            .param("positions", b.positions())
            .param("token_row", b.token_row())
            .param("chunk_table", b.chunk_table())
            .param("row_table", b.row_table())
            .param("output_token", b.output_token())
            .param("output_lane", b.output_lane())
            .param("page_table", b.page_table())
    }

    /// The kernel over `groups` workgroups, numbered by `group_index`. Buffers larger than `max_binding` are bound in part.
    pub fn build(mut self, op: &'static str, groups: usize, max_binding: u64) -> Kernel<B> {
        self.params.push(("groups", "u32", groups as u32));
        let mut bindings: Vec<Bound<B>> = vec![];
        let mut views = vec![];
        for v in &self.views {
            let t = &v.tensor;
            let elem = match t.dtype {
                _ if v.atomic => Elem::Atomic,
                DType::F32 => Elem::F32,
                DType::U32 => Elem::U32,
                DType::Bf16 => Elem::Bf16,
                DType::F16 => Elem::F16,
                DType::U8 => Elem::Codes(v.format),
                DType::I8 => Elem::Kv8(kv8::elements(t.dtype, t.dims().last().copied().unwrap_or_default())),
            };
            // A binding's element is 16 bytes: four words or eight halves.
            let per_vector = 16 / t.dtype.bytes();
            let aligned = t.offset % per_vector == 0 && (t.rows() <= 1 || t.row_stride % per_vector == 0);
            let whole = match v.format {
                Format::Plain => t.row_len() % per_vector == 0,
                format => codes::is_vectors(format),
            };
            let wide = v.vector && aligned && whole && !matches!(elem, Elem::Kv8(_));
            let (id, writable) = (t.buf.as_ref().map(Handle::id), v.access != Access::Read);
            let (from, to) = (t.byte_offset() as u64, t.byte_end() as u64);
            let binding = match bindings.iter().position(|(_, other, ..)| *other == id) {
                Some(i) => {
                    let (spec, _, _, first, last) = &mut bindings[i];
                    assert!(spec.elem == elem, "{op}: views of one buffer have different dtypes");
                    spec.wide &= wide;
                    spec.writable |= writable;
                    (*first, *last) = ((*first).min(from), (*last).max(to));
                    i
                }
                None => {
                    bindings.push((BindingSpec { elem, wide, writable }, id, t.buf.clone(), from, to));
                    bindings.len() - 1
                }
            };
            let access = match v.access {
                Access::Read => ViewAccess::Read,
                Access::Write => ViewAccess::Write,
                Access::InPlace => ViewAccess::Both,
            };
            views.push(ViewSpec { name: v.name, elem, binding, access });
        }
        let mut params: Vec<u32> = self.params.iter().map(|p| p.2).collect();
        let mut buffers = vec![];
        for (_, _, buf, first, last) in &bindings {
            // `Backend::alloc` rounds sizes up to whole vectors.
            let all = buf.as_ref().map_or(u64::MAX, |b| b.bytes().max(1).next_multiple_of(16));
            let from = if all <= max_binding { 0 } else { first / 256 * 256 };
            let to = if all <= max_binding { all } else { last.next_multiple_of(16).min(all) };
            buffers.push((buf.clone(), from, to - from));
        }
        for (v, spec) in self.views.iter().zip(&views) {
            let from = buffers[spec.binding].1 as usize / v.tensor.dtype.bytes();
            // Places in coded rows are counted in elements from the first byte of the view.
            let stride = v.format.block().map_or(v.tensor.row_stride, |(n, bytes)| v.tensor.row_stride / bytes * n);
            params.extend([(v.tensor.offset - from) as u32, stride as u32]);
        }
        assert!(4 * params.len() <= PARAM_BYTES, "{op}: {} parameters", params.len());
        let spec = Spec {
            shader: self.shader,
            consts: self.consts,
            params: self.params.iter().map(|p| (p.0, p.1)).collect(),
            views,
            bindings: bindings.into_iter().map(|b| b.0).collect(),
        };
        let rows = groups.div_ceil(MAX_GROUPS);
        Kernel { op, spec, buffers, params, grid: [groups.div_ceil(rows.max(1)) as u32, rows as u32, 1] }
    }
}
