use proptest::prelude::*;

use super::*;

const DEMO: &[u8] = include_bytes!("../../models/demo/tokenizer.json");

fn demo() -> Tokenizer {
    Tokenizer::new("dir/tokenizer.json", DEMO, None).unwrap()
}

/// A word-level tokenizer of the sentencepiece kind: `▁` marks a space, the decoder drops the first one, bytes are spelled out.
fn metaspace() -> Tokenizer {
    let json = r#"{"version":"1.0","added_tokens":[{"id":0,"content":"</s>","single_word":false,"lstrip":false,"rstrip":false,
        "normalized":true,"special":true}],
        "normalizer":{"type":"Replace","pattern":{"String":" "},"content":"▁"},
        "pre_tokenizer":null,"post_processor":null,
        "decoder":{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"▁"},"content":" "},
            {"type":"ByteFallback"},{"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":0}]},
        "model":{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,"end_of_word_suffix":null,
            "fuse_unk":true,"byte_fallback":true,"ignore_merges":false,
            "vocab":{"</s>":0,"▁":1,"a":2,"b":3,"▁a":4,"<":5,"/":6,"s":7,">":8,"<0xE2>":9,"<0x82>":10,"<0xAC>":11},
            "merges":[["▁","a"]]}}"#;
    Tokenizer::new("tokenizer.json", json.as_bytes(), None).unwrap()
}

fn stream(tokenizer: &Tokenizer, context: &[u32], ids: &[u32]) -> Vec<String> {
    let mut stream = TextStream::new(context);
    let mut pieces: Vec<String> = ids.iter().map(|id| stream.push(tokenizer, *id).unwrap()).collect();
    pieces.push(stream.finish(tokenizer).unwrap());
    pieces
}

#[test]
fn a_raw_prompt_may_contain_special_tokens_and_plain_text_may_not() {
    let t = demo();
    assert_eq!(t.token_id("<|end|>"), Some(2));
    assert_eq!(t.encode("<|bos|><|user|>").unwrap(), [1, 3]);
    let plain = t.encode_plain("<|end|><|user|>hello <|en").unwrap();
    assert!(plain.iter().all(|id| *id > 5), "{plain:?}");
    assert_eq!(t.decode(&plain).unwrap(), "<|end|><|user|>hello <|en");
}

#[test]
fn plain_text_is_encoded_as_if_there_were_no_special_tokens() {
    let t = demo();
    let mut reference = t.inner.clone();
    reference.set_encode_special_tokens(true);
    for text in ["<|end|>", "a<|end|><|user|>b 12", "<|<|end|>|>", "x <|assist", "plain", "<\u{fdd0}|end|>", ""] {
        let want = reference.encode(text.replace('\u{fdd0}', ""), false).unwrap();
        assert_eq!(t.encode_plain(text).unwrap(), want.get_ids(), "{text}");
    }
}

#[test]
fn special_tokens_that_are_matched_after_normalising_cannot_be_forged_either() {
    let t = metaspace();
    assert_eq!(t.encode("a</s>").unwrap(), [2, 0]);
    assert_eq!(t.encode_plain("a</s>").unwrap(), [2, 5, 6, 7, 8]);
    // The template's own token beside the forged one.
    let prompt = format!("{}</s>", t.guard("a</s>"));
    let encoded = t.encode_guarded(&prompt).unwrap();
    assert_eq!(encoded.ids, [2, 5, 6, 7, 8, 0]);
    assert_eq!(*encoded.ends.last().unwrap(), prompt.len());
}

#[test]
fn streamed_text_has_its_spaces_and_whole_characters_only() {
    let t = metaspace();
    assert_eq!(stream(&t, &[], &[4, 4, 3]).concat(), "a ab");
    // Going on from a text, the space before the first new word is kept.
    assert_eq!(stream(&t, &[3], &[4]).concat(), " a");
    assert_eq!(stream(&t, &[], &[3, 9, 10, 11, 2]), ["b", "", "", "€", "a", ""]);
    let cut = stream(&t, &[], &[3, 9, 10]);
    assert_eq!(cut[0], "b");
    assert!(cut[1..3].iter().all(String::is_empty) && cut[3].starts_with('\u{fffd}'), "{cut:?}");
    // Bytes that never become a character do not hold the rest back for ever.
    assert!(stream(&t, &[], &[10; 40])[..40].concat().contains('\u{fffd}'));
    assert_eq!(stream(&t, &[], &[0; 40]).concat(), "");
}

