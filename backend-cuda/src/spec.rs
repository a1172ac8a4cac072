//! A kernel variant: a source file and the constants that specialise it, printed as a prelude before the file.

use std::{
    borrow::Cow,
    fmt::{self, Display, Write},
    fs,
    path::PathBuf,
    sync::LazyLock,
};

use selkie_core::tensor::DType;

use crate::arguments::{self, Arguments, Parameter};

/// The header of every kernel.
const COMMON: &str = selkie_kernels::text("common.cuh");
/// Headers that some kernels include.
const HEADERS: [(&str, &str); 7] = [
    ("codes.cuh", selkie_kernels::text("codes.cuh")),
    ("gated_delta_unit.cuh", selkie_kernels::text("gated_delta_unit.cuh")),
    ("prologue_epilogue.cuh", selkie_kernels::text("prologue_epilogue.cuh")),
    ("ranks.cuh", selkie_kernels::text("ranks.cuh")),
    ("round.cuh", selkie_kernels::text("round.cuh")),
    ("route.cuh", selkie_kernels::text("route.cuh")),
    ("wgmma.cuh", selkie_kernels::text("wgmma.cuh")),
];

/// The folder whose files stand in for those of the binary, for trying a kernel without a build: `SELKIE_KERNELS`.
static FOLDER: LazyLock<Option<PathBuf>> = LazyLock::new(|| std::env::var_os("SELKIE_KERNELS").map(PathBuf::from));

/// A file of `kernels/`: from the folder if it is there, else as it was built in.
fn text_of(name: &str, built_in: &'static str) -> Cow<'static, str> {
    let there = FOLDER.as_ref().and_then(|dir| fs::read_to_string(dir.join(name)).ok());
    there.map_or(Cow::Borrowed(built_in), Cow::Owned)
}

macro_rules! kernels {
    ($($name:ident $file:literal $waits:ident $parameters:ident,)*) => {
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

            /// How the kernel takes part in programmatic dependent launch.
            pub fn waits(self) -> Waits {
                match self { $(Self::$name => Waits::$waits,)* }
            }

            /// The kernel's parameters.
            pub fn parameters(self) -> &'static [Parameter] {
                match self { $(Self::$name => arguments::$parameters::PARAMETERS,)* }
            }

            fn source(self) -> Cow<'static, str> {
                match self { $(Self::$name => {
                    text_of(concat!($file, ".cu"), const { selkie_kernels::text(concat!($file, ".cu")) })
                })* }
            }
        }
    };
}

/// How a kernel takes part in programmatic dependent launch: it may start while the kernel before it runs, if it waits for its
/// inputs by itself (`griddepcontrol.wait`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// It does not wait, so it is launched when everything before it is complete.
    Never,
    /// It waits, and may trigger the next kernel before that.
    Early,
    /// It waits, and triggers the next kernel only afterwards: when the next kernel starts, everything before this one is
    /// complete.
    Late,
}

