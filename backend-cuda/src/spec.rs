//! A kernel variant: a source file and the constants that specialise it, printed as a prelude before the file.

use std::{
    borrow::Cow,
    fmt::{self, Display, Write},
    fs,
    path::PathBuf,
    sync::LazyLock,
};

use selkie_core::tensor::DType;

/// What every kernel includes.
const COMMON: &str = selkie_kernels::text("common.cuh");
/// What some kernels include as well.
const HEADERS: [(&str, &str); 2] =
    [("around.cuh", selkie_kernels::text("around.cuh")), ("wgmma.cuh", selkie_kernels::text("wgmma.cuh"))];

/// The folder whose files stand in for those of the binary, for trying a kernel without a build: `SELKIE_KERNELS`.
static FOLDER: LazyLock<Option<PathBuf>> = LazyLock::new(|| std::env::var_os("SELKIE_KERNELS").map(PathBuf::from));

/// A file of `kernels/`: from the folder if it is there, else as it was built in.
fn text_of(name: &str, built_in: &'static str) -> Cow<'static, str> {
    let there = FOLDER.as_ref().and_then(|dir| fs::read_to_string(dir.join(name)).ok());
    there.map_or(Cow::Borrowed(built_in), Cow::Owned)
}

macro_rules! kernels {
    ($($name:ident $file:literal),* $(,)?) => {
        /// A file of `kernels/`, whose text is in the binary.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum File {
            $(#[doc = concat!("`", $file, ".cu`")] $name,)*
        }

        impl File {
            /// Every file.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The file's name without `.cu`.
            pub fn stem(self) -> &'static str {
                match self { $(Self::$name => $file,)* }
            }

            fn source(self) -> Cow<'static, str> {
                match self { $(Self::$name => {
                    text_of(concat!($file, ".cu"), const { selkie_kernels::text(concat!($file, ".cu")) })
                })* }
            }
        }
    };
}

/// Whether kernels leave their numbers when they start, see `faults.rs`. Reading where to takes each of them a quarter of a
/// microsecond, so the call is compiled in only then.
pub(crate) static NAMES_FAULTS: LazyLock<bool> =
    LazyLock::new(|| std::env::var_os("SELKIE_CUDA_NAME_FAULTS").is_some());

impl File {
    /// The source with a call of `mark_started` at the start of the kernel; an empty kernel stays empty.
    fn marked(self) -> String {
        let source = self.source();
        let body = |at: usize| Some(at + source[at..].find(") {")? + 3);
        match source.find("ENTRY(").and_then(body) {
            Some(at) if self != Self::Empty => format!("{} mark_started();{}", &source[..at], &source[at..]),
            _ => source.into(),
        }
    }
}

kernels! {
    Activation "activation",
    Attention "attention",
    AttentionCombine "attention_combine",
    AttentionDecode "attention_decode",
    AttentionPrefill "attention_prefill",
    AttentionWgmma "attention_wgmma",
    Conv1d "conv1d",
    Embed "embed",
    Empty "empty",
    ExpertCombine "expert_combine",
    ExpertGrouped "expert_grouped",
    ExpertMatmul "expert_matmul",
    ExpertSort "expert_sort",
    ExpertStream "expert_stream",
    Fill "fill",
    GatedDelta "gated_delta",
    GatedDeltaChunk "gated_delta_chunk",
    GatedDeltaPrepare "gated_delta_prepare",
    Gather "gather",
    Gemv "gemv",
    MatmulBias "matmul_bias",
    MatmulFew "matmul_few",
    MatmulFewBulk "matmul_few_bulk",
    MatmulPlain "matmul_plain",
    RmsNorm "rms_norm",
    RopeKv "rope_kv",
    Route "route",
    Sample "sample",
    SelectiveScan "selective_scan",
    SelectiveScanChunk "selective_scan_chunk",
}

/// See [`Spec::starts_next_late`].
const STARTS_NEXT_LATE: [File; 3] = [File::ExpertStream, File::Gemv, File::MatmulFewBulk];

/// Value of a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Value {
    Int(i64),
    Type(DTypeName),
}

/// [`DType`] with an order, for sorting variants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct DTypeName(&'static str);

impl From<DType> for DTypeName {
    fn from(t: DType) -> Self {
        Self(match t {
            DType::F32 => "float",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::U32 => "u32",
        })
    }
}

/// A variant: what is compiled, cached and launched. Its `Display` names it in errors and in the cache.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Spec {
    file: File,
    values: Vec<(&'static str, Value)>,
}

