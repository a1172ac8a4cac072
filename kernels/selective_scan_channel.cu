// Selective scan of long rows with parameters per channel (Mamba-1), bf16 in, f32 state. A block owns CB channels of one sequence and
// walks its chunks in order. What limits it is a power of two per state element and token, so nothing else is left to the
// warps that compute those: a thread of theirs holds 8 of a channel's 16 states. Four warps bring the coming chunk to shared
// memory, with softplus and products taken; four add the halves of the outputs and write them.
// Sums have the order of selective_scan.cu, so that both give the same bits.
// Grid (as many rows as can be long, channels / CB). Rows of at most MIN_TOKENS tokens are left to selective_scan.cu.
// HEADS, N, CB, HEADS_PER_GROUP, FIRST_HEAD (all channels are of one group), MIN_TOKENS; pool_t.

constexpr int Q = PAGE;
constexpr int SCAN = CB / 32 * 2;                // warps with state
constexpr int SIDE = 128;                        // threads that bring inputs, and as many that write outputs
constexpr int PIECES = CB / 8;                   // of 16 bytes of a row of x
constexpr int ROWS = SIDE / PIECES;              // tokens that the bringing threads take at a time
constexpr int PASSES = Q / ROWS;
constexpr int OWN = N / 2;                       // states of a thread
// Bytes of a stage: log2(e) dt and dt x of each token and channel, x, then B and C; all f32.
constexpr int AT_X = Q * CB * 8, AT_B = AT_X + Q * CB * 4, STAGE = AT_B + Q * 2 * N * 4;
constexpr int OUTPUTS = 2 * Q * CB * 4;          // both halves of the outputs of a chunk
constexpr int AHEAD = 2;                         // tokens of a turn
constexpr int TURNS = 8;                         // turns that are laid out one after the other, so that they may overlap
static_assert(N == 16, "two threads hold the states of a channel");

// Where 2 of the 8 channels of piece `p` lie in a row of pairs, and 4 of them in a row of floats: stores of 8 lanes and loads of a
// warp meet every bank once.
DEV int pair_at(int p, int i) { return p * 64 + ((i ^ p / 2 & 3) << 4); }
DEV int four_at(int p, int i) { return p * 32 + ((i ^ p / 4 & 1) << 4); }
DEV float4 floats(uint4 v) {
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
DEV void store_floats(u32 addr, float a, float b, float c, float d) {
    store_shared16(addr, make_uint4(__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d)));
}

// Inputs of a token for a thread with states: dt x, x, two runs of four of B and of C.
struct Token {
    float by, x;
    float4 b[2], c[2];
};

