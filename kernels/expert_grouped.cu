// Products of experts with the pairs that chose them, bf16 on tensor cores: a block owns BM pairs of one expert (gathered
// through the tables of expert_sort) and 128 columns. Grid (column tiles, tiles of pairs).
// K, N, BM, STAGES, TOP, X_PER_PAIR (x has a row per choice); out_t.

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int BN = 128;
constexpr int DEPTH = 64;
constexpr int PITCH = DEPTH + 8;
constexpr int STAGE = (BM + BN) * PITCH;
constexpr int STEPS = div_up(K, DEPTH);
constexpr int M_TILES = BM / 16;
constexpr int N_TILES = BN / WARPS / 8;

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(PARAMETERS) {
    let_next_start();
    wait_for_inputs();
    extern __shared__ __align__(16) u8 shared[];
    __shared__ u32 pairs[BM];
    bf16 *stages = reinterpret_cast<bf16 *>(shared);
    if (blockIdx.y >= tiles[0]) return;
    const u32 *tile = tiles + 4 * (1 + blockIdx.y);
    int e = tile[0], begin = tile[1], rows = tile[2];
    int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, c = lane % 4, n0 = blockIdx.x * BN;
    for (int i = tid; i < BM; i += THREADS) pairs[i] = order[begin + min(i, rows - 1)];
    __syncthreads();
    const bf16 *we = w + e * w_stride;
    auto fetch = [&](int step) {
        bf16 *sx = stages + step % STAGES * STAGE, *sw = sx + BM * PITCH;
        int k0 = step * DEPTH;
#pragma unroll
        for (int v = tid; v < BM * DEPTH / 8; v += THREADS) {
            int r = v / (DEPTH / 8), k = v % (DEPTH / 8) * 8;
            bool in = k0 + k < K && r < rows;
            i64 row = X_PER_PAIR ? pairs[r] : pairs[r] / TOP;
            cp_async16(smem_addr(sx + r * PITCH + k), in ? x + row * x_stride + k0 + k : x, in);
        }
#pragma unroll
        for (int v = tid; v < BN * DEPTH / 8; v += THREADS) {
            int r = v / (DEPTH / 8), k = v % (DEPTH / 8) * 8;
            bool in = k0 + k < K && n0 + r < N;
            cp_async16(smem_addr(sw + r * PITCH + k), in ? we + (i64)(n0 + r) * K + k0 + k : w, in);
        }
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < STEPS) fetch(s);
        cp_async_commit();
    }
    float acc[M_TILES][N_TILES][4];
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int n = 0; n < N_TILES; n++) acc[m][n][0] = acc[m][n][1] = acc[m][n][2] = acc[m][n][3] = 0.f;
    int block = lane / 8, brow = lane % 8;
    int a_row = brow + block % 2 * 8, a_col = block / 2 * 8;
    int b_row = brow + block / 2 * 8, b_col = block % 2 * 8;
    for (int step = 0; step < STEPS; step++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < STEPS) fetch(step + STAGES - 1);
        cp_async_commit();
        bf16 *sx = stages + step % STAGES * STAGE, *sw = sx + BM * PITCH + warp * (BN / WARPS) * PITCH;
#pragma unroll
        for (int k = 0; k < DEPTH; k += 16) {
            u32 a[M_TILES][4];
#pragma unroll
            for (int m = 0; m < M_TILES; m++) ldmatrix_x4(a[m], smem_addr(sx + (m * 16 + a_row) * PITCH + k + a_col));
#pragma unroll
            for (int n = 0; n < N_TILES / 2; n++) {
                u32 b[4];
                ldmatrix_x4(b, smem_addr(sw + (n * 16 + b_row) * PITCH + k + b_col));
#pragma unroll
                for (int m = 0; m < M_TILES; m++) {
                    mma_bf16(acc[m][2 * n], a[m], b[0], b[1]);
                    mma_bf16(acc[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }
    }
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int r = m * 16 + g + 8 * h;
            if (r >= rows) continue;
            out_t *o = out + (i64)pairs[r] * out_stride;
#pragma unroll
            for (int n = 0; n < N_TILES; n++) {
                int col = n0 + warp * (BN / WARPS) + n * 8 + 2 * c;
#pragma unroll
                for (int j = 0; j < 2; j++)
                    if (col + j < N) o[col + j] = from_f32<out_t>(acc[m][n][2 * h + j]);
            }
        }
}
