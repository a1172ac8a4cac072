//! Reading `config.json`: typed, bounded access to its keys, with errors that name the file, the key and what was found.
//!
//! A key may be given as several names separated by `|` (`"n_groups|mamba_n_groups"`); the first that is present and not
//! null counts. Under a `text_config` object its keys come before those of the top level. Sizes are bounded, so that products
//! of two of them fit in 64 bits and no file can ask for something absurd.

use serde_json::{Map, Value};

use crate::{Error, Result};

/// The largest value of a single size (a width, a vocabulary, a count).
pub const MAX_SIZE: usize = 1 << 24;
/// The largest number of positions.
const MAX_POSITIONS: usize = 1 << 31;
/// Most layers of a model.
pub const MOST_LAYERS: usize = 10_000;

/// What a layer does, in the vocabulary of this engine; [`LayerType::parse`] knows the synonyms of the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerType {
    /// A recurrent mixer: Mamba or linear attention, by the family.
    Recurrent,
    /// Attention over all positions.
    Attention,
    /// Attention over the last positions.
    SlidingAttention,
    /// A dense feed-forward layer.
    Mlp,
    /// A mixture of experts.
    Moe,
    /// A short convolution.
    Conv,
    /// A recurrent mixer and attention in one layer.
    Hybrid,
}

/// The usual names of layer types, for messages.
const LAYER_TYPES: &str = "mamba, linear_attention, full_attention, sliding_attention, mlp, moe, conv and hybrid";

impl LayerType {
    /// The meaning of an entry of `layer_types` or `layers_block_type`.
    pub fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "mamba" | "mamba2" | "linear_attention" | "recurrent" => Self::Recurrent,
            "attention" | "full_attention" => Self::Attention,
            "sliding_attention" => Self::SlidingAttention,
            "mlp" => Self::Mlp,
            "moe" => Self::Moe,
            "conv" => Self::Conv,
            "hybrid" => Self::Hybrid,
            _ => return None,
        })
    }

    /// The meaning of a character of `hybrid_override_pattern`.
    pub fn from_pattern(c: char) -> Option<Self> {
        Some(match c {
            'M' => Self::Recurrent,
            '*' => Self::Attention,
            '-' => Self::Mlp,
            'E' => Self::Moe,
            _ => return None,
        })
    }
}

/// The sizes of an attention layer; `heads` is a multiple of `kv_heads`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

/// A parsed `config.json`, or an object inside one.
#[derive(Clone, Debug)]
pub struct Config {
    file: String,
    /// Where in the file this object is, e.g. `linear_attn_config.`; empty at the top.
    prefix: String,
    /// Searched in order.
    levels: Vec<Map<String, Value>>,
}

impl Config {
    /// Parses `bytes`; `file` is its name in messages.
    ///
    /// # Errors
    /// [`Error::BadModel`] with the position if it is not a JSON object.
    pub fn parse(file: &str, bytes: &[u8]) -> Result<Self> {
        let mut top = parse_object(file, bytes)?;
        let mut levels = Vec::new();
        if let Some(Value::Object(text)) = top.remove("text_config") {
            levels.push(text);
        }
        levels.push(top);
        Ok(Self { file: file.into(), prefix: String::new(), levels })
    }

    /// A configuration that was made from what `file` says.
    pub fn from_keys(file: &str, keys: Map<String, Value>) -> Self {
        Self { file: file.into(), prefix: String::new(), levels: vec![keys] }
    }

    /// Has `keys` instead of its own.
    pub(crate) fn replace(&mut self, keys: Map<String, Value>) {
        self.levels.insert(0, keys);
    }

    /// Name of the file, for messages.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// `model_type`, by which the family is found; that of `text_config` for a composite model.
    ///
    /// # Errors
    /// [`Error::BadModel`] if it is missing or not a string.
    pub fn model_type(&self) -> Result<&str> {
        self.str("model_type")
    }

