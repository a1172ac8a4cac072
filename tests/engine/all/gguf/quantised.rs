//! Models of random blocks, made from a seed.

use super::{Memory, logits, logits_by, open, writer::Writer};
use crate::random::Random;
use selkie_core::format::{Format, Products};

/// Number of a type in files.
pub fn kind(format: Format) -> u32 {
    match format {
        Format::Plain => 0,
        Format::Q4_0 => 2,
        Format::Q4_1 => 3,
        Format::Q5_0 => 6,
        Format::Q5_1 => 7,
        Format::Q8_0 => 8,
        Format::Q4K => 12,
        Format::Q5K => 13,
        Format::Q6K => 14,
        Format::Iq4Nl => 20,
        Format::Mxfp4 => 39,
        Format::Nvfp4 => 40,
        Format::F4 | Format::F8 | Format::I4 | Format::I8 => unreachable!("not in GGUF files"),
    }
}

/// Random blocks for `n` elements of about `size`.
pub fn blocks(random: &mut Random, format: Format, n: usize, size: f32) -> Vec<u8> {
    let (per_block, bytes) = format.block().unwrap();
    let mut out = Vec::new();
    for _ in 0..n / per_block {
        let mut block: Vec<u8> = (0..bytes).map(|_| random.next() as u8).collect();
        let mut half = |at: usize, x: f32| block[at..at + 2].copy_from_slice(&half::f16::from_f32(x).to_le_bytes());
        // Largest codes, so that elements are about as large in every format.
        match format {
            Format::Q4_0 => half(0, size / 8.0),
            Format::Q4_1 => {
                half(0, size / 8.0);
                half(2, -size);
            }
            Format::Q5_0 => half(0, size / 16.0),
            Format::Q5_1 => {
                half(0, size / 16.0);
                half(2, -size);
            }
            Format::Q8_0 | Format::Iq4Nl => half(0, size / 127.0),
            Format::Q4K | Format::Q5K => {
                half(0, size / 500.0);
                half(2, size / 60.0);
            }
            Format::Q6K => half(208, size / 4000.0),
            Format::Mxfp4 => block[0] = 121,
            Format::Nvfp4 => block[..4].iter_mut().for_each(|d| *d = 0x10 | *d & 7),
            Format::Plain | Format::F4 | Format::F8 | Format::I4 | Format::I8 => unreachable!("not in GGUF files"),
        }
        out.extend(block);
    }
    out
}

/// A hybrid (Granite 4) of width 256: Mamba-2, attention, experts and a shared MLP, whose matrices are of the given formats in turn.
/// The second file holds what they decode to.
pub fn hybrid(seed: u64, formats: &[Format]) -> [Writer; 2] {
    let (d, vocab, inner, heads, state, f, experts) = (256usize, 96usize, 512usize, 8usize, 16usize, 256usize, 4usize);
    let mut out = Writer::new("granitehybrid");
    for (key, value) in [
        ("block_count", 3),
        ("context_length", 512),
        ("embedding_length", d),
        ("feed_forward_length", f),
        ("attention.head_count", 4),
        ("attention.key_length", 64),
        ("ssm.conv_kernel", 4),
        ("ssm.state_size", state),
        ("ssm.group_count", 1),
        ("ssm.inner_size", inner),
        ("ssm.time_step_rank", heads),
        ("expert_count", experts),
        ("expert_used_count", 2),
        ("expert_shared_feed_forward_length", f),
    ] {
        out.key(&format!("granitehybrid.{key}"), value);
    }
    out.key("granitehybrid.attention.head_count_kv", vec![0, 2, 0]);
    out.key("granitehybrid.attention.layer_norm_rms_epsilon", 1e-5);
    out.key("granitehybrid.rope.scaling.finetuned", true);
    let mut plain = out.clone();
    let mut random = Random(seed);
    let mut turn = formats.iter().cycle();
    let mut matrix = |name: String, shape: &[usize], random: &mut Random| {
        let format = *turn.next().unwrap();
        let (n, k) = (shape.iter().product::<usize>(), shape[shape.len() - 1]);
        let coded = blocks(random, format, n, 1.7 / (k as f32).sqrt());
        plain.f32(&name, shape, &format.decode(&coded));
        out.tensors.insert(name, (shape.to_vec(), kind(format), coded));
    };
    matrix("token_embd.weight".into(), &[vocab, d], &mut random);
    for i in 0..3 {
        let b = |leaf: &str| format!("blk.{i}.{leaf}.weight");
        if i == 1 {
            for (leaf, rows) in [("attn_q", 256), ("attn_k", 128), ("attn_v", 128), ("attn_output", 256)] {
                matrix(b(leaf), &[rows, 256], &mut random);
            }
        } else {
            matrix(b("ssm_in"), &[2 * inner + 2 * state + heads, d], &mut random);
            matrix(b("ssm_out"), &[d, inner], &mut random);
        }
        for leaf in ["ffn_gate_exps", "ffn_up_exps"] {
            matrix(b(leaf), &[experts, f, d], &mut random);
        }
        matrix(b("ffn_down_exps"), &[experts, d, f], &mut random);
        for (leaf, shape) in [("ffn_gate_shexp", [f, d]), ("ffn_up_shexp", [f, d]), ("ffn_down_shexp", [d, f])] {
            matrix(b(leaf), &shape, &mut random);
        }
    }
    let mut small = |name: String, shape: &[usize], around: f32, width: f32| {
        let values = random.floats(shape.iter().product(), around, width);
        out.f32(&name, shape, &values);
        plain.f32(&name, shape, &values);
    };
    small("output_norm.weight".into(), &[d], 1.0, 0.1);
    for i in 0..3 {
        let b = |leaf: &str| format!("blk.{i}.{leaf}");
        small(b("attn_norm.weight"), &[d], 1.0, 0.1);
        small(b("ffn_norm.weight"), &[d], 1.0, 0.1);
        small(b("ffn_gate_inp.weight"), &[experts, d], 0.0, 0.1);
        if i != 1 {
            let channels = inner + 2 * state;
            small(b("ssm_conv1d.weight"), &[channels, 4], 0.0, 0.5);
            small(b("ssm_conv1d.bias"), &[channels], 0.0, 0.1);
            small(b("ssm_dt.bias"), &[heads], -2.0, 1.0);
            small(b("ssm_a"), &[heads, 1], -4.0, 3.0);
            small(b("ssm_d"), &[heads, 1], 1.0, 0.5);
            small(b("ssm_norm.weight"), &[1, inner], 1.0, 0.1);
        }
    }
    [out, plain]
}

