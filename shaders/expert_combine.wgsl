// out[t] (+)= P.scale * Σ_j combine[t, j] products[t * choices + j], in ascending j, skipping choices that are NONE. One
// thread per four elements.

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let i = group_index(group, groups) * 64u + lane;
    let quads = P.n / 4u;
    if i >= P.tokens * quads {
        return;
    }
    let t = i / quads;
    let c = i % quads * 4u;
    var sum = vec4<f32>();
    for (var j = 0u; j < P.choices; j++) {
        if ids_at(t * P.ids_row + j) != NONE {
            sum += combine_at(t * P.combine_row + j) * bitcast<vec4<f32>>(products_v4((t * P.choices + j) * P.products_row + c));
        }
    }
    sum *= P.scale;
#if ACCUMULATE
    sum += out_v4(t * P.out_row + c);
#endif
    out_set4(t * P.out_row + c, sum);
}
