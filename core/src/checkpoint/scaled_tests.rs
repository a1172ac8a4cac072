use pollster::block_on;

use crate::checkpoint::{
    Checkpoint,
    tests::{Files, message},
};
use crate::format::Format;
use std::sync::Arc;

/// A file of tensors: name, dtype, shape, bytes.
type Tensors = Vec<(&'static str, &'static str, Vec<usize>, Vec<u8>)>;

pub(in crate::checkpoint) fn open(tensors: &Tensors) -> crate::Result<Checkpoint> {
    let (mut entries, mut data) = (Vec::new(), Vec::<u8>::new());
    for (name, dtype, shape, bytes) in tensors {
        let (from, to) = (data.len(), data.len() + bytes.len());
        entries.push(format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{from},{to}]}}"#));
        data.extend(bytes);
    }
    let header = format!("{{{}}}", entries.join(","));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes());
    file.extend(data);
    block_on(Checkpoint::open(Arc::new(Files(vec![("model.safetensors", file)]))))
}

fn bytes(n: usize, seed: u32) -> Vec<u8> {
    (0..n as u32).map(|i| ((i + seed).wrapping_mul(2_654_435_769) >> 19) as u8).collect()
}

fn floats(n: usize, seed: u32) -> Vec<f32> {
    bytes(n, seed).into_iter().map(|b| 0.01 + f32::from(b) / 999.0).collect()
}

fn le(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// The value of an 8-bit float by its definition; no NaN.
fn f8(bits: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f64::from(bits & 7));
    let magnitude = if exponent == 0 { mantissa / 512.0 } else { (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7) };
    if bits & 128 == 0 { magnitude } else { -magnitude }
}

fn finite(n: usize, seed: u32) -> Vec<u8> {
    bytes(n, seed).into_iter().map(|b| if b & 127 == 127 { b ^ 1 } else { b }).collect()
}

fn values(checkpoint: &Checkpoint, name: &str, shape: &[usize]) -> Vec<f32> {
    let raw = block_on(checkpoint.get(name, shape)).unwrap();
    raw.dtype.to_f32(&raw.bytes)
}

fn near(got: &[f32], want: impl Fn(usize) -> f64) {
    for (i, got) in got.iter().enumerate() {
        let want = want(i);
        assert!((f64::from(*got) - want).abs() <= 2e-7 * want.abs(), "element {i}: {got}, not {want}");
    }
}

#[test]
fn eight_bit_floats_have_their_scale() {
    // Rows of whole blocks and others, more rows than a block has.
    for (n, k) in [(5, 128), (150, 256), (131, 200), (3, 40)] {
        let codes = finite(n * k, 1);
        let grid = (n.div_ceil(128), k.div_ceil(128));
        let leaf = |scales: &str| if scales == "grid" { "l.weight_scale_inv" } else { "l.weight_scale" };
        for (kind, shape, columns) in [
            ("one", vec![1], 0),
            ("scalar", vec![], 0),
            ("rows", vec![n, 1], 1),
            ("vector", vec![n], 1),
            ("grid", vec![grid.0, grid.1], grid.1),
        ] {
            let scales = floats(shape.iter().product(), 9);
            let checkpoint = open(&vec![
                ("l.weight", "F8_E4M3", vec![n, k], codes.clone()),
                (leaf(kind), "F32", shape.clone(), le(&scales)),
                ("l.input_scale", "F32", vec![1], le(&[2.0])),
                ("other.weight", "F32", vec![1], le(&[7.0])),
            ])
            .unwrap();
            assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["l.weight", "other.weight"]);
            assert!(checkpoint.is_coded() && !checkpoint.holds_unknown_codes());
            let tensor = checkpoint.tensor("l.weight", &[n, k]).unwrap();
            assert_eq!(tensor.format == Format::F8, k % 128 == 0);
            let scale = |i: usize| match (kind, columns) {
                ("grid", columns) => scales[i / k / 128 * columns + i % k / 128],
                (_, 0) => scales[0],
                _ => scales[i / k],
            };
            near(&values(&checkpoint, "l.weight", &[n, k]), |i| f8(codes[i]) * f64::from(scale(i)));
            // Parts of it, which begin and end inside of rows.
            let whole = block_on(tensor.read(0..tensor.bytes())).unwrap();
            for range in [0..1, tensor.row_bytes() - 1..2 * tensor.row_bytes() + 3, 5..tensor.bytes()] {
                assert_eq!(*block_on(tensor.read(range.clone())).unwrap(), whole[range]);
            }
        }
    }
}

