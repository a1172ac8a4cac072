//! The keys of a tokenizer and of special tokens.

use serde_json::{Map, Value};

use crate::{
    Error, Result,
    config::parse_object,
    gguf::{GPT_2, Meta, MetaValue, pre},
    model_dir::{ModelFiles, Texts},
};

/// Kinds of tokens.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

/// A merge as a file has it: both parts with a space between.
fn merge(merge: &Value) -> Option<String> {
    match merge {
        Value::String(text) => Some(text.clone()),
        Value::Array(pair) => match pair.as_slice() {
            [a, b] => Some(format!("{} {}", a.as_str()?, b.as_str()?)),
            _ => None,
        },
        _ => None,
    }
}

/// Adds the keys. Returns whether other programs can use them.
///
/// # Errors
/// [`Error::Unsupported`] for a tokenizer that other programs cannot have, unless `selkie_only`; [`Error::BadModel`] for one
/// with more tokens than the model.
pub(super) async fn add(meta: &mut Meta, files: &ModelFiles, vocab: usize, selkie_only: bool) -> Result<bool> {
    let Texts { tokenizer, settings, template } = files.texts().await?;
    if let Some(template) = template {
        meta.set("tokenizer.chat_template", MetaValue::text(template));
    }
    let file = files.source().path("tokenizer.json");
    let words = match &tokenizer {
        Some(bytes) => Some(Words::read(&file, bytes, vocab)?),
        None => None,
    };
    special(meta, files, &settings, words.as_ref())?;
    let (Some(bytes), Some(words)) = (tokenizer, words) else {
        meta.set("tokenizer.ggml.model", MetaValue::text("none"));
        return Ok(true);
    };
    match words.known() {
        Ok(known) => {
            meta.set("tokenizer.ggml.model", MetaValue::text("gpt2"));
            meta.set("tokenizer.ggml.pre", MetaValue::text(known.pre));
            meta.set("tokenizer.ggml.merges", MetaValue::Texts(known.merges));
        }
        Err(why) if !selkie_only => {
            return Err(Error::Unsupported {
                what: format!("{file}: {why}: a tokenizer that other programs can use"),
                why: "GGUF files have no name for it, and others would split texts in another way; with --selkie-only the \
                      file is for selkie alone"
                    .into(),
            });
        }
        // Others then find no tokenizer rather than a wrong one.
        Err(_) => meta.set("tokenizer.ggml.model", MetaValue::text("none")),
    }
    words.flags(meta, &settings);
    let text = String::from_utf8(bytes).map_err(|_| Error::model(&file, "not UTF-8; download it again"))?;
    meta.set("tokenizer.huggingface.json", MetaValue::Text(text));
    meta.set("tokenizer.ggml.tokens", MetaValue::Texts(words.tokens));
    meta.set("tokenizer.ggml.token_type", MetaValue::i32s(&words.kinds));
    Ok(meta.has("tokenizer.ggml.pre"))
}

/// The ids of special tokens.
fn special(meta: &mut Meta, files: &ModelFiles, settings: &Map<String, Value>, words: Option<&Words>) -> Result<()> {
    let mut set = |name: &str, id: u32| meta.set(format!("tokenizer.ggml.{name}_token_id"), MetaValue::u32(id));
    let named = |key: &str| named(settings, key).and_then(|text| words?.id(text));
    for (key, name) in [("bos", "bos"), ("unk", "unknown"), ("pad", "padding"), ("mask", "mask")] {
        if let Some(id) = named(key) {
            set(name, id);
        }
    }
    // There are keys for three tokens that end an answer; the tokenizer's own comes first.
    let mut ends = files.eos()?;
    if let Some(own) = named("eos") {
        ends.retain(|id| *id != own);
        ends.insert(0, own);
    }
    for (name, id) in ["eos", "eot", "eom"].into_iter().zip(ends) {
        set(name, id);
    }
    Ok(())
}

/// The text of `bos_token` and the like.
fn named<'a>(settings: &'a Map<String, Value>, key: &str) -> Option<&'a str> {
    let value = settings.get(&format!("{key}_token"))?;
    value.as_str().or_else(|| value.get("content")?.as_str())
}

/// A vocabulary, and the file that it is from.
struct Words {
    file: Map<String, Value>,
    tokens: Vec<String>,
    kinds: Vec<i32>,
}

/// What other programs need to know of a vocabulary.
struct Known {
    pre: &'static str,
    merges: Vec<String>,
}

