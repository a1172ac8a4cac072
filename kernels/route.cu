// Experts of each token and their weights, a warp per token; expert e sits in register e / 32 of lane e % 32.
// E, TOP, KIND (0 softmax over all then top-k, 1 top-k then softmax, 2 sigmoid), RENORM, GROUPS, KEEP (groups), HAS_BIAS.

constexpr int WARPS = 4;
constexpr int PER = div_up(E, 32);
constexpr u32 ALL = 0xffffffffu;

// Largest value of the warp and its index; the lower index on ties.
DEV void best_of_warp(float &v, int &i) {
#pragma unroll
    for (int m = 16; m; m >>= 1) {
        float ov = __shfl_xor_sync(ALL, v, m);
        int oi = __shfl_xor_sync(ALL, i, m);
        if (ov > v || (ov == v && oi < i)) {
            v = ov;
            i = oi;
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    ENTRY(Step st, const float *logits, i64 logits_stride, const float *bias, u32 *ids, i64 ids_stride, float *weights,
          i64 weights_stride, float sum_eps, float scale) {
    let_next_start();
    wait_for_inputs();
    __shared__ float choices[WARPS][KIND == 2 && GROUPS > 1 ? E : 1], ranks[WARPS][GROUPS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    i64 t = blockIdx.x * WARPS + warp;
    if (t >= st.tokens) return;
    u32 *my_ids = ids + t * ids_stride;
    float *my_weights = weights + t * weights_stride;
    if (lane < TOP) {
        my_ids[lane] = NONE;
        my_weights[lane] = 0.f;
    }
    if (st.token_row(t) == NONE) return;
    __syncwarp();
    float score[PER], choice[PER];
    bool taken[PER];
#pragma unroll
    for (int p = 0; p < PER; p++) {
        int e = p * 32 + lane;
        score[p] = e < E ? logits[t * logits_stride + e] : -INF;
        taken[p] = e >= E;
        if constexpr (KIND == 2) {
            score[p] = sigmoid(score[p]);
            choice[p] = score[p];
            if constexpr (HAS_BIAS) choice[p] += e < E ? bias[e] : 0.f;
        } else {
            choice[p] = score[p];
        }
    }
    if constexpr (KIND == 2 && GROUPS > 1) {
        constexpr int SIZE = E / GROUPS;
#pragma unroll
        for (int p = 0; p < PER; p++)
            if (p * 32 + lane < E) choices[warp][p * 32 + lane] = choice[p];
        __syncwarp();
        for (int g = lane; g < GROUPS; g += 32) {
            float first = -INF, second = -INF;
            for (int i = 0; i < SIZE; i++) {
                float c = choices[warp][g * SIZE + i];
                second = fmaxf(second, fminf(first, c));
                first = fmaxf(first, c);
            }
            ranks[warp][g] = SIZE > 1 ? first + second : first;
        }
        __syncwarp();
#pragma unroll
        for (int p = 0; p < PER; p++) {
            if (p * 32 + lane >= E) continue;
            int mine = (p * 32 + lane) / SIZE, above = 0;
            for (int g = 0; g < GROUPS; g++)
                above += ranks[warp][g] > ranks[warp][mine] || (ranks[warp][g] == ranks[warp][mine] && g < mine);
            taken[p] |= above >= KEEP;
        }
    }
    float top = 0.f, sum = 0.f;
    u32 chosen[PER];
#pragma unroll
    for (int p = 0; p < PER; p++) chosen[p] = 0;
    for (int j = 0; j < TOP; j++) {
        float v = -INF;
        int i = E;
#pragma unroll
        for (int p = 0; p < PER; p++)
            if (!taken[p] && (choice[p] > v || i == E)) {
                v = choice[p];
                i = p * 32 + lane;
            }
        best_of_warp(v, i);
        if (i >= E) break;
        if (j == 0) top = v;
#pragma unroll
        for (int p = 0; p < PER; p++)
            if (i == p * 32 + lane) {
                taken[p] = true;
                chosen[p] = 1;
            }
    }
    if constexpr (KIND == 0) {
#pragma unroll
        for (int p = 0; p < PER; p++) {
            score[p] = p * 32 + lane < E ? expf(score[p] - top) : 0.f;
            sum += score[p];
        }
        sum = warp_sum(sum);
#pragma unroll
        for (int p = 0; p < PER; p++) score[p] /= sum;
    }
    if constexpr (KIND == 1) {
#pragma unroll
        for (int p = 0; p < PER; p++) score[p] = expf(score[p] - top);
    }
    float norm = 1.f;
    if constexpr (KIND == 1 || RENORM) {
        sum = 0.f;
#pragma unroll
        for (int p = 0; p < PER; p++) sum += chosen[p] ? score[p] : 0.f;
        norm = 1.f / (warp_sum(sum) + sum_eps);
    }
    int at = 0;
#pragma unroll
    for (int p = 0; p < PER; p++) {
        u32 mask = __ballot_sync(ALL, chosen[p]);
        if (chosen[p]) {
            int slot = at + __popc(mask & ((1u << lane) - 1));
            my_ids[slot] = p * 32 + lane;
            my_weights[slot] = score[p] * norm * scale;
        }
        at += __popc(mask);
    }
}
