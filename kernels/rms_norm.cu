// RMS norm per group of a row, with residual add and gate. A group is held in the registers of THREADS threads;
// groups of one warp share a block. Grid: rows * groups / PER_BLOCK.
// VEC, GROUP, GROUPS, THREADS, PER_BLOCK (1 unless THREADS is 32), HAS_ADD, GATE (0 none, 1 before, 2 after), GATE_ACT,
// SHARED_WEIGHT, ACCUMULATE (added to out); x_t, add_t, gate_t, out_t.

constexpr int PASSES = div_up(GROUP, VEC * THREADS);

extern "C" __global__ void __launch_bounds__(THREADS *PER_BLOCK) ENTRY(PARAMETERS) {
    __shared__ float part[32];
    u32 unit = blockIdx.x * PER_BLOCK + threadIdx.x / THREADS;
    if (PER_BLOCK > 1 && unit >= units) {
        wait_for_inputs();
        return;
    }
    i64 row = unit / GROUPS;
    int col = unit % GROUPS * GROUP, lane = threadIdx.x % THREADS * VEC;
    float v[PASSES][VEC], z[PASSES][VEC], w[PASSES][VEC];
    float sum = 0.f;
    let_next_start();
#pragma unroll
    for (int p = 0; p < PASSES; p++) {
        int c = lane + p * THREADS * VEC;
        if (c < GROUP) load<VEC>(weight + (SHARED_WEIGHT ? 0 : col) + c, w[p]);
    }
    wait_for_inputs();
#pragma unroll
    for (int p = 0; p < PASSES; p++) {
        int c = lane + p * THREADS * VEC;
        if (c >= GROUP) continue;
        load<VEC>(x + row * x_stride + col + c, v[p]);
        if constexpr (GATE != 0) load<VEC>(gate + row * gate_stride + col + c, z[p]);
        if constexpr (HAS_ADD) {
            float a[VEC];
            load<VEC>(add + row * add_stride + col + c, a);
#pragma unroll
            for (int i = 0; i < VEC; i++) v[p][i] = to_f32(from_f32<x_t>(v[p][i] + add_scale * a[i]));
            store<VEC>(x + row * x_stride + col + c, v[p]);
        }
#pragma unroll
        for (int i = 0; i < VEC; i++) {
            if constexpr (GATE != 0) z[p][i] = activate<GATE_ACT>(z[p][i]);
            if constexpr (GATE == 1) v[p][i] *= z[p][i];
            sum += v[p][i] * v[p][i];
        }
    }
    sum = block_sum<THREADS>(sum, part);
    float r = rsqrtf(sum / GROUP + eps);
#pragma unroll
    for (int p = 0; p < PASSES; p++) {
        int c = lane + p * THREADS * VEC;
        if (c >= GROUP) continue;
#pragma unroll
        for (int i = 0; i < VEC; i++) {
            v[p][i] *= w[p][i] * r;
            if constexpr (GATE == 2) v[p][i] *= z[p][i];
        }
        if constexpr (ACCUMULATE) {
            float before[VEC];
            load<VEC>(out + row * out_stride + col + c, before);
#pragma unroll
            for (int i = 0; i < VEC; i++) v[p][i] += before[i];
        }
        store<VEC>(out + row * out_stride + col + c, v[p]);
    }
}
