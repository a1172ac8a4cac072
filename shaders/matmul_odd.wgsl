// out[m, n] = P.scale * Σ x[m, k] w[n, k] where no shader reads four elements at a time: inner dimensions that are not a multiple of 4,
// rows of 16-bit weights that start inside a word. A thread computes one element, product by product.

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let item = group_index(group, groups) * 64u + thread;
    if item >= P.items {
        return;
    }
    let m = item / P.n;
    let n = item % P.n;
    var v = 0.0;
    for (var k = 0u; k < P.k; k++) {
        v += x_at(m * P.x_row + k) * w_at(n * P.w_row + k);
    }
    v *= P.scale;
    let c = P.col + n;
#if COLUMNS
    v *= columns_at(c);
#endif
#if BIAS
    v += bias_at(c);
#endif
#if ACCUMULATE
    v += out_at(m * P.out_row + c);
#endif
    out_set(m * P.out_row + c, v);
}
