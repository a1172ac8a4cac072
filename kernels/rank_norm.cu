// RMS norm of rows whose columns lie on TOGETHER consecutive ranks. A block holds a row's part in the registers of THREADS threads.
// VEC, DIM (columns of a rank), THREADS, RANK, RANKS, TOGETHER, GATE (0 none, 1 before, 2 after), GATE_ACT; x_t, gate_t, out_t.

#include "ranks.cuh"

constexpr int PASSES = div_up(DIM, VEC * THREADS);

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(PARAMETERS) {
    __shared__ float part[32], whole;
    u8 *own_area = (u8 *)areas[RANK];
    u32 *count = (u32 *)(own_area + COUNTS) + blockIdx.x;
    let_next_start();
    wait_for_inputs();
    u32 number = *count;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        number++;
        float v[PASSES][VEC], z[PASSES][VEC];
        float sum = 0.f;
#pragma unroll
        for (int p = 0; p < PASSES; p++) {
            int c = (p * THREADS + threadIdx.x) * VEC;
            if (c >= DIM) continue;
            load<VEC>(x + row * x_stride + c, v[p]);
            if constexpr (GATE != 0) load<VEC>(gate + row * gate_stride + c, z[p]);
#pragma unroll
            for (int i = 0; i < VEC; i++) {
                if constexpr (GATE != 0) z[p][i] = activate<GATE_ACT>(z[p][i]);
                if constexpr (GATE == 1) v[p][i] *= z[p][i];
                sum += v[p][i] * v[p][i];
            }
        }
        sum = block_sum<THREADS>(sum, part);
        if (threadIdx.x == 0) {
            constexpr int FIRST = RANK / TOGETHER * TOGETHER;
            float all = 0.f;
            // Every exchange is one of all ranks, or sets of places would not take turns.
#pragma unroll
            for (int r = 0; r < RANKS; r++)
                if (r != RANK) put_word((u8 *)areas[r] + words_at(RANK, blockIdx.x, number), __float_as_uint(sum), number);
#pragma unroll
            for (int r = 0; r < RANKS; r++) {
                float part = r == RANK ? sum : __uint_as_float(take_word(areas, own_area + words_at(r, blockIdx.x, number), number));
                if (r >= FIRST && r < FIRST + TOGETHER) all += part;
            }
            whole = all;
        }
        __syncthreads();
        float f = rsqrtf(whole / (DIM * TOGETHER) + eps);
#pragma unroll
        for (int p = 0; p < PASSES; p++) {
            int c = (p * THREADS + threadIdx.x) * VEC;
            if (c >= DIM) continue;
            float w[VEC];
            load<VEC>(weight + c, w);
#pragma unroll
            for (int i = 0; i < VEC; i++) {
                v[p][i] *= w[i] * f;
                if constexpr (GATE == 2) v[p][i] *= z[p][i];
            }
            store<VEC>(out + row * out_stride + c, v[p]);
        }
        // `part` and `whole` are used again.
        __syncthreads();
    }
    if (threadIdx.x == 0) *count = number;
}