extern "C" __global__ void __launch_bounds__(32 * SCAN + 2 * SIDE, 1) ENTRY(PARAMETERS) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ u64 bars[8];
    int r = long_row(st, MIN_TOKENS, blockIdx.x);
    if (r < 0) return;
    const u32 *row = st.row(r);
    int chunks = row[3];
    if (chunks == 0) return;
    const u32 *table = st.chunk(row[2]);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, h0 = blockIdx.y * CB;
    // A stage has been written, has been read; outputs have been written, have been read. Two of each.
    u32 full = smem_addr(bars), empty = full + 16, ready = empty + 16, taken = ready + 16;
    u32 stages = smem_addr(shared), outputs = stages + 2 * STAGE;
    // Every lane arrives for itself: racecheck does not follow one lane that arrives for its warp.
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            mbar_init(full + 8 * i, SIDE);
            mbar_init(empty + 8 * i, 32 * SCAN);
            mbar_init(ready + 8 * i, 32 * SCAN);
            mbar_init(taken + 8 * i, SIDE);
        }
    }
    __syncthreads();

    if (warp >= SCAN + SIDE / 32) {
        int tid = threadIdx.x - 32 * SCAN - SIDE;
        for (int i = 0; i < chunks; i++) {
            int start = table[5 * i + 1], len = table[5 * i + 2];
            u32 from = outputs + i % 2 * OUTPUTS;
            mbar_wait(ready + i % 2 * 8, i / 2 & 1);
#pragma unroll
            for (int j = 0; j < PASSES; j++) {
                int t = j * ROWS + tid / PIECES, p = tid % PIECES;
                if (t >= len) continue;
                u32 at = from + (t * CB + p * 8) * 4;
                float4 a[2], b[2];
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    a[k] = floats(load_shared16(at + 16 * k));
                    b[k] = floats(load_shared16(at + Q * CB * 4 + 16 * k));
                }
                *reinterpret_cast<uint4 *>(y + (i64)(start + t) * y_stride + h0 + p * 8) =
                    make_uint4(pack_bf16(a[0].x + b[0].x, a[0].y + b[0].y), pack_bf16(a[0].z + b[0].z, a[0].w + b[0].w),
                               pack_bf16(a[1].x + b[1].x, a[1].y + b[1].y), pack_bf16(a[1].z + b[1].z, a[1].w + b[1].w));
            }
            mbar_arrive(taken + i % 2 * 8);
        }
        return;
    }

    if (warp >= SCAN) {
        int tid = threadIdx.x - 32 * SCAN, p = tid % PIECES, group = FIRST_HEAD / HEADS_PER_GROUP * N;
        float bias[8];
#pragma unroll
        for (int k = 0; k < 8; k++) bias[k] = par[(N + 1) * par_stride + h0 + p * 8 + k];
        // Of ROWS tokens a pass: x and dt of 8 channels. Of token tid / 2: half of B and of C. Each is asked for as soon as the
        // one of the chunk before has been used.
        Packed<8, bf16> x_in[PASSES], dt_in[PASSES], b_in, c_in;
        auto fetch = [&](int i, int j) {
            i64 t = table[5 * i + 1] + min(j * ROWS + tid / PIECES, (int)table[5 * i + 2] - 1);
            x_in[j] = load_raw<8>(x + t * x_stride + h0 + p * 8);
            dt_in[j] = load_raw<8>(dt + t * dt_stride + h0 + p * 8);
        };
        auto fetch_shared = [&](int i) {
            i64 t = table[5 * i + 1] + min(tid / 2, (int)table[5 * i + 2] - 1);
            b_in = load_raw<8>(b + t * b_stride + group + tid % 2 * 8);
            c_in = load_raw<8>(cc + t * cc_stride + group + tid % 2 * 8);
        };
        fetch_shared(0);
#pragma unroll
        for (int j = 0; j < PASSES; j++) fetch(0, j);
        for (int i = 0; i < chunks; i++) {
            int len = table[5 * i + 2], following = min(i + 1, chunks - 1);
            if (i >= 2) mbar_wait(empty + i % 2 * 8, (i / 2 - 1) & 1);
            u32 to = stages + i % 2 * STAGE;
            // Tokens after the last one change nothing.
            auto put = [&](u32 at, const float *v, bool in) {
                store_floats(at, in ? v[0] : 0.f, in ? v[1] : 0.f, in ? v[2] : 0.f, in ? v[3] : 0.f);
            };
            float v[8], w[8];
            bool in = tid / 2 < len;
            u32 at = to + AT_B + tid * 32;
            unpack<8>(b_in, v);
            unpack<8>(c_in, w);
#pragma unroll
            for (int k = 0; k < 8; k += 4) {
                put(at + k * 4, v + k, in);
                put(at + Q * N * 4 + k * 4, w + k, in);
            }
            fetch_shared(following);
#pragma unroll
            for (int j = 0; j < PASSES; j++) {
                int t = j * ROWS + tid / PIECES;
                in = t < len;
                unpack<8>(x_in[j], v);
                unpack<8>(dt_in[j], w);
#pragma unroll
                for (int k = 0; k < 2; k++) put(to + AT_X + t * CB * 4 + four_at(p, k), v + 4 * k, in);
#pragma unroll
                for (int k = 0; k < 8; k += 2) {
                    float each[4];
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float step = fminf(fmaxf(softplus(w[k + e] + bias[k + e]), dt_min), dt_max);
                        each[2 * e] = LOG2E * step;
                        each[2 * e + 1] = step * v[k + e];
                    }
                    put(to + t * CB * 8 + pair_at(p, k / 2), each, in);
                }
                fetch(following, j);
            }
            mbar_arrive(full + i % 2 * 8);
        }
        return;
    }

    // The warp's half of the states: 4 half + 0 .. 3, then those 8 after them.
    int half = warp % 2, channel = warp / 2 * 32 + lane, h = h0 + channel;
    int at_step = pair_at(channel / 8, channel / 2 % 4) + channel % 2 * 8;
    int at_x = AT_X + four_at(channel / 8, channel / 4 % 2) + channel % 4 * 4, at_b = AT_B + half * 16;
    // The skip is the first half's.
    float a[OWN], s[OWN], d = half == 0 ? par[N * par_stride + h] : 0.f;
    u32 src = table[3];
    i64 base = (i64)h * N + half * 4;
