// Groups the (token, choice) pairs of a step by expert, for the grouped products. One block.
// order [pairs]: the pairs by expert. tiles [1 + tiles][4]: the number of tiles, then of each the expert, its first pair within
// `order`, the number of its pairs, and 0. An expert's pairs are split evenly into as few tiles of at most BM as hold them.
// Pairs of an expert have no fixed order. No result depends on it, since every pair is a separate row.
// E, TOP, BM.

constexpr int THREADS = 1024;
constexpr int PER = div_up(E, THREADS);
constexpr int BATCH = 8;                         // ids that a thread loads at a time

extern "C" __global__ void __launch_bounds__(THREADS, 1) ENTRY(PARAMETERS) {
    let_next_start();
    wait_for_inputs();
    __shared__ u32 count[E], warps[2][THREADS / 32];
    for (int e = threadIdx.x; e < E; e += THREADS) count[e] = 0;
    __syncthreads();
    auto each = [&](auto f) {
        for (u32 p = threadIdx.x; p < pairs; p += BATCH * THREADS) {
            u32 e[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                u32 q = p + i * THREADS;
                e[i] = q < pairs ? ids[q / TOP * ids_stride + q % TOP] : NONE;
            }
#pragma unroll
            for (int i = 0; i < BATCH; i++)
                if (e[i] < E) f(e[i], p + i * THREADS);
        }
    };
    each([&](u32 e, u32) { atomicAdd(&count[e], 1u); });
    __syncthreads();
    // Prefix sums of pairs and of tiles; a thread has PER experts in a row.
    u32 mine[2] = {0, 0}, upto[2];
    for (int i = 0; i < PER; i++) {
        int e = threadIdx.x * PER + i;
        u32 n = e < E ? count[e] : 0;
        mine[0] += n;
        mine[1] += (n + BM - 1) / BM;
    }
#pragma unroll
    for (int k = 0; k < 2; k++) {
        upto[k] = mine[k];
#pragma unroll
        for (int m = 1; m < 32; m *= 2) {
            u32 other = __shfl_up_sync(0xffffffffu, upto[k], m);
            if (threadIdx.x % 32 >= m) upto[k] += other;
        }
        if (threadIdx.x % 32 == 31) warps[k][threadIdx.x / 32] = upto[k];
    }
    __syncthreads();
    u32 at[2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
        at[k] = upto[k] - mine[k];
        for (int w = 0; w < threadIdx.x / 32; w++) at[k] += warps[k][w];
    }
    for (int i = 0; i < PER; i++) {
        int e = threadIdx.x * PER + i;
        if (e >= E) break;
        u32 n = count[e], of_expert = (n + BM - 1) / BM, most = of_expert ? (n + of_expert - 1) / of_expert : 0;
        for (u32 t = 0; t < of_expert; t++)
            reinterpret_cast<uint4 *>(tiles)[1 + at[1] + t] = make_uint4(e, at[0] + t * most, min(most, n - t * most), 0);
        count[e] = at[0];
        at[0] += n;
        at[1] += of_expert;
        if (e == E - 1) tiles[0] = at[1];
    }
    __syncthreads();
    each([&](u32 e, u32 p) { order[atomicAdd(&count[e], 1u)] = p; });
}
