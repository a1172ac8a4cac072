//! Mutations of good files.

use std::ops::Range;

use serde_json::{Map, Value, json};

/// Keys that configurations of some family have.
pub const CONFIG_KEYS: &[&str] = &[
    "text_config",
    "rope_scaling",
    "rope_parameters",
    "rope_theta",
    "partial_rotary_factor",
    "head_dim",
    "num_key_value_heads",
    "sliding_window",
    "use_sliding_window",
    "layer_types",
    "layers_block_type",
    "hybrid_override_pattern",
    "quantization_config",
    "tie_word_embeddings",
    "num_hidden_layers",
    "ssm_cfg",
    "time_step_limit",
    "mlp_only_layers",
    "decoder_sparse_step",
    "full_attention_interval",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "n_group",
    "topk_group",
    "moe_latent_size",
    "n_shared_experts",
    "eos_token_id",
    "logits_scaling",
    "embedding_multiplier",
    "residual_multiplier",
    "max_position_embeddings",
    "attention_bias",
    "mlp_bias",
    "hidden_act",
    "norm_topk_prob",
    "use_bias",
    "n_groups",
    "chunk_size",
    "model_type",
];

/// Keys of the two files of a tokenizer.
pub const TOKENIZER_KEYS: &[&str] =
    &["bos_token", "eos_token", "chat_template", "normalizer", "decoder", "truncation", "padding", "added_tokens"];

/// Prefix of a string that is written without its quotes: for JSON that `Value` cannot hold.
const RAW: &str = "@raw:";

/// Values of unexpected types and sizes.
pub fn hostile() -> Vec<Value> {
    let mut all = vec![Value::Null, json!(true), json!([]), json!({}), json!([0]), json!([[]]), json!({"a": 1})];
    let integers = [-1, 0, 1, 2, 3, 5, 7, 64, 65, 255, 4096, 65536, 1 << 24, (1 << 24) + 1, 1 << 31, 1 << 32, 1 << 53];
    all.extend(integers.map(|n: i64| json!(n)));
    all.extend([u64::MAX, 1 << 63].map(|n| json!(n)));
    all.extend([0.5, 4.0, -0.0, 1e-300, 1e300, 1e38].map(|x| json!(x)));
    all.extend(["NaN", "Infinity", "-Infinity", "18446744073709551616", "1e999"].map(|t| json!(format!("{RAW}{t}"))));
    let texts =
        ["", "x", "64", "\0", "\u{1b}[31m", "silu", "relu2", "linear", "llama3", "yarn", "mamba", "moe", "M*-E"];
    all.extend(texts.map(|t| json!(t)));
    all.extend([json!("x".repeat(5000)), json!(vec!["mamba"; 10001]), json!("M".repeat(10001))]);
    all.extend([json!({"rope_type": "linear", "factor": 0}), json!({"rope_type": "default", "rope_theta": -5.0})]);
    all
}

/// Header and data of a safetensors file.
pub fn parts(file: &[u8]) -> (&[u8], &[u8]) {
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    file[8..].split_at(length)
}

/// A safetensors file.
pub fn safetensors(header: &[u8], data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header, data].concat()
}

/// The bytes of an entry in the data.
pub fn range(entry: &Value) -> Range<usize> {
    let at = |i: usize| entry["data_offsets"][i].as_u64().unwrap() as usize;
    at(0)..at(1)
}

/// Numbers that follow from a seed.
pub struct Random(u64);

impl Random {
    /// The numbers of one case.
    pub fn new(seed: u64, kind: &str, case: u64) -> Self {
        let name = kind.bytes().fold(seed, |h, b| h.wrapping_mul(0x100_0000_01b3) ^ u64::from(b));
        let mut random = Self(name ^ case.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        random.next();
        random
    }

    /// splitmix64.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A number less than `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// One of them.
    pub fn pick<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }

    /// Changes JSON text: one to three of its values, or its bytes.
    pub fn mutate_json_file(&mut self, bytes: &mut Vec<u8>, keys: &[&str]) -> String {
        if self.below(7) == 0 {
            return self.mutate_bytes(bytes);
        }
        let mut value: Value = serde_json::from_slice(bytes).unwrap();
        let what = self.mutate_value(&mut value, keys);
        let mut text = value.to_string();
        if self.below(20) == 0
            && let Some(key) = keys.first()
        {
            text = format!("{}, \"{key}\": 5, \"{key}\": []}}", text.trim_end_matches('}'));
        }
        *bytes = unquote(&text).into_bytes();
        what
    }

    fn mutate_value(&mut self, value: &mut Value, keys: &[&str]) -> String {
        let mut said = Vec::new();
        for _ in 0..*self.pick(&[1, 1, 1, 2, 3]) {
            let mut paths = Vec::new();
            walk(value, String::new(), &mut paths);
            if paths.is_empty() {
                break;
            }
            let path = self.pick(&paths).clone();
            let place = value.pointer_mut(&path).unwrap();
            match self.below(8) {
                0..3 => *place = self.near(place),
                3..6 => *place = self.pick(&hostile()).clone(),
                6 => *place = Value::Null,
                _ => {
                    let (key, new) = (*self.pick(keys), self.pick(&hostile()).clone());
                    if let Some(object) = value.as_object_mut() {
                        object.insert(key.to_owned(), new);
                    }
                    said.push(format!("new {key}"));
                    continue;
                }
            }
            let now = value.pointer(&path).unwrap().to_string();
            said.push(format!("{path} = {}", now.chars().take(60).collect::<String>()));
        }
        said.join("; ")
    }

    /// A value that differs a little.
    fn near(&mut self, value: &Value) -> Value {
        match value {
            Value::Bool(b) => json!(!b),
            Value::Number(n) if n.is_i64() => {
                let n = n.as_i64().unwrap();
                let near = [n.saturating_add(1), n.saturating_sub(1), n.saturating_mul(2), n / 2, n.wrapping_neg()];
                if self.below(6) == 0 { json!(n as f64 + 0.5) } else { json!(self.pick(&near)) }
            }
            Value::Number(n) => {
                let x = n.as_f64().unwrap();
                json!(self.pick(&[-x, x * 1e10, x * 1e-20, 0.0, x.trunc()]))
            }
            Value::String(s) => {
                let reversed = s.chars().rev().collect::<String>();
                json!(self.pick(&[format!("{s}x"), s.repeat(3), s.to_uppercase(), reversed, String::new()]))
            }
            Value::Array(list) => {
                let (mut doubled, mut shorter, mut reversed) = ([&list[..], list].concat(), list.clone(), list.clone());
                doubled.truncate(10_000);
                shorter.pop();
                reversed.reverse();
                json!(self.pick(&[doubled, shorter, reversed]))
            }
            _ => json!({}),
        }
    }

    fn mutate_bytes(&mut self, bytes: &mut Vec<u8>) -> String {
        let mut said = Vec::new();
        for _ in 0..*self.pick(&[1, 1, 2, 4]) {
            if bytes.is_empty() {
                break;
            }
            let at = self.below(bytes.len());
            let end = bytes.len().min(at + 1 + self.below(40));
            match self.below(5) {
                0 => bytes[at] ^= 1 << self.below(8),
                1 => drop(bytes.drain(at..end)),
                2 => {
                    let deep = "[".repeat(5000);
                    let piece = *self.pick(&[&deep, "NaN", "1e999", "\"", "\\ud800", "{}", ",,", "\u{feff}", "\0"]);
                    bytes.splice(at..at, piece.bytes());
                }
                3 => bytes.truncate(at),
                _ => {
                    let copy = bytes[at..end].to_vec();
                    let to = self.below(bytes.len());
                    bytes.splice(to..to, copy);
                }
            }
            said.push(format!("bytes at {at}"));
        }
        said.join("; ")
    }