    /// An error about `key` of this file.
    pub fn bad(&self, key: &str, why: impl std::fmt::Display) -> Error {
        // A value from the file may be as long as the file.
        let mut why = why.to_string();
        if let Some((end, _)) = why.char_indices().nth(300) {
            why.replace_range(end.., "...");
        }
        Error::model(&self.file, format!("key `{}{}`: {why}", self.prefix, key.replace('|', "` or `")))
    }

    fn missing(&self, key: &str, expected: &str) -> Error {
        let names = key.replace('|', &format!("` or `{}", self.prefix));
        Error::model(&self.file, format!("key `{}{names}` is missing; {expected} is needed", self.prefix))
    }

    fn ill_typed(&self, key: &str, expected: &str, found: &Value) -> Error {
        self.bad(key, format_args!("expected {expected}, found {}", describe(found)))
    }

    /// The first of the names in `key` that is present and not null, with its name.
    fn find<'a>(&'a self, key: &'a str) -> Option<(&'a str, &'a Value)> {
        let level = |level: &'a Map<String, Value>| {
            key.split('|').find_map(|name| level.get(name).filter(|v| !v.is_null()).map(|v| (name, v)))
        };
        self.levels.iter().find_map(level)
    }

    /// Whether one of the names is present and not null.
    pub fn has(&self, key: &str) -> bool {
        self.find(key).is_some()
    }

    /// Whether the key is there and null.
    pub fn is_null(&self, key: &str) -> bool {
        self.levels.iter().any(|level| level.get(key).is_some_and(Value::is_null))
    }

    /// Whether the object has no keys.
    pub fn is_empty(&self) -> bool {
        self.levels.iter().all(Map::is_empty)
    }

    fn opt<'a, T>(&'a self, key: &'a str, expected: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let Some((name, value)) = self.find(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| self.ill_typed(name, expected, value))
    }

    fn integer(&self, key: &str, least: usize, most: usize) -> Result<Option<usize>> {
        let expected = format!("an integer from {least} to {most}");
        self.opt(key, &expected, |v| as_integer(v).filter(|n| (least..=most).contains(n)))
    }

    /// A positive size.
    ///
    /// # Errors
    /// [`Error::BadModel`] if it is missing, no integer, 0 or larger than [`MAX_SIZE`].
    pub fn usize(&self, key: &str) -> Result<usize> {
        self.opt_usize(key)?.ok_or_else(|| self.missing(key, "a positive integer"))
    }

    /// A positive size with a default for a missing or null key.
    ///
    /// # Errors
    /// [`Error::BadModel`] as for [`Config::usize`], except that the key may be missing.
    pub fn usize_or(&self, key: &str, default: usize) -> Result<usize> {
        Ok(self.opt_usize(key)?.unwrap_or(default))
    }

    /// A positive size that may be missing.
    ///
    /// # Errors
    /// As for [`Config::usize_or`].
    pub fn opt_usize(&self, key: &str) -> Result<Option<usize>> {
        self.integer(key, 1, MAX_SIZE)
    }

    /// A count that may be 0, such as a number of experts.
    ///
    /// # Errors
    /// As for [`Config::usize_or`].
    pub fn count_or(&self, key: &str, default: usize) -> Result<usize> {
        Ok(self.opt_count(key)?.unwrap_or(default))
    }

    /// A count that may be 0 or missing.
    ///
    /// # Errors
    /// As for [`Config::usize_or`].
    pub fn opt_count(&self, key: &str) -> Result<Option<usize>> {
        self.integer(key, 0, MAX_SIZE)
    }

    /// A number of layers.
    ///
    /// # Errors
    /// [`Error::BadModel`] if it is missing or not from 1 to [`MOST_LAYERS`].
    pub fn layers(&self, key: &str) -> Result<usize> {
        self.integer(key, 1, MOST_LAYERS)?.ok_or_else(|| self.missing(key, "a positive integer"))
    }

    /// The longest context the model was made for, `max_position_embeddings`.
    ///
    /// # Errors
    /// [`Error::BadModel`] if it is there and not from 1 to 2^31.
    pub fn max_positions(&self) -> Result<Option<usize>> {
        self.integer("max_position_embeddings|model_max_length", 1, MAX_POSITIONS)
    }

    /// A finite number.
    ///
    /// # Errors
    /// [`Error::BadModel`] if it is missing, not a number or not finite as f32.
    pub fn f32(&self, key: &str) -> Result<f32> {
        self.opt_f32(key)?.ok_or_else(|| self.missing(key, "a number"))
    }

    /// A finite number with a default.
    ///
    /// # Errors
    /// As for [`Config::f32`], except that the key may be missing.
    pub fn f32_or(&self, key: &str, default: f32) -> Result<f32> {
        Ok(self.opt_f32(key)?.unwrap_or(default))
    }

    /// A finite number that may be missing.
    ///
    /// # Errors
    /// As for [`Config::f32_or`].
    pub fn opt_f32(&self, key: &str) -> Result<Option<f32>> {
        Ok(self.opt_f64(key)?.map(|x| x as f32))
    }

    /// The same in double precision, for factors of sizes that are rounded down: 0.35 * 40 is 14 in f64, and less in
    /// f32.
    ///
    /// # Errors
    /// As for [`Config::f32_or`].
    pub fn opt_f64(&self, key: &str) -> Result<Option<f64>> {
        self.opt(key, "a finite number", |v| as_f64(v).filter(|x| (*x as f32).is_finite()))
    }

    /// A small positive number, the epsilon of a norm.
    ///
    /// # Errors
    /// [`Error::BadModel`] if it is there and not from 0 to 1.
    pub fn eps_or(&self, key: &str, default: f32) -> Result<f32> {
        let eps = self.opt(key, "a number from 0 to 1", |v| as_f64(v).filter(|x| (0.0..=1.0).contains(x)))?;
        Ok(eps.map_or(default, |x| x as f32))
    }

    /// A list of finite numbers that may be missing.
    ///
    /// # Errors
    /// [`Error::BadModel`] if it is anything else.
    pub fn opt_f32s(&self, key: &str) -> Result<Option<Vec<f32>>> {
        let number = |v: &Value| as_f64(v).map(|x| x as f32).filter(|x| x.is_finite());
        self.opt(key, "a list of finite numbers", |v| v.as_array()?.iter().map(number).collect())
    }

    /// A list of integers from 0 to [`MAX_SIZE`] that may be missing.
    ///
    /// # Errors
    /// [`Error::BadModel`] if it is anything else.
    pub fn opt_usizes(&self, key: &str) -> Result<Option<Vec<usize>>> {
        let number = |v: &Value| as_integer(v).filter(|n| *n <= MAX_SIZE);
        self.opt(key, "a list of non-negative integers", |v| v.as_array()?.iter().map(number).collect())
    }

    /// A switch with a default.
    ///
    /// # Errors
    /// [`Error::BadModel`] if it is there and not `true` or `false`.
    pub fn bool_or(&self, key: &str, default: bool) -> Result<bool> {
        Ok(self.opt(key, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    /// A string.
    ///
    /// # Errors
    /// [`Error::BadModel`] if it is missing or not a string.
    pub fn str<'a>(&'a self, key: &'a str) -> Result<&'a str> {
        self.opt_str(key)?.ok_or_else(|| self.missing(key, "a string"))
    }

    /// A string that may be missing.
    ///
    /// # Errors
    /// [`Error::BadModel`] if it is there and not a string.
    pub fn opt_str<'a>(&'a self, key: &'a str) -> Result<Option<&'a str>> {
        self.opt(key, "a string", Value::as_str)
    }

    /// A string with a default.
    ///
    /// # Errors
    /// As for [`Config::opt_str`].
    pub fn str_or<'a>(&'a self, key: &'a str, default: &'a str) -> Result<&'a str> {
        Ok(self.opt_str(key)?.unwrap_or(default))
    }

    /// A list of strings that may be missing.
    ///
    /// # Errors
    /// [`Error::BadModel`] if it is anything else.
    pub fn opt_strs<'a>(&'a self, key: &'a str) -> Result<Option<Vec<&'a str>>> {
        self.opt(key, "a list of strings", |v| v.as_array()?.iter().map(Value::as_str).collect())
    }

    /// An object inside this one, to be read in the same way.
    ///
    /// # Errors
    /// [`Error::BadModel`] if it is there and not an object.
    pub fn opt_object(&self, key: &str) -> Result<Option<Self>> {
        let Some(object) = self.opt(key, "an object", Value::as_object)? else { return Ok(None) };
        let name = self.find(key).map_or(key, |(name, _)| name);
        let prefix = format!("{}{name}.", self.prefix);
        Ok(Some(Self { file: self.file.clone(), prefix, levels: vec![object.clone()] }))
    }

    /// The raw value of a key, for shapes of data that only one family has.
    pub fn value<'a>(&'a self, key: &'a str) -> Option<&'a Value> {
        self.find(key).map(|(_, value)| value)
    }

    /// Checks that `a` is a multiple of `b`; the keys name them in the message.
    ///
    /// # Errors
    /// [`Error::BadModel`] if it is not.
    pub fn divides(&self, (a_key, a): (&str, usize), (b_key, b): (&str, usize)) -> Result<()> {
        if b == 0 || !a.is_multiple_of(b) {
            return Err(self.bad(a_key, format_args!("{a} is not a multiple of `{}{b_key}`, {b}", self.prefix)));
        }
        Ok(())
    }

    /// The product of sizes that make up a width, e.g. heads times head dim; `keys` names them in the message.
    ///
    /// # Errors
    /// [`Error::BadModel`] if it is 0 or larger than [`MAX_SIZE`].
    pub fn width(&self, keys: &str, sizes: &[usize]) -> Result<usize> {
        let product = sizes.iter().try_fold(1usize, |n, s| n.checked_mul(*s)).filter(|n| (1..=MAX_SIZE).contains(n));
        product.ok_or_else(|| self.bad(keys, format_args!("the product of {sizes:?} must be from 1 to {MAX_SIZE}")))
    }

    /// Heads of the attention layers: `num_attention_heads`, `num_key_value_heads` (default: as many) and `head_dim`
    /// (default: the hidden size divided by the heads).
    ///
    /// # Errors
    /// [`Error::BadModel`] if a key is ill-typed or the numbers do not divide.
    pub fn heads(&self) -> Result<Heads> {
        let heads = self.usize("num_attention_heads")?;
        let kv_heads = self.usize_or("num_key_value_heads", heads)?;
        self.divides(("num_attention_heads", heads), ("num_key_value_heads", kv_heads))?;
        let head_dim = match self.opt_usize("head_dim|attention_head_dim")? {
            Some(d) => d,
            None => {
                let hidden = self.usize("hidden_size")?;
                self.divides(("hidden_size", hidden), ("num_attention_heads", heads))?;
                hidden / heads
            }
        };
        self.width("num_attention_heads", &[heads, head_dim])?;
        Ok(Heads { heads, kv_heads, head_dim })
    }

    /// The list of layer types under `key`, if it is there.
    ///
    /// # Errors
    /// [`Error::BadModel`] for anything but a list of known names.
    pub fn layer_types(&self, key: &str) -> Result<Option<Vec<LayerType>>> {
        let Some(names) = self.opt_strs(key)? else { return Ok(None) };
        let parse = |name: &str| {
            let why = || self.bad(key, format_args!("layer type {name:?} is not known; {LAYER_TYPES} are"));
            LayerType::parse(name).ok_or_else(why)
        };
        names.into_iter().map(parse).collect::<Result<_>>().map(Some)
    }

    /// Whether the output matrix is the embedding.
    ///
    /// # Errors
    /// [`Error::BadModel`] if the key is ill-typed.
    pub fn tied_embeddings(&self, default: bool) -> Result<bool> {
        self.bool_or("tie_embedding|tie_word_embeddings", default)
    }

    /// Bounds of the time step after softplus, `time_step_limit`; `None` if there are none, i.e. (0, infinity).
    ///
    /// # Errors
    /// [`Error::BadModel`] if it is not a pair of numbers in order.
    pub fn time_step_limit(&self) -> Result<Option<(f32, f32)>> {
        let pair = |v: &Value| match v.as_array()?.as_slice() {
            [lo, hi] => Some((as_f64(lo)? as f32, as_f64(hi)? as f32)).filter(|(lo, hi)| *lo >= 0.0 && lo <= hi),
            _ => None,
        };
        let limit = self.opt("time_step_limit|mamba_dt_limit", "a pair of numbers, the smaller one first", pair)?;
        Ok(limit.filter(|(lo, hi)| *lo > 0.0 || hi.is_finite()))
    }

    /// The tokens that end a text, `eos_token_id`: none, one or several.
    ///
    /// # Errors
    /// [`Error::BadModel`] if it is neither an id nor a list of ids.
    pub fn eos_token_ids(&self) -> Result<Vec<u32>> {
        let id = |v: &Value| as_integer(v).filter(|n| *n < MAX_SIZE).map(|n| n as u32);
        let ids = |v: &Value| match v {
            Value::Array(list) => list.iter().map(id).collect(),
            // Some configurations write "none" as a negative id.
            one if one.as_i64().is_some_and(|n| n < 0) => Some(vec![]),
            one => id(one).map(|id| vec![id]),
        };
        Ok(self.opt("eos_token_id", "a token id or a list of them", ids)?.unwrap_or_default())
    }
}

