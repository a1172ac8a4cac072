// A product per head for many tokens on tensor cores; the matrix is rounded to bf16. 64 tokens x 64 rows of a head's matrix a
// block, 32 x 32 a warp; the next 64 columns arrive in registers while the last ones are multiplied.
// Grid (tiles of ROWS, tiles of T, H).
// K (elements of a head that are multiplied, a multiple of 8), WIDTH (columns of a head of x), ROWS (of a head's matrix, an even
// number); x and out in bf16.

constexpr int THREADS = 128;
constexpr int SIDE = 64;
constexpr int OWN = SIDE * 8 / THREADS;          // 16-byte pieces of a tile that a thread brings

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(PARAMETERS) {
    let_next_start();
    wait_for_inputs();
    __shared__ __align__(128) u8 shared_x[SIDE * 128], shared_w[SIDE * 128];
    u32 xs = smem_addr(shared_x), ws = smem_addr(shared_w);
    int n0 = blockIdx.x * SIDE, m0 = blockIdx.y * SIDE, h = blockIdx.z, tid = threadIdx.x;
    const bf16 *from = x + (i64)h * WIDTH;
    const float *matrix = w + (i64)h * ROWS * K;
    uint4 next_x[OWN], next_w[OWN];
    // Pieces past an end are zeros.
    auto bring = [&](int k0) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            int row = (tid + i * THREADS) / 8, k = k0 + tid % 8 * 8;
            next_x[i] = next_w[i] = make_uint4(0, 0, 0, 0);
            if (k < K && m0 + row < tokens)
                next_x[i] = *reinterpret_cast<const uint4 *>(from + (m0 + row) * x_stride + k);
            if (k < K && n0 + row < ROWS) {
                float v[8];
                load<8>(matrix + (i64)(n0 + row) * K + k, v);
                next_w[i] = make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
            }
        }
    };
    int warp = tid / 32, lane = tid % 32, m = warp / 2 * 32, n = warp % 2 * 32;
    int block = lane / 8, brow = lane % 8;
    int a_row = brow + block % 2 * 8, a_piece = block / 2, b_row = brow + block / 2 * 8, b_piece = block % 2;
    float acc[2][4][4] = {};
    bring(0);
#pragma unroll 1
    for (int k0 = 0; k0 < K; k0 += SIDE) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            u32 at = swizzle<8>((tid + i * THREADS) / 8, tid % 8);
            store_shared16(xs + at, next_x[i]);
            store_shared16(ws + at, next_w[i]);
        }
        __syncthreads();
        if (k0 + SIDE < K) bring(k0 + SIDE);
#pragma unroll
        for (int k = 0; k < SIDE / 16; k++) {
            u32 a[2][4], b[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                ldmatrix_x4(a[i], xs + swizzle<8>(m + i * 16 + a_row, 2 * k + a_piece));
                ldmatrix_x4(b[i], ws + swizzle<8>(n + i * 16 + b_row, 2 * k + b_piece));
            }
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) mma_bf16(acc[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int t = m0 + m + i * 16 + lane / 4 + 8 * e;
            if (t >= tokens) continue;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int row = n0 + n + j * 8 + lane % 4 * 2;
                if (row < ROWS) store_pair(out + t * out_stride + (i64)h * ROWS + row, acc[i][j][2 * e], acc[i][j][2 * e + 1]);
            }
        }
}
