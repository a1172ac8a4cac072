// Rounds rows of x to 8 bits for matmul_vec, as `format::round_group` does: integers of -127 to 127, four in a word, and per 32
// of them a scale and the sums of both halves times the scale. A thread takes 16 elements, two threads share a scale.

var<workgroup> most: array<u32, 64>;
var<workgroup> sums: array<i32, 64>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let i = group_index(group, groups) * 64u + lane;
    let runs = P.k / 16u;
    let inside = i < P.m * runs;
    let row = i / runs;
    let k = i % runs * 16u;
    var x: array<vec4<f32>, 4>;
    var own = 0u;
#for i 4
    if inside {
        x[$i] = x_v4(row * P.x_row + k + 4u * $iu);
        own = larger(own, x[$i]);
    }
#end
    most[lane] = own;
    workgroupBarrier();
    let by = rounding(max(own, most[lane ^ 1u]));
    var codes = vec4<u32>();
    var sum = vec4<i32>();
#for i 4
    let c$i = integers(x[$i], by.x);
    codes[$i] = pack4xI8(c$i);
    sum += c$i;
#end
    sums[lane] = sum.x + sum.y + sum.z + sum.w;
    workgroupBarrier();
    if !inside {
        return;
    }
    codes_set4(row * P.codes_row + k / 4u, codes);
    if (lane & 1u) == 0u {
        let unit = vec4<f32>(by.y, by.y * f32(sums[lane]), by.y * f32(sums[lane + 1u]), 0.0);
        units_set4(row * P.units_row + k / 8u, bitcast<vec4<u32>>(unit));
    }
}
