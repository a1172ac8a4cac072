// x += P.add_scale * add; out = x * rsqrt(mean(x²) + eps) * weight with a gate before or after. A workgroup of WG
// threads per group of a row; P.len elements each.

var<workgroup> sums: array<f32, WG>;

@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let index = group_index(group, groups);
    if index >= P.groups {
        return;
    }
    let t = index / P.parts;
    let first = index % P.parts * P.len;
    var sum = 0.0;
    for (var i = 4u * lane; i < P.len; i += 4u * WG) {
        let c = first + i;
#if ADD
        var v = x_v4(t * P.x_row + c) + P.add_scale * add_v4(t * P.add_row + c);
        x_set4(t * P.x_row + c, v);
#else
        var v = x_v4(t * P.x_row + c);
#endif
#if GATE_BEFORE
        v *= activate4(ACT, z_v4(t * P.z_row + c));
#endif
        sum += dot(v, v);
    }
    sums[lane] = sum;
    workgroupBarrier();
    for (var half = WG / 2u; half > 0u; half /= 2u) {
        if lane < half {
            sums[lane] += sums[lane + half];
        }
        workgroupBarrier();
    }
    let scale = 1.0 / sqrt(sums[0] / f32(P.len) + P.eps);
    for (var i = 4u * lane; i < P.len; i += 4u * WG) {
        let c = first + i;
        var v = x_v4(t * P.x_row + c);
#if GATE_BEFORE
        v *= activate4(ACT, z_v4(t * P.z_row + c));
#endif
        v *= scale * weight_v4(select(c, i, P.shared_weight != 0u));
#if GATE_AFTER
        v *= activate4(ACT, z_v4(t * P.z_row + c));
#endif
        out_set4(t * P.out_row + c, v);
    }
}
