// Converts rows of x to f16 for matmul_coop. One workgroup per row; a thread holds HELD times eight elements. Each row is
// scaled by a power of two so that its largest element lies in [2^14, 2^15): nothing overflows, and only elements below
// 2^-38 of the row's largest underflow. With PRECISE a row is the low parts of its elements, then the high ones; with CODED
// these come first too, times 2^-10, for the low parts of w.

var<workgroup> largest: array<f32, WG>;

fn store(segment: u32, m: u32, k: u32, v: vec4<u32>) {
    packed_set4(m * P.packed_row + (segment * P.k + k) / 2u, bitcast<vec4<f32>>(v));
}

@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let m = group_index(group, groups);
    if m >= P.groups {
        return;
    }
    var most = vec4<f32>();
#for i HELD
    let k$i = 8u * (lane + $iu * WG);
    var x$i = mat2x4<f32>();
    if k$i < P.k {
        x$i = x_v8(m * P.x_row + k$i);
    }
#end
#for i HELD
    most = max(most, max(abs(x$i[0]), abs(x$i[1])));
#end
    largest[lane] = max(max(most.x, most.y), max(most.z, most.w));
    workgroupBarrier();
    for (var half = WG / 2u; half > 0u; half /= 2u) {
        if lane < half {
            largest[lane] = max(largest[lane], largest[lane + half]);
        }
        workgroupBarrier();
    }
    // 2^(14 - e) for a row whose largest element has exponent e; the inverse is stored with the row.
    let exponent = clamp(bitcast<u32>(largest[0]) >> 23u, 20u, 254u);
    let factor = bitcast<f32>((268u - exponent) << 23u);
#for i HELD
    if k$i < P.k {
        let a = x$i[0] * factor;
        let b = x$i[1] * factor;
#if PRECISE
        let high_a = high_part(a);
        let high_b = high_part(b);
        store(SEGMENTS - 1u, m, k$i, halves(high_a, high_b));
        store(SEGMENTS - 2u, m, k$i, halves(a - high_a, b - high_b));
#if CODED
        store(0u, m, k$i, halves(high_a / 1024.0, high_b / 1024.0));
#endif
#else
        store(0u, m, k$i, halves(a, b));
#endif
    }
#end
    if lane == 0u {
        unit_set4(4u * m, bitcast<vec4<f32>>(vec4<u32>((exponent - 14u) << 23u)));
    }
}
