// Second half of the chunked gated delta rule on tensor cores: a block owns DB columns of the state of one head of one
// sequence and walks the chunks in order. A warp holds 16 columns of S, transposed, in registers: sums of one product are
// operands of the next, and columns are independent, so warps exchange nothing between S and the next S. A second warp computes the outputs of the same columns, others copy the coming chunks to shared memory.
// Per chunk, with the results of the first half: R = V - f_k ⊙ (K S); O = f_q ⊙ (Q S) + (M T) R; S = decay S + Wᵀ R.
// With a decay per channel (EACH), K̂ and Q̂ of the first half stand for f_k ⊙ K and f_q ⊙ Q.
// Grid (as many rows as can be long, heads * DV / DB). Rows of at most MIN_TOKENS tokens are left to gated_delta.cu.
// HEADS, DK, DV, DB, STAGES, EACH, HEADS_PER_KEY, FIRST_HEAD, MIN_TOKENS; pool_t.

#include "gated_delta_unit.cuh"
constexpr int PAIRS = DB / 16;
constexpr int THREADS = 64 * PAIRS;              // that compute; COPY more threads copy
constexpr int COPY = 128;
// Bytes of a stage: a unit; unless it has them, K and Q; V.
constexpr int AT_V = AT_Q + Q * DK * 2, STAGE = AT_V + Q * DB * 2;
constexpr int PAIR_BYTES = (KSTEPS + Q / 16) * 512;        // S and R as operands, for the warp of the outputs
constexpr int BLOCKS = DV / DB;

