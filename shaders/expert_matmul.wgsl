// Product with the chosen expert for one output row, or with COMBINE the weighted sum over a token's choices, for the
// experts of one range and row block. A workgroup computes 256 / LANES columns; LANES threads share a weight row.

const COLUMNS: u32 = 256u / LANES;

var<workgroup> sums: array<f32, 256>;

fn product(x_first: u32, w_first: u32, lane: u32) -> f32 {
    var sum = 0.0;
#if EIGHT
    for (var k = 8u * lane; k < P.k; k += 8u * LANES) {
        let w = w_v8(w_first + k);
        let x = x_v8(x_first + k);
        sum += dot(x[0], w[0]) + dot(x[1], w[1]);
    }
#else
    for (var k = 4u * lane; k < P.k; k += 4u * LANES) {
        sum += dot(w_v4(w_first + k), x_v4(x_first + k));
    }
#endif
    return sum;
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups);
    if index >= P.groups {
        return;
    }
    let o = index / P.n_tiles;
    let lane = thread % LANES;
    let n = index % P.n_tiles * COLUMNS + thread / LANES;
    var sum = 0.0;
#if COMBINE
    for (var j = 0u; j < P.choices; j++) {
        let id = ids_at(o * P.ids_row + j);
        if id != NONE && id >= P.first && id - P.first < P.experts && n < P.n {
            let w_first = (id - P.first) * P.w_row + n * P.k;
            sum += combine_at(o * P.combine_row + j) * product((o * P.choices + j) * P.x_row, w_first, lane);
        }
    }
#else
    let id = ids_at(o / P.choices * P.ids_row + o % P.choices);
    if id == NONE || id < P.first || id - P.first >= P.experts {
        return;
    }
    if n < P.n {
        sum = product(o / P.choices * P.x_row, (id - P.first) * P.w_row + n * P.k, lane);
    }
#endif
    sums[thread] = sum;
    workgroupBarrier();
    for (var half = LANES / 2u; half > 0u; half /= 2u) {
        if lane < half {
            sums[thread] += sums[thread + half];
        }
        workgroupBarrier();
    }
    if lane == 0u && n < P.n {
        let at = o * P.out_row + P.col + n;
#if ACCUMULATE
        out_set(at, out_at(at) + P.scale * sums[thread]);
#else
        out_set(at, P.scale * sums[thread]);
#endif
    }
}
