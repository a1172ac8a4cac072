//! The file of a bundle, without an engine: what is written is read, and what was altered is refused.

use std::io::Cursor;

use selkie_core::{
    Result,
    bundle::{Dtypes, Head, Identity, Part, Reader, Writer, convert, lineage, parts},
    digest::Digest,
    layer::{KvShape, LayerState},
    tensor::DType,
};

use crate::random::Random;

const LAYERS: [LayerState; 3] = [
    LayerState { kv: None, conv: Some([6, 3]), recurrent: Some([2, 4, 2]) },
    LayerState { kv: Some(KvShape { heads: 1, key_dim: 2, value_dim: 2 }), conv: None, recurrent: None },
    LayerState { kv: None, conv: Some([4, 2]), recurrent: None },
];

fn identity(n: u8) -> Identity {
    Identity { weights: Digest([n; 32]), config: Digest([2; 32]), tokenizer: Digest::of(b"") }
}

fn head(dtype: DType) -> Head {
    let dtypes = Dtypes { kv: dtype, conv: dtype, state: DType::F32 };
    Head {
        name: "a \"model\"\n".into(),
        model: identity(1),
        numerics: "cpu".into(),
        tokens: (0..133).collect(),
        ends: vec![7, 64, 133],
        messages: Some(r#"[{"role":"user","content":"ä"}]"#.into()),
        from: 0,
        parts: parts(&LAYERS, dtypes, 2, &[64, 128]),
    }
}

/// Any bytes that are finite values of every dtype.
fn values(part: &Part, row: usize) -> Vec<u8> {
    (0..part.row_bytes())
        .map(|i| ((i * 7 + row * 3 + part.position as usize + part.layer as usize) % 60) as u8)
        .collect()
}

fn write(head: &Head, piece: usize) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new(), head).unwrap();
    let all = head.parts.iter().flat_map(|p| (0..p.rows()).flat_map(|row| values(p, row))).collect::<Vec<u8>>();
    all.chunks(piece).for_each(|piece| writer.write(piece.to_vec()).unwrap());
    let (out, written) = writer.finish().unwrap();
    assert_eq!(out.len() as u64, written);
    out
}

fn open(bytes: &[u8]) -> Result<Reader<'_>> {
    let mut reader = Reader::open(Cursor::new(bytes), "x.bundle")?;
    reader.verify()?;
    Ok(reader)
}

fn refused(bytes: &[u8]) -> String {
    open(bytes).err().expect("a bundle that is not one").to_string()
}

/// Replaces text of the header by text of the same length and makes its checksum right.
fn with_header(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let text = std::str::from_utf8(&bytes[8..header]).unwrap();
    assert_eq!((from.len(), text.matches(from).count()), (to.len(), 1), "{from}");
    let mut out = bytes.to_vec();
    out[8..header].copy_from_slice(text.replace(from, to).as_bytes());
    sum_header(&mut out, header);
    out
}

/// Writes the checksum of the header, whose place is the start of the last tensor.
fn sum_header(bytes: &mut [u8], header: usize) {
    // Header, tokens, ends, messages.
    let rows = 4 + head(DType::F32).parts.len();
    let at = bytes.len() - 32 * rows;
    let sum = Digest::of(&bytes[..header]).0;
    bytes[at..at + 32].copy_from_slice(&sum);
}

#[test]
fn what_was_written_is_read_row_by_row() {
    for dtype in [DType::F32, DType::Bf16] {
        let head = head(dtype);
        let bytes = write(&head, 1 << 20);
        assert_eq!(write(&head, 13), bytes, "pieces change nothing");
        let reader = open(&bytes).unwrap();
        assert_eq!(*reader.head(), head);
        let mut rows = Vec::new();
        reader
            .rows(&mut |part, first, bytes| {
                for (row, bytes) in (first..).zip(bytes.chunks_exact(part.row_bytes())) {
                    assert_eq!(bytes, values(part, row), "{} row {row}", part.name());
                    rows.push((part.name(), row));
                }
                Ok(())
            })
            .unwrap();
        let names: Vec<String> = rows.iter().map(|(name, row)| format!("{name}/{row}")).collect();
        let want = "layers.1.key/0 layers.1.key/1 layers.1.value/0 layers.1.value/1 layers.0.conv.64/0 \
            layers.0.recurrent.64/0 layers.2.conv.64/0 layers.0.conv.128/0 layers.0.recurrent.128/0 layers.2.conv.128/0";
        assert_eq!(names.join(" "), want);
        assert_eq!((head.pages(), head.positions(), head.depth()), (2, vec![64, 128], 128));
    }
}

