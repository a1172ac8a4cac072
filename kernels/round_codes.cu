// x as 8-bit floats and scales: codes [M, K], a power of two per row and 128 columns [K / 128, M]. Grid (rows, column tiles).
// DIM; x_t.

#include "round.cuh"

extern "C" __global__ void __launch_bounds__(256) ENTRY(PARAMETERS) {
    let_next_start();
    wait_for_inputs();
    i64 t = blockIdx.x;
    int c = (blockIdx.y * 256 + threadIdx.x) * 8;
    // The lanes of a group leave together.
    if (c >= DIM) return;
    float v[8];
    load<8>(x + t * x_stride + c, v);
    EightScale s = eight_scale<8>(v);
    u32 words[2] = {};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float y = v[i] * s.inverse;
        words[i / 4] |= (eight_code(y) | (__float_as_uint(y) >> 24 & 0x80u)) << 8 * (i % 4);
    }
    *reinterpret_cast<uint2 *>(codes + t * DIM + c) = make_uint2(words[0], words[1]);
    if (c % 128 == 0) scales[(i64)(c / 128) * gridDim.x + t] = s.scale;
}
