// Groups the (token, choice) pairs of a step by expert, for the grouped products. One block.
// list [2 (E + 1) + pairs] u32: first pair of each expert, first tile of BM pairs of each expert, the pairs by expert.
// Pairs of an expert come in no fixed order; no result depends on it, every pair being a row of its own.
// E, TOP, BM.

constexpr int THREADS = 1024;
constexpr int PER = div_up(E, THREADS);

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(PARAMETERS) {
    let_next_start();
    wait_for_inputs();
    __shared__ u32 count[E], warps[2][THREADS / 32];
    for (int e = threadIdx.x; e < E; e += THREADS) count[e] = 0;
    __syncthreads();
    for (u32 p = threadIdx.x; p < pairs; p += THREADS) {
        u32 e = ids[p / TOP * ids_stride + p % TOP];
        if (e < E) atomicAdd(&count[e], 1u);
    }
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
    u32 *first = list, *tiles = list + E + 1, *order = list + 2 * (E + 1);
    for (int i = 0; i < PER; i++) {
        int e = threadIdx.x * PER + i;
        if (e > E) break;
        first[e] = at[0];
        tiles[e] = at[1];
        if (e == E) break;
        u32 n = count[e];
        count[e] = at[0];
        at[0] += n;
        at[1] += (n + BM - 1) / BM;
        if (e == E - 1) {
            first[E] = at[0];
            tiles[E] = at[1];
        }
    }
    __syncthreads();
    for (u32 p = threadIdx.x; p < pairs; p += THREADS) {
        u32 e = ids[p / TOP * ids_stride + p % TOP];
        if (e < E) order[atomicAdd(&count[e], 1u)] = p;
    }
}
