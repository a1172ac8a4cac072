// The sum of all ranks' rows, in ascending order of ranks. Grid: up to WORD_BLOCKS or PIECE_BLOCKS.
// VEC, DIM, RANK, RANKS, LONG, ACCUMULATE (added to out); x_t, out_t.

#include "ranks.cuh"

// Four blocks of an SM keep all of a grid resident; left alone, the assembler spills to fit more.
extern "C" __global__ void __launch_bounds__(LONG ? PIECE_THREADS : WORD_THREADS, 4) ENTRY(PARAMETERS) {
    constexpr int ROW = DIM / VEC;
    let_next_start();
    wait_for_inputs();
    float sum[VEC];
    auto get = [&](int i) { return load_raw<VEC>(x + i / ROW * x_stride + i % ROW * VEC); };
    auto put = [&](int i, int r, const Packed<VEC, x_t> &piece) {
        float v[VEC];
        unpack<VEC, x_t>(piece, v);
#pragma unroll
        for (int k = 0; k < VEC; k++) sum[k] = r == 0 ? v[k] : sum[k] + v[k];
        if (r + 1 < RANKS) return;
        out_t *to = out + i / ROW * out_stride + i % ROW * VEC;
        if constexpr (ACCUMULATE) {
            float before[VEC];
            load<VEC>(to, before);
#pragma unroll
            for (int k = 0; k < VEC; k++) sum[k] += before[k];
        }
        store<VEC>(to, sum);
    };
    exchange<LONG, VEC, x_t>(areas, rows * ROW, get, put);
}