#[test]
fn other_tools_read_it_as_safetensors() {
    let head = head(DType::Bf16);
    let bytes = write(&head, 99);
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.len(), 4 + head.parts.len());
    assert_eq!(file.tensor("layers.1.key").unwrap().shape(), [2, 1, 64, 2]);
    let tokens = file.tensor("tokens").unwrap();
    assert_eq!(tokens.data().len(), 4 * 133);
    assert_eq!(file.tensor("layers.0.recurrent.64").unwrap().data(), values(&head.parts[3], 0));
}

#[test]
fn every_flipped_bit_and_every_missing_byte_is_found() {
    let good = write(&head(DType::Bf16), 1 << 20);
    let mut bytes = good.clone();
    for at in 0..bytes.len() {
        bytes[at] ^= 1 << (at % 8);
        refused(&bytes);
        bytes[at] = good[at];
    }
    assert!(open(&bytes).is_ok());
    for len in (0..good.len()).step_by(7).chain(good.len() - 40..good.len()) {
        refused(&good[..len]);
    }
    refused(&[good.as_slice(), b"x"].concat());
}

#[test]
fn refusals_name_what_is_wrong() {
    let good = write(&head(DType::F32), 1 << 20);
    let mut altered = good.clone();
    let at = altered.len() - 32 * (4 + head(DType::F32).parts.len()) - 1;
    altered[at] ^= 1;
    assert!(refused(&altered).contains("x.bundle: tensor `layers.2.conv.128` does not have the checksum"));
    for (from, to, why) in [
        ("\"version\":\"1\"", "\"version\":\"7\"", "version \"7\""),
        ("selkie-bundle", "selkie-bottle", "not a bundle"),
        ("layers.2.conv.64", "layers.2.conu.64", "knows no such kind of state"),
        ("layers.2.conv.64", "layers.2.conv.65", "multiple of 64"),
        ("layers.2.conv.64", "layers.9.conv.64", ""),
        ("layers.0.conv.128", "layers.0.conv.064", "not part of this version"),
        ("layers.0.recurrent.64", "layers.0.recurrent.32", "multiple of 64"),
        ("\"shape\":[133]", "\"shape\":[132]", "not at its place"),
        ("\"tokens\"", "\"tokenz\"", "`tokens` is missing"),
        ("\"messages\"", "\"massages\"", "not part of this version"),
        ("\"numerics\":\"cpu\"", "\"numerix_\":\"cpu\"", "no `numerics`"),
    ] {
        let changed = with_header(&good, from, to);
        match open(&changed) {
            Err(e) => assert!(e.to_string().contains(why), "{from} → {to}: {e}"),
            // Well formed, but of no model.
            Ok(reader) => {
                let error = reader.head().check_parts("x.bundle", &LAYERS).unwrap_err().to_string();
                assert!(error.contains("layers."), "{from} → {to}: {error}");
            }
        }
    }
    let reader = open(&good).unwrap();
    reader.head().check_parts("x", &LAYERS).unwrap();
    reader.head().check_model("x", &identity(1)).unwrap();
    let error = reader.head().check_model("x", &identity(9)).unwrap_err().to_string();
    assert!(error.contains("another model") && error.contains("weights"), "{error}");
    let mut other = LAYERS;
    other[0].conv = Some([3, 6]);
    let error = reader.head().check_parts("x", &other).unwrap_err().to_string();
    assert!(error.contains("`layers.0.conv.64` has shape [6, 3], this model's has [3, 6]"), "{error}");
    let error = reader.head().check_parts("x", &LAYERS[..2]).unwrap_err().to_string();
    assert!(error.contains("layers."), "{error}");
}

