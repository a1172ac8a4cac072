use proptest::prelude::*;

use super::*;

fn config(text: &str) -> Config {
    Config::parse("dir/config.json", text.as_bytes()).unwrap()
}

#[test]
fn every_reference_configuration_is_read() {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden");
    let mut read = 0;
    for entry in std::fs::read_dir(golden).unwrap() {
        let file = entry.unwrap().path().join("config.json");
        if !file.exists() {
            continue;
        }
        let c = Config::parse(&file.display().to_string(), &std::fs::read(&file).unwrap()).unwrap();
        c.model_type().unwrap();
        assert!(c.usize("vocab_size").unwrap() > 0, "{}", file.display());
        assert_eq!(c.time_step_limit().unwrap(), None, "{}", file.display());
        c.layer_types("layers_block_type|layer_types").unwrap();
        if c.has("num_attention_heads") {
            c.heads().unwrap();
        }
        read += 1;
    }
    assert!(read >= 17, "{read} configurations");
}

#[test]
fn both_spellings_of_infinity_are_read_and_strings_are_left_alone() {
    let c = config(r#"{"a": [0.001, Infinity], "s": "a \"NaN\\", "t": "Infinity", "x": -Infinity, "n": NaN}"#);
    assert_eq!(c.str("s").unwrap(), r#"a "NaN\"#);
    assert_eq!(c.str("t").unwrap(), "Infinity");
    assert!(c.f32("x").unwrap_err().to_string().contains("expected a finite number, found the number -inf"));
    assert!(c.f32("n").is_err());
    for text in [r#"[0.0, Infinity]"#, r#"[0.0, {"__float__": "Infinity"}]"#, "null"] {
        assert_eq!(config(&format!("{{\"time_step_limit\": {text}}}")).time_step_limit().unwrap(), None);
    }
    let c = config(r#"{"time_step_limit": [0.01, Infinity]}"#);
    assert_eq!(c.time_step_limit().unwrap(), Some((0.01, f32::INFINITY)));
    assert!(config(r#"{"time_step_limit": [1, 0.5]}"#).time_step_limit().is_err());
    assert!(config(r#"{"time_step_limit": [0, NaN]}"#).time_step_limit().is_err());
}

#[test]
fn errors_name_file_key_and_both_types() {
    let c = config(r#"{"hidden_size": "big", "vocab_size": 0, "n": -3, "h": 1e30, "l": {"heads": true}, "w": null}"#);
    let message = |r: Result<usize>| r.unwrap_err().to_string();
    assert_eq!(
        message(c.usize("hidden_size")),
        "dir/config.json: key `hidden_size`: expected an integer from 1 to 16777216, found the string \"big\""
    );
    assert!(message(c.usize("vocab_size")).contains("found the number 0"));
    assert!(message(c.usize("n")).contains("found the number -3"));
    assert!(message(c.usize("h")).contains("`h`"));
    let missing = message(c.usize("a|b"));
    assert_eq!(missing, "dir/config.json: key `a` or `b` is missing; a positive integer is needed");
    let inner = c.opt_object("l").unwrap().unwrap();
    assert!(message(inner.usize("heads")).contains("key `l.heads`: expected"));
    assert!(message(inner.usize("dim")).contains("key `l.dim` is missing"));
    assert_eq!(c.usize_or("w", 7).unwrap(), 7);
    assert!(c.opt_object("vocab_size").is_err());
    assert!(
        Config::parse("f", b"[1]").unwrap_err().to_string().contains("f: expected a JSON object, found the list [1]")
    );
    assert!(Config::parse("f", b"{").unwrap_err().to_string().contains("f: not valid JSON"));
    assert!(Config::parse("f", &[0xff]).is_err());
}

#[test]
fn names_in_order_of_preference_and_the_text_configuration_first() {
    let c = config(
        r#"{"model_type": "v", "eos_token_id": 5, "text_config": {"model_type": "t", "b": 2, "a": null, "c": 3.0}}"#,
    );
    assert_eq!(c.model_type().unwrap(), "t");
    assert_eq!(c.usize("a|b").unwrap(), 2);
    assert_eq!(c.usize("c").unwrap(), 3);
    assert_eq!(c.eos_token_ids().unwrap(), [5]);
    assert_eq!(config(r#"{"eos_token_id": [1, 2]}"#).eos_token_ids().unwrap(), [1, 2]);
    assert!(config("{}").eos_token_ids().unwrap().is_empty());
    assert!(config(r#"{"eos_token_id": -1}"#).eos_token_ids().unwrap().is_empty());
    assert!(config(r#"{"eos_token_id": [-1]}"#).eos_token_ids().is_err());
}

#[test]
fn heads_have_their_fallbacks_and_must_divide() {
    let heads = |text: &str| config(text).heads();
    let expected = Heads { heads: 4, kv_heads: 4, head_dim: 16 };
    assert_eq!(heads(r#"{"num_attention_heads": 4, "hidden_size": 64}"#).unwrap(), expected);
    let text = r#"{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48, "hidden_size": 64}"#;
    assert_eq!(heads(text).unwrap(), Heads { heads: 4, kv_heads: 2, head_dim: 48 });
    for text in [
        r#"{"num_attention_heads": 4, "num_key_value_heads": 3, "head_dim": 48}"#,
        r#"{"num_attention_heads": 4, "hidden_size": 66}"#,
        r#"{"num_attention_heads": 16777216, "head_dim": 16777216}"#,
    ] {
        assert!(heads(text).is_err(), "{text}");
    }
}

#[test]
fn layer_types_in_both_vocabularies() {
    use LayerType::*;
    let c = config(r#"{"a": ["mamba", "attention"], "b": ["linear_attention", "full_attention"], "c": ["magic"]}"#);
    assert_eq!(c.layer_types("a").unwrap(), Some(vec![Recurrent, Attention]));
    assert_eq!(c.layer_types("a").unwrap(), c.layer_types("b").unwrap());
    assert!(c.layer_types("c").unwrap_err().to_string().contains("\"magic\""));
    assert_eq!("M-*E".chars().map(LayerType::from_pattern).collect::<Vec<_>>().len(), 4);
    assert_eq!(LayerType::from_pattern('x'), None);
}

proptest! {
    #[test]
    fn any_text_is_parsed_or_refused(text in r#"[\{\}\[\]":,\\ INafinity0-9_-]{0,40}"#) {
        let _ = Config::parse("f", text.as_bytes());
    }
}
