// Second pass of matmul_coop with SPLIT: adds up the P.parts partial sums of P.part_rows rows from the arena and undoes the
// row scale of matmul_pack. Four columns per thread.

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let i = 4u * (group_index(group, groups) * 256u + thread);
    let m = i / P.n;
    let n = i % P.n;
    if m >= P.m {
        return;
    }
    var v = vec4<f32>();
    for (var piece = 0u; piece < P.parts; piece++) {
        v += sums_v4((piece * P.part_rows + m) * P.sums_row + n);
    }
    v *= P.scale * unit_at(4u * m);
#if COLUMNS
    v *= columns_v4(P.col + n);
#endif
#if BIAS
    v += bias_v4(P.col + n);
#endif
#if ACCUMULATE
    v += out_v4(m * P.out_row + P.col + n);
#endif
    out_set4(m * P.out_row + P.col + n, v);
}
