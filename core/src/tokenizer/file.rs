//! Checks `tokenizer.json` before the library reads it: files that could take all memory are refused. It also computes
//! by how much the rules can shrink or grow a text.

use serde_json::{Map, Value};

use super::bytes::byte_characters;

/// Rules (normalisers, pre-tokenisers, post-processors, decoders) of one kind.
const MAX_RULES: usize = 64;
/// Bytes of a text in a rule; the longest published ones are patterns of some 600.
const MAX_TEXT: usize = 4096;
/// Entries of a list in a rule.
const MAX_LIST: usize = 1024;
/// How many times longer normalisers may make a text.
const MAX_GROWTH: usize = 64;
/// Longest word that WordPiece may process: its time grows with the square.
const MAX_WORD: u64 = 10_000;

/// Effect of a tokenizer's rules on the length of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lengths {
    /// Bytes of the longest token.
    pub longest: usize,
    /// Most bytes of text that one token can stand for; `None` if rules drop text or join it.
    pub per_token: Option<usize>,
    /// How many times longer normalisers may make a text.
    pub growth: usize,
}

/// Checks the file. Settings that pad or cut texts, left by some training runs, are removed: a prompt is encoded whole.
/// The second result says whether there were any.
///
/// # Errors
/// The key and its fault.
pub(super) fn check(file: &mut Map<String, Value>) -> Result<(Lengths, bool), String> {
    let mut changed = false;
    for key in ["padding", "truncation"] {
        if let Some(value) = file.get_mut(key).filter(|value| !value.is_null()) {
            *value = Value::Null;
            changed = true;
        }
    }
    let rules = |kind: &'static str, parts: &'static str| Rules::read(kind, file.get(kind), parts);
    let normalizer = rules("normalizer", "normalizers")?;
    let pre_tokenizer = rules("pre_tokenizer", "pretokenizers")?;
    rules("post_processor", "processors")?;
    let decoder = rules("decoder", "decoders")?;
    let model = file.get("model").and_then(Value::as_object);
    let word = model.and_then(|m| m.get("max_input_chars_per_word")).and_then(Value::as_u64).unwrap_or(0);
    if word > MAX_WORD {
        return Err(format!("key `model.max_input_chars_per_word` is {word}; at most {MAX_WORD} is allowed"));
    }
    decoder.growth()?;
    let growth = normalizer.growth()?;
    let added: Vec<&Map<String, Value>> =
        file.get("added_tokens").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_object).collect();
    let text = |token: &Map<String, Value>| token.get("content").and_then(Value::as_str).map_or(0, str::len);
    let longest = added.iter().map(|token| text(token)).max().unwrap_or(0);
    if longest > MAX_TEXT {
        return Err(format!("key `added_tokens`: a token has {longest} bytes; at most {MAX_TEXT} are allowed"));
    }
    let longest = longest.max(model.map_or(0, longest_token)).max(1);
    let strips =
        |token: &&Map<String, Value>| ["lstrip", "rstrip"].iter().any(|k| token.get(*k) == Some(&Value::Bool(true)));
    let whole =
        model.is_some_and(|model| drops_nothing(model, &normalizer, &pre_tokenizer)) && !added.iter().any(strips);
    let shrink = normalizer.shrink().filter(|_| whole && pre_tokenizer.keeps_text());
    // An unknown character is one token.
    let per_token = shrink.map(|shrink| longest.max(4).saturating_mul(shrink));
    Ok((Lengths { longest, per_token, growth }, changed))
}

/// The rules of one kind, those of sequences one by one.
struct Rules<'a> {
    kind: &'static str,
    list: Vec<&'a Map<String, Value>>,
}

impl<'a> Rules<'a> {
    fn read(kind: &'static str, value: Option<&'a Value>, parts: &str) -> Result<Self, String> {
        let mut list = Vec::new();
        let mut rest: Vec<&Value> = value.into_iter().collect();
        while let Some(value) = rest.pop() {
            let Some(rule) = value.as_object() else { continue };
            match rule.get(parts).and_then(Value::as_array) {
                Some(inner) => rest.extend(inner.iter().rev()),
                None => list.push(rule),
            }
            if list.len() + rest.len() > MAX_RULES {
                return Err(format!("key `{kind}` has more than {MAX_RULES} rules"));
            }
        }
        for rule in &list {
            for (key, value) in *rule {
                let bounded = if key == "precompiled_charsmap" { charsmap(value) } else { bounded(value) };
                bounded.map_err(|why| format!("key `{kind}.{key}`: {why}"))?;
            }
        }
        Ok(Self { kind, list })
    }

    /// How many times longer the rules may make a text.
    fn growth(&self) -> Result<usize, String> {
        let growth = self.list.iter().map(|rule| growth(rule)).fold(1usize, usize::saturating_mul);
        if growth > MAX_GROWTH {
            let kind = self.kind;
            return Err(format!(
                "key `{kind}`: together the rules may make a text more than {MAX_GROWTH} times longer"
            ));
        }
        Ok(growth)
    }

    /// How many times shorter these normalisers may make a text; `None` if there is no limit.
    fn shrink(&self) -> Option<usize> {
        self.list.iter().try_fold(1usize, |product, rule| Some(product.saturating_mul(shrink(rule)?)))
    }

    /// Whether these pre-tokenisers only split text.
    fn keeps_text(&self) -> bool {
        self.list.iter().all(|rule| match kind(rule) {
            "ByteLevel" | "Metaspace" | "Digits" | "UnicodeScripts" => true,
            "Split" | "Punctuation" => rule.get("behavior").and_then(Value::as_str).is_some_and(|b| b != "Removed"),
            _ => false,
        })
    }

