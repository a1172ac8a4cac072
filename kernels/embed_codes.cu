// Token embedding of one row block of a coded table. A thread decodes 8 elements of 32. Grid (T, column tiles).
// FORMAT, DIM; out_t.

#include "codes.cuh"

extern "C" __global__ void __launch_bounds__(256) ENTRY(PARAMETERS) {
    let_next_start();
    wait_for_inputs();
    int t = blockIdx.x, c = blockIdx.y * 256 + threadIdx.x, group = c / 4 % (UNIT / 32), q = c % 4;
    if (c >= DIM / 8 || st.token_row(t) == NONE) return;
    u32 id = st.id(t);
    if (id & FROM_DEVICE) id = last[id & ~FROM_DEVICE];
    id -= first;
    if (id >= rows) return;
    int g = id % 8, r = id / 8 % 2;
    const u8 *unit = table + ((i64)(id / TILE) * div_up(DIM, UNIT) + c / 4 / (UNIT / 32)) * UNIT_BYTES;
    float v[8];
    Codes codes(unit, group / 2, 4 * g + q);
    Scales scales(unit, g);
    // Indices that are constants keep the codes in registers.
#pragma unroll
    for (int i = 0; i < UNIT / 32 * 2; i++)
        if (i == 2 * group + r) elements(codes, scales, i / 4, i / 2 % 2, i % 2, v);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] *= scale;
    out_t *o = out + t * out_stride + c / 4 * 32 + q * 4;
#pragma unroll
    for (int i = 0; i < 8; i++) o[i / 4 * 16 + i % 4] = from_f32<out_t>(v[i]);
}
