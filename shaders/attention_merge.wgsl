// Puts together what attention made of the parts of a token's pages: a workgroup of 64 threads per token and head.

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let index = group_index(group, groups);
    if index >= P.groups {
        return;
    }
    let t = index / P.heads;
    if ints_at(P.token_row + t) == NONE {
        return;
    }
    let first = index * P.splits * P.partial_row;
    // The largest score and the sum of weights of a part.
    var largest = LOWEST;
    for (var s = 0u; s < P.splits; s++) {
        largest = max(largest, bitcast<f32>(partial_v4(first + s * P.partial_row + HEAD_DIM).x));
    }
    for (var d = 4u * lane; d < HEAD_DIM; d += 256u) {
        var sum = vec4<f32>();
        var total = 0.0;
        for (var s = 0u; s < P.splits; s++) {
            let at = first + s * P.partial_row;
            let facts = bitcast<vec4<f32>>(partial_v4(at + HEAD_DIM));
            let factor = exp(facts.x - largest);
            total += factor * facts.y;
            sum += factor * bitcast<vec4<f32>>(partial_v4(at + d));
        }
        out_set4(t * P.out_row + index % P.heads * HEAD_DIM + d, sum * select(0.0, 1.0 / total, total > 0.0));
    }
}
