use super::*;
use crate::step::{Bucket, Step};
use crate::tensor::DType;

/// A buffer of one MiB by number.
#[derive(Clone, Debug)]
struct Numbered(usize);

impl Handle for Numbered {
    fn id(&self) -> usize {
        self.0
    }
    fn bytes(&self) -> u64 {
        1 << 20
    }
}

fn tensor(id: usize, dims: &[usize]) -> Tensor<Numbered> {
    Tensor::new(Numbered(id), DType::F32, dims)
}

/// Four heads of 8 x 8 over two tokens; the arguments are views of the buffers `ids`, in the order of the fields.
fn delta(ids: [usize; 9]) -> Op<Numbered> {
    let bucket = Bucket { tokens: 2, rows: 1, chunks: 1, outputs: 1, pages: 1 };
    let [step, q, k, v, a, b, par, pool, out] = ids;
    GatedDelta {
        step: Step::new(Numbered(step), bucket),
        q: tensor(q, &[2, 32]),
        k: tensor(k, &[2, 32]),
        v: tensor(v, &[2, 32]),
        a: tensor(a, &[2, 4]),
        b: tensor(b, &[2, 4]),
        par: tensor(par, &[2, 4]),
        pool: tensor(pool, &[3, 4, 8, 8]),
        out: tensor(out, &[2, 32]),
        heads_per_key: 1,
        first_head: 0,
        beta_scale: 1.0,
    }
    .into()
}

#[test]
fn views_of_one_buffer_are_one_binding() {
    let op = delta([0, 1, 1, 1, 2, 2, 3, 4, 5]);
    op.check();
    assert_eq!(op.bindings(), 7);
}

#[test]
#[should_panic(expected = "gated_delta: binds 9 buffers")]
fn more_buffers_than_a_shader_stage_has_are_refused() {
    let op = delta([0, 1, 2, 3, 4, 4, 5, 6, 7]);
    assert_eq!(op.bindings(), 9);
    op.check();
}

#[test]
#[should_panic(expected = "gated_delta: tensors 8 (Write) and 3 share a buffer")]
fn a_buffer_that_is_read_and_written_is_refused() {
    delta([0, 1, 1, 2, 3, 3, 4, 5, 2]).check();
}

#[test]
fn a_product_binds_one_row_block_at_a_time() {
    let blocks = (0..12).map(|i| RowBlock::plain(tensor(2 + i, &[4, 8]), 4 * i)).collect();
    let op: Op<Numbered> = Matmul {
        x: tensor(0, &[1, 8]),
        w: Weight { blocks, n: 48, k: 8 },
        columns: None,
        bias: None,
        out: tensor(1, &[1, 48]),
        scale: 1.0,
        accumulate: false,
        precise: false,
    }
    .into();
    op.check();
    assert_eq!(op.bindings(), 4);
}