/// Parses a JSON object as Python writes it, i.e. with `Infinity` and `NaN`.
pub(crate) fn parse_object(file: &str, bytes: &[u8]) -> Result<Map<String, Value>> {
    let text = std::str::from_utf8(bytes)
        .map_err(|e| Error::model(file, format!("not UTF-8: {e}; correct the file, or download it again")))?;
    let value = serde_json::from_str(&quote_floats(text.trim_start_matches('\u{feff}')));
    match value
        .map_err(|e| Error::model(file, format!("not valid JSON: {e}; correct the file, or download it again")))?
    {
        Value::Object(map) => Ok(map),
        other => Err(Error::model(file, format!("expected a JSON object, found {}", describe(&other)))),
    }
}

/// Rewrites the tokens `Infinity`, `-Infinity` and `NaN` outside of strings as `{"__float__":"..."}`, the form in which newer
/// files have them.
fn quote_floats(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    let mut in_string = false;
    while let Some(c) = rest.chars().next() {
        let token = ["-Infinity", "Infinity", "NaN"].into_iter().find(|t| !in_string && rest.starts_with(t));
        let taken = match (token, c) {
            (Some(token), _) => {
                out += &format!("{{\"__float__\":\"{token}\"}}");
                rest = &rest[token.len()..];
                continue;
            }
            (None, '\\') if in_string => 1 + rest[1..].chars().next().map_or(0, char::len_utf8),
            (None, '"') => {
                in_string = !in_string;
                1
            }
            (None, c) => c.len_utf8(),
        };
        out += &rest[..taken];
        rest = &rest[taken..];
    }
    out
}

