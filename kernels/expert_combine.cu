// out[t] (+)= scale * Σ_j weights[t, j] * products[t * k + j], in ascending j, choices without an expert left out.
// Grid (T, column tiles).
// VEC, N, TOP, ACCUMULATE; product_t, out_t.

extern "C" __global__ void __launch_bounds__(256) ENTRY(PARAMETERS) {
    let_next_start();
    wait_for_inputs();
    i64 t = blockIdx.x;
    int c = (blockIdx.y * 256 + threadIdx.x) * VEC;
    if (c >= N) return;
    float sum[VEC] = {};
    for (int j = 0; j < TOP; j++) {
        if (ids[t * ids_stride + j] == NONE) continue;
        float w = weights[t * weights_stride + j], v[VEC];
        load<VEC>(products + (t * TOP + j) * N + c, v);
#pragma unroll
        for (int i = 0; i < VEC; i++) sum[i] += w * v[i];
    }
    out_t *o = out + t * out_stride + c;
    float old[VEC] = {};
    if constexpr (ACCUMULATE) load<VEC>(o, old);
#pragma unroll
    for (int i = 0; i < VEC; i++) sum[i] = sum[i] * scale + old[i];
    store<VEC>(o, sum);
}
