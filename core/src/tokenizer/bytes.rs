//! What single tokens add to a text.

use std::collections::HashMap;

use serde_json::Value;

use super::Tokenizer;

impl Tokenizer {
    /// The bytes that each token below `vocab` adds to a text: `[vocab]`. Special tokens add none, nor do ids without a token.
    pub fn token_bytes(&self, vocab: usize) -> Vec<Vec<u8>> {
        let rules = Rules::of(&self.inner);
        let mut all = vec![Vec::new(); vocab];
        for (text, id) in self.inner.get_vocab(false) {
            if let Some(bytes) = all.get_mut(id as usize) {
                *bytes = rules.bytes(&text);
            }
        }
        for (id, token) in self.inner.get_added_tokens_decoder() {
            if let Some(bytes) = all.get_mut(id as usize) {
                *bytes = if token.special { Vec::new() } else { token.content.into_bytes() };
            }
        }
        all
    }

    /// Special tokens of two characters or more, with their texts.
    pub fn special_tokens(&self) -> impl Iterator<Item = (u32, &str)> {
        self.special_ids.iter().map(|(id, text)| (*id, text.as_str()))
    }

    /// The text of a special token.
    pub fn special_text(&self, id: u32) -> Option<&str> {
        self.special_ids.get(&id).map(String::as_str)
    }
}

/// The decoder's rules that work on single tokens.
struct Rules {
    /// Characters stand for bytes.
    byte_level: Option<HashMap<char, u8>>,
    /// Tokens like `<0x0A>` stand for bytes.
    byte_fallback: bool,
    /// Texts that are replaced, in order.
    replaced: Vec<(String, String)>,
}

impl Rules {
    fn of(tokenizer: &tokenizers::Tokenizer) -> Self {
        let decoder =
            tokenizer.get_decoder().and_then(|decoder| serde_json::to_value(decoder).ok()).unwrap_or_default();
        let list = match decoder.get("decoders").and_then(Value::as_array) {
            Some(list) => list.clone(),
            None => vec![decoder],
        };
        let has = |name: &str| list.iter().any(|rule| rule.get("type").and_then(Value::as_str) == Some(name));
        let replaced = |rule: &Value| match rule.get("type")?.as_str()? {
            "Replace" => Some((
                rule.get("pattern")?.get("String")?.as_str()?.to_owned(),
                rule.get("content")?.as_str()?.to_owned(),
            )),
            "Metaspace" => Some((rule.get("replacement")?.as_str()?.to_owned(), " ".to_owned())),
            _ => None,
        };
        Self {
            byte_level: has("ByteLevel").then(byte_characters),
            byte_fallback: has("ByteFallback"),
            replaced: list.iter().filter_map(replaced).filter(|(pattern, _)| !pattern.is_empty()).collect(),
        }
    }

    fn bytes(&self, token: &str) -> Vec<u8> {
        let text = self.replaced.iter().fold(token.to_owned(), |text, (from, to)| text.replace(from, to));
        if self.byte_fallback
            && let Some(hex) = token.strip_prefix("<0x").and_then(|t| t.strip_suffix('>')).filter(|hex| hex.len() == 2)
            && let Ok(byte) = u8::from_str_radix(hex, 16)
        {
            return vec![byte];
        }
        match &self.byte_level {
            // A token with another character stands for its own text.
            Some(map) => text.chars().map(|c| map.get(&c).copied()).collect::<Option<_>>().unwrap_or(text.into_bytes()),
            None => text.into_bytes(),
        }
    }
}

/// GPT-2's characters for bytes: printable ones stand for themselves, the others for the characters from 256 on.
pub(super) fn byte_characters() -> HashMap<char, u8> {
    let mut next = 256;
    (0..=255u8)
        .map(|byte| {
            let code = if matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) {
                u32::from(byte)
            } else {
                next += 1;
                next - 1
            };
            (char::from_u32(code).expect("below the surrogates"), byte)
        })
        .collect()
}
