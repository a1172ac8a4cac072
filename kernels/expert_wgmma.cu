// Products of experts with the pairs that chose them, bf16, compute capability 9.0, and the activation after them. A tile is up to
// BT pairs of one expert, from the tables of expert_sort, and ROWS rows of w. w is the left operand of the products, so that an
// expert with few pairs wastes few columns. One warpgroup copies and gathers the rows of x, two compute. Gate and up lie in a tile
// in turn, 8 rows of each, so that a thread holds both. Block b takes the tiles b, b + gridDim.x and so on.
// K, N, TOP, X_PER_PAIR (x has a row per choice), BT, STAGES, PARTS (2: gate and up), HAS_MID, ACT; out and mid are bf16.

#include "wgmma.cuh"

constexpr int GROUP = 128;                       // threads of a warpgroup
constexpr int BM = 256;                          // most rows of w in a tile
constexpr int M_TILES = div_up(N, BM);
constexpr int ROWS = div_up(div_up(N, M_TILES), 16) * 16;
constexpr int STEPS = div_up(K, 64);
constexpr u32 W_BYTES = BM * 128, STAGE = W_BYTES + BT * 128;
constexpr int INNER = N / PARTS;
constexpr int GRAIN = 16;                        // columns of a product are a multiple of it
constexpr int CHUNK = 32;                        // pairs that are stored at a time
constexpr int PIECES = 16;                       // of 16 bytes, of a warpgroup's rows of w

struct Tile {
    u32 expert, begin, pairs, unused;
};

// The outputs of a warpgroup: the tile's pairs, and their place in memory.
struct Place {
    u32 staged;                                  // CHUNK x PIECES pieces in shared memory
    const u32 *order;                            // of the tile
    int pairs, m0, group, tid;
};

// Stores CHUNK pairs from `first` on, of WIDE pieces each; `column` says where a piece goes, or a negative number.
template <int WIDE, class F> DEV void copy_out(const Place &at, int first, bf16 *to, i64 stride, F column) {
    named_sync(1 + at.group, GROUP);
#pragma unroll
    for (int v = at.tid; v < CHUNK * WIDE; v += GROUP) {
        int t = v / WIDE, p = v % WIDE, col = column(p);
        if (first + t < at.pairs && col >= 0)
            *reinterpret_cast<uint4 *>(to + at.order[first + t] * stride + col) =
                load_shared16(at.staged + swizzle<WIDE>(t, p));
    }
    named_sync(1 + at.group, GROUP);
}

// Sums of CHUNK pairs, rounded, two pairs in a register. Indices: 64 rows of w of the warpgroup, 8 pairs, and of the warp's 16 rows of w
// the first or the last 8.
typedef u32 Sums[2][CHUNK / 8][2];

DEV void round_sums(float (*acc)[BT / 2], int first, Sums &sums) {
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int j = 0; j < CHUNK / 8; j++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int i = (first / 8 + j) * 4 + 2 * h;
                sums[m][j][h] = i < BT / 2 ? pack_bf16(acc[m][i], acc[m][i + 1]) : 0;
            }
}

DEV u32 activate_two(u32 x) { return pack_bf16(activate<ACT>(bf16_lo(x)), activate<ACT>(bf16_hi(x))); }
DEV u32 activate_two(u32 gate, u32 up) {
    return pack_bf16(activate<ACT>(bf16_lo(gate)) * bf16_lo(up), activate<ACT>(bf16_hi(gate)) * bf16_hi(up));
}

// Pairs to rows of PIECES pieces in shared memory.
DEV void stage_sums(const Place &at, const Sums &sums) {
    int warp = at.tid / 32, lane = at.tid % 32, pair = lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int j = 0; j < CHUNK / 8; j += 2)
            store_transposed_x4(at.staged + swizzle<PIECES>(8 * j + pair, m * 8 + warp * 2 + lane / 8 % 2), sums[m][j][0],
                                sums[m][j][1], sums[m][j + 1][0], sums[m][j + 1][1]);
}

// The products of activated gate and up, to rows of half as many pieces.
DEV void stage_gated(const Place &at, const Sums &sums) {
    int warp = at.tid / 32, lane = at.tid % 32, pair = lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int j = 0; j < CHUNK / 8; j += 2) {
        u32 r[4];
#pragma unroll
        for (int i = 0; i < 4; i++) r[i] = activate_two(sums[i % 2][j + i / 2][0], sums[i % 2][j + i / 2][1]);
        store_transposed_x4(at.staged + swizzle<PIECES / 2>(8 * j + pair, lane / 8 % 2 * 4 + warp), r[0], r[1], r[2], r[3]);
    }
}

// Stores the sums of a tile and the activation of the rounded sums.
DEV void finish(const Place &at, float (*acc)[BT / 2], bf16 *out, i64 out_stride, bf16 *mid, i64 mid_stride) {
    int row0 = at.m0 + at.group * 128, valid = min(ROWS, N - at.m0) - at.group * 128;   // the warpgroup's rows of w
    auto column = [&](int p) {
        int row = row0 + p * 8;
        return p * 8 >= valid ? -1 : PARTS == 1 ? row : row / 16 * 8 + row / 8 % 2 * INNER;
    };
#pragma unroll
    for (int first = 0; first < BT; first += CHUNK) {
        if (first >= at.pairs) break;
        Sums sums;
        round_sums(acc, first, sums);
        stage_sums(at, sums);
        copy_out<PIECES>(at, first, out, out_stride, column);
        if constexpr (HAS_MID && PARTS == 2) {
            stage_gated(at, sums);
            copy_out<PIECES / 2>(at, first, mid, mid_stride, [&](int p) { return p * 16 >= valid ? -1 : row0 / 2 + p * 8; });
        } else if constexpr (HAS_MID) {
            u32 *all = &sums[0][0][0];
#pragma unroll
            for (int i = 0; i < CHUNK / 2; i++) all[i] = activate_two(all[i]);
            stage_sums(at, sums);
            copy_out<PIECES>(at, first, mid, mid_stride, column);
        }
    }
}

