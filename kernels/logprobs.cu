// Counts and log probabilities of sampled tokens, see core/src/ops/logprobs.rs. A block per output; sums have a fixed order.
// Flag COUNTED, header words FLAGS and TOP.

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / 32;
constexpr u32 ALL = 0xffffffffu;

// A u32 with the order of the floats; both zeros are equal. NaN counts as minus infinity.
constexpr u32 LOWEST_KEY = 0x007fffffu, INFINITE_KEY = 0xff800000u;
DEV u32 key_of(float x) {
    u32 b = __float_as_uint(x + 0.f);
    return x != x ? LOWEST_KEY : b & 0x80000000u ? ~b : b | 0x80000000u;
}
DEV float float_of(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// The largest key of all threads, the lowest id among equals, for every thread.
DEV void best_of_all(u32 &key, u32 &id, u32 *keys, u32 *ids) {
    for (int round = 0; round < 2; round++) {
#pragma unroll
        for (int m = 16; m; m >>= 1) {
            u32 k = __shfl_xor_sync(ALL, key, m), i = __shfl_xor_sync(ALL, id, m);
            if (k > key || (k == key && i < id)) {
                key = k;
                id = i;
            }
        }
        if (round == 1) break;
        if (threadIdx.x % 32 == 0) {
            keys[threadIdx.x / 32] = key;
            ids[threadIdx.x / 32] = id;
        }
        __syncthreads();
        key = keys[threadIdx.x % 32];
        id = ids[threadIdx.x % 32];
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(PARAMETERS) {
    let_next_start();
    wait_for_inputs();
    __shared__ u32 keys[WARPS], best_ids[WARPS];
    __shared__ float sums[WARPS];
    int o = blockIdx.x;
    if (st.output_token(o) == NONE || ids[o] == NONE) return;
    u32 token = ids[o], *lane_rules = rules + st.output_lane(o) * rules_stride;
    if (threadIdx.x == 0 && (lane_rules[FLAGS] & COUNTED)) lane_rules[counts + token]++;
    int n = (int)lane_rules[TOP] - 1;
    if (n < 0) return;
    const float *x = logits + o * logits_stride;
    float *to = report + o * report_stride;

    u32 key = 0, id = NONE;
    for (u32 i = threadIdx.x; i < vocab; i += THREADS) {
        u32 k = key_of(x[i]);
        if (k > key) {
            key = k;
            id = i;
        }
    }
    best_of_all(key, id, keys, best_ids);
    bool finite = key < INFINITE_KEY;
    float largest = float_of(key), sum = 0.f;
    for (u32 i = threadIdx.x; i < vocab && finite; i += THREADS)
        if (key_of(x[i]) > LOWEST_KEY) sum += expf(x[i] - largest);
    for (int round = 0; round < 2; round++) {
#pragma unroll
        for (int m = 16; m; m >>= 1) sum += __shfl_xor_sync(ALL, sum, m);
        if (round == 1) break;
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
        __syncthreads();
        sum = sums[threadIdx.x % 32];
    }
    float log_sum = logf(sum);
    if (threadIdx.x == 0) to[0] = finite && key_of(x[token]) > LOWEST_KEY ? (x[token] - largest) - log_sum : -INF;
    for (int rank = 0; rank < n; rank++) {
        bool found = finite && key > LOWEST_KEY;
        if (threadIdx.x == 0) {
            to[1 + 2 * rank] = found ? (float)id : -1.f;
            to[2 + 2 * rank] = found ? (float_of(key) - largest) - log_sum : 0.f;
        }
        if (rank + 1 == n) break;
        // The next one in the order of falling keys and then rising ids.
        u32 last_key = key, last_id = id;
        key = 0;
        id = NONE;
        for (u32 i = threadIdx.x; i < vocab; i += THREADS) {
            u32 k = key_of(x[i]);
            bool follows = k < last_key || (k == last_key && i > last_id);
            if (follows && k > key) {
                key = k;
                id = i;
            }
        }
        best_of_all(key, id, keys, best_ids);
    }
}
