// The rules of lanes over their logits, see core/src/ops/adjust.rs. Grid (O, tiles of TILE ids), 256 threads.
// TILE, flags RULED, MASKED, COUNTED, header words FLAGS, REPETITION, FREQUENCY, PRESENCE, ENTRIES, and FIRST_ENTRY.

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(PARAMETERS) {
    let_next_start();
    wait_for_inputs();
    // Bias of each id of the tile; minus infinity: it may not come yet.
    __shared__ float biases[TILE];
    int o = blockIdx.x;
    u32 token = st.output_token(o);
    if (token == NONE) return;
    u32 lane = st.output_lane(o);
    const u32 *lane_rules = rules + lane * rules_stride, *known = seen + lane * seen_stride;
    u32 flags = lane_rules[FLAGS], first = blockIdx.y * TILE, last = min(first + TILE, vocab);
    const float *from = logits + o * logits_stride;
    float *to = out + o * out_stride;
    if (!(flags & RULED)) {
        for (u32 id = first + threadIdx.x; id < last; id += THREADS) to[id] = from[id];
        return;
    }
    for (int i = threadIdx.x; i < TILE; i += THREADS) biases[i] = 0.f;
    __syncthreads();
    u32 position = st.position(token) + 1, entries = lane_rules[ENTRIES];
    for (u32 e = threadIdx.x; e < entries; e += THREADS) {
        const u32 *entry = lane_rules + FIRST_ENTRY + 3 * e;
        if (entry[0] < first || entry[0] >= last) continue;
        biases[entry[0] - first] = position < entry[2] ? -INF : __uint_as_float(entry[1]);
    }
    __syncthreads();
    float penalty = __uint_as_float(lane_rules[REPETITION]), frequency = __uint_as_float(lane_rules[FREQUENCY]),
          presence = __uint_as_float(lane_rules[PRESENCE]);
    for (u32 id = first + threadIdx.x; id < last; id += THREADS) {
        float x = from[id], bias = biases[id - first];
        bool denied = x != x || bias == -INF;
        if (flags & MASKED) denied |= !(lane_rules[mask + id / 32] >> (id % 32) & 1);
        if (denied) {
            to[id] = -INF;
            continue;
        }
        x += bias;
        if (penalty != 1.f && (known[id / 32] >> (id % 32) & 1)) x = x > 0.f ? x / penalty : x * penalty;
        u32 n = flags & COUNTED ? lane_rules[counts + id] : 0;
        if (n > 0) x = (x - frequency * n) - presence;
        to[id] = x;
    }
}
