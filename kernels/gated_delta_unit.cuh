// What the kernels of the chunked gated delta rule share. A unit is what the first half leaves for the second, of one chunk and value head,
// as it will lie in shared memory: W [64, DK] and M T [64, 64] bf16, swizzled (blocks above the diagonal undefined), then f32. With one
// decay per head these are f_k, f_q, and the decay of the whole chunk in each entry, [3, 64]. With a decay per channel (EACH) they are
// the chunk's decays [DK], and K̂ and Q̂ [64, DK] bf16 follow, swizzled: keys and queries, normalised, with the decay from the chunk's start.
// DK, EACH.

constexpr int Q = PAGE;
constexpr int KSTEPS = DK / 16;
constexpr int AT_M = Q * DK * 2, AT_F = AT_M + Q * Q * 2, AT_K = AT_F + 4 * (EACH ? DK : 3 * Q), AT_Q = AT_K + Q * DK * 2;
constexpr int UNIT_BYTES = EACH ? AT_Q + Q * DK * 2 : AT_K;

// The rest is for the first half: 4 warps and, in shared memory, keys and queries of PITCH, A of A_PITCH, T of T_PITCH.
constexpr int PREPARERS = 128;
constexpr int PITCH = DK + 8;
constexpr int A_PITCH = Q + 4;
constexpr int T_PITCH = Q + 8;
constexpr int COLS = 32;                         // most columns of W that a warp computes, 16 at a time

// Rounded to the bits that a tf32 product reads.
DEV u32 tf32(float x) { return __float_as_uint(x) + 0x1000; }
DEV void mma_tf32(float *d, const u32 *a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// What normalises keys and queries, of which `sk` and `sq` are tiles.
DEV void norms(const bf16 *sk, const bf16 *sq, float *rk, float *rq) {
    int tid = threadIdx.x;
    // Two threads a token.
    const bf16 *pk = sk + tid / 2 * PITCH + tid % 2 * (DK / 2), *pq = sq + (pk - sk);
    float kk = 0.f, qq = 0.f;
#pragma unroll 4
    for (int i = 0; i < DK / 2; i += 8) {
        float v[8];
        load<8>(pk + i, v);
#pragma unroll
        for (int j = 0; j < 8; j++) kk += v[j] * v[j];
        load<8>(pq + i, v);
#pragma unroll
        for (int j = 0; j < 8; j++) qq += v[j] * v[j];
    }
    kk += __shfl_xor_sync(0xffffffffu, kk, 1);
    qq += __shfl_xor_sync(0xffffffffu, qq, 1);
    if (tid % 2 == 0) {
        rk[tid / 2] = rsqrtf(kk + 1e-6f);
        rq[tid / 2] = rsqrtf(qq + 1e-6f) * rsqrtf((float)DK);
    }
}

// (I + A)⁻¹ of A below the diagonal in `am`; where it lies then, `inverse4` knows. A warp has written its 16 rows of A. Blocks of 16 on the
// diagonal by forward substitution in f32, those below by products in tf32.
DEV void invert(float *am, int warp, int lane) {
    int g = lane / 4, c = lane % 4;
    __syncwarp();
    // A warp's block on the diagonal, a lane per column.
    if (lane < 16) {
        float *diagonal = am + warp * 16 * (A_PITCH + 1), x[16];
#pragma unroll
        for (int r = 0; r < 16; r++) {
            x[r] = r == lane ? 1.f : 0.f;
#pragma unroll
            for (int j = 0; j < r; j += 4) {
                float v[4];
                load<4>(diagonal + r * A_PITCH + j, v);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (j + i < r) x[r] -= v[i] * x[j + i];
            }
        }
        __syncwarp(0xffffu);
#pragma unroll
        for (int r = 0; r < 16; r++) diagonal[r * A_PITCH + lane] = x[r];
    }
    __syncthreads();
    // Operands of tf32 products in `am`; the inner dimension runs in the order 0 2 4 6 1 3 5 7, so that sums are operands.
    u32 f[4];
    auto left = [&](int row, int col) {
        const float *p = am + (row + g) * A_PITCH + col + 2 * c;
        float2 lo = *reinterpret_cast<const float2 *>(p), hi = *reinterpret_cast<const float2 *>(p + 8 * A_PITCH);
        f[0] = tf32(lo.x), f[1] = tf32(hi.x), f[2] = tf32(lo.y), f[3] = tf32(hi.y);
    };
    auto left_sums = [&](const float *y) { f[0] = tf32(y[0]), f[1] = tf32(y[2]), f[2] = tf32(y[1]), f[3] = tf32(y[3]); };
    auto times = [&](float *d, int row, int col) {
        const float *p = am + (row + 2 * c) * A_PITCH + col + g;
        mma_tf32(d, f, tf32(p[0]), tf32(p[A_PITCH]));
    };
    auto put = [&](const float *d, int row, int col) {
        float *p = am + (row + g) * A_PITCH + col + 2 * c;
        *reinterpret_cast<float2 *>(p) = make_float2(-d[0], -d[1]);
        *reinterpret_cast<float2 *>(p + 8 * A_PITCH) = make_float2(-d[2], -d[3]);
    };
    {
        // Blocks (1, 0) and (3, 2) of the inverse, 8 columns a warp, left in the places of (0, 1) and (2, 3).
        int o = warp / 2 * 32;
        float y[2][4] = {}, d[4] = {};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            left(o + 16, o + 16 + 8 * i);
            times(y[0], o + 16 + 8 * i, o);
            times(y[1], o + 16 + 8 * i, o + 8);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            left_sums(y[i]);
            times(d, o + 8 * i, o + warp % 2 * 8);
        }
        put(d, o, o + 16 + warp % 2 * 8);
    }
    __syncthreads();
    {
        // Rows 32 to 63, columns 0 to 31, a block of 16 x 16 a warp, left 32 rows up and 32 columns to the right.
        int i = warp / 2, n = warp % 2;
        float y[4][4] = {}, d[2][4] = {};
#pragma unroll
        for (int b = 0; b < 2; b++) {
            if (b > i) continue;
#pragma unroll
            for (int x = 0; x < 2; x++) {
                left(32 + 16 * b, 32 + 16 * i + 8 * x);
#pragma unroll
                for (int j = 0; j < 4; j++) times(y[j], 32 + 16 * b + 8 * x, 8 * j);
            }
        }
#pragma unroll
        for (int b = 0; b < 2; b++) {
            if (b < n) continue;
#pragma unroll
            for (int x = 0; x < 2; x++) {
                left_sums(y[2 * b + x]);
                times(d[0], 16 * n + 8 * x, 16 * b);
                times(d[1], 16 * n + 8 * x, 16 * b + 8);
            }
        }
        put(d[0], 16 * i, 32 + 16 * n);
        put(d[1], 16 * i, 32 + 16 * n + 8);
    }
    __syncthreads();
}

