//! The tokenizer of a GGUF file, rebuilt as the `tokenizer.json` that the tokenizer library reads.

use std::collections::{BTreeSet, HashMap};

use serde_json::{Map, Value, json};

use super::meta::Meta;
use crate::{Error, Result};

/// Kinds of tokens.
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

/// Longest piece in bytes that is split into two.
const MAX_PIECE: usize = 512;

/// Tokens that end an answer wherever they are in a vocabulary.
const ENDS: [&str; 8] =
    ["<|im_end|>", "<|end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "</s>", "<|eom_id|>"];

/// Splits of a text before byte-level BPE.
struct Pre {
    /// Values of `tokenizer.ggml.pre`.
    names: &'static [&'static str],
    /// Patterns, one after the other.
    patterns: &'static [&'static str],
    /// A piece that is a token is not split further.
    ignore_merges: bool,
    /// Whether texts begin with the token for that, unless the file says otherwise.
    add_bos: bool,
}

const CONTRACTED: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The split of byte-level BPE in its first form, which the tokenizer library has built in.
pub const GPT_2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

const PRES: &[Pre] = &[
    Pre {
        names: &["llama-bpe", "llama-v3", "llama3", "lfm2", "falcon-h1", "falcon3", "pixtral"],
        patterns: &[CONTRACTED],
        ignore_merges: true,
        add_bos: true,
    },
    Pre { names: &["dbrx", "smaug-bpe"], patterns: &[CONTRACTED], ignore_merges: false, add_bos: false },
    Pre {
        names: &["qwen2", "deepseek-r1-qwen"],
        patterns: &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ignore_merges: false,
        add_bos: false,
    },
    Pre {
        names: &["qwen35"],
        patterns: &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ignore_merges: false,
        add_bos: false,
    },
    Pre {
        names: &["tekken"],
        patterns: &[
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ignore_merges: true,
        add_bos: true,
    },
    Pre {
        names: &["gpt-4o", "llama4"],
        patterns: &[
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ignore_merges: false,
        add_bos: false,
    },
    Pre {
        names: &["gpt-2", "olmo", "mpt", "granite-docling"],
        patterns: &[GPT_2],
        ignore_merges: false,
        add_bos: false,
    },
    Pre {
        names: &["starcoder", "refact", "smollm", "command-r"],
        patterns: &[r"\p{N}", GPT_2],
        ignore_merges: false,
        add_bos: false,
    },
];

/// The rules of other programs that split texts as `patterns`, one after the other, do: the name by which files ask for them.
pub fn pre(patterns: &[&str], ignore_merges: bool) -> Option<&'static str> {
    let same = |p: &&Pre| p.patterns == patterns && p.ignore_merges == ignore_merges;
    PRES.iter().find(same).map(|p| p.names[0])
}

/// Ids of the tokens that end a text.
pub(super) fn ends(meta: &Meta) -> Vec<u32> {
    let ids = ["eos", "eot", "eom"].iter().filter_map(|name| id(meta, name));
    let texts = meta.texts("tokenizer.ggml.tokens").unwrap_or_default();
    let named = texts.iter().enumerate().filter(|(_, text)| ENDS.contains(&text.as_str())).map(|(i, _)| i as u32);
    ids.chain(named).collect::<BTreeSet<_>>().into_iter().collect()
}

/// The id under `tokenizer.ggml.NAME_token_id`, if the vocabulary has it.
fn id(meta: &Meta, name: &str) -> Option<u32> {
    let id = u32::try_from(meta.int(&format!("tokenizer.ggml.{name}_token_id"))?).ok()?;
    meta.texts("tokenizer.ggml.tokens").is_none_or(|t| (id as usize) < t.len()).then_some(id)
}

/// A tokenizer as the files of other models have it.
#[derive(Debug)]
pub struct TokenizerFiles {
    /// The text of `tokenizer.json`.
    pub tokenizer: Vec<u8>,
    /// The keys of `tokenizer_config.json`.
    pub settings: Map<String, Value>,
}

/// See [`super::Gguf::tokenizer`].
pub(super) fn tokenizer(path: &str, meta: &Meta) -> Result<Option<TokenizerFiles>> {
    let Some(tokens) = meta.texts("tokenizer.ggml.tokens") else { return Ok(None) };
    let mut settings = Map::new();
    for (key, name) in [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"), ("mask", "mask")] {
        if let Some(id) = id(meta, name) {
            settings.insert(format!("{key}_token"), tokens[id as usize].clone().into());
        }
    }
    if let Some(whole) = meta.text("tokenizer.huggingface.json") {
        return Ok(Some(TokenizerFiles { tokenizer: whole.as_bytes().to_vec(), settings }));
    }
    let v = Vocabulary { path, meta, tokens, kinds: meta.ints("tokenizer.ggml.token_type").unwrap_or_default() };
    let file = match meta.text("tokenizer.ggml.model").unwrap_or_default() {
        "gpt2" => v.byte_level()?,
        "llama" => v.sentence_pieces()?,
        other => {
            return Err(Error::Unsupported {
                what: format!("{path}: a vocabulary of kind {other:?} (key `tokenizer.ggml.model`)"),
                why: "gpt2 and llama are supported; put the model's tokenizer.json beside the file".into(),
            });
        }
    };
    Ok(Some(TokenizerFiles { tokenizer: file.to_string().into_bytes(), settings }))
}

struct Vocabulary<'a> {
    path: &'a str,
    meta: &'a Meta,
    tokens: &'a [String],
    kinds: Vec<i64>,
}

