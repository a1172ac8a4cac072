//! Architectures of GGUF files as data: which keys make the configuration of a family of this engine, and which stored tensors
//! make which of its weights. One file per architecture.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::{Change, Stored, meta::Meta};
use crate::{Error, Result};

mod falcon_h1;
mod granite;
mod jamba;
mod lfm2;
mod llama;
mod mamba;
mod nemotron_h;
mod qwen3;
mod qwen3next;

/// Positions of the training of models with Llama 3's rule. Others differ from it by the bounds of the ramp alone.
const TRAINED: f64 = 8192.0;

/// An architecture, or several that differ little.
pub(super) struct Arch {
    /// Values of `general.architecture`.
    pub names: &'static [&'static str],
    /// Adds to the keys that all have.
    pub config: fn(&Facts<'_>, &mut Map<String, Value>) -> Result<()>,
    /// Where the weights are.
    pub rules: fn(&Facts<'_>) -> Result<Vec<Rule>>,
}

/// All that are read.
const ARCHS: &[Arch] = &[
    llama::ARCH,
    qwen3::ARCH,
    nemotron_h::ARCH,
    granite::ARCH,
    mamba::ARCH,
    mamba::ARCH_2,
    jamba::ARCH,
    falcon_h1::ARCH,
    lfm2::ARCH,
    qwen3next::ARCH,
];

/// The architecture of a name.
pub(super) fn find(path: &str, name: &str) -> Result<&'static Arch> {
    let known = || ARCHS.iter().flat_map(|a| a.names).copied().collect::<Vec<_>>().join(", ");
    ARCHS.iter().find(|a| a.names.contains(&name)).ok_or_else(|| Error::Unsupported {
        what: format!("{path}: architecture {name:?}"),
        why: format!("the supported ones are {}", known()),
    })
}

/// Why the family's own configuration does not describe the weights of a file, if it does not.
pub(super) fn differs_from_config(name: &str) -> Option<&'static str> {
    if falcon_h1::ARCH.names.contains(&name) {
        return Some("they hold the factors that it names");
    }
    let tiled = qwen3next::ARCH.names.contains(&name) && qwen3next::tiled(name);
    tiled.then_some("their heads stand in another order")
}

/// How stored tensors make a weight.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum How {
    /// As it is.
    Copy,
    /// As a vector, stored in rows of this many elements.
    Flat(usize),
    /// Rows of several, one after the other.
    Join,
    /// Rows, by source.
    Rows(Vec<Pick>),
    /// The halves of this many heads, whose rows were interleaved.
    Unpermute(usize),
    /// The columns of the one source are these of the weight. Readers keep the order of the file instead, because blocks hold
    /// several columns.
    Columns(Vec<usize>),
}

impl How {
    /// Rows of the sources of a weight with `n` rows, if there are `sources`.
    pub fn rows(&self, n: usize, sources: usize) -> Vec<usize> {
        match self {
            Self::Join => vec![n / sources; sources],
            Self::Rows(picks) => {
                let of = |s| {
                    picks
                        .iter()
                        .filter(move |p| p.source == s)
                        .map(|p| p.first + p.count.saturating_sub(1) * p.step + 1)
                };
                (0..sources).map(|s| of(s).max().unwrap_or(0)).collect()
            }
            _ => vec![n],
        }
    }

    /// The rows of a weight in order, out of sources with these numbers of them.
    pub fn picks(&self, rows: &[usize]) -> Result<Vec<Pick>, String> {
        let all = |source: usize| Pick { source, first: 0, step: 1, count: rows[source] };
        match self {
            Self::Copy | Self::Flat(_) | Self::Columns(_) => Ok(vec![all(0)]),
            Self::Join => Ok((0..rows.len()).map(all).collect()),
            Self::Rows(picks) => Ok(picks.clone()),
            Self::Unpermute(heads) => {
                let n = rows[0];
                if *heads == 0 || !n.is_multiple_of(2 * heads) {
                    return Err(format!("{n} rows are not those of {heads} heads of an even size"));
                }
                let d = n / heads;
                let half = |h| Pick { source: 0, first: h / 2 * d + h % 2, step: 2, count: d / 2 };
                Ok((0..2 * heads).map(half).collect())
            }
        }
    }
}

/// Every `step`th row of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pick {
    pub source: usize,
    pub first: usize,
    pub step: usize,
    pub count: usize,
}

/// A weight by the name that the family asks for, and the stored tensors; `{}` is the number of a layer.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Rule {
    pub name: String,
    pub sources: Vec<String>,
    pub how: How,
    pub change: Change,
}

