use pollster::block_on;

use crate::checkpoint::{Checkpoint, scaled::tests::open, tests::message};

type Tensors = Vec<(&'static str, &'static str, Vec<usize>, Vec<u8>)>;

fn floats(name: &'static str, shape: &[usize], values: &[f32]) -> (&'static str, &'static str, Vec<usize>, Vec<u8>) {
    (name, "F32", shape.to_vec(), values.iter().flat_map(|x| x.to_le_bytes()).collect())
}

fn values(checkpoint: &Checkpoint, name: &str, shape: &[usize]) -> Vec<f32> {
    let raw = block_on(checkpoint.get(name, shape)).unwrap();
    raw.dtype.to_f32(&raw.bytes)
}

#[test]
fn experts_that_were_split_are_joined() {
    let tensors: Tensors = vec![
        floats("a.block_sparse_moe.switch_mlp.gate_proj.weight", &[2, 1, 2], &[1., 2., 5., 6.]),
        floats("a.block_sparse_moe.switch_mlp.up_proj.weight", &[2, 1, 2], &[3., 4., 7., 8.]),
        floats("a.mlp.gate_proj.weight", &[1, 2], &[1., 2.]),
    ];
    let checkpoint = open(&tensors).unwrap().with_mlx(None, "llama").unwrap();
    let names: Vec<&str> = checkpoint.names().collect();
    assert_eq!(names, ["a.block_sparse_moe.input_linear.weight", "a.mlp.gate_proj.weight"]);
    assert_eq!(values(&checkpoint, names[0], &[2, 2, 2]), [1., 2., 3., 4., 5., 6., 7., 8.]);
    assert_eq!(checkpoint.bytes(), 40);
    assert_eq!(checkpoint.passed_over(), [""; 0]);
    let digest = |c: &Checkpoint| block_on(c.digest(&mut |_| ())).unwrap();
    let mut other = tensors.clone();
    other[1].3[0] ^= 1;
    let other = open(&other).unwrap().with_mlx(None, "llama").unwrap();
    assert_ne!(digest(&checkpoint), digest(&other), "the second part counts");
}

#[test]
fn norms_are_centred_only_where_axes_have_moved() {
    let norm = floats("model.layers.0.input_layernorm.weight", &[2], &[1.5, 0.5]);
    let moved = floats("model.layers.0.linear_attn.conv1d.weight", &[1, 4, 1], &[0.; 4]);
    let kept = floats("model.layers.0.linear_attn.conv1d.weight", &[1, 1, 4], &[0.; 4]);
    for (conv, family, want) in [
        (&moved, "qwen3_next", [0.5, -0.5]),
        (&moved, "qwen3_5_moe_text", [0.5, -0.5]),
        (&moved, "olmo_hybrid", [1.5, 0.5]),
        (&kept, "qwen3_next", [1.5, 0.5]),
    ] {
        let checkpoint = open(&vec![norm.clone(), conv.clone()]).unwrap().with_mlx(None, family).unwrap();
        assert_eq!(values(&checkpoint, norm.0, &[2]), want, "{family}");
    }
}

#[test]
fn parts_that_do_not_fit_are_refused_by_name() {
    let one = floats("a.mlp.gate_proj.weight", &[1, 2], &[0.; 2]);
    for (other, says) in [
        (floats("a.mlp.up_proj.weight", &[2, 1], &[0.; 2]), "rows of [1, 2] and [2, 1] under `a.`"),
        (floats("b.mlp.up_proj.weight", &[1, 2], &[0.; 2]), "tensor `a.mlp.up_proj.weight` is missing"),
    ] {
        let error = message(open(&vec![one.clone(), other]).unwrap().with_mlx(None, "granitemoehybrid"));
        assert!(error.contains(says), "{error}");
    }
    let computed = floats("model.layers.0.self_attn.embed_q.weight", &[1, 1, 1], &[0.]);
    let error = message(open(&vec![computed]).unwrap().with_mlx(None, "kimi_linear"));
    assert!(error.contains("embed_q.weight` of MLX") && error.contains("transformers"), "{error}");
}