// Where the ring of stages is.
struct Ring {
    u32 tiles, full, empty;
    int stage, phase;
    DEV void next() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// Products of a tile with NT columns.
template <int NT> DEV void multiply(Ring &ring, const Place &at, float (*acc)[BT / 2]) {
    u32 before = 0;
#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
        mbar_wait(ring.full + 8 * ring.stage, ring.phase);
        wgmma_publish();
        u32 sw = ring.tiles + ring.stage * STAGE;
        u64 dw = tile_desc(sw + at.group * 128 * 128, 0, 1024), dx = tile_desc(sw + W_BYTES, 0, 1024);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int m = 0; m < 2; m++) wgmma<NT>(acc[m], dw + m * 64 * 8 + k * 2, dx + k * 2, step + k > 0);
        wgmma_commit();
        if (step > 0) {
            wgmma_wait<1>();
            if (at.tid % 32 == 0) mbar_arrive(before);
        }
        before = ring.empty + 8 * ring.stage;
        ring.next();
    }
    wgmma_wait<0, NT / 2>(acc[0]);
    wgmma_wait<0, NT / 2>(acc[1]);
    if (at.tid % 32 == 0) mbar_arrive(before);
}

// The same with the least number of columns that holds the tile's pairs.
template <int NT> DEV void multiply_least(Ring &ring, const Place &at, float (*acc)[BT / 2]) {
    if constexpr (NT < BT) {
        if (at.pairs > NT) return multiply_least<NT + GRAIN>(ring, at, acc);
    }
    multiply<NT>(ring, at, acc);
}

extern "C" __global__ void __launch_bounds__(3 * GROUP, 1) ENTRY(PARAMETERS) {
    let_next_start();
    extern __shared__ u8 shared[];
    __shared__ u64 bars[2 * STAGES];
    u32 base = (smem_addr(shared) + 1023) & ~1023u;
    // Of each stage: it has arrived, it has been read.
    Ring ring = {base, smem_addr(bars), smem_addr(bars + STAGES), 0, 0};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbar_init(ring.full + 8 * i, GROUP);
            mbar_init(ring.empty + 8 * i, 8);
        }
        wgmma_publish();
    }
    __syncthreads();
    wait_for_inputs();
    int group = threadIdx.x / GROUP, tid = threadIdx.x % GROUP;
    const Tile *table = reinterpret_cast<const Tile *>(tiles) + 1;
    int count = tiles[0] * M_TILES;

    if (group == 2) {
        registers_lower<72>();
        int row = tid / 8, piece = tid % 8;            // of the first of this thread's pieces; 16 rows between them
        u32 to = swizzle<8>(row, piece);
        // Of w: rows of a tile are those of gate and up in turn, by 8.
        int source = PARTS == 1 ? row : row % 8 + row / 8 * INNER;
        ring.phase = 1;
        for (int i = blockIdx.x; i < count; i += gridDim.x) {
            Tile tile = table[i / M_TILES];
            int m0 = i % M_TILES * ROWS, rows = min(ROWS, N - m0);
            const bf16 *from = w + tile.expert * w_stride + (i64)(m0 / PARTS + source) * K + piece * 8;
            u32 x_at[BT / 16];
#pragma unroll
            for (int j = 0; j < BT / 16; j++) {
                u32 pair = j * 16 + row < tile.pairs ? order[tile.begin + j * 16 + row] : 0;
                x_at[j] = (X_PER_PAIR ? pair : pair / TOP) * (u32)(x_stride / 8) + piece;
            }
#pragma unroll 1
            for (int step = 0; step < STEPS; step++) {
                mbar_wait(ring.empty + 8 * ring.stage, ring.phase);
                u32 sw = ring.tiles + ring.stage * STAGE + to, sx = sw + W_BYTES;
                bool in = K % 64 == 0 || step * 64 + piece * 8 < K;
                const bf16 *now = in ? from + step * 64 : w;
#pragma unroll
                for (int r = 0; r < ROWS / 16; r++)
                    if (r * 16 + row < rows) cp_async16(sw + r * 16 * 128, now + (in ? r * (16 / PARTS) * K : 0), in);
                const bf16 *x_now = x + step * 64;
#pragma unroll
                for (int j = 0; j < BT / 16; j++)
                    if (j * 16 + row < tile.pairs) cp_async16(sx + j * 16 * 128, in ? x_now + (i64)x_at[j] * 8 : x, in);
                mbar_arrive_copied(ring.full + 8 * ring.stage);
                ring.next();
            }
        }
        return;
    }

    registers_raise<216>();
    u32 staged = base + STAGES * STAGE + group * CHUNK * PIECES * 16;
    for (int i = blockIdx.x; i < count; i += gridDim.x) {
        Tile tile = table[i / M_TILES];
        Place at = {staged, order + tile.begin, (int)tile.pairs, i % M_TILES * ROWS, group, tid};
        float acc[2][BT / 2];
        multiply_least<GRAIN>(ring, at, acc);
        finish(at, acc, out, out_stride, mid, mid_stride);
    }
}