    /// Changes the length, the header or the data of a safetensors file.
    pub fn mutate_safetensors(&mut self, file: &mut Vec<u8>) -> String {
        let (header, data) = parts(file);
        let (mut header, mut data) = (header.to_vec(), data.to_vec());
        match self.below(10) {
            0 => {
                let what = self.mutate_bytes(&mut header);
                *file = safetensors(&header, &data);
                what
            }
            1 => {
                let n = header.len() as u64;
                let length =
                    *self.pick(&[0, 1, n - 1, n + 1, 1 << 63, u64::MAX, u64::MAX - 7, 100_000_001, 1 << 32, n / 2]);
                file[..8].copy_from_slice(&length.to_le_bytes());
                format!("length {length}")
            }
            2 if !data.is_empty() => {
                data.truncate(self.below(data.len()));
                *file = safetensors(&header, &data);
                format!("{} bytes of data", data.len())
            }
            // Numbers of the weights, among them NaN and infinity.
            3 | 4 if data.len() > 4 => {
                for _ in 0..50 {
                    let at = self.below(data.len() - 4);
                    let numbers: [[u8; 4]; 4] = [f32::NAN, f32::INFINITY, -1e38, 0.0].map(f32::to_le_bytes);
                    data[at..at + 4].copy_from_slice(&numbers[self.below(4)]);
                }
                *file = safetensors(&header, &data);
                "data".into()
            }
            _ => {
                let mut entries: Map<String, Value> = serde_json::from_slice(&header).unwrap();
                let what: Vec<String> =
                    (0..*self.pick(&[1, 1, 2, 3])).map(|_| self.mutate_entry(&mut entries)).collect();
                let mut text = unquote(&Value::from(entries).to_string());
                if self.below(20) == 0 {
                    let name = text.split('"').nth(1).unwrap_or_default().to_owned();
                    text = format!("{}, \"{name}\": 5}}", text.strip_suffix('}').unwrap());
                }
                *file = safetensors(text.as_bytes(), &data);
                what.join("; ")
            }
        }
    }

    fn mutate_entry(&mut self, entries: &mut Map<String, Value>) -> String {
        let names: Vec<String> = entries.keys().cloned().collect();
        let Some(name) = (!names.is_empty()).then(|| self.pick(&names).clone()) else { return "no entry".into() };
        let entry = &mut entries[&name];
        if !entry.is_object() {
            return format!("entry {name} is {entry}");
        }
        let [a, z] = [0, 1].map(|i| entry["data_offsets"][i].as_u64().unwrap_or(0));
        match self.below(9) {
            0 => {
                entry["dtype"] =
                    self.pick(&["F32", "BF16", "F64", "U8", "XX", "", "f32", "F4"].map(Value::from)).clone()
            }
            1 => {
                let offsets =
                    [json!([z, a]), json!([a, z + 1]), json!([a + 1, z + 1]), json!([0, z]), json!([a]), json!([])];
                let huge =
                    [json!([u64::MAX, u64::MAX]), json!([-1, z]), json!([a, 1u64 << 63]), json!([a, a]), json!("0")];
                entry["data_offsets"] = self.pick(&[&offsets[..], &huge].concat()).clone();
            }
            2 => {
                let shapes = [json!([]), json!([0]), json!([1u64 << 32, 1u64 << 32]), json!([u64::MAX]), json!([-1])];
                let more = [json!([1; 200].to_vec()), json!([1.0]), Value::Null, json!([[1]]), json!([z - a.min(z)])];
                entry["shape"] = self.pick(&[&shapes[..], &more].concat()).clone();
            }
            3 => _ = entries.remove(&name),
            4 => {
                let entry = entries.remove(&name).unwrap();
                let other = ["", "../../etc/passwd", "\u{1b}]0;x\u{7}", "weight.bias"];
                entries.insert((*self.pick(&other)).to_owned(), entry);
            }
            5 => *entry = self.pick(&hostile()).clone(),
            6 => entry["extra"] = json!({"a": [1, 2, 3]}),
            7 => _ = entries.insert("__metadata__".into(), self.pick(&hostile()).clone()),
            _ => {
                // Not a fault: empty tensors between the others.
                entries.insert("empty".into(), json!({"dtype": "F32", "shape": [0, 7], "data_offsets": [a, a]}));
            }
        }
        format!("entry {name}")
    }

