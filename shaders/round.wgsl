// out = x as 8-bit floats with a power of two per 128 columns. A thread takes four elements, 32 threads share a scale.

var<workgroup> most: array<u32, 256>;

// The magnitude of y, at most 448, with three bits of mantissa, or as a multiple of 2^-9.
fn eight(y: f32) -> f32 {
    let bits = bitcast<u32>(abs(y));
    if bits < 0x3c800000u {
        return round(abs(y) * 512.0) * 0.001953125;
    }
    return bitcast<f32>((bits + 0x7ffffu + ((bits >> 20u) & 1u)) & 0xfff00000u);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let i = group_index(group, groups) * 256u + lane;
    let quads = P.width / 4u;
    let inside = i < P.tokens * quads;
    let t = i / quads;
    let c = i % quads * 4u;
    var x = vec4<f32>();
    if inside {
        x = x_v4(t * P.x_row + c);
    }
    most[lane] = larger(0u, x);
    workgroupBarrier();
    var largest = 0u;
    for (var j = 0u; j < 32u; j++) {
        largest = max(largest, most[(lane & 0xe0u) + j]);
    }
    // The exponent of the smallest power of two with which no code exceeds 448, but at least 2^-100.
    let exponent = min(max((largest + 0x1fffffu) >> 23u, 35u) - 8u, 247u);
    let scale = bitcast<f32>(exponent << 23u);
    let y = x * bitcast<f32>((254u - exponent) << 23u);
    var codes = bitcast<vec4<u32>>(vec4<f32>(eight(y.x), eight(y.y), eight(y.z), eight(y.w)) * scale);
    codes |= bitcast<vec4<u32>>(x) & vec4<u32>(0x80000000u);
    if largest >= 0x7f800000u {
        codes = vec4<u32>(0x7fc00000u);
    }
    if inside {
        out_set4(t * P.out_row + c, bitcast<vec4<f32>>(codes));
    }
}
