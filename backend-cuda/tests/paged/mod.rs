//! An attention of one token over a page that may not exist.

use selkie_core::{
    Result,
    backend::Backend,
    ops::{Attention, KvPool},
    step::{Bucket, Chunk, PAGE, Row, Src, Step, TokenRef, bucket_of, encode},
    tensor::{DType, Tensor},
};

/// Pages of the pool; those from here on do not exist.
const PAGES: usize = 3;
const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 128;

/// The bucket and the bytes of a step whose token sees `page`.
pub fn step(page: u32) -> (Bucket, Vec<u8>) {
    let rows = [Row {
        first_position: PAGE as u32 - 1,
        tokens: vec![TokenRef::Known(0)],
        chunks: vec![Chunk { len: 1, src: Src::Slot(0), dst: 0 }],
        pages: vec![page].into(),
        outputs: vec![0],
        ..Row::default()
    }];
    let bucket = bucket_of(&rows);
    (bucket, encode(&rows, bucket).iter().flat_map(|word| word.to_le_bytes()).collect())
}

/// The attention in bf16 of a step whose integers are `ints`.
pub fn attention<B: Backend>(backend: &B, ints: B::Buf, bucket: Bucket) -> Result<Attention<B::Buf>> {
    let tensor = |dims: &[usize]| {
        let bytes = 2 * dims.iter().product::<usize>() as u64;
        Ok::<_, selkie_core::Error>(Tensor::new(backend.alloc("x", bytes)?, DType::Bf16, dims))
    };
    let pool = [PAGES, KV_HEADS, PAGE, HEAD_DIM];
    Ok(Attention {
        step: Step::new(ints, bucket),
        q: tensor(&[1, HEADS * HEAD_DIM])?,
        pool: KvPool { k: tensor(&pool)?, v: tensor(&pool)? },
        out: tensor(&[1, HEADS * HEAD_DIM])?,
        head_dim: HEAD_DIM,
        scale: 1.0,
        window: None,
        first: 0,
    })
}