impl Vocabulary<'_> {
    fn bad(&self, key: &str, why: impl std::fmt::Display) -> Error {
        Error::model(self.path, format!("key `tokenizer.ggml.{key}`: {why}"))
    }

    /// Ids by text. Of tokens with the same text the first counts.
    fn ids(&self) -> Map<String, Value> {
        let mut ids = Map::new();
        for (id, token) in self.tokens.iter().enumerate() {
            ids.entry(token.clone()).or_insert_with(|| id.into());
        }
        ids
    }

    /// Tokens that are found in a text before anything else is done to it.
    fn added(&self) -> Vec<Value> {
        let found =
            |(id, _): &(usize, &String)| matches!(self.kinds.get(*id), Some(&(UNKNOWN | CONTROL | USER_DEFINED)));
        let token = |(id, text): (usize, &String)| {
            json!({
                "id": id, "content": text, "special": self.kinds[id] != USER_DEFINED,
                "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            })
        };
        self.tokens.iter().enumerate().filter(|(_, text)| !text.is_empty()).filter(found).map(token).collect()
    }

    /// Tokens before and after every text.
    fn around(&self, add_bos: bool) -> Value {
        let flag = |name: &str, default| self.meta.bool(&format!("tokenizer.ggml.add_{name}_token")).unwrap_or(default);
        let wanted = |name: &str, default| id(self.meta, name).filter(|_| flag(name, default));
        let (bos, eos) = (wanted("bos", add_bos), wanted("eos", false));
        if bos.is_none() && eos.is_none() {
            return Value::Null;
        }
        let text = |id: u32| &self.tokens[id as usize];
        let special = |id: u32| json!({ "SpecialToken": { "id": text(id), "type_id": 0 } });
        let sequence = |name: &str| json!({ "Sequence": { "id": name, "type_id": 0 } });
        let around =
            |middle: Vec<Value>| bos.map(special).into_iter().chain(middle).chain(eos.map(special)).collect::<Vec<_>>();
        let tokens: Map<String, Value> = bos
            .into_iter()
            .chain(eos)
            .map(|id| (text(id).clone(), json!({ "id": text(id), "ids": [id], "tokens": [text(id)] })))
            .collect();
        json!({
            "type": "TemplateProcessing", "single": around(vec![sequence("A")]),
            "pair": around(vec![sequence("A"), sequence("B")]), "special_tokens": tokens,
        })
    }

    fn byte_level(&self) -> Result<Value> {
        let name = self.meta.text("tokenizer.ggml.pre").unwrap_or("default");
        let pre = PRES.iter().find(|p| p.names.contains(&name)).ok_or_else(|| Error::Unsupported {
            what: format!("{}: pre-tokeniser {name:?} (key `tokenizer.ggml.pre`)", self.path),
            why: "its rules are not known here; put the model's tokenizer.json beside the file".into(),
        })?;
        let merges = self.meta.texts("tokenizer.ggml.merges");
        let merges = merges.ok_or_else(|| self.bad("merges", "it is missing; put tokenizer.json beside the file"))?;
        // A leading space belongs to the first part.
        let pair = |m: &String| {
            let first = m.chars().next().map_or(0, char::len_utf8);
            let at = first + m.get(first..)?.find(' ')?;
            Some(json!([&m[..at], &m[at + 1..]]))
        };
        let merges: Option<Vec<Value>> = merges.iter().map(pair).collect();
        let merges = merges.ok_or_else(|| self.bad("merges", "an entry is no pair"))?;
        let byte_level =
            json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
        let split = |pattern: &&str| json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false });
        let mut steps: Vec<Value> = pre.patterns.iter().map(split).collect();
        steps.push(byte_level.clone());
        Ok(json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": self.added(), "normalizer": null,
            "pre_tokenizer": { "type": "Sequence", "pretokenizers": steps },
            "post_processor": self.around(pre.add_bos),
            "decoder": byte_level,
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                "ignore_merges": pre.ignore_merges, "vocab": self.ids(), "merges": merges,
            },
        }))
    }

    /// Pieces with scores: merges by the score of what they make.
    fn sentence_pieces(&self) -> Result<Value> {
        let scores = self.meta.numbers("tokenizer.ggml.scores").filter(|s| s.len() == self.tokens.len());
        let scores = scores.ok_or_else(|| self.bad("scores", "there is no number for every token"))?;
        let prefix = self.meta.bool("tokenizer.ggml.add_space_prefix").unwrap_or(true);
        let mut rules = vec![json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" })];
        let mut back = vec![
            json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " }),
            json!({ "type": "ByteFallback" }),
            json!({ "type": "Fuse" }),
        ];
        if prefix {
            rules.insert(0, json!({ "type": "Prepend", "prepend": "▁" }));
            back.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
        }
        let unknown = id(self.meta, "unknown").or_else(|| {
            self.kinds.iter().position(|kind| *kind == UNKNOWN).filter(|i| *i < self.tokens.len()).map(|i| i as u32)
        });
        Ok(json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": self.added(),
            "normalizer": { "type": "Sequence", "normalizers": rules },
            "pre_tokenizer": null,
            "post_processor": self.around(true),
            "decoder": { "type": "Sequence", "decoders": back },
            "model": {
                "type": "BPE", "dropout": null, "unk_token": unknown.map(|id| &self.tokens[id as usize]),
                "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true,
                "ignore_merges": false, "vocab": self.ids(), "merges": self.merges(&scores),
            },
        }))
    }

    /// Every split of every piece into two others: the best piece first, of equal ones the longer first part.
    fn merges(&self, scores: &[f64]) -> Vec<Value> {
        let ids: HashMap<&str, usize> = self.tokens.iter().enumerate().map(|(i, t)| (t.as_str(), i)).collect();
        // Longer pieces than any published vocabulary has would take time with their square.
        let short = |piece: &String| piece.len() <= MAX_PIECE;
        let plain = |id: &usize| !matches!(self.kinds.get(*id), Some(&(UNKNOWN | CONTROL | USER_DEFINED)));
        let mut all: Vec<(f64, &str, &str)> = Vec::new();
        for (piece, score) in
            self.tokens.iter().zip(scores).enumerate().filter(|(i, p)| plain(i) && short(p.0)).map(|(_, p)| p)
        {
            for (at, _) in piece.char_indices().skip(1) {
                let (left, right) = piece.split_at(at);
                if [left, right].iter().all(|part| ids.get(part).is_some_and(plain)) {
                    all.push((*score, left, right));
                }
            }
        }
        let length = |text: &str| text.chars().count();
        all.sort_by(|a, b| b.0.total_cmp(&a.0).then(length(b.1).cmp(&length(a.1))).then(length(b.2).cmp(&length(a.2))));
        all.into_iter().map(|(_, left, right)| json!([left, right])).collect()
    }
}