    fn any(&self, wanted: &str) -> bool {
        self.list.iter().any(|rule| kind(rule) == wanted)
    }
}

fn kind(rule: &Map<String, Value>) -> &str {
    rule.get("type").and_then(Value::as_str).unwrap_or_default()
}

fn text<'a>(rule: &'a Map<String, Value>, key: &str) -> Option<&'a str> {
    rule.get(key).and_then(Value::as_str)
}

/// The text that `Replace` looks for, if it is fixed.
fn fixed_pattern(rule: &Map<String, Value>) -> Option<&str> {
    rule.get("pattern")?.get("String")?.as_str().filter(|text| !text.is_empty())
}

fn growth(rule: &Map<String, Value>) -> usize {
    match kind(rule) {
        "Prepend" => 1 + text(rule, "prepend").map_or(0, str::len),
        "Replace" => {
            let content = text(rule, "content").map_or(0, str::len);
            // A pattern may match between any two characters.
            fixed_pattern(rule).map_or(content + 1, |pattern| content.div_ceil(pattern.len()).max(1))
        }
        _ => 1,
    }
}

fn shrink(rule: &Map<String, Value>) -> Option<usize> {
    match kind(rule) {
        "Prepend" | "ByteLevel" => Some(1),
        // A mathematical letter of four bytes becomes a letter of one; a Kelvin sign of three becomes one; jamo of nine bytes three.
        "NFC" | "NFD" | "NFKC" | "NFKD" | "Lowercase" => Some(4),
        "Replace" => {
            let content = text(rule, "content").filter(|content| !content.is_empty())?;
            Some(fixed_pattern(rule)?.len().div_ceil(content.len()))
        }
        _ => None,
    }
}

fn longest_token(model: &Map<String, Value>) -> usize {
    match model.get("vocab") {
        Some(Value::Object(vocab)) => vocab.keys().map(String::len).max().unwrap_or(0),
        Some(Value::Array(vocab)) => {
            vocab.iter().filter_map(|entry| entry.get(0)?.as_str()).map(str::len).max().unwrap_or(0)
        }
        _ => 0,
    }
}

/// Whether the model has a token for every byte or character, alone.
fn drops_nothing(model: &Map<String, Value>, normalizer: &Rules<'_>, pre_tokenizer: &Rules<'_>) -> bool {
    // Some files do not name the type; only BPE has merges.
    let Some(vocab) = model.get("vocab").and_then(Value::as_object).filter(|_| model.contains_key("merges")) else {
        return false;
    };
    let is = |key: &str| model.get(key) == Some(&Value::Bool(true));
    if normalizer.any("ByteLevel") || pre_tokenizer.any("ByteLevel") {
        let mut one = [0u8; 4];
        return byte_characters().keys().all(|c| vocab.contains_key(&*c.encode_utf8(&mut one)));
    }
    let bytes = || (0..=255).all(|byte| vocab.contains_key(&format!("<0x{byte:02X}>")));
    let unknown = model.get("unk_token").is_some_and(Value::is_string) && !is("fuse_unk");
    unknown || (is("byte_fallback") && bytes())
}

/// Refuses long texts and lists at any depth.
fn bounded(value: &Value) -> Result<(), String> {
    match value {
        Value::String(text) if text.len() > MAX_TEXT => {
            Err(format!("a text has {} bytes; at most {MAX_TEXT} are allowed", text.len()))
        }
        Value::Array(list) if list.len() > MAX_LIST => {
            Err(format!("a list has {} entries; at most {MAX_LIST} are allowed", list.len()))
        }
        Value::Array(list) => list.iter().try_for_each(bounded),
        Value::Object(map) if map.len() > MAX_LIST => {
            Err(format!("there are {} entries; at most {MAX_LIST} are allowed", map.len()))
        }
        Value::Object(map) => map.values().try_for_each(bounded),
        _ => Ok(()),
    }
}

/// Checks a sentencepiece map of characters, in base64: four bytes with the size of a table in bytes, the table of u32,
/// and texts. The library allocates that size without a check.
fn charsmap(value: &Value) -> Result<(), String> {
    let Some(text) = value.as_str() else { return Ok(()) };
    let digit = |c: u8| match c {
        b'A'..=b'Z' => Some(u32::from(c - b'A')),
        b'a'..=b'z' => Some(u32::from(c - b'a') + 26),
        b'0'..=b'9' => Some(u32::from(c - b'0') + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let bytes = text.trim_end_matches('=').len() * 3 / 4;
    let Some(head) = text.as_bytes().get(..6).filter(|_| bytes >= 4) else {
        return Err("the map is too short to be one".into());
    };
    let bits = head.iter().try_fold(0u64, |bits, &c| Some(bits << 6 | u64::from(digit(c)?)));
    let Some(bits) = bits else { return Err("this is not base64".into()) };
    // 36 bits: four bytes and a half.
    let size = ((bits >> 4) as u32).swap_bytes() as usize;
    if !size.is_multiple_of(4) || size > bytes - 4 {
        return Err(format!("the table claims {size} bytes, but {} follow", bytes - 4));
    }
    Ok(())
}

/// Whether these normalisers can produce one of `specials` from a text that holds none.
pub(super) fn may_forge(normalizer: Option<&Value>, specials: &[String]) -> bool {
    let Ok(rules) = Rules::read("normalizer", normalizer, "normalizers") else { return true };
    let foreign = |text: &str| !text.is_empty() && text.chars().all(|c| !specials.iter().any(|s| s.contains(c)));
    !rules.list.iter().all(|rule| match kind(rule) {
        "Prepend" => text(rule, "prepend").is_some_and(foreign),
        "Replace" => text(rule, "content").is_some_and(foreign),
        _ => false,
    })
}
