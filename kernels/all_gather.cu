// The columns of all ranks side by side. Grid: up to WORD_BLOCKS or PIECE_BLOCKS.
// VEC, DIM (columns of a rank), RANK, RANKS, LONG; x_t, out_t.

#include "ranks.cuh"

extern "C" __global__ void __launch_bounds__(LONG ? PIECE_THREADS : WORD_THREADS) ENTRY(PARAMETERS) {
    constexpr int ROW = DIM / VEC;
    let_next_start();
    wait_for_inputs();
    auto get = [&](int i) { return load_raw<VEC>(x + i / ROW * x_stride + i % ROW * VEC); };
    auto put = [&](int i, int r, const Packed<VEC, x_t> &piece) {
        float v[VEC];
        unpack<VEC, x_t>(piece, v);
        store<VEC>(out + i / ROW * out_stride + r * DIM + i % ROW * VEC, v);
    };
    exchange<LONG, VEC, x_t>(areas, rows * ROW, get, put);
}
