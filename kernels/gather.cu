// Copies the rows whose logits are needed. Grid (O, column tiles).
// VEC, DIM; x_t, out_t.

extern "C" __global__ void __launch_bounds__(256) ENTRY(PARAMETERS) {
    let_next_start();
    wait_for_inputs();
    int o = blockIdx.x, c = (blockIdx.y * 256 + threadIdx.x) * VEC;
    if (c >= DIM) return;
    u32 t = st.output_token(o);
    float v[VEC];
#pragma unroll
    for (int i = 0; i < VEC; i++) v[i] = 0.f;
    if (t != NONE) load<VEC>(x + t * x_stride + c, v);
    store<VEC>(out + o * out_stride + c, v);
}
