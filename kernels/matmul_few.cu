// out = scale x Wᵀ (+ bias) (+ out) for at most 8 rows of x: reads W once, at memory speed. bf16 W and x.
// A block owns 16 * MT rows of W; its warps split K and add up in a fixed order, so a row's result does not depend on the
// number of rows. W is the A operand of the mma: a thread loads 8 consecutive k of a row (16 bytes) and the same 8 of x,
// which permutes k alike on both sides. Grid (row tiles of W).
// K, M, MT, WARPS, ACCUMULATE, HAS_BIAS; out_t.

constexpr int UNROLL = 4;
constexpr int STEP = 32 * UNROLL;     // k that a warp takes at a time
constexpr int ROWS = 16 * MT;

DEV uint4 load_stream(const bf16 *p) {
    uint4 r;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(p));
    return r;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    ENTRY(const bf16 *x, i64 x_stride, const bf16 *w, i64 w_stride, int n, const float *bias, out_t *out,
          i64 out_stride, float scale) {
    __shared__ float part[WARPS][8][ROWS + 1];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    int n0 = blockIdx.x * ROWS;
    const bf16 *wr[2 * MT];
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) wr[i] = w + min(n0 + g + 8 * i, n - 1) * w_stride + q * 8;
    const bf16 *xr = x + (g < M ? g : 0) * x_stride + q * 8;
    float acc[MT][4];
#pragma unroll
    for (int i = 0; i < MT; i++) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.f;
    for (int k0 = warp * STEP; k0 < K; k0 += WARPS * STEP) {
        uint4 a[UNROLL][2 * MT], b[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            int k = k0 + u * 32;
            bool in = (K % (WARPS * STEP) == 0) || k + q * 8 < K;
#pragma unroll
            for (int i = 0; i < 2 * MT; i++) a[u][i] = in ? load_stream(wr[i] + k) : make_uint4(0, 0, 0, 0);
            b[u] = in && g < M ? *reinterpret_cast<const uint4 *>(xr + k) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
#pragma unroll
            for (int i = 0; i < MT; i++) {
                u32 lo[4] = {a[u][2 * i].x, a[u][2 * i + 1].x, a[u][2 * i].y, a[u][2 * i + 1].y};
                u32 hi[4] = {a[u][2 * i].z, a[u][2 * i + 1].z, a[u][2 * i].w, a[u][2 * i + 1].w};
                mma_bf16(acc[i], lo, b[u].x, b[u].y);
                mma_bf16(acc[i], hi, b[u].z, b[u].w);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < MT; i++) {
        part[warp][2 * q][16 * i + g] = acc[i][0];
        part[warp][2 * q + 1][16 * i + g] = acc[i][1];
        part[warp][2 * q][16 * i + g + 8] = acc[i][2];
        part[warp][2 * q + 1][16 * i + g + 8] = acc[i][3];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < M * ROWS; i += 32 * WARPS) {
        int m = i / ROWS, r = i % ROWS;
        if (n0 + r >= n) continue;
        float s = 0.f;
#pragma unroll
        for (int j = 0; j < WARPS; j++) s += part[j][m][r];
        s *= scale;
        if constexpr (HAS_BIAS) s += bias[n0 + r];
        out_t *o = out + m * out_stride + n0 + r;
        if constexpr (ACCUMULATE) s += to_f32(*o);
        *o = from_f32<out_t>(s);
    }
}
