// Token embedding of one row block of the table. Grid (T, column tiles).
// VEC, DIM; table_t, out_t.

extern "C" __global__ void __launch_bounds__(256) ENTRY(PARAMETERS) {
    let_next_start();
    wait_for_inputs();
    int t = blockIdx.x, c = (blockIdx.y * 256 + threadIdx.x) * VEC;
    if (c >= DIM || st.token_row(t) == NONE) return;
    u32 id = st.id(t);
    if (id & FROM_DEVICE) id = last[id & ~FROM_DEVICE];
    id -= first;
    if (id >= rows) return;
    float v[VEC];
    load<VEC>(table + id * table_stride + c, v);
#pragma unroll
    for (int i = 0; i < VEC; i++) v[i] *= scale;
    store<VEC>(out + t * out_stride + c, v);
}
