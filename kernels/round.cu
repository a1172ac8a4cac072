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
    EightScale s = eight_scale<VEC>(v);
#pragma unroll
    for (int i = 0; i < VEC; i++) v[i] = s.scale * eight_value(v[i] * s.inverse);
    store<VEC>(out + t * out_stride + c, v);
}
