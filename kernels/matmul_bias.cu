// out += bias, after a library product. Grid (M, column tiles).
// N; out_t.

extern "C" __global__ void __launch_bounds__(256) ENTRY(const float *bias, out_t *out, i64 out_stride) {
    let_next_start();
    wait_for_inputs();
    int c = blockIdx.y * 256 + threadIdx.x;
    if (c >= N) return;
    out_t *o = out + blockIdx.x * out_stride + c;
    *o = from_f32<out_t>(to_f32(*o) + bias[c]);
}