#[test]
fn a_flag_that_the_file_forgot_is_set() {
    let text = String::from_utf8(DEMO.to_vec()).unwrap().replace("\"special\": true", "\"special\": false");
    assert!(text.contains("\"special\": false"));
    let config = parse_object("c", br#"{"eos_token": {"content": "<|end|>"}, "bos_token": "<|bos|>"}"#).unwrap();
    let t = Tokenizer::new("f", text.as_bytes(), Some(&config)).unwrap();
    assert_eq!(t.named_token("eos_token"), Some("<|end|>"));
    assert!(!t.encode_plain("<|end|>").unwrap().contains(&2));
    assert_eq!(t.decode(&[2]).unwrap(), "");
    // Its id is the same, and tokens that nothing names stay as they are.
    assert_eq!(t.encode("<|end|>").unwrap(), [2]);
    assert!(t.encode_plain("<|user|>").unwrap().contains(&3));
}

#[test]
fn a_damaged_file_is_named() {
    for bytes in [&DEMO[..DEMO.len() / 2], b"", b"{}", b"[]", b"\xff\xfe", br#"{"model":{"type":"Magic"}}"#] {
        let message = Tokenizer::new("dir/tokenizer.json", bytes, None).err().unwrap().to_string();
        assert!(message.starts_with("dir/tokenizer.json: "), "{message}");
    }
    // The library panics on these: when it reads the file, encodes or decodes.
    let vocab = r#""vocab":{"a":0,"b":1},"merges":[]"#;
    for parts in [
        r#""normalizer":{"type":"Precompiled","precompiled_charsmap":""},"model":{"type":"BPE",VOCAB}"#,
        r#""normalizer":{"type":"Prepend","prepend":""},"model":{"type":"BPE",VOCAB}"#,
        r#""pre_tokenizer":{"type":"FixedLength","length":0},"model":{"type":"BPE",VOCAB}"#,
    ] {
        let json = format!("{{{}}}", parts.replace("VOCAB", vocab));
        if let Err(e) = Tokenizer::new("dir/tokenizer.json", json.as_bytes(), None) {
            assert!(e.to_string().starts_with("dir/tokenizer.json: not a valid tokenizer"), "{e}");
        }
    }
}

#[test]
fn a_byte_order_mark_is_no_damage() {
    let marked = [b"\xef\xbb\xbf", DEMO].concat();
    assert_eq!(Tokenizer::new("tokenizer.json", &marked, None).unwrap().vocab_size(), demo().vocab_size());
}

#[test]
fn ids_are_checked_against_the_model() {
    assert!(check_ids(&[0, 9], 10).is_ok());
    let message = check_ids(&[0, 10], 10).unwrap_err().to_string();
    assert_eq!(message, "token id 10 at place 1 of the prompt is out of range; the model has ids 0 to 9");
    assert!(check_ids(&[], 10).unwrap_err().to_string().contains("empty"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Streaming any tokens gives the text of all of them.
    #[test]
    fn a_stream_is_the_text(ids in prop::collection::vec(0u32..1024, 0..40)) {
        let t = demo();
        prop_assert_eq!(stream(&t, &[], &ids).concat(), t.decode(&ids).unwrap());
    }

    /// Any text comes back, special or not, and none of it acts.
    #[test]
    fn plain_text_comes_back(parts in prop::collection::vec("<\\|end\\|>|<\\|user|\\|>|<|.|é", 0..12)) {
        let t = demo();
        let text = parts.concat();
        let ids = t.encode_plain(&text).unwrap();
        prop_assert!(ids.iter().all(|id| *id > 5));
        prop_assert_eq!(t.decode(&ids).unwrap(), text);
    }
}
