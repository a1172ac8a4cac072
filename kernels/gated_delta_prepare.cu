// First half of the chunked gated delta rule: what does not depend on the state, for every chunk and value head at once.
// With k, q normalised and c the running sum of the log decays: A[t, s] = β_t (k_t·k_s) exp(c_t - c_s) for s < t,
// T = (I + A)⁻¹ diag(β) by forward substitution in f32, a thread per column, and M[t, s] = (q_t·k_s) exp(c_t - c_s), s <= t.
// Per unit in scratch: T [64, 64] bf16, M [64, 64] bf16, then [4, 64] f32: factors of kᵀS, of qᵀS, of k for the new state,
// and the decay of the whole chunk in each entry of the last row. Grid (C, heads).
// HEADS, DK, HEADS_PER_KEY, FIRST_HEAD, MIN_TOKENS.

constexpr int THREADS = 128;
constexpr int Q = PAGE;
constexpr int PITCH = DK + 8;
constexpr int A_PITCH = Q + 4;
constexpr int KSTEPS = DK / 16;
constexpr int UNIT_BYTES = 2 * Q * Q * 2 + 4 * Q * 4;

extern "C" __global__ void __launch_bounds__(THREADS)
    ENTRY(Step st, const bf16 *q, i64 q_stride, const bf16 *k, i64 k_stride, const bf16 *a, i64 a_stride, const bf16 *b,
          i64 b_stride, const float *par, i64 par_stride, u8 *scratch, float beta_scale) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ float sum[Q], beta[Q], rk[Q], rq[Q];
    Chunk ch(st.chunk(blockIdx.x));
    if (ch.len == 0 || st.row(ch.row)[1] <= MIN_TOKENS) return;
    int h = blockIdx.y, key = (FIRST_HEAD + h) / HEADS_PER_KEY * DK, len = ch.len;
    int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, c = lane % 4;
    bf16 *sk = reinterpret_cast<bf16 *>(shared), *sq = sk + Q * PITCH;
    float *am = reinterpret_cast<float *>(sq + Q * PITCH);
#pragma unroll 4
    for (int v = tid; v < Q * DK / 8; v += THREADS) {
        int t = v / (DK / 8), x = v % (DK / 8) * 8;
        bool in = t < len;
        i64 at = in ? ch.start + t : ch.start;
        cp_async16(smem_addr(sk + t * PITCH + x), k + at * k_stride + key + x, in);
        cp_async16(smem_addr(sq + t * PITCH + x), q + at * q_stride + key + x, in);
    }
    cp_async_commit();
    if (warp == 0) {
        float gv[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int t = 2 * lane + e;
            i64 at = ch.start + t;
            gv[e] = t < len ? par[h] * softplus(to_f32(a[at * a_stride + h]) + par[par_stride + h]) : 0.f;
            beta[t] = t < len ? beta_scale * sigmoid(to_f32(b[at * b_stride + h])) : 0.f;
        }
        float total = gv[0] + gv[1];
#pragma unroll
        for (int m = 1; m < 32; m *= 2) {
            float other = __shfl_up_sync(0xffffffffu, total, m);
            if (lane >= m) total += other;
        }
        sum[2 * lane] = total - gv[1];
        sum[2 * lane + 1] = total;
    }
    cp_async_wait<0>();
    __syncthreads();
    {
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
    __syncthreads();
    u8 *unit = scratch + ((i64)blockIdx.x * HEADS + h) * UNIT_BYTES;
    bf16 *out_t = reinterpret_cast<bf16 *>(unit), *out_m = out_t + Q * Q;
    float *factors = reinterpret_cast<float *>(out_m + Q * Q);
    float last = sum[Q - 1];
    if (tid < Q) {
        factors[tid] = rk[tid] * __expf(sum[tid]);
        factors[Q + tid] = rq[tid] * __expf(sum[tid]);
        factors[2 * Q + tid] = rk[tid] * __expf(last - sum[tid]);
        factors[3 * Q + tid] = __expf(last);
    }
    int block = lane / 8, brow = lane % 8;
    int a_row = brow + block % 2 * 8, a_col = block / 2 * 8;
    int b_row = brow + block / 2 * 8, b_col = block % 2 * 8;
    int tt = warp * 16;
#pragma unroll 1
    for (int s0 = 0; s0 <= tt; s0 += 16) {
        float kk[2][4] = {}, qk[2][4] = {};
#pragma unroll
        for (int i = 0; i < KSTEPS; i++) {
            u32 ka[4], qa[4], kb[4];
            ldmatrix_x4(ka, smem_addr(sk + (tt + a_row) * PITCH + i * 16 + a_col));
            ldmatrix_x4(qa, smem_addr(sq + (tt + a_row) * PITCH + i * 16 + a_col));
            ldmatrix_x4(kb, smem_addr(sk + (s0 + b_row) * PITCH + i * 16 + b_col));
            mma_bf16(kk[0], ka, kb[0], kb[1]);
            mma_bf16(kk[1], ka, kb[2], kb[3]);
            mma_bf16(qk[0], qa, kb[0], kb[1]);
            mma_bf16(qk[1], qa, kb[2], kb[3]);
        }
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int t = tt + g + 8 * e, s = s0 + n * 8 + 2 * c;
                float m[2];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    // Masked before the exponential: above the diagonal it overflows.
                    float d = s + j <= t ? __expf(sum[t] - sum[s + j]) * rk[s + j] : 0.f;
                    am[t * A_PITCH + s + j] = s + j < t ? kk[n][2 * e + j] * d * rk[t] * beta[t] : 0.f;
                    m[j] = qk[n][2 * e + j] * d * rq[t];
                }
                *reinterpret_cast<u32 *>(out_m + t * Q + s) = pack_bf16(m[0], m[1]);
            }
    }
    __syncthreads();
    if (tid >= Q) return;
    float col[Q], mine = beta[tid];
#pragma unroll
    for (int r = 0; r < Q; r++) {
        float acc[4] = {};
#pragma unroll
        for (int j = 0; j < r; j += 4) {
            float v[4];
            load<4>(am + r * A_PITCH + j, v);
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (j + i < r) acc[i] += v[i] * col[j + i];
        }
        col[r] = (r == tid ? 1.f : 0.f) - ((acc[0] + acc[1]) + (acc[2] + acc[3]));
        out_t[r * Q + tid] = from_f32<bf16>(col[r] * mine);
    }
}
