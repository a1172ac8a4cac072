// The part of the chunked scans that heads of a group share: C B' for all pairs of tokens of a chunk, with rows of INNER.
// One workgroup per chunk and group; a thread computes 8 x 4 products.

// 64 tokens of 8 quads, columns swizzled so that adjacent rows lie in different banks.
var<workgroup> cs: array<vec4<f32>, 512>;
var<workgroup> bs: array<vec4<f32>, 512>;

@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups);
    if index >= P.groups {
        return;
    }
    let g = index % P.bc_groups;
    let chunk = P.chunk_table + 5u * (index / P.bc_groups);
    let start = ints_at(chunk + 1u);
    let len = ints_at(chunk + 2u);
    if len == 0u || ints_at(P.row_table + 4u * ints_at(chunk) + 1u) <= P.short {
        return;
    }
    let tq = thread & 15u;
    let tm = thread >> 4u;
#for i 8
    var sum$i = vec4<f32>();
#end
    for (var n = 0u; n < INNER; n += 32u) {
        workgroupBarrier();
#for i 4
        {
            let t = $iu * 16u + thread / 8u;
            let q = thread % 8u;
            // Tokens past the end of the chunk repeat the last one; their results are not used.
            let at = start + min(t, len - 1u);
            let col = (P.first_group + g) * INNER + n + 4u * q;
            cs[8u * t + (q ^ (t & 7u))] = c_v4(at * P.c_row + col);
            bs[8u * t + (q ^ ((t >> 2u) & 7u))] = b_v4(at * P.b_row + col);
        }
#end
        workgroupBarrier();
        for (var q = 0u; q < 8u; q++) {
            let b = transpose(mat4x4<f32>(
#for j 4
                bs[8u * (4u * tq + $ju) + (q ^ (tq & 7u))],
#end
            ));
#for i 8
            let c$i = cs[8u * (tm + 8u * $iu) + (q ^ tm)];
            sum$i += c$i.x * b[0];
            sum$i += c$i.y * b[1];
            sum$i += c$i.z * b[2];
            sum$i += c$i.w * b[3];
#end
        }
    }
#for i 8
    if tm + 8u * $iu < len {
        pairs_set4(((start + tm + 8u * $iu) * P.bc_groups + g) * 64u + 4u * tq, bitcast<vec4<u32>>(sum$i));
    }
#end
}
