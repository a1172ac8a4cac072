//! Which type each tensor gets: the mixes that other programs make under the same names.

use std::str::FromStr;

use crate::{Error, Result, format::Format, gguf::Kind};

/// What a file is converted to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// All of f32.
    F32,
    /// Matrices of bf16.
    Bf16,
    /// 8 bits.
    Q8_0,
    /// 6 bits in blocks of 256.
    Q6K,
    /// 5 bits in blocks of 256, and 6 for some matrices.
    Q5KM,
    /// 4 bits in blocks of 256, and 6 for some matrices.
    Q4KM,
    /// 4 bits that stand for unevenly spaced integers.
    Iq4Nl,
    /// 4 bits.
    Q4_0,
}

impl Target {
    /// All of them, the most exact first.
    pub const ALL: [Self; 8] =
        [Self::F32, Self::Bf16, Self::Q8_0, Self::Q6K, Self::Q5KM, Self::Q4KM, Self::Iq4Nl, Self::Q4_0];

    /// Its name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Q8_0 => "q8_0",
            Self::Q6K => "q6_k",
            Self::Q5KM => "q5_k_m",
            Self::Q4KM => "q4_k_m",
            Self::Iq4Nl => "iq4_nl",
            Self::Q4_0 => "q4_0",
        }
    }

    /// The value of `general.file_type`.
    pub(super) const fn file_type(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::Bf16 => 32,
            Self::Q8_0 => 7,
            Self::Q6K => 18,
            Self::Q5KM => 17,
            Self::Q4KM => 15,
            Self::Iq4Nl => 25,
            Self::Q4_0 => 2,
        }
    }

    /// Of most matrices; plain for files without codes.
    fn usual(self) -> Format {
        match self {
            Self::F32 | Self::Bf16 => Format::Plain,
            Self::Q8_0 => Format::Q8_0,
            Self::Q6K => Format::Q6K,
            Self::Q5KM => Format::Q5K,
            Self::Q4KM => Format::Q4K,
            Self::Iq4Nl => Format::Iq4Nl,
            Self::Q4_0 => Format::Q4_0,
        }
    }
}

impl FromStr for Target {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|t| t.name().eq_ignore_ascii_case(name)).ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(" ");
            Error::BadRequest(format!("{name}: files are not written in this type; there are {known}"))
        })
    }
}

/// The choice of types for one file.
pub(super) struct Mix {
    target: Target,
    layers: usize,
    /// Whether the output matrix is a tensor of its own.
    output: bool,
    /// Layers with values of attention, and those that were asked for.
    values: usize,
    seen: usize,
}

impl Mix {
    /// For a file with these tensors.
    pub fn new<'a>(target: Target, layers: usize, names: impl Iterator<Item = &'a str> + Clone) -> Self {
        let output = names.clone().any(|n| n == "output.weight");
        Self { target, layers, output, values: names.filter(|n| is_values(n)).count(), seen: 0 }
    }

    /// The type of a tensor. Tensors are asked for in the order of their layers.
    pub fn kind(&mut self, name: &str, shape: &[usize]) -> Kind {
        if shape.len() < 2 || !name.ends_with(".weight") || is_small(name) || self.target == Target::F32 {
            return Kind::F32;
        }
        if self.target == Target::Bf16 {
            return Kind::BF16;
        }
        let width = shape[shape.len() - 1];
        let mut format = self.format(name);
        loop {
            let kind = Kind::of(format).expect("a format of GGUF files");
            if width.is_multiple_of(kind.block()) {
                return kind;
            }
            format = match format {
                Format::Q4K => Format::Q5_0,
                Format::Q5K => Format::Q5_1,
                Format::Q6K => Format::Q8_0,
                // No block fits.
                _ => return Kind::F16,
            };
        }
    }

    /// The format of a matrix whose width is a multiple of every block.
    fn format(&mut self, name: &str) -> Format {
        let usual = self.target.usual();
        let head = if self.output { "output.weight" } else { "token_embd.weight" };
        if name == head {
            return if usual == Format::Q8_0 { usual } else { Format::Q6K };
        }
        if !matches!(self.target, Target::Q4KM | Target::Q5KM) {
            return usual;
        }
        let more = |i: usize, n: usize| i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2;
        if is_values(name) {
            self.seen += 1;
            return if more(self.seen - 1, self.values) { Format::Q6K } else { usual };
        }
        match name.contains("ffn_down") && more(layer(name).unwrap_or(0), self.layers) {
            true => Format::Q6K,
            false => usual,
        }
    }
}