// Four neighbours of row t of the inverse that `invert` left in `am`; zeros above the diagonal.
DEV void inverse4(const float *am, int t, int s, float *x) {
    int bt = t / 16, bs = s / 16;
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = 0.f;
    if (bt / 2 > bs / 2) load<4>(am + (t - 32) * A_PITCH + 32 + s, x);
    else if (bt >= bs) load<4>(am + (bs * 16 + t % 16) * A_PITCH + bt * 16 + s % 16, x);
}

// M T to the unit, of rows 16 (3 - warp) of M, whose blocks are the last of `m`; `mine` is a warp's 4 KiB of shared memory, through which
// results go so that whole sectors are written.
DEV void put_mt(u8 *unit, u32 mine, const bf16 *tb, const u32 (*m)[4], int warp, int lane) {
    int g = lane / 4, c = lane % 4, block = lane / 8, brow = lane % 8;
    int a_row = brow + block % 2 * 8, a_col = block / 2 * 8;
    int kt = warp, mt = 3 - warp;
    float d[8][4] = {};
#pragma unroll
    for (int u = 1; u < 5; u++) {
        int s = u - kt - 1;
        if (s < 0) continue;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            if (n > s) continue;
            u32 x[4];
            ldmatrix_x4_trans(x, smem_addr(tb + (s * 16 + a_row) * T_PITCH + n * 16 + a_col));
            mma_bf16(d[2 * n], m[u], x[0], x[1]);
            mma_bf16(d[2 * n + 1], m[u], x[2], x[3]);
        }
    }
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++)
            store_shared(mine + swizzle<8>(g + 8 * e, n) + 4 * c, pack_bf16(d[n][2 * e], d[n][2 * e + 1]));
    __syncwarp();
#pragma unroll
    for (int v = lane; v < 16 * Q / 8; v += 32)
        *reinterpret_cast<uint4 *>(unit + Q * DK * 2 + swizzle<8>(mt * 16 + v / 8, v % 8)) =
            load_shared16(mine + swizzle<8>(v / 8, v % 8));
    __syncwarp();
}

// W = Tᵀ K to the unit, in the same way.
template <int KEY_PITCH> DEV void put_w(u8 *unit, u32 mine, const bf16 *keys, const bf16 *tf, int warp, int lane) {
    int g = lane / 4, c = lane % 4, block = lane / 8, brow = lane % 8;
    int a_row = brow + block % 2 * 8, a_col = block / 2 * 8;
    int b_row = brow + block / 2 * 8, b_col = block % 2 * 8;
    // 16 columns at a time, for want of registers; where they are few, two turns for the warps with the fewest blocks of M T.
    int turns = KSTEPS == 8 ? 2 : 1 + (warp >= 8 - KSTEPS), unit0 = KSTEPS == 8 ? 2 * warp : warp + max(warp - 8 + KSTEPS, 0);
#pragma unroll 1
    for (int half = 0; half < turns; half++) {
        float w[4][2][4] = {};
#pragma unroll
        for (int t = 0; t < 4; t++) {
            u32 kb[4];
            ldmatrix_x4_trans(kb, smem_addr(keys + (t * 16 + a_row) * KEY_PITCH + (unit0 + half) * 16 + a_col));
#pragma unroll
            for (int s = 0; s <= t; s++) {
                u32 x[4];
                ldmatrix_x4_trans(x, smem_addr(tf + (t * 16 + b_row) * T_PITCH + s * 16 + b_col));
                mma_bf16(w[s][0], x, kb[0], kb[1]);
                mma_bf16(w[s][1], x, kb[2], kb[3]);
            }
        }
#pragma unroll
        for (int s = 0; s < 4; s++)
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    store_shared(mine + swizzle<4>(s * 16 + g + 8 * e, 2 * half + n) + 4 * c,
                                 pack_bf16(w[s][n][2 * e], w[s][n][2 * e + 1]));
    }
    __syncwarp();
#pragma unroll 8
    for (int v = lane; v < Q * 2 * turns; v += 32) {
        int t = v >> turns, piece = v & 2 * turns - 1;
        *reinterpret_cast<uint4 *>(unit + swizzle<DK / 8>(t, unit0 * 2 + piece)) = load_shared16(mine + swizzle<4>(t, piece));
    }
}
