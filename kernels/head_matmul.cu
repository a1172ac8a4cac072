// A product per head for few tokens: 8 lanes share a row of a head's matrix, which is read once for all tokens. A block has
// 32 rows of one head. Grid (tiles of ROWS, H).
// VEC, K (elements of a head that are multiplied), WIDTH (columns of a head of x), ROWS (of a head's matrix), TOKENS (at most);
// x_t, out_t.

constexpr int LANES = 8;
constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(PARAMETERS) {
    let_next_start();
    wait_for_inputs();
    int h = blockIdx.y, lane = threadIdx.x % LANES, row = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
    // Rows and tokens past the end repeat the last one; their results are not stored.
    const float *mine = w + ((i64)h * ROWS + min(row, ROWS - 1)) * K;
    const x_t *from[TOKENS];
    float sums[TOKENS] = {};
#pragma unroll
    for (int i = 0; i < TOKENS; i++) from[i] = x + (i64)min(i, tokens - 1) * x_stride + (i64)h * WIDTH;
#pragma unroll 4
    for (int k = lane * VEC; k < K; k += LANES * VEC) {
        float a[VEC], b[VEC];
        load<VEC>(mine + k, a);
#pragma unroll
        for (int i = 0; i < TOKENS; i++) {
            load<VEC>(from[i] + k, b);
#pragma unroll
            for (int e = 0; e < VEC; e++) sums[i] = __fmaf_rn(a[e], b[e], sums[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
#pragma unroll
        for (int m = LANES / 2; m; m /= 2) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], m);
        if (lane == 0 && row < ROWS && i < tokens)
            out[i * out_stride + (i64)h * ROWS + row] = from_f32<out_t>(sums[i]);
    }
}
