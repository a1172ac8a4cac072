// out = act(gate) * up * sigmoid(row_gate). Grid (rows, column tiles).
// VEC, DIM, ACT, HAS_UP, HAS_ROW_GATE; gate_t, up_t, row_gate_t, out_t.

extern "C" __global__ void __launch_bounds__(256) ENTRY(PARAMETERS) {
    let_next_start();
    wait_for_inputs();
    i64 t = blockIdx.x;
    int c = (blockIdx.y * 256 + threadIdx.x) * VEC;
    if (c >= DIM) return;
    float g[VEC], u[VEC];
    load<VEC>(gate + t * gate_stride + c, g);
    if constexpr (HAS_UP) load<VEC>(up + t * up_stride + c, u);
    float s = 1.f;
    if constexpr (HAS_ROW_GATE) s = sigmoid(to_f32(row_gate[t * row_gate_stride]));
#pragma unroll
    for (int i = 0; i < VEC; i++) {
        float r = activate<ACT>(g[i]);
        if constexpr (HAS_UP) r *= u[i];
        if constexpr (HAS_ROW_GATE) r *= s;
        g[i] = r;
    }
    store<VEC>(out + t * out_stride + c, g);
}