impl Words {
    fn read(name: &str, bytes: &[u8], vocab: usize) -> Result<Self> {
        let file = parse_object(name, bytes)?;
        let mut tokens: Vec<Option<(String, i32)>> = vec![None; vocab];
        let mut put = |id: u64, text: &str, kind: i32| {
            let place = usize::try_from(id).ok().and_then(|id| tokens.get_mut(id)).ok_or_else(|| {
                let why = format!("token {id}, {text:?}, has no row in the embedding, which has {vocab}");
                Error::model(name, format!("{why}; the tokenizer is of another model"))
            })?;
            *place = Some((text.to_owned(), kind));
            Ok::<_, Error>(())
        };
        match file.get("model").and_then(|m| m.get("vocab")) {
            Some(Value::Object(ids)) => {
                for (text, id) in ids {
                    put(id.as_u64().unwrap_or(u64::MAX), text, NORMAL)?;
                }
            }
            Some(Value::Array(scored)) => {
                for (id, entry) in scored.iter().enumerate() {
                    put(id as u64, entry.get(0).and_then(Value::as_str).unwrap_or_default(), NORMAL)?;
                }
            }
            _ => {}
        }
        for token in file.get("added_tokens").and_then(Value::as_array).into_iter().flatten() {
            let id = token.get("id").and_then(Value::as_u64).unwrap_or(u64::MAX);
            let text = token.get("content").and_then(Value::as_str).unwrap_or_default();
            let special = token.get("special").and_then(Value::as_bool).unwrap_or(false);
            put(id, text, if special { CONTROL } else { USER_DEFINED })?;
        }
        let unused = |(id, token): (usize, Option<_>)| token.unwrap_or_else(|| (format!("[PAD{id}]"), UNUSED));
        let (tokens, kinds) = tokens.into_iter().enumerate().map(unused).unzip();
        Ok(Self { file, tokens, kinds })
    }

    fn id(&self, text: &str) -> Option<u32> {
        self.tokens.iter().position(|t| t == text).map(|id| id as u32)
    }

    /// The name of the splits and the merges; the error is what others do not know.
    fn known(&self) -> Result<Known, String> {
        let model = self.file.get("model").and_then(Value::as_object).ok_or("there is no `model`")?;
        let text = |key: &str| model.get(key).and_then(Value::as_str).unwrap_or_default();
        let on = |key: &str| model.get(key).and_then(Value::as_bool).unwrap_or(false);
        if text("type") != "BPE" || on("byte_fallback") {
            return Err(format!("a vocabulary of kind {:?}", text("type")));
        }
        let normalizer = self.file.get("normalizer").and_then(|n| n.get("type")).and_then(Value::as_str);
        // Others do without that of Qwen too.
        if normalizer.is_some_and(|n| n != "NFC") {
            return Err(format!("a normaliser of type {:?}", normalizer.unwrap_or_default()));
        }
        let patterns = self.patterns().ok_or("a pre-tokeniser of other steps than patterns and bytes")?;
        let pre = pre(&patterns, on("ignore_merges")).ok_or("a pre-tokeniser with patterns of its own")?;
        let merges = model.get("merges").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let merges = merges.iter().map(merge).collect::<Option<Vec<_>>>().ok_or("a merge that is no pair")?;
        Ok(Known { pre, merges })
    }

    /// The patterns by which texts are split, one after the other, if bytes follow.
    fn patterns(&self) -> Option<Vec<&str>> {
        let whole = self.file.get("pre_tokenizer")?;
        let steps = match whole.get("pretokenizers").and_then(Value::as_array) {
            Some(steps) => steps.iter().collect(),
            None => vec![whole],
        };
        let (bytes, splits) = steps.split_last()?;
        if bytes.get("type")? != "ByteLevel" || flag(bytes, "add_prefix_space", true) {
            return None;
        }
        let own = flag(bytes, "use_regex", true).then_some(GPT_2);
        splits.iter().map(|step| pattern(step)).chain(own.map(Some)).collect()
    }

    /// Whether texts get tokens at their ends.
    fn flags(&self, meta: &mut Meta, settings: &Map<String, Value>) {
        let post = self.file.get("post_processor");
        let of_steps = post.and_then(|p| p.get("processors")).and_then(Value::as_array).into_iter().flatten();
        let steps = of_steps.chain(post);
        let single = steps.filter_map(|p| p.get("single")?.as_array()).next();
        let token = |place: Option<&Value>| place?.get("SpecialToken")?.get("id")?.as_str().map(str::to_owned);
        for (name, place) in [("bos", single.and_then(|s| s.first())), ("eos", single.and_then(|s| s.last()))] {
            let added = token(place).is_some_and(|text| named(settings, name) == Some(text.as_str()));
            meta.set(format!("tokenizer.ggml.add_{name}_token"), MetaValue::bool(added));
        }
    }
}

fn flag(of: &Value, key: &str, default: bool) -> bool {
    of.get(key).and_then(Value::as_bool).unwrap_or(default)
}

/// The pattern of a step that splits.
fn pattern(step: &Value) -> Option<&str> {
    match step.get("type")?.as_str()? {
        "Split" if step.get("behavior")? == "Isolated" && !flag(step, "invert", false) => {
            step.get("pattern")?.get("Regex")?.as_str()
        }
        "Digits" if flag(step, "individual_digits", false) => Some(r"\p{N}"),
        _ => None,
    }
}