#pragma unroll
    for (int e = 0; e < OWN; e++) {
        int n = e / 4 * 8 + e % 4;
        a[e] = par[(half * 4 + n) * par_stride + h];
        s[e] = src == 0 ? 0.f : to_f32(pool[src * pool_stride + base + n]);
    }
    for (int i = 0; i < chunks; i++) {
        int len = table[5 * i + 2];
        u32 dst = table[5 * i + 4];
        u32 from = stages + i % 2 * STAGE, to = outputs + i % 2 * OUTPUTS + half * (Q * CB * 4) + channel * 4;
        mbar_wait(full + i % 2 * 8, i / 2 & 1);
        if (i >= 2) mbar_wait(taken + i % 2 * 8, (i / 2 - 1) & 1);
        // Decays are taken a turn before their use, from steps that were read a turn before that: a warp that has no other on its
        // scheduler must not wait for what it asked for last. Turns after the chunk's end read its last tokens, for nothing.
        float steps[2][AHEAD], decays[2][AHEAD][OWN];
        Token tokens[2][AHEAD];
        auto fetch_steps = [&](int of, int t) {
#pragma unroll
            for (int j = 0; j < AHEAD; j++) steps[of][j] = load_shared_f32(from + at_step + (min(t, Q - AHEAD) + j) * (CB * 8));
        };
        auto fetch = [&](int of, int t) {
            t = min(t, Q - AHEAD);
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                Token &token = tokens[of][j];
                token.by = load_shared_f32(from + at_step + 4 + (t + j) * (CB * 8));
                token.x = load_shared_f32(from + at_x + (t + j) * (CB * 4));
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    token.b[k] = floats(load_shared16(from + at_b + (t + j) * (N * 4) + k * 32));
                    token.c[k] = floats(load_shared16(from + at_b + Q * N * 4 + (t + j) * (N * 4) + k * 32));
                }
            }
        };
        // The tokens of set `of`, from t on, and the decays of the other set. One after the other for every state, so that the powers
        // are spread between the products.
        auto advance = [&](int of, int t) {
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                const Token &token = tokens[of][j];
                float sums[2] = {d * token.x, 0.f};
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    const float bv[4] = {token.b[k].x, token.b[k].y, token.b[k].z, token.b[k].w};
                    const float cv[4] = {token.c[k].x, token.c[k].y, token.c[k].z, token.c[k].w};
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float &v = s[4 * k + e];
                        decays[1 - of][j][4 * k + e] = ex2(steps[1 - of][j] * a[4 * k + e]);
                        v = __fmaf_rn(token.by, bv[e], decays[of][j][4 * k + e] * v);
                        sums[k] = __fmaf_rn(v, cv[e], sums[k]);
                    }
                }
                store_shared(to + (t + j) * (CB * 4), __float_as_uint(sums[0] + sums[1]));
            }
        };
        fetch_steps(0, 0);
        fetch(0, 0);
        fetch_steps(1, AHEAD);
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
#pragma unroll
            for (int e = 0; e < OWN; e++) decays[0][j][e] = ex2(steps[0][j] * a[e]);
        fetch_steps(0, 2 * AHEAD);
        // Tokens after the last one change nothing.
        for (int t = 0; t < len; t += TURNS * AHEAD) {
#pragma unroll
            for (int j = 0; j < TURNS; j++) {
                fetch(1 - j % 2, t + (1 + j) * AHEAD);
                advance(j % 2, t + j * AHEAD);
                fetch_steps(1 - j % 2, t + (3 + j) * AHEAD);
            }
        }
        mbar_arrive(empty + i % 2 * 8);
        mbar_arrive(ready + i % 2 * 8);
        if (dst != 0) {
#pragma unroll
            for (int e = 0; e < OWN; e++) pool[dst * pool_stride + base + e / 4 * 8 + e % 4] = from_f32<pool_t>(s[e]);
        }
    }
}
