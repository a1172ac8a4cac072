use std::sync::Arc;

use pollster::block_on;

use std::ops::Range;

use super::*;
use crate::{cpu::CpuBackend, source::Dir};

/// The biases of the rows of the parts, in the order of their columns and with the factor of the part: of a part of a
/// tensor, those of its own rows.
#[test]
fn biases_follow_the_rows_of_their_parts_and_the_scale() {
    const NAME: &str = "model.layers.0.self_attn.q_proj.weight";
    let dir = Dir::open(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/llama_bias3")).unwrap();
    let checkpoint = block_on(Checkpoint::open(Arc::new(dir))).unwrap();
    let shape = checkpoint.info(NAME).unwrap().shape.clone();
    let (backend, mut report) = (CpuBackend::new(), |_| ());
    let mut loader = Loader::new(&backend, &checkpoint, &mut report);
    let stored = block_on(loader.values("model.layers.0.self_attn.q_proj.bias", &shape[..1])).unwrap();
    assert_eq!(stored.len(), 80);
    let part = |rows: Range<usize>, col| Part { scale: 0.5, ..Part::rows(NAME, 80, rows, col) };
    let parts = [part(40..50, 0), part(8..11, 10)];
    let linear = block_on(loader.linear(shape[1], &parts, true, 0.25)).unwrap();
    let bytes = block_on(backend.read(linear.bias.as_ref().unwrap())).unwrap();
    let want: Vec<f32> = stored[40..50].iter().chain(&stored[8..11]).map(|b| 0.5 * b).collect();
    assert!(want.iter().any(|b| *b != 0.0));
    assert_eq!(bytemuck::pod_collect_to_vec::<u8, f32>(&bytes), want);
    // The factor of the input is none of a bias.
    assert_eq!(linear.scale, 0.125);
}

/// Blocks in any order, of which the middle columns take the input as it is.
#[test]
fn parts_of_a_layer_are_runs_of_columns_that_are_rounded_or_not() {
    let block = |col: usize, n: usize| RowBlock::plain(Tensor::new((), DType::F32, &[n, 8]), col);
    let weight = || Weight { blocks: vec![block(6, 3), block(0, 1), block(1, 3), block(4, 2)], n: 9, k: 8 };
    let parts = LinearPart::of(weight(), |block| block.col != 4);
    let found: Vec<_> = parts.iter().map(|p| (p.col, p.w.n, p.rounds, p.w.blocks.len())).collect();
    assert_eq!(found, [(0, 4, true, 2), (4, 2, false, 1), (6, 3, true, 1)]);
    assert_eq!(parts[0].w.blocks.iter().map(|b| b.col).collect::<Vec<_>>(), [0, 1]);
    assert!(parts[1..].iter().all(|p| p.w.blocks[0].col == 0));
    // Alike, they stay as they are.
    let [part] = &LinearPart::of(weight(), |_| true)[..] else { panic!("several parts") };
    assert_eq!((part.col, part.rounds, part.w.blocks[0].col), (0, true, 6));
}