/// Matrices that make values, alone or with queries and keys.
fn is_values(name: &str) -> bool {
    name.ends_with("attn_v.weight") || name.ends_with("attn_qkv.weight")
}

/// The layer of a tensor, by its name.
pub(super) fn layer(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

/// Matrices that are too small, or too sensitive, to be worth codes.
fn is_small(name: &str) -> bool {
    name.ends_with("_norm.weight") || ["ffn_gate_inp", "ssm_conv1d", "shortconv.conv."].iter().any(|p| name.contains(p))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(target: Target, name: &str, shape: &[usize]) -> &'static str {
        Mix::new(target, 32, ["output.weight"].into_iter()).kind(name, shape).name()
    }

    #[test]
    fn small_tensors_stay_as_they_are() {
        for name in ["blk.0.ssm_norm.weight", "blk.0.ffn_gate_inp.weight", "blk.0.ssm_conv1d.weight", "blk.0.ssm_a"] {
            assert_eq!(kind(Target::Q4KM, name, &[256, 256]), "F32", "{name}");
        }
        assert_eq!(kind(Target::Bf16, "blk.0.attn_norm.weight", &[256]), "F32");
        assert_eq!(kind(Target::Bf16, "blk.0.attn_q.weight", &[256, 256]), "BF16");
        assert_eq!(kind(Target::F32, "blk.0.attn_q.weight", &[256, 256]), "F32");
    }

    #[test]
    fn widths_that_a_type_cannot_hold_get_another() {
        for (target, width, want) in [
            (Target::Q4KM, 512, "Q4_K"),
            (Target::Q4KM, 2688, "Q5_0"),
            (Target::Q5KM, 2688, "Q5_1"),
            (Target::Q6K, 2688, "Q8_0"),
            (Target::Q4KM, 40, "F16"),
            (Target::Q8_0, 40, "F16"),
            (Target::Iq4Nl, 96, "IQ4_NL"),
        ] {
            assert_eq!(kind(target, "blk.3.ssm_in.weight", &[8, width]), want, "{target:?} {width}");
        }
    }

    #[test]
    fn some_matrices_of_a_mix_get_more_bits() {
        let of = |name: &str| kind(Target::Q4KM, name, &[256, 256]);
        assert_eq!(of("output.weight"), "Q6_K");
        assert_eq!(of("token_embd.weight"), "Q4_K");
        assert_eq!(of("blk.0.ffn_down.weight"), "Q6_K");
        assert_eq!(of("blk.4.ffn_down.weight"), "Q4_K");
        assert_eq!(of("blk.6.ffn_down_exps.weight"), "Q6_K");
        assert_eq!(of("blk.31.ffn_down_shexp.weight"), "Q6_K");
        let tied = Mix::new(Target::Q4_0, 2, ["token_embd.weight"].into_iter()).kind("token_embd.weight", &[256, 256]);
        assert_eq!(tied.name(), "Q6_K");
        // Of eight layers with values, the first and last and every third between.
        let leaf = |i| if i % 2 == 0 { "attn_v" } else { "attn_qkv" };
        let names: Vec<String> = (0..8).map(|i| format!("blk.{i}.{}.weight", leaf(i))).collect();
        let mut mix = Mix::new(Target::Q4KM, 8, names.iter().map(String::as_str));
        let kinds: Vec<&str> = names.iter().map(|n| mix.kind(n, &[256, 256]).name()).collect();
        assert_eq!(kinds, ["Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K"]);
    }

    #[test]
    fn a_type_is_known_by_its_name() {
        assert_eq!("Q4_K_M".parse::<Target>().unwrap(), Target::Q4KM);
        let why = "q3_k".parse::<Target>().unwrap_err().to_string();
        assert!(why.contains("q3_k") && why.contains("q4_k_m"), "{why}");
    }
}