impl Rule {
    pub fn new(name: impl Into<String>, sources: &[&str], how: How) -> Self {
        let sources = sources.iter().map(|s| (*s).to_owned()).collect();
        Self { name: name.into(), sources, how, change: Change::None }
    }

    /// The same with a change of its elements.
    pub fn changed(self, change: Change) -> Self {
        Self { change, ..self }
    }
}

/// Weights, and biases where there are any, that are stored as they are: `(name below the prefix, name below blk.N)`.
pub(super) fn copies(rules: &mut Vec<Rule>, prefix: &str, pairs: &[(&str, &str)]) {
    for (name, stored) in pairs {
        for leaf in ["weight", "bias"] {
            rules.push(Rule::new(format!("{prefix}{name}.{leaf}"), &[&format!("blk.{{}}.{stored}.{leaf}")], How::Copy));
        }
    }
}

/// Projections of attention; `permuted` if the rows of q and k were.
pub(super) fn attention(rules: &mut Vec<Rule>, f: &Facts<'_>, prefix: &str, permuted: bool) -> Result<()> {
    copies(rules, prefix, &[("v_proj", "attn_v"), ("o_proj", "attn_output")]);
    let heads = if permuted { Some(f.heads()?) } else { None };
    let mut first = 0;
    for (name, stored, n) in
        [("q_proj", "attn_q", heads.map(|h| h.heads)), ("k_proj", "attn_k", heads.map(|h| h.kv_heads))]
    {
        for leaf in ["weight", "bias"] {
            let how = n.map_or(How::Copy, How::Unpermute);
            rules.push(Rule::new(format!("{prefix}{name}.{leaf}"), &[&format!("blk.{{}}.{stored}.{leaf}")], how));
        }
    }
    // The fused form; q and k are permuted in it too, which no writer does for the architectures that permute.
    let h = f.heads()?;
    let widths = [("q_proj", h.heads), ("k_proj", h.kv_heads), ("v_proj", h.kv_heads)];
    for (name, n) in widths.into_iter().filter(|_| !permuted) {
        let pick = Pick { source: 0, first, step: 1, count: n * h.head_dim };
        first += pick.count;
        for leaf in ["weight", "bias"] {
            let stored = format!("blk.{{}}.attn_qkv.{leaf}");
            rules.push(Rule::new(format!("{prefix}{name}.{leaf}"), &[&stored], How::Rows(vec![pick])));
        }
    }
    Ok(())
}

/// A Mamba-2 mixer.
pub(super) fn mamba2(rules: &mut Vec<Rule>, f: &Facts<'_>, prefix: &str) -> Result<()> {
    copies(rules, prefix, &[("in_proj", "ssm_in"), ("conv1d", "ssm_conv1d"), ("out_proj", "ssm_out")]);
    rules.push(Rule::new(format!("{prefix}dt_bias"), &["blk.{}.ssm_dt.bias"], How::Copy));
    rules.push(Rule::new(format!("{prefix}A_log"), &["blk.{}.ssm_a"], How::Flat(1)).changed(Change::NegLog));
    rules.push(Rule::new(format!("{prefix}D"), &["blk.{}.ssm_d"], How::Flat(1)));
    let groups = f.opt("ssm.group_count")?.filter(|n| *n > 0).unwrap_or(1);
    let group = f.opt("ssm.inner_size")?.unwrap_or(0) / groups;
    rules.push(Rule::new(format!("{prefix}norm.weight"), &["blk.{}.ssm_norm.weight"], How::Flat(group)));
    Ok(())
}

/// A Mamba-1 mixer.
pub(super) fn mamba1(rules: &mut Vec<Rule>, prefix: &str) {
    let pairs = [
        ("in_proj", "ssm_in"),
        ("conv1d", "ssm_conv1d"),
        ("x_proj", "ssm_x"),
        ("dt_proj", "ssm_dt"),
        ("out_proj", "ssm_out"),
        ("dt_layernorm", "ssm_dt_norm"),
        ("b_layernorm", "ssm_b_norm"),
        ("c_layernorm", "ssm_c_norm"),
    ];
    copies(rules, prefix, &pairs);
    rules.push(Rule::new(format!("{prefix}A_log"), &["blk.{}.ssm_a"], How::Copy).changed(Change::NegLog));
    rules.push(Rule::new(format!("{prefix}D"), &["blk.{}.ssm_d"], How::Copy));
}

/// Stacked experts with gates.
pub(super) fn experts(rules: &mut Vec<Rule>, input: &str, output: &str) {
    rules.push(Rule::new(input, &["blk.{}.ffn_gate_exps.weight", "blk.{}.ffn_up_exps.weight"], How::Join));
    rules.push(Rule::new(input, &["blk.{}.ffn_gate_up_exps.weight"], How::Copy));
    rules.push(Rule::new(output, &["blk.{}.ffn_down_exps.weight"], How::Copy));
}