#[test]
fn a_head_that_no_reader_accepts_is_not_written() {
    let good = head(DType::F32);
    let wrong: [fn(&mut Head); 8] = [
        |h| h.from = 64,
        |h| h.from = usize::MAX - 63,
        |h| h.parts.clear(),
        |h| h.tokens.truncate(100),
        |h| h.ends = vec![200],
        |h| h.ends = vec![5, 4],
        |h| h.numerics.clear(),
        |h| h.parts.swap(0, 1),
    ];
    for change in wrong {
        let mut head = good.clone();
        change(&mut head);
        assert_eq!(Writer::new(Vec::new(), &head).err().unwrap().kind(), std::io::ErrorKind::InvalidInput);
    }
    let writer = Writer::new(Vec::new(), &good).unwrap();
    assert!(writer.finish().is_err(), "values are missing");
}

#[test]
fn ten_thousand_damaged_headers_end_in_errors() {
    let good = write(&head(DType::F32), 1 << 20);
    let header = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let pieces: [&[u8]; 12] =
        [b"9", b"0", b"-", b"18446744073709551615", b"[", b"]", b"{", b",", b"\"", b"F16", b"layers", b"4294967296"];
    let mut random = Random(20);
    let mut accepted = 0;
    for case in 0..10_000 {
        let mut text = good[8..header].to_vec();
        for _ in 0..1 + random.below(3) {
            let at = random.below(text.len());
            match random.below(3) {
                0 => text[at] ^= 1 << random.below(7),
                1 => {
                    let piece = pieces[random.below(pieces.len())];
                    let end = (at + random.below(piece.len() + 2)).min(text.len());
                    text.splice(at..end, piece.iter().copied());
                }
                // A digit for a digit keeps the JSON whole.
                _ => {
                    if let Some(i) = text[at..].iter().position(u8::is_ascii_digit) {
                        text[at + i] = b'0' + random.below(10) as u8;
                    }
                }
            }
        }
        // The checksum is right, so that what lies behind it is tried.
        let mut bytes = [&(text.len() as u64).to_le_bytes(), text.as_slice(), &good[header..]].concat();
        let end = 8 + text.len();
        sum_header(&mut bytes, end);
        if let Ok(reader) = open(&bytes) {
            accepted += 1;
            // Changed names and numerics; what holds the state is as it was, or is refused for the model.
            let head = reader.head();
            assert!(
                head.check_parts("x", &LAYERS).is_err() || head.depth() == 128 && head.tokens.len() == 133,
                "case {case}"
            );
        }
    }
    assert!((10..3000).contains(&accepted), "{accepted} damaged headers were accepted");
}

#[test]
fn conversion_rounds_and_refuses_what_does_not_fit() {
    let one = 1.0f32.to_le_bytes();
    assert_eq!(convert(&one, DType::F32, DType::F32, 1).unwrap(), one.as_slice());
    let half = convert(&one, DType::F32, DType::Bf16, 1).unwrap();
    assert_eq!(convert(&half, DType::Bf16, DType::F32, 1).unwrap(), one.as_slice());
    assert_eq!(convert(&one, DType::F32, DType::F16, 1).unwrap(), half::f16::ONE.to_le_bytes().as_slice());
    assert!(convert(&1e9f32.to_le_bytes(), DType::F32, DType::F16, 1).is_none());
    assert!(convert(&f32::NAN.to_le_bytes(), DType::F32, DType::F16, 1).is_some());
}

#[test]
fn a_lineage_never_equals_its_own_numerics() {
    let (a, b) = ("cpu", "wgpu");
    assert_eq!(lineage("", a), a);
    let ab = lineage(a, b);
    assert_eq!(
        (ab.as_str(), lineage(&ab, a).as_str(), lineage(&ab, b).as_str()),
        ("cpu > wgpu", "cpu > wgpu", "cpu > wgpu")
    );
    assert_ne!(lineage(a, a), a);
}
