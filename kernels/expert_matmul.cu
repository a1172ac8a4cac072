// Products of the experts that a token chose, one (token, choice) at a time: decode, and every shape that the grouped
// kernel does not take. A warp owns 4 output columns. Grid (token * choice, column tiles).
// VEC, K, TOP, X_PER_PAIR (x has a row per choice); x_t, w_t, out_t.

constexpr int COLS = 4;
constexpr int WARPS = 8;

extern "C" __global__ void __launch_bounds__(32 * WARPS) ENTRY(PARAMETERS) {
    let_next_start();
    wait_for_inputs();
    i64 pair = blockIdx.x;
    u32 e = ids[pair / TOP * ids_stride + pair % TOP] - first;
    if (e >= experts) return;
    int lane = threadIdx.x % 32, col = (blockIdx.y * WARPS + threadIdx.x / 32) * COLS;
    if (col >= n) return;
    const x_t *px = x + (X_PER_PAIR ? pair : pair / TOP) * x_stride;
    const w_t *pw = w + e * w_stride;
    float acc[COLS] = {};
#pragma unroll 4
    for (int k = lane * VEC; k < K; k += 32 * VEC) {
        float xv[VEC];
        load<VEC>(px + k, xv);
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            float wv[VEC];
            load<VEC>(pw + (i64)min(col + c, n - 1) * K + k, wv);
#pragma unroll
            for (int i = 0; i < VEC; i++) acc[c] += xv[i] * wv[i];
        }
    }
#pragma unroll
    for (int c = 0; c < COLS; c++) {
        float s = warp_sum(acc[c]);
        if (lane == c && col + c < n) out[pair * out_stride + col + c] = from_f32<out_t>(s);
    }
}
