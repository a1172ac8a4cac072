// Combines the partial attention results of a token's page splits. One workgroup of 256 threads per token and head; a thread
// handles one quad of the head and every TEAMS-th split.

const QUADS: u32 = HEAD_DIM / 4u;
const TEAMS: u32 = 256u / QUADS;

var<workgroup> sums: array<vec4<f32>, 256>;
// Largest score and sum of weights of a split.
var<workgroup> largest: array<f32, SPLITS>;
var<workgroup> totals: array<f32, SPLITS>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups);
    if index >= P.groups {
        return;
    }
    let t = index / P.heads;
    if ints_at(P.token_row + t) == NONE {
        return;
    }
    let first = index * SPLITS * P.partial_row;
    if thread < SPLITS {
        let facts = bitcast<vec4<f32>>(partial_v4(first + thread * P.partial_row + HEAD_DIM));
        largest[thread] = facts.x;
        totals[thread] = facts.y;
    }
    workgroupBarrier();
    var top = LOWEST;
    for (var s = 0u; s < SPLITS; s++) {
        top = max(top, largest[s]);
    }
    let quad = thread % QUADS;
    var sum = vec4<f32>();
    for (var s = thread / QUADS; s < SPLITS; s += TEAMS) {
        sum += exp(largest[s] - top) * bitcast<vec4<f32>>(partial_v4(first + s * P.partial_row + 4u * quad));
    }
    sums[thread] = sum;
    workgroupBarrier();
    if thread < QUADS {
        var total = 0.0;
        for (var s = 0u; s < SPLITS; s++) {
            total += exp(largest[s] - top) * totals[s];
        }
        sum = vec4<f32>();
        for (var i = 0u; i < TEAMS; i++) {
            sum += sums[i * QUADS + thread];
        }
        let factor = select(0.0, 1.0 / total, total > 0.0);
        out_set4(t * P.out_row + index % P.heads * HEAD_DIM + 4u * thread, sum * factor);
    }
}
