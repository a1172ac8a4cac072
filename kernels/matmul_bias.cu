// out = columns out (+ bias), after a library product. A thread takes VEC columns of ROWS rows. Grid (row tiles, column tiles).
// N, VEC, THREADS, ROWS, HAS_COLUMNS, HAS_BIAS; out_t.

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(PARAMETERS) {
    let_next_start();
    int c = (blockIdx.y * THREADS + threadIdx.x) * VEC, first = blockIdx.x * ROWS;
    float by[VEC], plus[VEC];
    if (c < N) {
        if constexpr (HAS_COLUMNS) load<VEC>(columns + c, by);
        if constexpr (HAS_BIAS) load<VEC>(bias + c, plus);
    }
    wait_for_inputs();
    if (c >= N) return;
    out_t *o = out + first * out_stride + c;
    Packed<VEC, out_t> raw[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        if (first + i < m) raw[i] = load_raw<VEC>(o + i * out_stride);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        if (first + i >= m) break;
        float v[VEC];
        unpack<VEC>(raw[i], v);
#pragma unroll
        for (int e = 0; e < VEC; e++) {
            if constexpr (HAS_COLUMNS) v[e] *= by[e];
            if constexpr (HAS_BIAS) v[e] += plus[e];
        }
        store<VEC>(o + i * out_stride, v);
    }
}
