use super::*;

/// 1024 elements of every format: random blocks and what PyPI `gguf` 0.19 decodes them to, f32.
const VECTORS: &[u8] = include_bytes!("vectors.bin");

#[test]
fn decoding_equals_the_reference_of_gguf_bit_for_bit() {
    let mut rest = VECTORS;
    for format in Format::CODED {
        let (coded, after) = rest.split_at(format.bytes(1024, 0));
        let (want, after) = after.split_at(4096);
        rest = after;
        let got = format.decode(coded);
        let want = want.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
        for (i, (got, want)) in got.into_iter().zip(want).enumerate() {
            assert_eq!(got.to_bits(), want.to_bits(), "{} element {i}: {got}, {want}", format.name());
        }
    }
    assert!(rest.is_empty());
}

#[test]
fn blocks_are_whole_groups() {
    for format in Format::CODED {
        let (n, bytes) = format.block().unwrap();
        assert!(n % GROUP == 0 && format.bytes(4 * n, 0) == 4 * bytes, "{}", format.name());
    }
    assert_eq!(Format::Plain.bytes(10, 2), 20);
}
