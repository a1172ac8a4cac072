// Skinny GEMM: out = scale columns x Wᵀ (+ bias) (+ out) for at most 8 rows of x. Reads W once, at memory speed. bf16 W and x.
// A block takes tiles of 16 rows of W in turn; its warps share the inner dimension in slices of DEPTH and add up in a
// fixed order, so a result does not depend on the number of rows of x. Each warp copies its slices of W and x through its own
// cp.async ring, which continues across tiles: copies never wait for a sum. W is the A operand of the mma, x the B operand.
// Grid (blocks that fit on the device at once, at most the tiles).
// K, M, WARPS, STAGES, DEPTH, X_RESIDENT (x is copied once, not with every slice), ACCUMULATE, HAS_BIAS; out_t.

constexpr int SLICES_ALL = div_up(div_up(K, DEPTH), WARPS);
constexpr int ROWS = 16;
constexpr int PITCH = DEPTH + 8;
constexpr int STAGE = (ROWS + (X_RESIDENT ? 0 : 8)) * PITCH;
constexpr int FETCHED = ROWS + (X_RESIDENT ? 0 : M);      // rows of a slice; rows M .. 7 of x reach no result
constexpr int X_PITCH = DEPTH * WARPS * SLICES_ALL + 8;
constexpr int VECS = DEPTH / 8;
constexpr int SLICES = SLICES_ALL;               // of a warp, per tile

extern "C" __global__ void __launch_bounds__(32 * WARPS) ENTRY(PARAMETERS) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ float part[2][WARPS][M][ROWS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    bf16 *resident = reinterpret_cast<bf16 *>(shared) + WARPS * STAGES * STAGE;
    bf16 *ring = reinterpret_cast<bf16 *>(shared) + warp * STAGES * STAGE;
    int tiles = div_up(n, ROWS);
    int mine = blockIdx.x < tiles ? div_up(tiles - (int)blockIdx.x, (int)gridDim.x) : 0;
    int total = mine * SLICES;
    int f_tile = blockIdx.x, f_slice = 0;         // the next slice to fetch
    u64 policy = evict_first();
    // Rows `begin .. end` of a slice: those of W, then those of x.
    auto copy = [&](int stage, int k0, int n0, int begin, int end) {
        bf16 *sw = ring + stage * STAGE;
#pragma unroll
        for (int i = 0; i < div_up((end - begin) * VECS, 32); i++) {
            int v = i * 32 + lane, r = begin + v / VECS, k = v % VECS * 8;
            if ((end - begin) * VECS % 32 && v >= (end - begin) * VECS) break;
            bool in = K % (DEPTH * WARPS) == 0 || k0 + k < K;
            const bf16 *from = r < ROWS ? w + (i64)min(n0 + r, n - 1) * w_stride : x + (r - ROWS) * x_stride;
            if (r < ROWS)
                cp_async16(smem_addr(sw + r * PITCH + k), in ? from + k0 + k : w, in, policy);
            else
                cp_async16(smem_addr(sw + r * PITCH + k), in ? from + k0 + k : w, in);
        }
    };
    auto advance = [&]() {
        if (++f_slice == SLICES) {
            f_slice = 0;
            f_tile += gridDim.x;
        }
    };
    auto fetch = [&](int stage) {
        copy(stage, (f_slice * WARPS + warp) * DEPTH, f_tile * ROWS, 0, FETCHED);
        advance();
    };
    // Weights do not wait for the previous kernels.
    let_next_start();
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s >= total) break;
        copy(s, (f_slice * WARPS + warp) * DEPTH, f_tile * ROWS, 0, ROWS);
        advance();
    }
    wait_for_inputs();
    if constexpr (X_RESIDENT) {
        for (int v = threadIdx.x; v < M * (X_PITCH / 8 - 1); v += 32 * WARPS) {
            int r = v / (X_PITCH / 8 - 1), k = v % (X_PITCH / 8 - 1) * 8;
            cp_async16(smem_addr(resident + r * X_PITCH + k), k < K ? x + r * x_stride + k : x, k < K);
        }
    }
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (!X_RESIDENT && s < total) copy(s, (s % SLICES * WARPS + warp) * DEPTH, 0, ROWS, FETCHED);
        cp_async_commit();
    }
    int block = lane / 8, brow = lane % 8;
    int a_at = (brow + block % 2 * 8) * PITCH + block / 2 * 8;
    // Eight rows of x, 32 k at once; rows that are not there repeat the first.
    int b_at = X_RESIDENT ? (brow < M ? brow : 0) * X_PITCH + block * 8 : (ROWS + brow) * PITCH + block * 8;
    if constexpr (X_RESIDENT) {
        cp_async_wait<0>();
        __syncthreads();
    }
    int done = 0;
    for (int i = 0; i < mine; i++) {
        int n0 = (blockIdx.x + i * gridDim.x) * ROWS;
        float acc[4] = {0.f, 0.f, 0.f, 0.f};
        for (int s = 0; s < SLICES; s++, done++) {
            cp_async_wait<STAGES - 2>();
            __syncwarp();
            if (done + STAGES - 1 < total) fetch((done + STAGES - 1) % STAGES);
            cp_async_commit();
            bf16 *at = ring + done % STAGES * STAGE;
            bf16 *bx = X_RESIDENT ? resident + (s * WARPS + warp) * DEPTH : at;
#pragma unroll
            for (int k = 0; k < DEPTH; k += 32) {
                u32 a[4], b[4];
                ldmatrix_x4(b, smem_addr(bx + b_at + k));
                ldmatrix_x4(a, smem_addr(at + a_at + k));
                mma_bf16(acc, a, b[0], b[1]);
                ldmatrix_x4(a, smem_addr(at + a_at + k + 16));
                mma_bf16(acc, a, b[2], b[3]);
            }
        }
        float (*sum)[M][ROWS] = part[i % 2];
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (2 * q + e % 2 < M) sum[warp][2 * q + e % 2][g + e / 2 * 8] = acc[e];
        __syncthreads();
        for (int j = threadIdx.x; j < M * ROWS; j += 32 * WARPS) {
            int m = j / ROWS, r = j % ROWS;
            if (n0 + r >= n) continue;
            float v = 0.f;
#pragma unroll
            for (int k = 0; k < WARPS; k++) v += sum[k][m][r];
            v *= scale;
            if constexpr (HAS_COLUMNS) v *= columns[n0 + r];
            if constexpr (HAS_BIAS) v += bias[n0 + r];
            out_t *o = out + m * out_stride + n0 + r;
            if constexpr (ACCUMULATE) v += to_f32(*o);
            *o = from_f32<out_t>(v);
        }
    }
}
