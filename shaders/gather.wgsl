// out[o] = x[output_token[o]], 0 for padding. One workgroup per output.

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let o = group_index(group, groups);
    if o >= P.groups {
        return;
    }
    let t = ints_at(P.output_token + o);
    for (var i = 4u * lane; i < P.width; i += 256u) {
        var v = vec4<f32>();
        if t != NONE {
            v = x_v4(t * P.x_row + i);
        }
        out_set4(o * P.out_row + i, v);
    }
}
