// Rows of x as f16 for matmul_coop, whole tiles of rows: a workgroup per row. A power of two is taken out of each row so that
// its largest element lies in [2^14, 2^15): nothing overflows, and what underflows is 2^-38 of the row's largest.

var<workgroup> largest: array<f32, 64>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let m = group_index(group, groups);
    if m >= P.groups {
        return;
    }
    let inside = m < P.m;
    var most = vec4<f32>();
    if inside {
        for (var k = 4u * lane; k < P.k; k += 256u) {
            most = max(most, abs(x_v4(m * P.x_row + k)));
        }
    }
    largest[lane] = max(max(most.x, most.y), max(most.z, most.w));
    workgroupBarrier();
    for (var half = 32u; half > 0u; half /= 2u) {
        if lane < half {
            largest[lane] = max(largest[lane], largest[lane + half]);
        }
        workgroupBarrier();
    }
    // 2^(14 - e) for a row whose largest element has exponent e; its inverse goes beside the row.
    let exponent = clamp(bitcast<u32>(largest[0]) >> 23u, 20u, 254u);
    let factor = bitcast<f32>((268u - exponent) << 23u);
    for (var k = 8u * lane; k < P.k; k += 512u) {
        var v = vec4<u32>();
        if inside {
            let a = x_v4(m * P.x_row + k) * factor;
            let b = x_v4(m * P.x_row + k + 4u) * factor;
            v = vec4<u32>(pack2x16float(a.xy), pack2x16float(a.zw), pack2x16float(b.xy), pack2x16float(b.zw));
        }
        packed_set4(m * P.packed_row + k / 2u, v);
    }
    if lane == 0u {
        unit_set4(4u * m, vec4<u32>((exponent - 14u) << 23u));
    }
}
