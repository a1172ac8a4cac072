//! Files of a model that two readers could understand differently, or whose names disturb the terminal.

use std::fs;

use serde_json::{Value, json};

use crate::binary::*;

fn header(bytes: &[u8]) -> (&[u8], &[u8]) {
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[8..].split_at(length)
}

fn with_header(header: &[u8], data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header, data].concat()
}

/// The message of `logits` about the weights `bytes` of a model that is fine otherwise.
fn refused(dir: &TempDir, bytes: &[u8]) -> String {
    dir.write("model.safetensors", bytes);
    let (ids, out) = (dir.write("ids.json", "[1, 2]"), dir.arg("out.safetensors"));
    let out = run(&["logits", "-m", dir.dir(), "--backend", "cpu", "--ids", &ids, "--out", &out]);
    assert_eq!(out.status.code(), Some(1), "{}", stderr(&out));
    stderr(&out)
}

#[test]
fn weights_that_can_be_read_in_two_ways_are_refused() {
    let dir = copy_of("tests/golden/llama", "attack_twice");
    let whole = fs::read(dir.path("model.safetensors")).unwrap();
    let (text, data) = header(&whole);
    let name = "model.norm.weight";
    let parsed: Value = serde_json::from_slice(text).unwrap();
    let range = &parsed[name]["data_offsets"];
    let bytes = (range[1].as_u64().unwrap() - range[0].as_u64().unwrap()) as usize;
    let mut entry = parsed[name].clone();
    entry["data_offsets"] = json!([data.len(), data.len() + bytes]);
    let text = String::from_utf8(text.to_vec()).unwrap();
    let twice = format!("{}, \"{name}\": {entry}}}", text.trim_end().strip_suffix('}').unwrap());
    let message = refused(&dir, &with_header(twice.as_bytes(), &[data, &vec![0; bytes]].concat()));
    assert!(message.contains("model.safetensors: the header names tensor `model.norm.weight` twice"), "{message}");
    let message = refused(&dir, &[&whole[..], b"#!/bin/sh\n"].concat());
    assert!(message.contains("model.safetensors: 10 bytes at the end belong to no tensor"), "{message}");
}

#[test]
fn inspect_tells_of_weights_of_another_model() {
    let dir = copy_of("tests/golden/llama", "attack_inspect");
    let fault = || {
        let facts: Value = serde_json::from_str(&stdout(run(&["inspect", "-m", dir.dir(), "--json"]))).unwrap();
        facts["fault"].clone()
    };
    assert_eq!(fault(), Value::Null);
    edit_json(&dir, "config.json", |c| c["intermediate_size"] = 64.into());
    let why = fault();
    assert!(why.as_str().unwrap().contains("these files do not belong together"), "{why}");
    let text = stdout(run(&["inspect", "-m", dir.dir()]));
    assert!(text.contains("fault        the weights do not fit: "), "{text}");
}

#[test]
fn names_of_tensors_do_not_reach_the_terminal_as_they_are() {
    let dir = copy_of("tests/golden/llama_bias3", "attack_names");
    edit_header(&dir, |h| {
        let old = h.as_object_mut().unwrap().remove("model.norm.weight").unwrap();
        h["model.norm.weight"] = old;
        let end = h.as_object().unwrap().values().filter_map(|t| t["data_offsets"][1].as_u64()).max().unwrap();
        let name = "model.norm.\r\u{202e}\u{1b}[2J\u{7}gone";
        h[name] = json!({"dtype": "U8", "shape": [0], "data_offsets": [end, end]});
    });
    let (ids, out) = (dir.write("ids.json", "[1, 2]"), dir.arg("out.safetensors"));
    let out = run(&["logits", "-m", dir.dir(), "--backend", "cpu", "--ids", &ids, "--out", &out]);
    let message = stderr(&out);
    assert!(message.contains("and ignored: `model.norm.") && message.contains("gone`"), "{message}");
    assert!(!message.contains(['\r', '\u{202e}', '\u{1b}', '\u{7}']), "{message:?}");
}
