//! Files that are damaged or made to deceive end in an error that names them.

use super::{Memory, families, golden_folders, logits, open, writer};

fn good() -> Vec<u8> {
    let folder = golden_folders().into_iter().find(|f| f.ends_with("lfm2")).unwrap();
    families::convert(&folder).unwrap().out.bytes()
}

fn error(bytes: Vec<u8>) -> String {
    open(Memory::of("model.gguf", bytes)).err().expect("it is broken").to_string()
}

/// A header with these counts and what follows them.
fn header(tensors: u64, keys: u64, rest: &[u8]) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend(tensors.to_le_bytes());
    out.extend(keys.to_le_bytes());
    out.extend(rest);
    out
}

fn key(name: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    writer::text(&mut out, name);
    out.extend(kind.to_le_bytes());
    out.extend(value);
    out
}

fn tensor(name: &str, dims: &[u64], kind: u32, offset: u64) -> Vec<u8> {
    let mut out = Vec::new();
    writer::text(&mut out, name);
    out.extend((dims.len() as u32).to_le_bytes());
    dims.iter().for_each(|n| out.extend(n.to_le_bytes()));
    out.extend(kind.to_le_bytes());
    out.extend(offset.to_le_bytes());
    out
}

#[test]
fn lengths_that_cannot_be_are_refused_before_room_is_made() {
    let huge = u64::MAX.to_le_bytes();
    let list = |of: u32, n: u64| [of.to_le_bytes().as_slice(), &n.to_le_bytes()].concat();
    for (bytes, expected) in [
        (b"GGML".to_vec(), "no GGUF file"),
        (b"GGUF\x01\0\0\0".to_vec(), "version 1"),
        (b"GGUF\0\0\0\x03".to_vec(), "big endian"),
        (header(u64::MAX, 0, &[]), "tensors cannot be in"),
        (header(0, 1 << 40, &[]), "keys cannot be in"),
        (header(0, 1, &[&huge[..], &[0; 20]].concat()), "bytes at byte 32"),
        (header(0, 1, &key("a", 8, &[&huge[..], &[0; 20]].concat())), "key `a`"),
        (header(0, 1, &key("a", 9, &[&list(4, 1 << 60)[..], &[0; 20]].concat())), "elements of an array cannot be"),
        (header(0, 1, &key("a", 9, &[&list(8, 1 << 60)[..], &[0; 20]].concat())), "strings of an array cannot be"),
        (header(0, 1, &key("a", 9, &[&list(9, 1)[..], &[0; 20]].concat())), "arrays of type 9"),
        (header(0, 1, &key("a", 77, &[0; 20])), "values of type 77"),
        (header(0, 2, &[key("a", 0, &[1]), key("a", 0, &[1]), vec![0; 40]].concat()), "key `a` comes twice"),
        (header(0, 1, &[key("general.alignment", 4, &[33, 0, 0, 0]), vec![0; 9]].concat()), "no power of two"),
        (header(1, 0, &tensor("t", &[1 << 40, 1 << 40], 0, 0)), "ends after the end"),
        (header(1, 0, &tensor("t", &[1; 5], 0, 0)), "5 dimensions"),
        (header(1, 0, &[tensor("t", &[0], 0, 0), vec![0; 64]].concat()), "impossible size"),
        (header(1, 0, &[tensor("t", &[33], 8, 0), vec![0; 64]].concat()), "rows of 33"),
        (header(1, 0, &[tensor("t", &[4], 0, 5), vec![0; 64]].concat()), "not aligned to 32"),
        (header(1, 0, &[tensor("t", &[4], 99, 0), vec![0; 64]].concat()), "type 99"),
        (header(1, 0, &[tensor("t", &[4], 0, u64::MAX - 31), vec![0; 64]].concat()), "ends after the end"),
        (header(2, 0, &[tensor("t", &[4], 0, 0), tensor("u", &[4], 0, 0), vec![0; 128]].concat()), "overlap"),
        (header(2, 0, &[tensor("t", &[4], 0, 0), tensor("t", &[4], 0, 32), vec![0; 128]].concat()), "comes twice"),
        (header(0, 0, &[]), "`general.architecture` is missing"),
    ] {
        let error = error(bytes);
        assert!(error.contains(expected) && error.starts_with("memory/model.gguf"), "{expected}: {error}");
    }
}

#[test]
fn a_file_that_ends_early_is_an_error() {
    let good = good();
    for part in 0..60 {
        let end = good.len() * part / 60;
        let error = error(good[..end].to_vec());
        assert!(error.starts_with("memory/model.gguf"), "{error}");
    }
}

#[test]
fn a_byte_that_was_changed_never_panics() {
    let good = good();
    let mut random = crate::random::Random(5);
    for _ in 0..400 {
        let mut bytes = good.clone();
        for _ in 0..1 + random.next() % 3 {
            let at = random.next() as usize % 6000;
            bytes[at] = random.next() as u8;
        }
        if let Ok(files) = open(Memory::of("model.gguf", bytes)) {
            // Models of this size have no more than 20,000 rows of anything.
            if selkie_core::models::spec(&files.config).is_ok_and(|spec| spec.parameters < 1 << 20) {
                let _ = logits(&files.config, &files.checkpoint, &[1, 2, 3]);
            }
        }
    }
}
