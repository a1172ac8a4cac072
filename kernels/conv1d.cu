// Depthwise causal convolution. A block owns all tokens of a chunk for a tile of channels: SUBS groups of COLS threads,
// each VEC channels and 64 / SUBS tokens. All of a block's state reads come before its writes, so that a slot may be
// updated in place. Grid (chunks + padding blocks, channel tiles).
// VEC, CHANNELS, TAPS, SUBS, COLS, LOADS (tokens in flight), PACKED_WEIGHT (its row stride is TAPS + 1), ACT; x_t, pool_t, out_t.

constexpr int RUN = PAGE / SUBS;
constexpr int BACK = TAPS - 1;

extern "C" __global__ void __launch_bounds__(SUBS *COLS, VEC == 4 && sizeof(x_t) == 2 ? 5 : 1)
    ENTRY(Step st, const x_t *x, i64 x_stride, const float *weight, i64 weight_stride, pool_t *pool, i64 slot_stride,
          out_t *out, i64 out_stride, u32 untouched) {
    let_next_start();
    int sub = threadIdx.x / COLS, c = (blockIdx.y * COLS + threadIdx.x % COLS) * VEC;
    bool active = c < CHANNELS;
    if (blockIdx.x >= st.chunks) {
        wait_for_inputs();
        int first = (blockIdx.x - st.chunks) * PAGE, last = min(first + PAGE, st.tokens);
        bool padding = false;
        for (int t = first + threadIdx.x; t < last; t += SUBS * COLS) padding |= st.token_row(t) == NONE;
        if (!__syncthreads_or(padding) || !active) return;
        for (int t = first + sub; t < last; t += SUBS)
            if (st.token_row(t) == NONE) store_zero<VEC>(out + t * out_stride + c);
        return;
    }
    Chunk ch(st.chunk(blockIdx.x));
    if (ch.len == 0) {
        wait_for_inputs();
        return;
    }
    int begin = sub * RUN, end = min((int)ch.len, begin + RUN);
    active = active && begin < end;
    float w[TAPS + 1][VEC];
    if (active) {
        if constexpr (PACKED_WEIGHT) {
            // The thread's channels lie one after the other.
            float flat[VEC * (TAPS + 1)];
            constexpr int WIDTH = VEC * (TAPS + 1) % 4 == 0 ? 4 : 1;
#pragma unroll
            for (int i = 0; i < VEC * (TAPS + 1); i += WIDTH) load<WIDTH>(weight + c * (TAPS + 1) + i, flat + i);
#pragma unroll
            for (int i = 0; i < VEC; i++)
#pragma unroll
                for (int j = 0; j <= TAPS; j++) w[j][i] = flat[i * (TAPS + 1) + j];
        } else {
#pragma unroll
            for (int i = 0; i < VEC; i++)
#pragma unroll
                for (int j = 0; j <= TAPS; j++) w[j][i] = weight[(c + i) * weight_stride + j];
        }
    }
    // A row's first chunk needs nothing but its state before the input itself.
    int before = (int)(ch.start - st.row(ch.row)[0]) + begin;
    if (!untouched || before > 0) wait_for_inputs();
    // Inputs before `begin`, oldest first: earlier tokens of the row, then the state that the row started from.
    float window[BACK][VEC];
    if (active) {
        u32 src = 0;
        if (before < BACK) src = ch.src != CARRY ? ch.src : st.chunk(st.row(ch.row)[2])[3];
#pragma unroll
        for (int j = 0; j < BACK; j++) {
            int back = BACK - j;
            if (before >= back) {
                load<VEC>(x + (i64)(ch.start + begin - back) * x_stride + c, window[j]);
            } else {
#pragma unroll
                for (int i = 0; i < VEC; i++)
                    window[j][i] =
                        src == 0 ? 0.f : to_f32(pool[src * slot_stride + (i64)(c + i) * BACK + BACK - back + before]);
            }
        }
    }
    wait_for_inputs();
    __syncthreads();
    if (!active) return;
    const x_t *px = x + (i64)ch.start * x_stride + c;
    out_t *po = out + (i64)ch.start * out_stride + c;
    constexpr int AHEAD = RUN < LOADS ? RUN : LOADS;
    Packed<VEC, x_t> in[AHEAD], following[AHEAD];
    auto fetch = [&](Packed<VEC, x_t> *to, int t0) {
#pragma unroll
        for (int a = 0; a < AHEAD; a++)
            if (t0 + a < end) to[a] = load_raw<VEC>(px + (i64)(t0 + a) * x_stride);
    };
    fetch(in, begin);
    for (int t0 = begin; t0 < end; t0 += AHEAD) {
        fetch(following, t0 + AHEAD);
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            if (t0 + a >= end) continue;
            float cur[VEC], y[VEC];
            unpack<VEC>(in[a], cur);
#pragma unroll
            for (int i = 0; i < VEC; i++) {
                float s = w[TAPS][i];
#pragma unroll
                for (int j = 0; j < BACK; j++) s = __fmaf_rn(w[j][i], window[j][i], s);
                y[i] = activate<ACT>(__fmaf_rn(w[BACK][i], cur[i], s));
#pragma unroll
                for (int j = 0; j + 1 < BACK; j++) window[j][i] = window[j + 1][i];
                window[BACK - 1][i] = cur[i];
            }
            store<VEC>(po + (i64)(t0 + a) * out_stride, y);
        }
#pragma unroll
        for (int a = 0; a < AHEAD; a++) in[a] = following[a];
    }
    if (ch.dst == 0 || end != (int)ch.len) return;
#pragma unroll
    for (int i = 0; i < VEC; i++)
#pragma unroll
        for (int j = 0; j < BACK; j++)
            pool[ch.dst * slot_stride + (i64)(c + i) * BACK + j] = from_f32<pool_t>(window[j][i]);
}
