// The experts of a token and their weights, chosen by a warp; expert e sits in register e / 32 of lane e % 32.
// E, TOP, KIND (0 softmax over all then top-k, 1 top-k then softmax, 2 sigmoid), RENORM, GROUPS, KEEP (groups), HAS_BIAS.

constexpr int PER = div_up(E, 32);
constexpr u32 ALL = 0xffffffffu;

// A number whose order is that of the values, NaN below all others, and the value. 0 is below every number.
DEV u32 rank_of(float x) {
    u32 bits = __float_as_uint(x + 0.f);         // -0 is 0
    return x != x ? 1 : bits ^ ((int)bits < 0 ? 0xffffffffu : 0x80000000u);
}
DEV float ranked(u32 r) { return __uint_as_float(r ^ ((int)r < 0 ? 0x80000000u : 0xffffffffu)); }

// Of N numbers from FIRST on, as a tree.
template <int FIRST, int N> DEV u32 largest(const u32 *v) {
    if constexpr (N == 1) return v[FIRST];
    else return max(largest<FIRST, N / 2>(v), largest<FIRST + N / 2, N - N / 2>(v));
}

// What is added to the scores for the choice. No kernel writes it.
DEV void load_extra(const float *bias, float *extra) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int p = 0; p < PER; p++) extra[p] = KIND == 2 && HAS_BIAS && p * 32 + lane < E ? bias[p * 32 + lane] : 0.f;
}

// Writes TOP ids in ascending order and their weights; NONE and 0 where there is no expert. The logits are read past the L1, which may
// hold older values. `choices` [E] and `ranks` [GROUPS] are shared memory of the warp, used with several groups.
DEV void choose(const float *logits, const float *extra, float sum_eps, float scale, u32 *my_ids, float *my_weights, float *choices,
                float *ranks) {
    int lane = threadIdx.x % 32;
    if (lane < TOP) {
        my_ids[lane] = NONE;
        my_weights[lane] = 0.f;
    }
    __syncwarp();
    float score[PER], choice[PER];
    bool taken[PER];
#pragma unroll
    for (int p = 0; p < PER; p++) {
        int e = p * 32 + lane;
        score[p] = e < E ? __ldcg(logits + e) : -INF;
        taken[p] = e >= E;
        if constexpr (KIND == 2) {
            score[p] = sigmoid(score[p]);
            choice[p] = score[p];
            if constexpr (HAS_BIAS) choice[p] += extra[p];
        } else {
            choice[p] = score[p];
        }
    }
    if constexpr (KIND == 2 && GROUPS > 1) {
        constexpr int SIZE = E / GROUPS;
#pragma unroll
        for (int p = 0; p < PER; p++)
            if (p * 32 + lane < E) choices[p * 32 + lane] = choice[p];
        __syncwarp();
        for (int g = lane; g < GROUPS; g += 32) {
            float first = -INF, second = -INF;
            for (int i = 0; i < SIZE; i++) {
                float c = choices[g * SIZE + i];
                second = fmaxf(second, fminf(first, c));
                first = fmaxf(first, c);
            }
            ranks[g] = SIZE > 1 ? first + second : first;
        }
        __syncwarp();
#pragma unroll
        for (int p = 0; p < PER; p++) {
            if (p * 32 + lane >= E) continue;
            int mine = (p * 32 + lane) / SIZE, above = 0;
            for (int g = 0; g < GROUPS; g++)
                above += ranks[g] > ranks[mine] || (ranks[g] == ranks[mine] && g < mine);
            taken[p] |= above >= KEEP;
        }
    }
    float top = 0.f, sum = 0.f;
    u32 chosen[PER], rank[PER];
#pragma unroll
    for (int p = 0; p < PER; p++) {
        chosen[p] = 0;
        rank[p] = taken[p] ? 0 : rank_of(choice[p]);
    }
    for (int j = 0; j < TOP; j++) {
        u32 best = __reduce_max_sync(ALL, largest<0, PER>(rank));
        int i = E;
        if (best == 0) break;
        // The lowest of equals.
#pragma unroll
        for (int p = PER - 1; p >= 0; p--)
            if (rank[p] == best) i = p * 32 + lane;
        i = __reduce_min_sync(ALL, i);
        if (j == 0) top = ranked(best);
#pragma unroll
        for (int p = 0; p < PER; p++)
            if (i == p * 32 + lane) {
                rank[p] = 0;
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
        float inverse = 1.f / sum;
#pragma unroll
        for (int p = 0; p < PER; p++) score[p] *= inverse;
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