/// An integer; transformers writes some of them as `4.0`.
fn as_integer(v: &Value) -> Option<usize> {
    let float = || v.as_f64().filter(|x| x.fract() == 0.0 && (0.0..9e15).contains(x)).map(|x| x as u64);
    usize::try_from(v.as_u64().or_else(float)?).ok()
}

fn as_f64(v: &Value) -> Option<f64> {
    match v {
        Value::Object(o) if o.len() == 1 => match o.get("__float__")?.as_str()? {
            "Infinity" => Some(f64::INFINITY),
            "-Infinity" => Some(f64::NEG_INFINITY),
            "NaN" => Some(f64::NAN),
            _ => None,
        },
        v => v.as_f64(),
    }
}

fn describe(v: &Value) -> String {
    match v {
        Value::Null => "null".into(),
        Value::Bool(b) => format!("{b}"),
        Value::Number(n) => format!("the number {n}"),
        Value::String(s) if s.chars().count() <= 40 => format!("the string {s:?}"),
        Value::String(_) => "a long string".into(),
        Value::Array(a) => match v.to_string() {
            short if short.len() <= 60 => format!("the list {short}"),
            _ => format!("a list of {} values", a.len()),
        },
        Value::Object(_) => as_f64(v).map_or("an object".into(), |x| format!("the number {x}")),
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
