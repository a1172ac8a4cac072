// A product per head for many tokens, in f32 arithmetic: 64 tokens x 64 rows of a head's matrix a block, 4 x 4 a thread.
// Grid (tiles of ROWS, tiles of T, H).
// K (elements of a head that are multiplied), WIDTH (columns of a head of x), ROWS (of a head's matrix); x_t, out_t.

constexpr int DEPTH = 32;

extern "C" __global__ void __launch_bounds__(256) ENTRY(PARAMETERS) {
    let_next_start();
    wait_for_inputs();
    __shared__ __align__(16) float xs[DEPTH][64 + 4], ws[DEPTH][64 + 4];
    int n0 = blockIdx.x * 64, m0 = blockIdx.y * 64, h = blockIdx.z;
    int tn = threadIdx.x % 16, tm = threadIdx.x / 16;
    const x_t *from = x + (i64)h * WIDTH;
    const float *matrix = w + (i64)h * ROWS * K;
    float acc[4][4] = {};
    for (int k0 = 0; k0 < K; k0 += DEPTH) {
        int k = threadIdx.x % DEPTH;
#pragma unroll
        for (int r = threadIdx.x / DEPTH; r < 64; r += 256 / DEPTH) {
            bool in = k0 + k < K;
            xs[k][r] = in && m0 + r < tokens ? to_f32(from[(m0 + r) * x_stride + k0 + k]) : 0.f;
            ws[k][r] = in && n0 + r < ROWS ? matrix[(i64)(n0 + r) * K + k0 + k] : 0.f;
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
                for (int j = 0; j < 4; j++) acc[i][j] = __fmaf_rn(a[i], b[j], acc[i][j]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int t = m0 + tm * 4 + i;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int row = n0 + tn * 4 + j;
            if (t < tokens && row < ROWS) out[t * out_stride + (i64)h * ROWS + row] = from_f32<out_t>(acc[i][j]);
        }
    }
}
