// A product per head. A workgroup handles 4 tokens, one head and 32 rows of its matrix; 8 threads share a row.

var<workgroup> sums: array<vec4<f32>, 256>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups);
    if index >= P.groups {
        return;
    }
    let part = index % P.parts;
    let head = index / P.parts % P.heads;
    let first = index / (P.parts * P.heads) * 4u;
    let row = part * 32u + thread / 8u;
    // Rows and tokens past the end repeat the last one; their results are not stored.
    let start = (head * P.rows + min(row, P.rows - 1u)) * P.w_row;
    let last = P.tokens - 1u;
#for i 4
    let x$i = min(first + $iu, last) * P.x_row + head * P.width;
#end
    var sum = vec4<f32>();
    for (var k = 4u * (thread % 8u); k < K; k += 32u) {
        let w = w_v4(start + k);
#for i 4
        sum[$i] += dot(w, x_v4(x$i + k));
#end
    }
    sums[thread] = sum;
    workgroupBarrier();
    // A thread per token and row.
    if thread < 128u {
        let token = thread / 32u;
        let mine = part * 32u + thread % 32u;
        var all = 0.0;
        for (var l = 0u; l < 8u; l++) {
            all += sums[8u * (thread % 32u) + l][token];
        }
        if first + token < P.tokens && mine < P.rows {
            out_set((first + token) * P.out_row + head * P.rows + mine, all);
        }
    }
}
