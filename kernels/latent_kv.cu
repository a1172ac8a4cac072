// Norm of the latents and their write into pages, with the part of the keys that all heads share. A warp per token.
// Grid (T / 4).
// VEC, LATENT, SHARED; kv_t, page_t (of i8: codes, see CODED).

constexpr int WARPS = 4;

extern "C" __global__ void __launch_bounds__(32 * WARPS) ENTRY(PARAMETERS) {
    let_next_start();
    wait_for_inputs();
    i64 t = (i64)blockIdx.x * WARPS + threadIdx.x / 32;
    int first = threadIdx.x % 32 * VEC;
    if (t >= st.tokens) return;
    u32 r = st.token_row(t);
    if (r == NONE) return;
    u32 position = st.position(t);
    i64 page = st.page_row(r)[position / PAGE];
    int in_page = position % PAGE;
    const kv_t *from = kv + t * kv_stride;
    float x[VEC], w[VEC], sum = 0.f;
#pragma unroll 4
    for (int c = first; c < LATENT; c += 32 * VEC) {
        load<VEC>(from + c, x);
#pragma unroll
        for (int i = 0; i < VEC; i++) sum = __fmaf_rn(x[i], x[i], sum);
    }
    float s = rsqrtf(warp_sum(sum) / LATENT + eps);
    page_t *latent = k_pages + page * k_pages_stride + (i64)in_page * LATENT;
    // Factors that make codes.
    float code = 1.f, tail_code = 1.f;
    if constexpr (CODED<page_t>) {
        u32 most = 0, tail_most = 0;
#pragma unroll 4
        for (int c = first; c < LATENT; c += 32 * VEC) {
            load<VEC>(from + c, x);
            load<VEC>(weight + c, w);
#pragma unroll
            for (int i = 0; i < VEC; i++) most = max(most, magnitude(x[i] * s * w[i]));
        }
#pragma unroll 4
        for (int c = first; c < SHARED; c += 32 * VEC) {
            load<VEC>(from + LATENT + c, x);
#pragma unroll
            for (int i = 0; i < VEC; i++) tail_most = max(tail_most, magnitude(x[i]));
        }
        code = code_factor(most, scales_of(k_pages + page * k_pages_stride, LATENT) + in_page);
        tail_code = code_factor(tail_most, scales_of(v_pages + page * v_pages_stride, SHARED) + in_page);
    }
#pragma unroll 4
    for (int c = first; c < LATENT; c += 32 * VEC) {
        load<VEC>(from + c, x);
        load<VEC>(weight + c, w);
#pragma unroll
        for (int i = 0; i < VEC; i++) x[i] = x[i] * s * w[i] * code;
        store_global<VEC>(latent + c, x);
    }
    page_t *tail = v_pages + page * v_pages_stride + (i64)in_page * SHARED;
#pragma unroll 4
    for (int c = first; c < SHARED; c += 32 * VEC) {
        load<VEC>(from + LATENT + c, x);
#pragma unroll
        for (int i = 0; i < VEC; i++) x[i] *= tail_code;
        store_global<VEC>(tail + c, x);
    }
}