impl Spec {
    /// The file without constants.
    pub fn new(file: File) -> Self {
        Self { file, values: Vec::with_capacity(12) }
    }

    /// Adds `constexpr int name = value`.
    pub fn int(mut self, name: &'static str, value: usize) -> Self {
        self.values.push((name, Value::Int(value as i64)));
        self
    }

    /// Adds `constexpr int name = 0 or 1`.
    pub fn flag(self, name: &'static str, value: bool) -> Self {
        self.int(name, usize::from(value))
    }

    /// Adds `using name = dtype`.
    pub fn ty(mut self, name: &'static str, dtype: DType) -> Self {
        self.values.push((name, Value::Type(dtype.into())));
        self
    }

    /// The file.
    pub fn file(&self) -> File {
        self.file
    }

    /// Whether the kernel itself waits for what runs before it, so that it may start early.
    pub fn waits(&self) -> bool {
        self.file.source().contains("wait_for_inputs();")
    }

    /// Whether the kernel lets the next one start only behind its own wait, so that all before it is done by then.
    pub fn starts_next_late(&self) -> bool {
        STARTS_NEXT_LATE.contains(&self.file)
    }

    /// Name of the kernel's symbol; profilers show it.
    pub fn entry(&self) -> String {
        let mut s = self.file.stem().to_string();
        for (_, v) in &self.values {
            match v {
                Value::Int(i) => write!(s, "_{i}"),
                Value::Type(t) => write!(s, "_{}", t.0),
            }
            .expect("writing to a string");
        }
        s
    }

    /// The whole translation unit. Lines of the log count from the top of the kernel's own file.
    pub fn text(&self) -> String {
        let mut s = format!("#line 1 \"common.cuh\"\n{}\n", text_of("common.cuh", COMMON));
        writeln!(s, "#define ENTRY {}", self.entry()).expect("writing to a string");
        for (name, v) in &self.values {
            match v {
                Value::Int(i) => writeln!(s, "constexpr int {name} = {i};"),
                Value::Type(t) => writeln!(s, "using {name} = {};", t.0),
            }
            .expect("writing to a string");
        }
        let source = if *NAMES_FAULTS { self.file.marked().into() } else { self.file.source() };
        writeln!(s, "#line 1 \"{}.cu\"", self.file.stem()).expect("writing to a string");
        for (i, line) in source.lines().enumerate() {
            match HEADERS.iter().find(|(name, _)| line == format!("#include \"{name}\"")) {
                Some(&(name, text)) => {
                    writeln!(
                        s,
                        "#line 1 \"{name}\"\n{}\n#line {} \"{}.cu\"",
                        text_of(name, text),
                        i + 2,
                        self.file.stem()
                    )
                }
                None => writeln!(s, "{line}"),
            }
            .expect("writing to a string");
        }
        s
    }
}

impl Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.cu [", self.file.stem())?;
        for (i, (name, v)) in self.values.iter().enumerate() {
            let sep = if i == 0 { "" } else { ", " };
            match v {
                Value::Int(i) => write!(f, "{sep}{name}={i}")?,
                Value::Type(t) => write!(f, "{sep}{name}={}", t.0)?,
            }
        }
        f.write_str("]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_says_that_it_started() {
        for &file in File::ALL.iter().filter(|f| **f != File::Empty) {
            assert_eq!(file.marked().matches(" mark_started();").count(), 1, "{}", file.stem());
        }
        assert!(!File::Empty.marked().contains(" mark_started();"));
    }

    #[test]
    fn late_kernels_wait_before_the_next_starts() {
        for file in STARTS_NEXT_LATE {
            let source = file.source();
            let code: Vec<&str> = source.lines().map(str::trim).filter(|l| !l.starts_with("//")).collect();
            let at: Vec<usize> = (0..code.len()).filter(|&i| code[i] == "let_next_start();").collect();
            assert!(!at.is_empty() && at.iter().all(|&i| code[i - 1] == "wait_for_inputs();"), "{}", file.stem());
        }
    }

    /// On a device the lack of it shows only where kernels overlap.
    #[test]
    fn padding_is_zeroed_behind_the_kernels_ahead() {
        let body = COMMON.split("zero_padding(").nth(1).and_then(|rest| rest.split_once('{')).expect("a function").1;
        assert!(body.trim_start().starts_with("wait_for_inputs();"));
    }
}
