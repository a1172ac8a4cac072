// One token per output row by the rule of core/src/sample.rs. Weights are 40-bit fixed point, so that sums do not depend on
// the order in which threads add. A block per output.
// MOST_TILES: at least vocab / TILE. The vocabulary is an argument, so that one image serves most models.

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / 32;
constexpr int TILE = THREADS * 4;
constexpr u32 ALL = 0xffffffffu;

DEV u32 mix(u32 h) {
    h = (h ^ (h >> 16)) * 0x85ebca6bu;
    h = (h ^ (h >> 13)) * 0xc2b2ae35u;
    return h ^ (h >> 16);
}

// 24 random bits of a position.
DEV u32 uniform24(u32 seed_low, u32 seed_high, u32 position) {
    u32 h = mix(seed_low ^ 0x9e3779b9u);
    h = mix(h ^ seed_high) + 0x7f4a7c15u;
    h = mix(h ^ position) + 0x165667b1u;
    return mix(h) >> 8;
}

// A u32 with the order of the floats; both zeros are equal.
DEV u32 key_of(float x) {
    u32 b = __float_as_uint(x + 0.f);
    return b & 0x80000000u ? ~b : b | 0x80000000u;
}

struct Row {
    const float *logits;
    const u32 *seen;
    int vocab;
    float penalty, max, inverse_temperature;

    // The penalised logit.
    DEV float score(int id) const {
        float x = logits[id];
        if (x != x) return -INF;
        if (penalty != 1.f && (seen[id / 32] >> (id % 32) & 1)) x = x > 0.f ? x / penalty : x * penalty;
        return x;
    }
    DEV u64 weight(float x) const { return (u64)(expf((x - max) * inverse_temperature) * 1099511627776.f); }
};