extern "C" __global__ void __launch_bounds__(THREADS + COPY, 1) ENTRY(PARAMETERS) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ u64 bars[2 * STAGES + 2 * PAIRS];
    int r = long_row(st, MIN_TOKENS, blockIdx.x);
    if (r < 0) return;
    const u32 *row = st.row(r);
    int chunks = row[3], first = row[2];
    if (chunks == 0) return;
    const u32 *table = st.chunk(first);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    int h = blockIdx.y / BLOCKS, col0 = blockIdx.y % BLOCKS * DB;
    // A stage has arrived, has been read; the operands of a pair have been written, have been read.
    u32 full = smem_addr(bars), empty = full + 8 * STAGES, ready = empty + 8 * STAGES, taken = ready + 8 * PAIRS;
    u32 stages = smem_addr(shared), pairs = stages + STAGES * STAGE;
    // Every lane arrives for itself: racecheck does not follow one lane that arrives for its warp.
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbar_init(full + 8 * i, COPY);
            mbar_init(empty + 8 * i, 64 * PAIRS);
        }
        for (int i = 0; i < 2 * PAIRS; i++) mbar_init(ready + 8 * i, 32);
    }
    __syncthreads();

    if (warp >= 2 * PAIRS) {
        int copier = threadIdx.x - THREADS, key = (FIRST_HEAD + h) / HEADS_PER_KEY * DK;
        i64 start = table[1];
        int len = table[2];
        const u8 *unit = scratch + ((i64)first * HEADS + h) * UNIT_BYTES;
        // Every thread waits for its copies of a chunk before it copies the next, and arrives: racecheck reports copies here that
        // arrive by themselves, and it takes no longer.
        auto arrive = [&](int i) {
            cp_async_wait<0>();
            mbar_arrive(full + 8 * (i % STAGES));
        };
        for (int i = 0; i < chunks; i++, unit += (i64)HEADS * UNIT_BYTES) {
            int s = i % STAGES;
            if (i > 0) arrive(i - 1);
            if (i >= STAGES) mbar_wait(empty + 8 * s, (i / STAGES - 1) & 1);
            u32 to = stages + s * STAGE;
            if (!EACH) {
                cp_async_tile<Q, DK / 8, COPY>(to + AT_K, k + start * k_stride + key, k_stride, len, copier);
                cp_async_tile<Q, DK / 8, COPY>(to + AT_Q, q + start * q_stride + key, q_stride, len, copier);
            }
            cp_async_tile<Q, DB / 8, COPY>(to + AT_V, v + start * v_stride + h * DV + col0, v_stride, len, copier);
#pragma unroll
            for (int j = 0; j < UNIT_BYTES; j += COPY * 16)
                if (j + COPY * 16 <= UNIT_BYTES || j + copier * 16 < UNIT_BYTES)
                    cp_async16(to + j + copier * 16, unit + j + copier * 16);
            cp_async_commit();
            if (i + 1 < chunks) {
                start = table[5 * i + 6];
                len = table[5 * i + 7];
            }
        }
        arrive(chunks - 1);
        return;
    }

    int pair = warp % PAIRS;
    u32 mine = pairs + pair * PAIR_BYTES + lane * 16;
    ready += 8 * pair;
    taken += 8 * pair;
    int block = lane / 8, brow = lane % 8;
    int a_row = brow + block % 2 * 8, a_piece = block / 2;
    int b_row = brow + block / 2 * 8, b_piece = block % 2;

    if (warp >= PAIRS) {
        int start = table[1], len = table[2];
        for (int i = 0; i < chunks; i++) {
            mbar_wait(ready, i & 1);
            uint4 s[KSTEPS], d[Q / 16];
#pragma unroll
            for (int j = 0; j < KSTEPS; j++) s[j] = load_shared16(mine + j * 512);
#pragma unroll
            for (int j = 0; j < Q / 16; j++) d[j] = load_shared16(mine + (KSTEPS + j) * 512);
            mbar_arrive(taken);
            mbar_wait(full + 8 * (i % STAGES), i / STAGES & 1);
            u32 from = stages + i % STAGES * STAGE;
            float o[4][2][4] = {};
#pragma unroll
            for (int j = 0; j < KSTEPS; j++)
#pragma unroll
                for (int t = 0; t < 4; t++) {
                    u32 x[4];
                    ldmatrix_x4(x, from + AT_Q + swizzle<DK / 8>(t * 16 + a_row, 2 * j + a_piece));
                    mma_bf16(o[t][0], x, s[j].x, s[j].z);
                    mma_bf16(o[t][1], x, s[j].y, s[j].w);
                }
#pragma unroll
            for (int t = 0; t < 4 && !EACH; t++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float f = load_shared_f32(from + AT_F + (Q + t * 16 + g + 8 * e) * 4);
#pragma unroll
                    for (int n = 0; n < 2; n++) o[t][n][2 * e] *= f, o[t][n][2 * e + 1] *= f;
                }
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int t = j; t < 4; t++) {
                    u32 x[4];
                    ldmatrix_x4(x, from + AT_M + swizzle<Q / 8>(t * 16 + a_row, 2 * j + a_piece));
                    mma_bf16(o[t][0], x, d[j].x, d[j].z);
                    mma_bf16(o[t][1], x, d[j].y, d[j].w);
                }
            mbar_arrive(empty + 8 * (i % STAGES));
            bf16 *to = out + (i64)start * out_stride + h * DV + col0 + pair * 16 + 2 * c;
#pragma unroll
            for (int t = 0; t < 4; t++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    int at = t * 16 + g + 8 * e;
                    if (at >= len) continue;
#pragma unroll
                    for (int n = 0; n < 2; n++)
                        *reinterpret_cast<u32 *>(to + at * out_stride + n * 8) = pack_bf16(o[t][n][2 * e], o[t][n][2 * e + 1]);
                }
            if (i + 1 < chunks) {
                start = table[5 * i + 6];
                len = table[5 * i + 7];
            }
        }
        return;
    }

    // Tile n of s: columns g and g + 8 of these 16, rows 8 n + 2 c, + 1 of S.
    float s[2 * KSTEPS][4];
    i64 base = ((i64)h * DK + 2 * c) * DV + col0 + pair * 16 + g;
    u32 src = table[3];