/// The rules of the block of the head for drafts, which follows the layers: `own` with its number in the stored names, and the
/// tensors around its layer under the names that the family gives them.
pub(super) fn head(
    rules: &mut Vec<Rule>,
    f: &Facts<'_>,
    own: Vec<Rule>,
    around: [&str; 4],
    change: Change,
) -> Result<()> {
    let number = f.layers()?.to_string();
    let fill = |rule: Rule| Rule { sources: rule.sources.iter().map(|s| s.replace("{}", &number)).collect(), ..rule };
    rules.extend(own.into_iter().map(fill));
    let stored = [("eh_proj", Change::None), ("enorm", change), ("hnorm", change), ("shared_head_norm", change)];
    for (name, (stored, change)) in around.into_iter().zip(stored) {
        let stored = format!("blk.{number}.nextn.{stored}.weight");
        rules.push(Rule::new(format!("mtp.{name}.weight"), &[&stored], How::Copy).changed(change));
    }
    Ok(())
}

/// Embedding, output matrix and the final norm.
pub(super) fn ends(embedding: &str, norm: &str, change: Change) -> Vec<Rule> {
    vec![
        Rule::new(embedding, &["token_embd.weight"], How::Copy),
        Rule::new("lm_head.weight", &["output.weight"], How::Copy),
        Rule::new(norm, &["output_norm.weight"], How::Copy).changed(change),
    ]
}

/// Heads of attention.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heads {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

/// What a file says, for the functions of an [`Arch`].
pub(super) struct Facts<'a> {
    pub path: &'a str,
    /// `general.architecture`.
    pub arch: &'a str,
    pub meta: &'a Meta,
    pub tensors: &'a BTreeMap<String, Stored>,
    /// `rope_freqs.weight`, by which frequencies are divided.
    pub rope_factors: Option<&'a [f32]>,
    /// The weights stand in the order of the family's own files even where readers keep another one.
    pub own_order: bool,
}