#[test]
fn nvfp4_has_both_of_its_scales() {
    const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    for (n, k) in [(5, 128), (3, 192), (4, 48)] {
        let codes = bytes(n * k / 2, 3);
        let scales: Vec<u8> = finite(n * k / 16, 4).into_iter().map(|b| b & 127).collect();
        let value = |i: usize| {
            let code = codes[i / 2] >> (4 * (i % 2)) & 15;
            let magnitude = E2M1[usize::from(code & 7)] * f8(scales[i / 16]);
            if code & 8 == 0 { magnitude } else { -magnitude }
        };
        let modelopt = open(&vec![
            ("l.weight", "U8", vec![n, k / 2], codes.clone()),
            ("l.weight_scale", "F8_E4M3", vec![n, k / 16], scales.clone()),
            ("l.weight_scale_2", "F32", vec![], le(&[0.37])),
            ("l.input_scale", "F32", vec![], le(&[2.0])),
        ])
        .unwrap();
        near(&values(&modelopt, "l.weight", &[n, k]), |i| value(i) * f64::from(0.37f32));
        let tensors = open(&vec![
            ("l.weight_packed", "U8", vec![n, k / 2], codes.clone()),
            ("l.weight_scale", "F8_E4M3", vec![n, k / 16], scales.clone()),
            ("l.weight_global_scale", "F32", vec![1], le(&[250.0])),
            ("l.input_global_scale", "F32", vec![1], le(&[2.0])),
        ])
        .unwrap();
        assert_eq!(tensors.names().collect::<Vec<_>>(), ["l.weight"]);
        assert_eq!(tensors.tensor("l.weight", &[n, k]).unwrap().format == Format::F4, k % 64 == 0);
        near(&values(&tensors, "l.weight", &[n, k]), |i| value(i) / 250.0);
    }
}

#[test]
fn scales_that_do_not_fit_are_refused_by_name() {
    let weight = || ("l.weight", "F8_E4M3", vec![4, 256], vec![0; 1024]);
    for (tensors, why) in [
        (vec![weight()], "`l.weight` of dtype F8_E4M3 has no `weight_scale`"),
        (vec![weight(), ("l.weight_scale", "F32", vec![3], vec![0; 12])], "scales of shape [3] for a matrix [4, 256]"),
        (vec![weight(), ("l.weight_scale", "U8", vec![4], vec![0; 4])], "its scales are U8"),
        (
            vec![
                ("l.weight", "U8", vec![4, 32], vec![0; 128]),
                ("l.weight_scale", "F8_E4M3", vec![4, 5], vec![0; 20]),
                ("l.weight_scale_2", "F32", vec![1], vec![0; 4]),
            ],
            "scales F8_E4M3 [4, 5]",
        ),
    ] {
        let text = message(open(&tensors));
        assert!(text.contains(why), "{text}");
    }
}

#[test]
fn a_digest_knows_how_scales_apply() {
    let digest = |codes: &'static str, factor: &'static str| {
        let checkpoint = open(&vec![
            (codes, "U8", vec![2, 8], bytes(16, 1)),
            ("l.weight_scale", "F8_E4M3", vec![2, 1], finite(2, 2)),
            (factor, "F32", vec![1], le(&[2.0])),
        ]);
        block_on(checkpoint.unwrap().digest(&mut |_| ())).unwrap()
    };
    let multiplied = digest("l.weight", "l.weight_scale_2");
    assert_eq!(multiplied, digest("l.weight", "l.weight_scale_2"));
    assert_ne!(multiplied, digest("l.weight_packed", "l.weight_global_scale"));
}
