// out = x as 8-bit floats with a power of two per 128 columns. Grid (rows, column tiles).
// VEC (4 or 8), DIM; x_t.

#include "round.cuh"

extern "C" __global__ void __launch_bounds__(256) ENTRY(PARAMETERS) {
    let_next_start();
    wait_for_inputs();
    i64 t = blockIdx.x;
    int c = (blockIdx.y * 256 + threadIdx.x) * VEC;
    // The lanes of a group leave together.
    if (c >= DIM) return;
    float v[VEC];
    load<VEC>(x + t * x_stride + c, v);
    if constexpr (sizeof(x_t) == 2) {
        u32 pairs[VEC / 2];
#pragma unroll
        for (int i = 0; i < VEC / 2; i++) pairs[i] = pack_bf16(v[2 * i], v[2 * i + 1]);
        round_pairs<VEC>(pairs);
#pragma unroll
        for (int i = 0; i < VEC; i++) v[i] = i % 2 ? bf16_hi(pairs[i / 2]) : bf16_lo(pairs[i / 2]);
    } else {
        EightScale s = eight_scale<VEC>(v);
#pragma unroll
        for (int i = 0; i < VEC; i++) v[i] = s.scale * eight_value(v[i] * s.inverse);
    }
    store<VEC>(out + t * out_stride + c, v);
}