// Largest key t with `sum over keys >= max(t, least) of (1 or the weight) >= target`, 8 bits at a time.
template <bool WEIGHTED> DEV u32 select(const Row &row, u32 least, u64 target, u64 *bins, u64 *found) {
    u32 prefix = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < 256; i += THREADS) bins[i] = 0;
        __syncthreads();
        for (int id = threadIdx.x; id < row.vocab; id += THREADS) {
            float x = row.score(id);
            u32 key = key_of(x);
            if (key < least || (shift < 24 && (key ^ prefix) >> (shift + 8))) continue;
            u64 w = WEIGHTED ? row.weight(x) : 1;
            if (w) atomicAdd(&bins[key >> shift & 255], w);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            u64 sum = 0;
            int digit = 255;
            for (; digit > 0 && sum + bins[digit] < target; digit--) sum += bins[digit];
            found[0] = digit;
            found[1] = target - sum;
        }
        __syncthreads();
        prefix |= (u32)found[0] << shift;
        target = found[1];
        __syncthreads();
    }
    return prefix;
}

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(PARAMETERS) {
    let_next_start();
    wait_for_inputs();
    __shared__ u64 bins[256], found[2], tiles[MOST_TILES], warps[WARPS];
    __shared__ float best_value[WARPS];
    __shared__ int best_id[WARPS];
    int o = blockIdx.x;
    u32 token = st.output_token(o);
    if (token == NONE) return;
    u32 lane = st.output_lane(o);
    const u32 *params = lanes + lane * lanes_stride;
    float temperature = __uint_as_float(params[0]), top_p = __uint_as_float(params[1]),
          min_p = __uint_as_float(params[2]);
    const int V = vocab, TILES = div_up(V, TILE);
    Row row = {logits + o * logits_stride, seen + lane * seen_stride, V, __uint_as_float(params[3]), 0.f,
               1.f / temperature};
    u32 top_k = params[4];
    float max = -INF;
    int best = 0x7fffffff;
    if (row.penalty == 1.f && V % 4 == 0 && (u64)row.logits % 16 == 0) {
        // First the largest of many together (NaN is never the largest), then its id.
        constexpr int AHEAD = 8;
        int from = V;
        float x[AHEAD][4];
        auto fetch = [&](int base) {
#pragma unroll
            for (int a = 0; a < AHEAD; a++)
                if (base + a * TILE < V) load<4>(row.logits + base + a * TILE, x[a]);
        };
        for (int base = threadIdx.x * 4; base < V; base += AHEAD * TILE) {
            float top = -INF;
            fetch(base);
#pragma unroll
            for (int a = 0; a < AHEAD; a++)
                if (base + a * TILE < V) top = fmaxf(top, fmaxf(fmaxf(x[a][0], x[a][1]), fmaxf(x[a][2], x[a][3])));
            if (top > max) {
                max = top;
                from = base;
            }
        }
        fetch(from);
#pragma unroll
        for (int a = AHEAD - 1; a >= 0; a--)
#pragma unroll
            for (int e = 3; e >= 0; e--)
                if (from + a * TILE < V && x[a][e] == max) best = from + a * TILE + e;
    } else {
        for (int id = threadIdx.x; id < V; id += THREADS) {
            float x = row.score(id);
            if (x > max) {
                max = x;
                best = id;
            }
        }
    }
    for (int round = 0; round < 2; round++) {
#pragma unroll
        for (int m = 16; m; m >>= 1) {
            float x = __shfl_xor_sync(ALL, max, m);
            int id = __shfl_xor_sync(ALL, best, m);
            if (x > max || (x == max && id < best)) {
                max = x;
                best = id;
            }
        }
        if (round == 1) break;
        if (threadIdx.x % 32 == 0) {
            best_value[threadIdx.x / 32] = max;
            best_id[threadIdx.x / 32] = best;
        }
        __syncthreads();
        max = best_value[threadIdx.x % 32];
        best = best_id[threadIdx.x % 32];
    }
    bool finite = max > -INF && max < INF;
    int id = finite ? best : (int)NONE;
    if (temperature != 0.f && finite) {
        row.max = max;
        u32 least = 0;
        if (top_k > 0 && top_k < V) least = select<false>(row, 0, top_k, bins, found);
        if (top_p < 1.f) {
            if (threadIdx.x == 0) found[0] = 0;
            __syncthreads();
            u64 sum = 0;
            for (int i = threadIdx.x; i < V; i += THREADS) {
                float x = row.score(i);
                if (key_of(x) >= least) sum += row.weight(x);
            }
            atomicAdd(&found[0], sum);
            __syncthreads();
            u64 target = (u64)ceil((double)top_p * (double)found[0]);
            __syncthreads();
            least = ::max(least, select<true>(row, least, ::max(target, 1ull), bins, found));
        }
        if (min_p > 0.f) {
            float floor = min_p < 1.f ? (float)((double)max + log((double)min_p) * (double)temperature) : max;
            least = ::max(least, key_of(floor));
        }
        // Weight of every tile, then the tile that the random number falls into, then the id in it.
        for (int i = threadIdx.x; i < TILES; i += THREADS) tiles[i] = 0;
        __syncthreads();
        for (int t = 0; t < TILES; t++) {
            u64 sum = 0;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int i = t * TILE + threadIdx.x * 4 + j;
                float x = i < V ? row.score(i) : -INF;
                if (i < V && key_of(x) >= least) sum += row.weight(x);
            }
#pragma unroll
            for (int m = 16; m; m >>= 1) sum += __shfl_xor_sync(ALL, sum, m);
            if (threadIdx.x % 32 == 0 && sum) atomicAdd(&tiles[t], sum);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            u64 total = 0;
            for (int t = 0; t < TILES; t++) total += tiles[t];
            u64 bits = uniform24(params[5], params[6], st.position(token) + 1);
            u64 target = __umul64hi(total, bits) << 40 | (total * bits) >> 24;
            u64 sum = 0;
            int t = 0;
            for (; t < TILES - 1 && sum + tiles[t] <= target; t++) sum += tiles[t];
            found[0] = t;
            found[1] = target - sum;
            best_id[0] = best;
        }
        __syncthreads();
        int base = (int)found[0] * TILE + threadIdx.x * 4;
        u64 target = found[1], w[4], mine = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float x = base + j < V ? row.score(base + j) : -INF;
            w[j] = base + j < V && key_of(x) >= least ? row.weight(x) : 0;
            mine += w[j];
        }
        u64 upto = mine;
#pragma unroll
        for (int m = 1; m < 32; m *= 2) {
            u64 other = __shfl_up_sync(ALL, upto, m);
            if (threadIdx.x % 32 >= m) upto += other;
        }
        if (threadIdx.x % 32 == 31) warps[threadIdx.x / 32] = upto;
        __syncthreads();
        for (int i = 0; i < threadIdx.x / 32; i++) upto += warps[i];
        u64 before = upto - mine;
        if (before <= target && upto > target) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (before <= target && before + w[j] > target) best_id[0] = base + j;
                before += w[j];
            }
        }
        __syncthreads();
        id = best_id[0];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        ids[o] = id;
        // Of several outputs of a lane, the last one's id stays.
        if (o + 1 >= st.outputs || st.output_token(o + 1) == NONE || st.output_lane(o + 1) != lane) last[lane] = id;
        if (finite) atomicOr(seen + lane * seen_stride + id / 32, 1u << (id % 32));
    }
}
