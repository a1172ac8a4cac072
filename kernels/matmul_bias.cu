// out = columns out (+ bias), after a library product. Grid (M, column tiles).
// N, HAS_COLUMNS, HAS_BIAS; out_t.

extern "C" __global__ void __launch_bounds__(256) ENTRY(PARAMETERS) {
    let_next_start();
    wait_for_inputs();
    int c = blockIdx.y * 256 + threadIdx.x;
    if (c >= N) return;
    out_t *o = out + blockIdx.x * out_stride + c;
    float v = to_f32(*o);
    if constexpr (HAS_COLUMNS) v *= columns[c];
    if constexpr (HAS_BIAS) v += bias[c];
    *o = from_f32<out_t>(v);
}