    /// A chat template, `depth` levels of blocks deep.
    pub fn template(&mut self, depth: usize) -> String {
        let start = "{% set x = 'a' %}{% set ns = namespace(x='a') %}";
        format!("{start}{}{{{{ \"hi\" }}}}", self.node(depth))
    }

    fn node(&mut self, depth: usize) -> String {
        let expressions = [
            "messages",
            "x ~ x",
            "range(10**9)",
            "'a' * 1000000000",
            "'%999999999d' | format(1)",
            "'x' | indent(10**9)",
            "('x' * 100000) | replace('', 'yyyyyyyyyy')",
            "[x] * 100000",
            "x | list",
            "x[::-1]",
            "x[2**70]",
            "10**400",
            "1/0",
            "1//0",
            "5 % 0",
            "9223372036854775807 + 1",
            "x | join(x)",
            "x.split('')",
            "x | tojson(indent=999999999)",
            "raise_exception(x)",
            "x is divisibleby(0)",
            "x | batch(0) | list",
            "x | slice(10**9) | list",
            "self",
            "loop",
            "caller()",
            "f(x)",
            "x | pprint",
            "x.ljust(10**9)",
            "ns",
            "messages | map(attribute='content') | list",
        ];
        let mut expression = (*self.pick(&expressions)).to_owned();
        if self.below(5) == 0 {
            let operator = *self.pick(&["+", "~", "*", "==", "<", "in", "and", "%", "**", "//"]);
            expression = format!("({expression}) {operator} ({})", self.pick(&expressions));
        }
        if self.below(12) == 0 {
            let long = [
                "1".to_owned() + &"+1".repeat(20_000),
                "not ".repeat(3000) + "x",
                "(".repeat(300) + "x",
                "[".repeat(5000),
            ];
            expression = self.pick(&long).clone();
        }
        let inner = if depth > 0 { self.node(depth - 1) } else { String::new() };
        match self.below(9) {
            0 | 1 => format!("{{{{ {expression} }}}}{inner}"),
            2 => format!("{{% set x = {expression} %}}{inner}"),
            3 => format!("{{% for m in {expression} %}}{inner}{{% endfor %}}"),
            4 => format!("{{% if {expression} %}}{inner}{{% endif %}}"),
            5 => format!("{{% macro f(x) %}}{inner}{{{{ f(x ~ x) }}}}{{% endmacro %}}{{{{ f(1) }}}}"),
            6 => "{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}".into(),
            7 => "{% set ns.x = ns %}{{ ns }}".into(),
            _ => {
                let odd = [
                    "{% include 'x' %}",
                    "{%",
                    "{{",
                    "{#",
                    "{% raw %}",
                    "{% break %}",
                    "{% block a %}{{ self.a() }}{% endblock %}",
                ];
                (*self.pick(&odd)).to_owned() + &inner
            }
        }
    }
}

/// The JSON pointers of all values below the top; of long lists the first ones.
fn walk(value: &Value, at: String, paths: &mut Vec<String>) {
    if !at.is_empty() {
        paths.push(at.clone());
    }
    match value {
        Value::Object(object) => object.iter().for_each(|(key, value)| {
            walk(value, format!("{at}/{}", key.replace('~', "~0").replace('/', "~1")), paths);
        }),
        Value::Array(list) => {
            list.iter().take(40).enumerate().for_each(|(i, value)| walk(value, format!("{at}/{i}"), paths));
        }
        _ => {}
    }
}

/// Removes the quotes of strings marked by [`RAW`].
fn unquote(text: &str) -> String {
    let mark = format!("\"{RAW}");
    let mut pieces = text.split(&mark);
    let mut out = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let (raw, rest) = piece.split_once('"').unwrap_or((piece, ""));
        out += raw;
        out += rest;
    }
    out
}