#[test]
fn exact_products_equal_those_of_decoded_weights_bit_for_bit() {
    let ids: Vec<u32> = (0..80).map(|i| (i * 29 + 3) % 96).collect();
    let mut mixes: Vec<Vec<Format>> = Format::CODED.iter().map(|f| vec![*f]).collect();
    mixes.push(Format::CODED.to_vec());
    for formats in mixes {
        let [coded, plain] = hybrid(7, &formats).map(|w| open(Memory::of("model.gguf", w.bytes())).unwrap());
        assert_eq!([&coded, &plain].map(|m| m.checkpoint.is_coded()), [true, false], "{formats:?}");
        let [got, want] = [coded, plain].map(|m| logits(&m.config, &m.checkpoint, &ids).unwrap());
        assert!(want.iter().all(|x| x.is_finite()) && want.iter().any(|x| x.abs() > 0.1), "{formats:?}");
        let equal = got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(equal && got.len() == want.len(), "{formats:?}");
    }
}

#[test]
fn logits_do_not_depend_on_how_many_tokens_a_step_has() {
    let ids: Vec<u32> = (0..80).map(|i| (i * 31 + 5) % 96).collect();
    let [coded, _] = hybrid(11, &Format::CODED);
    let model = open(Memory::of("model.gguf", coded.bytes())).unwrap();
    for products in [Products::Fast, Products::Exact] {
        let in_steps = |steps: &[usize]| logits_by(products, &model.config, &model.checkpoint, &ids, steps).unwrap();
        let want = in_steps(&[80]);
        for steps in [[1; 80].as_slice(), &[64, 9, 7], &[3, 70, 7]] {
            let equal = in_steps(steps).iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(equal, "{steps:?}, {products:?}");
        }
    }
}

#[test]
fn products_in_eight_bits_are_near_exact_ones() {
    let ids: Vec<u32> = (0..80).map(|i| (i * 23 + 1) % 96).collect();
    for format in Format::CODED {
        let [coded, _] = hybrid(5, &[format]);
        let model = open(Memory::of("model.gguf", coded.bytes())).unwrap();
        let [fast, exact] = [Products::Fast, Products::Exact]
            .map(|products| logits_by(products, &model.config, &model.checkpoint, &ids, &[80]).unwrap());
        let square = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>();
        let off = square(&mut fast.iter().zip(&exact).map(|(a, b)| a - b)) / square(&mut exact.iter().copied());
        println!("{}: NMSE of logits {off:.1e}", format.name());
        // Not the error of the products, which their cases limit: a router may choose another of two experts that are nearly equal.
        assert!(off > 0.0 && off < 0.05, "{}: {off:e}", format.name());
    }
}
