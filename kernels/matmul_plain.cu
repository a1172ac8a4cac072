// out = scale columns x Wᵀ (+ bias) (+ out) in f32 arithmetic, any dtypes, any sizes: the f32 mode, f16 weights, odd shapes.
// 64 x 64 outputs a block, 4 x 4 a thread. Grid (tiles of N, tiles of M).
// K, ACCUMULATE, HAS_BIAS; x_t, w_t, out_t.

constexpr int DEPTH = 32;

extern "C" __global__ void __launch_bounds__(256) ENTRY(PARAMETERS) {
    let_next_start();
    wait_for_inputs();
    __shared__ __align__(16) float xs[DEPTH][64 + 4], ws[DEPTH][64 + 4];
    int n0 = blockIdx.x * 64, m0 = blockIdx.y * 64;
    int tn = threadIdx.x % 16, tm = threadIdx.x / 16;
    float acc[4][4] = {};
    for (int k0 = 0; k0 < K; k0 += DEPTH) {
        int k = threadIdx.x % DEPTH;
        for (int r = threadIdx.x / DEPTH; r < 64; r += 256 / DEPTH) {
            bool in = k0 + k < K;
            xs[k][r] = in && m0 + r < m ? to_f32(x[(m0 + r) * x_stride + k0 + k]) : 0.f;
            ws[k][r] = in && n0 + r < n ? to_f32(w[(n0 + r) * w_stride + k0 + k]) : 0.f;
        }
        __syncthreads();
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            float a[4], b[4];
            load<4>(&xs[d][tm * 4], a);
            load<4>(&ws[d][tn * 4], b);
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) acc[i][j] += a[i] * b[j];
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int row = m0 + tm * 4 + i;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int col = n0 + tn * 4 + j;
            if (row >= m || col >= n) continue;
            float s = acc[i][j] * scale;
            if constexpr (HAS_COLUMNS) s *= columns[col];
            if constexpr (HAS_BIAS) s += bias[col];
            out_t *o = out + row * out_stride + col;
            if constexpr (ACCUMULATE) s += to_f32(*o);
            *o = from_f32<out_t>(s);
        }
    }
}
