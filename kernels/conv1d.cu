// Depthwise causal convolution. A block owns all tokens of a chunk for a tile of COLS * VEC channels, a thread all tokens of VEC
// channels: it reads its part of a state before it writes it, so that a slot may be updated in place. Whole groups of LOADS
// tokens are loaded one group early and need no test for the chunk's end.
// Grid (the channel tiles of the first chunk, of the next, ..., then blocks for padding): blocks that run at the same time read and
// write whole rows.
// VEC, CHANNELS, TAPS, COLS, LOADS, PACKED_WEIGHT (its row stride is TAPS + 1), ACT; x_t, pool_t, out_t.
// HAS_FACTOR: of one token, the activation before it too, GATE_ACT(x) * factor, to the same bits as its own kernel; `mid` is its output.

constexpr int BACK = TAPS - 1;
constexpr int TILES = div_up(CHANNELS, COLS * VEC);

extern "C" __global__ void __launch_bounds__(COLS, VEC == 4 && sizeof(x_t) == 2 ? 5 : 1) ENTRY(PARAMETERS) {
    let_next_start();
    int unit = blockIdx.x / TILES, c = (blockIdx.x % TILES * COLS + threadIdx.x) * VEC;
    if (unit >= st.chunks) {
        zero_padding<COLS, CHANNELS>(st, out, out_stride, blockIdx.x - st.chunks * TILES);
        return;
    }
    // Inputs that no kernel writes, before the first value that another load depends on.
    float w[TAPS + 1][VEC];
    if (c < CHANNELS) {
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
    Chunk ch(st.chunk(unit));
    int len = ch.len;
    if (len == 0 || c >= CHANNELS) {
        wait_for_inputs();
        return;
    }
    const x_t *px = x + (i64)ch.start * x_stride + c;
    Packed<VEC, x_t> in[LOADS], following[LOADS];
    auto fetch = [&](Packed<VEC, x_t> *to, int t) {
        const x_t *p = px + t * x_stride;
        if (t + LOADS <= len) {
#pragma unroll
            for (int i = 0; i < LOADS; i++, p += x_stride) to[i] = load_raw<VEC>(p);
        } else {
#pragma unroll
            for (int i = 0; i < LOADS; i++, p += x_stride)
                if (t + i < len) to[i] = load_raw<VEC>(p);
        }
    };
    // A row's first chunk needs nothing but its state before the input itself.
    bool first = ch.src != CARRY, early = state_unwritten && first;
    // Inputs before the next token, oldest first: earlier tokens of the row, then the state that the row started from.
    float window[BACK][VEC];
    auto from_state = [&](u32 src, int j, int at) {
#pragma unroll
        for (int i = 0; i < VEC; i++)
            window[j][i] = src == 0 ? 0.f : to_f32(pool[src * pool_stride + (i64)(c + i) * BACK + at]);
    };
    if (!early) wait_for_inputs();
    if (first) {
#pragma unroll
        for (int j = 0; j < BACK; j++) from_state(ch.src, j, j);
    }
    if (early) wait_for_inputs();
    fetch(in, 0);
    Packed<VEC, x_t> with;
    if constexpr (HAS_FACTOR) with = load_raw<VEC>(factor + c);
    if (!first) {
        const u32 *row = st.row(ch.row);
        int before = ch.start - row[0];
        u32 src = before < BACK ? st.chunk(row[2])[3] : 0;
#pragma unroll
        for (int j = 0; j < BACK; j++) {
            int back = BACK - j;
            if (before >= back) load<VEC>(px - back * x_stride, window[j]);
            else from_state(src, j, j + before);
        }
    }
    out_t *to = out + (i64)ch.start * out_stride + c;
    auto token = [&](const Packed<VEC, x_t> &raw) {
        float cur[VEC], y[VEC];
        unpack<VEC>(raw, cur);
        if constexpr (HAS_FACTOR) {
            float by[VEC];
            unpack<VEC>(with, by);
#pragma unroll
            for (int i = 0; i < VEC; i++) cur[i] = to_f32(from_f32<x_t>(activate<GATE_ACT>(cur[i]) * by[i]));
            store<VEC>(mid + c, cur);
        }
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
        store<VEC>(to, y);
        to += out_stride;
    };
    int t = 0;
    for (; t + LOADS <= len; t += LOADS) {
        fetch(following, t + LOADS);
#pragma unroll
        for (int i = 0; i < LOADS; i++) token(in[i]);
#pragma unroll
        for (int i = 0; i < LOADS; i++) in[i] = following[i];
    }
#pragma unroll
    for (int i = 0; i < LOADS - 1; i++)
        if (t + i < len) token(in[i]);
    if (ch.dst == 0) return;
#pragma unroll
    for (int i = 0; i < VEC; i++)
#pragma unroll
        for (int j = 0; j < BACK; j++)
            pool[ch.dst * pool_stride + (i64)(c + i) * BACK + j] = from_f32<pool_t>(window[j][i]);
}
