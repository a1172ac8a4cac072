//! Elements of stored weight rows of any dtype at any alignment.

use super::simd::{LANES, Simd};
use crate::tensor::DType;

/// 16 (or the last few) elements from stored bytes, then zeros.
#[inline(always)]
pub(crate) fn load<S: Simd>(s: S, bytes: &[u8], dtype: DType) -> S::V {
    let n = bytes.len() / dtype.bytes();
    let (p, full) = (bytes.as_ptr(), n >= LANES);
    // SAFETY: `bytes` holds 16 elements if `full`, else n.
    unsafe {
        match (dtype, full) {
            (DType::F32, true) => s.load_ptr(p),
            (DType::F32, false) => s.load_ptr_partial(p, n),
            (DType::Bf16, true) => s.load_bf16(p),
            (DType::F16, true) => s.load_f16(p),
            (dtype, false) => s.load_half_partial(p, n, dtype == DType::Bf16),
            (DType::U32 | DType::U8 | DType::I8, true) => panic!("a weight of integers"),
        }
    }
}