impl Facts<'_> {
    pub fn bad(&self, key: &str, why: impl std::fmt::Display) -> Error {
        Error::model(self.path, format!("key `{}.{key}`: {why}", self.arch))
    }

    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    /// A count that may be missing; of an entry per layer the one that all layers have but those with 0.
    pub fn opt(&self, key: &str) -> Result<Option<usize>> {
        let full = self.key(key);
        if !self.meta.has(&full) {
            return Ok(None);
        }
        let numbers = self.meta.ints(&full).ok_or_else(|| self.bad(key, "expected integers"))?;
        let mut some = numbers.iter().copied().filter(|n| *n != 0);
        let Some(first) = some.next() else { return Ok(Some(0)) };
        if let Some(other) = some.find(|n| *n != first) {
            return Err(self.bad(key, format_args!("layers with {first} and with {other} are not supported")));
        }
        usize::try_from(first).map(Some).map_err(|_| self.bad(key, format_args!("{first} is no size")))
    }

    /// A count.
    pub fn usize(&self, key: &str) -> Result<usize> {
        let missing = || Error::model(self.path, format!("key `{}.{key}` is missing; an integer is needed", self.arch));
        self.opt(key)?.ok_or_else(missing)
    }

    /// A number that may be missing.
    pub fn float(&self, key: &str) -> Option<f64> {
        self.meta.float(&self.key(key))
    }

    /// A switch that may be missing.
    pub fn bool(&self, key: &str) -> Option<bool> {
        self.meta.bool(&self.key(key))
    }

    /// Layers, without those that draft tokens.
    pub fn layers(&self) -> Result<usize> {
        let (all, drafts) = (self.usize("block_count")?, self.drafts()?);
        let layers = all.checked_sub(drafts).filter(|n| (1..=10_000).contains(n));
        layers.ok_or_else(|| self.bad("block_count", format_args!("{all} layers, {drafts} of them for drafts")))
    }

    /// Layers that draft tokens. They are the last ones.
    pub fn drafts(&self) -> Result<usize> {
        Ok(self.opt("nextn_predict_layers")?.unwrap_or(0))
    }

    /// Whether a layer has a tensor.
    pub fn stores(&self, layer: usize, leaf: &str) -> bool {
        self.tensors.contains_key(&format!("blk.{layer}.{leaf}"))
    }

    /// Whether any layer has.
    pub fn any(&self, leaf: &str) -> Result<bool> {
        Ok((0..self.layers()?).any(|i| self.stores(i, leaf)))
    }

    /// The entry of every layer, as `of` has it.
    pub fn layer_types(&self, of: impl Fn(usize) -> &'static str) -> Result<Value> {
        Ok((0..self.layers()?).map(of).collect::<Vec<_>>().into())
    }

    /// Heads of the attention layers.
    pub fn heads(&self) -> Result<Heads> {
        let heads = self.usize("attention.head_count")?;
        let kv_heads = self.opt("attention.head_count_kv")?.filter(|n| *n > 0).unwrap_or(heads);
        let head_dim = match self.opt("attention.key_length")? {
            Some(n) => n,
            None if heads > 0 => self.usize("embedding_length")? / heads,
            None => 0,
        };
        if heads == 0 || head_dim == 0 || heads > 1 << 16 || head_dim > 1 << 16 || kv_heads > heads {
            return Err(self.bad("attention.head_count", format_args!("{heads} heads of {head_dim} are impossible")));
        }
        Ok(Heads { heads, kv_heads, head_dim })
    }

    /// Adds the keys of attention.
    pub fn attention(&self, c: &mut Map<String, Value>) -> Result<()> {
        let h = self.heads()?;
        c.insert("num_attention_heads".into(), h.heads.into());
        c.insert("num_key_value_heads".into(), h.kv_heads.into());
        c.insert("head_dim".into(), h.head_dim.into());
        c.insert("attention_bias".into(), self.any("attn_q.bias")?.into());
        Ok(())
    }

    /// Adds the keys of the rotation.
    pub fn rope(&self, c: &mut Map<String, Value>) -> Result<()> {
        let head_dim = self.heads()?.head_dim;
        let rotated = self.opt("rope.dimension_count")?.filter(|n| *n > 0).unwrap_or(head_dim);
        // The reader rounds the product down.
        let part = if rotated < head_dim { (rotated as f64 + 0.25) / head_dim as f64 } else { 1.0 };
        let mut rope = Map::new();
        rope.insert("rope_theta".into(), self.float("rope.freq_base").unwrap_or(10_000.0).into());
        rope.insert("partial_rotary_factor".into(), part.into());
        let kind = self.meta.text(&self.key("rope.scaling.type")).unwrap_or("none");
        rope.insert("rope_type".into(), if kind == "none" { "default" } else { kind }.into());
        if let Some(factor) = self.float("rope.scaling.factor") {
            rope.insert("factor".into(), factor.into());
        }
        if let Some(factors) = self.rope_factors {
            rope.extend(self.llama3(factors, &rope, rotated)?);
        }
        c.insert("rope_parameters".into(), rope.into());
        Ok(())
    }

    /// Llama 3's rule out of the factors that it gives: the numbers of the published models, or others that fit.
    fn llama3(&self, factors: &[f32], rope: &Map<String, Value>, rotated: usize) -> Result<Map<String, Value>> {
        let theta = rope["rope_theta"].as_f64().unwrap_or(10_000.0);
        let factor = factors.iter().fold(1.0f64, |a, b| a.max((*b).into()));
        let frequency = |i: usize| theta.powf(-2.0 * i as f64 / rotated as f64);
        let keeps = |i: usize, [low, high]: [f64; 2]| {
            ((TRAINED * frequency(i) / std::f64::consts::TAU - low) / (high - low)).clamp(0.0, 1.0)
        };
        let fits = |bounds: &[f64; 2]| {
            let near = |(i, found): (usize, &f32)| {
                let keep = keeps(i, *bounds);
                (((1.0 - keep) / factor + keep).recip() / f64::from(*found) - 1.0).abs() < 1e-5
            };
            factors.len() == rotated / 2 && factors.iter().enumerate().all(near)
        };
        let fitted = || {
            // On the ramp, the kept share is a linear function of the frequency. Two of its points determine both ends.
            let kept = |i: usize| (f64::from(factors[i]).recip() - factor.recip()) / (1.0 - factor.recip());
            let ramp = (0..factors.len()).filter(|i| (1e-4..1.0 - 1e-4).contains(&kept(*i)));
            let ramp: Vec<usize> = ramp.collect();
            let all = |i: usize| TRAINED * frequency(i) / std::f64::consts::TAU;
            match ramp.as_slice() {
                // A step: anything between its two sides.
                [] => {
                    let stretched = (0..factors.len()).find(|i| kept(*i) < 0.5)?;
                    Some([all(stretched), all(stretched.checked_sub(1)?)])
                }
                // One point says one thing; the bounds of all published models are 1 to 4.
                [only] => Some(all(*only) / (1.0 + 3.0 * kept(*only))).map(|low| [low, 4.0 * low]),
                [a, .., b] => {
                    let slope = (kept(*a) - kept(*b)) / (all(*a) - all(*b));
                    let periods = |kept_there: f64| all(*a) + (kept_there - kept(*a)) / slope;
                    Some([periods(0.0), periods(1.0)])
                }
            }
        };
        let bounds = Some([1.0, 4.0]).filter(fits).or_else(|| fitted().filter(fits));
        let [low, high] = bounds.ok_or_else(|| Error::Unsupported {
            what: format!("{}: tensor `rope_freqs.weight`", self.path),
            why: "its factors are not those of Llama 3's rule".into(),
        })?;
        let object = json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": TRAINED,
        });
        Ok(object.as_object().expect("it is an object").clone())
    }

    /// Channels, heads, state, groups and taps of Mamba-2 under the names of a family.
    pub fn mamba2(&self, c: &mut Map<String, Value>, names: [&str; 5]) -> Result<usize> {
        let (inner, heads) = (self.usize("ssm.inner_size")?, self.usize("ssm.time_step_rank")?);
        if heads == 0 || !inner.is_multiple_of(heads) {
            return Err(self.bad("ssm.time_step_rank", format_args!("{heads} heads for {inner} channels")));
        }
        let values = [
            heads,
            inner / heads,
            self.usize("ssm.state_size")?,
            self.opt("ssm.group_count")?.unwrap_or(1),
            self.usize("ssm.conv_kernel")?,
        ];
        for (name, value) in names.iter().zip(values) {
            c.insert((*name).to_owned(), value.into());
        }
        Ok(inner)
    }

    /// How many times the model width the channels of a recurrent mixer are.
    pub fn expand(&self) -> Result<usize> {
        let (inner, width) = (self.usize("ssm.inner_size")?, self.usize("embedding_length")?);
        let times = inner.checked_div(width).filter(|n| n * width == inner);
        times.ok_or_else(|| self.bad("ssm.inner_size", format_args!("{inner} is no multiple of the width, {width}")))
    }

    /// The keys that every family has.
    pub fn common(&self, model_type: &str) -> Result<Map<String, Value>> {
        let rows = self.tensors.get("token_embd.weight").and_then(|t| t.shape.first());
        let vocab = match rows {
            Some(rows) => *rows,
            None => self.usize("vocab_size")?,
        };
        let eps = self.float("attention.layer_norm_rms_epsilon").or(self.float("attention.layer_norm_epsilon"));
        let mut c = Map::new();
        c.insert("model_type".into(), model_type.into());
        c.insert("vocab_size".into(), vocab.into());
        c.insert("hidden_size".into(), self.usize("embedding_length")?.into());
        c.insert("num_hidden_layers".into(), self.layers()?.into());
        c.insert("tie_word_embeddings".into(), (!self.tensors.contains_key("output.weight")).into());
        if let Some(context) = self.opt("context_length")?.filter(|n| *n > 0) {
            c.insert("max_position_embeddings".into(), context.into());
        }
        if let Some(eps) = eps {
            // A number that was rounded to f32 is rounded to the same one again.
            for key in ["rms_norm_eps", "norm_eps", "layer_norm_epsilon"] {
                c.insert(key.into(), eps.into());
            }
        }
        // The key counts experts too where there are both.
        let stored = (0..self.layers()?).find_map(|i| self.tensors.get(&format!("blk.{i}.ffn_up.weight")));
        let width = match stored.filter(|t| t.shape.len() == 2) {
            Some(t) => Some(t.shape[0]),
            None => self.opt("feed_forward_length")?.filter(|n| *n > 0),
        };
        if let Some(width) = width {
            c.insert("intermediate_size".into(), width.into());
        }
        Ok(c)
    }

    /// The keys of experts under their usual names.
    pub fn experts(&self, c: &mut Map<String, Value>) -> Result<()> {
        c.insert("num_experts".into(), self.usize("expert_count")?.into());
        c.insert("num_experts_per_tok".into(), self.usize("expert_used_count")?.into());
        let inner = match self.opt("expert_feed_forward_length")?.filter(|n| *n > 0) {
            Some(n) => n,
            None => self.usize("feed_forward_length")?,
        };
        c.insert("moe_intermediate_size".into(), inner.into());
        c.insert("norm_topk_prob".into(), self.bool("expert_weights_norm").unwrap_or(true).into());
        let scale = self.float("expert_weights_scale").filter(|s| *s != 0.0).unwrap_or(1.0);
        c.insert("routed_scaling_factor".into(), scale.into());
        Ok(())
    }
}
