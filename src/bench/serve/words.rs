//! A tokenizer for random weights.

use selkie_core::{Result, tokenizer::Tokenizer};
use serde_json::{Map, Value, json};

use crate::bench::{Random, SEED};

/// Characters of words, some of them as often as in texts.
const LETTERS: &[u8] = b"eeeeeeetttttaaaaooooiiiinnnnssshhhrrrdddlllcccuuummmwwffggyyppbbvkjxqzETAOINS0123456789";
/// What a word may begin with: in the alphabet of such tokenizers, a space is written as the second one.
const BEFORE: [&str; 4] = ["", "\u{120}", "\u{120}", "\u{120}"];

/// Made-up words for ids below `vocab`, the first ones for single bytes: so that answers are decoded, and structures have the
/// vocabulary of a real model's size to choose from.
pub fn made_up(vocab: usize) -> Result<Tokenizer> {
    let mut ids: Map<String, Value> = (0..=255).map(|byte| (letter(byte).to_string(), byte.into())).collect();
    let mut random = Random(SEED);
    while ids.len() < vocab {
        let mut word = BEFORE[random.below(BEFORE.len())].to_owned();
        word.extend((0..2 + random.below(7)).map(|_| char::from(LETTERS[random.below(LETTERS.len())])));
        let next = ids.len();
        ids.entry(word).or_insert(next.into());
    }
    let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    let file = json!({
        "version": "1.0",
        "pre_tokenizer": bytes,
        "decoder": bytes,
        "model": { "type": "BPE", "vocab": ids, "merges": [] },
    });
    Tokenizer::new("the made-up tokenizer", file.to_string().as_bytes(), None)
}

/// The character that stands for a byte.
fn letter(byte: u8) -> char {
    let shown = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match shown(byte) {
        true => char::from(byte),
        // The others, in order, begin after the last byte.
        false => {
            let before = (0..byte).filter(|b| !shown(*b)).count();
            char::from_u32(256 + before as u32).unwrap_or(' ')
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_id_has_bytes() {
        let tokenizer = made_up(5000).unwrap();
        let bytes = tokenizer.token_bytes(5000);
        assert!(bytes.iter().all(|bytes| !bytes.is_empty()));
        assert!((0..=255).all(|byte| bytes[usize::from(byte)] == [byte]));
        assert!(tokenizer.decode(&[300, 4999]).unwrap().len() > 3);
    }
}