/// Whether kernels write their numbers to host memory when they start, see `faults.rs`. That costs a quarter of a microsecond per
/// kernel, so the call is compiled in on request only.
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
    Activation "activation" Early Activation,
    Adjust "adjust" Early Adjust,
    AllGather "all_gather" Early Exchange,
    AllReduce "all_reduce" Early Exchange,
    Attention "attention" Early Attention,
    AttentionCombine "attention_combine" Early AttentionCombine,
    AttentionDecode "attention_decode" Early AttentionDecode,
    AttentionPrefill "attention_prefill" Never AttentionTiles,
    AttentionWgmma "attention_wgmma" Never AttentionTiles,
    CodesArrange "codes_arrange" Never CodesArrange,
    CodesDecode "codes_decode" Early CodesDecode,
    CodesRows "codes_rows" Early CodesRows,
    Conv1d "conv1d" Early Conv1d,
    CopyRows "copy_rows" Never CopyRows,
    Embed "embed" Early Embed,
    EmbedCodes "embed_codes" Early Embed,
    Empty "empty" Never Empty,
    ExpertCodes "expert_codes" Early ExpertMatmul,
    ExpertCombine "expert_combine" Early ExpertCombine,
    ExpertGrouped "expert_grouped" Early ExpertGrouped,
    ExpertGroupedCodes "expert_grouped_codes" Early ExpertGroupedCodes,
    ExpertMatmul "expert_matmul" Early ExpertMatmul,
    ExpertRingCodes "expert_ring_codes" Late ExpertRingCodes,
    ExpertSort "expert_sort" Early ExpertSort,
    ExpertStream "expert_stream" Late ExpertStream,
    ExpertStreamCodes "expert_stream_codes" Late ExpertStream,
    ExpertWgmma "expert_wgmma" Early ExpertWgmma,
    Fill "fill" Never Fill,
    GatedDelta "gated_delta" Early GatedDelta,
    GatedDeltaChannel "gated_delta_channel" Never GatedDeltaChannel,
    GatedDeltaChunk "gated_delta_chunk" Never GatedDeltaChunk,
    GatedDeltaPrepare "gated_delta_prepare" Never GatedDeltaPrepare,
    GatedDeltaPrepareChannel "gated_delta_prepare_channel" Never GatedDeltaPrepare,
    Gather "gather" Early Gather,
    Gemv "gemv" Late FusedProduct,
    HeadMatmul "head_matmul" Early HeadMatmul,
    HeadMatmulMma "head_matmul_mma" Early HeadMatmulMma,
    HeadMatmulTile "head_matmul_tile" Early HeadMatmul,
    LatentAttention "latent_attention" Early LatentAttention,
    LatentAttentionTile "latent_attention_tile" Early LatentAttentionTile,
    LatentAttentionWgmma "latent_attention_wgmma" Early LatentAttentionTile,
    LatentKv "latent_kv" Early LatentKv,
    Logprobs "logprobs" Early Logprobs,
    MatmulBias "matmul_bias" Early MatmulBias,
    MatmulCodes "matmul_codes" Late FusedProduct,
    MatmulCodesWgmma "matmul_codes_wgmma" Late MatmulCodesWgmma,
    MatmulPlain "matmul_plain" Early MatmulPlain,
    MatmulSkinny "matmul_skinny" Early MatmulSkinny,
    MatmulSkinnyBulk "matmul_skinny_bulk" Late ProductPair,
    RankNorm "rank_norm" Early RankNorm,
    RmsNorm "rms_norm" Early RmsNorm,
    RopeKv "rope_kv" Early RopeKv,
    Round "round" Early Round,
    RoundCodes "round_codes" Early RoundCodes,
    Route "route" Early Route,
    Sample "sample" Early Sample,
    SelectiveScan "selective_scan" Early SelectiveScan,
    SelectiveScanChannel "selective_scan_channel" Never SelectiveScanChunk,
    SelectiveScanChunk "selective_scan_chunk" Never SelectiveScanChunk,
}

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
            DType::U8 => "u8",
            DType::I8 => "i8",
        })
    }
}

/// A variant of a kernel: the unit of compilation, caching and launching. Its `Display` names it in errors and in the cache.
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
        let parameters: Vec<String> = self.file.parameters().iter().map(Parameter::declaration).collect();
        writeln!(s, "#define PARAMETERS {}", parameters.join(", ")).expect("writing to a string");
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
    fn kernels_wait_as_the_table_says() {
        for &file in File::ALL {
            let source = file.source();
            let code: Vec<&str> = source.lines().map(str::trim).filter(|l| !l.starts_with("//")).collect();
            let triggers: Vec<usize> = (0..code.len()).filter(|&i| code[i] == "let_next_start();").collect();
            let late = !triggers.is_empty() && triggers.iter().all(|&i| code[i - 1] == "wait_for_inputs();");
            let waits = match (source.contains("wait_for_inputs();"), late) {
                (false, _) => Waits::Never,
                (true, false) => Waits::Early,
                (true, true) => Waits::Late,
            };
            assert_eq!(file.waits(), waits, "{}", file.stem());
        }
    }

    /// A parameter that no line reads is one that host and kernel do not agree on.
    #[test]
    fn kernels_use_the_parameters_that_are_declared() {
        for &file in File::ALL {
            let text = Spec::new(file).text();
            let (_, body) = text.split_once("ENTRY(PARAMETERS) {").expect("a signature");
            for p in file.parameters() {
                let word = |c: char| c.is_alphanumeric() || c == '_';
                assert!(body.split(|c| !word(c)).any(|w| w == p.name), "{}: {}", file.stem(), p.name);
            }
        }
    }

    /// On a device a missing wait shows only where kernels overlap.
    #[test]
    fn padding_is_zeroed_after_the_wait() {
        let body = COMMON.split("zero_padding(").nth(1).and_then(|rest| rest.split_once('{')).expect("a function").1;
        assert!(body.trim_start().starts_with("wait_for_inputs();"));
    }
}