#pragma unroll
    for (int n = 0; n < 2 * KSTEPS; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[n][e] = src == 0 ? 0.f : to_f32(pool[src * pool_stride + base + (8 * n + e % 2) * DV + e / 2 * 8]);
    u32 dst = table[4];
    for (int i = 0; i < chunks; i++) {
        u32 from = stages + i % STAGES * STAGE;
        mbar_wait(full + 8 * (i % STAGES), i / STAGES & 1);
        if (i > 0) mbar_wait(taken, (i - 1) & 1);
        float d[8][4] = {};
#pragma unroll
        for (int j = 0; j < KSTEPS; j++) {
            u32 x[4] = {pack_bf16(s[2 * j][0], s[2 * j][1]), pack_bf16(s[2 * j][2], s[2 * j][3]),
                        pack_bf16(s[2 * j + 1][0], s[2 * j + 1][1]), pack_bf16(s[2 * j + 1][2], s[2 * j + 1][3])};
            store_shared16(mine + j * 512, make_uint4(x[0], x[1], x[2], x[3]));
#pragma unroll
            for (int t = 0; t < 4; t++) {
                u32 y[4];
                ldmatrix_x4(y, from + AT_K + swizzle<DK / 8>(t * 16 + b_row, 2 * j + b_piece));
                mma_bf16(d[2 * t], x, y[0], y[1]);
                mma_bf16(d[2 * t + 1], x, y[2], y[3]);
            }
        }
        u32 w[4][4];
#pragma unroll
        for (int t = 0; t < 4; t++) {
            u32 y[4];
            ldmatrix_x4_trans(y, from + AT_V + swizzle<DB / 8>(t * 16 + b_row, 2 * pair + b_piece));
#pragma unroll
            for (int n = 0; n < 2; n++) {
                u32 f = from + AT_F + (t * 16 + n * 8 + 2 * c) * 4;
                float2 by = EACH ? make_float2(1.f, 1.f) : load_shared_f32x2(f);
                const float *z = d[2 * t + n];
                w[t][2 * n] = pack_bf16(bf16_lo(y[2 * n]) - by.x * z[0], bf16_hi(y[2 * n]) - by.y * z[1]);
                w[t][2 * n + 1] = pack_bf16(bf16_lo(y[2 * n + 1]) - by.x * z[2], bf16_hi(y[2 * n + 1]) - by.y * z[3]);
            }
            store_shared16(mine + (KSTEPS + t) * 512, make_uint4(w[t][0], w[t][1], w[t][2], w[t][3]));
        }
        mbar_arrive(ready);
        // Of one number every row's is the same.
        float2 decay = load_shared_f32x2(from + AT_F + (EACH ? 8 * c : 2 * Q * 4));
#pragma unroll
        for (int n = 0; n < 2 * KSTEPS; n++) {
            if (EACH && n > 0) decay = load_shared_f32x2(from + AT_F + (8 * n + 2 * c) * 4);
#pragma unroll
            for (int e = 0; e < 4; e++) s[n][e] *= e % 2 ? decay.y : decay.x;
        }
#pragma unroll
        for (int t = 0; t < 4; t++)
#pragma unroll
            for (int n = 0; n < KSTEPS; n++) {
                u32 y[4];
                ldmatrix_x4_trans(y, from + swizzle<DK / 8>(t * 16 + a_row, 2 * n + a_piece));
                mma_bf16(s[2 * n], w[t], y[0], y[1]);
                mma_bf16(s[2 * n + 1], w[t], y[2], y[3]);
            }
        mbar_arrive(empty + 8 * (i % STAGES));
        if (dst != 0) {
#pragma unroll
            for (int n = 0; n < 2 * KSTEPS; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    pool[dst * pool_stride + base + (8 * n + e % 2) * DV + e / 2 * 8] = from_f32<pool_t>(s[n][e]);
        }
        if (i + 1 < chunks) dst = table[5 * i + 9];
    }
}
