// out[m, n] = P.scale * Σ x[m, k] w[n, k] for few rows: LANES threads share a weight row, every thread takes VEC
// elements of K at a time and all MR rows of x. A workgroup makes 256 / LANES columns of MR rows.

var<workgroup> sums: array<f32, 256u * MR>;

fn product(m: u32, w: mat2x4<f32>, k: u32) -> f32 {
    let x = x_v8(m * P.x_row + k);
    return dot(x[0], w[0]) + dot(x[1], w[1]);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups);
    if index >= P.groups {
        return;
    }
    const COLUMNS = 256u / LANES;
    let lane = thread % LANES;
    let n = index * COLUMNS + thread / LANES;
    var acc: array<f32, MR>;
    if n < P.n {
        let row = n * P.w_row;
#if EIGHT
        var k = 8u * lane;
        // Four loads in flight.
        for (; k + 24u * LANES < P.k; k += 32u * LANES) {
            let w0 = w_v8(row + k);
            let w1 = w_v8(row + k + 8u * LANES);
            let w2 = w_v8(row + k + 16u * LANES);
            let w3 = w_v8(row + k + 24u * LANES);
            for (var m = 0u; m < MR; m++) {
                acc[m] += product(m, w0, k) + product(m, w1, k + 8u * LANES);
                acc[m] += product(m, w2, k + 16u * LANES) + product(m, w3, k + 24u * LANES);
            }
        }
        for (; k < P.k; k += 8u * LANES) {
            let w = w_v8(row + k);
            for (var m = 0u; m < MR; m++) {
                acc[m] += product(m, w, k);
            }
        }
#else
        for (var k = 4u * lane; k < P.k; k += 4u * LANES) {
            let w = w_v4(row + k);
            for (var m = 0u; m < MR; m++) {
                acc[m] += dot(w, x_v4(m * P.x_row + k));
            }
        }
#endif
    }
    for (var m = 0u; m < MR; m++) {
        sums[m * 256u + thread] = acc[m];
    }
    workgroupBarrier();
    for (var half = LANES / 2u; half > 0u; half /= 2u) {
        if lane < half {
            for (var m = 0u; m < MR; m++) {
                sums[m * 256u + thread] += sums[m * 256u + thread + half];
            }
        }
        workgroupBarrier();
    }
    if thread < COLUMNS * MR {
        let column = index * COLUMNS + thread % COLUMNS;
        let m = thread / COLUMNS;
        if column < P.n && m < P.m {
            store(m, column, sums[m * 256u + thread % COLUMNS * LANES]);
        }
    }
}

fn store(m: u32, n: u32, sum: f32) {
    var v = P.scale * sum;
    let c = P.col + n;
#if BIAS
    v += bias_at(c);
#endif
#if ACCUMULATE
    v += out_at(m * P.out_row + c);
#endif
    out_set(m * P.out_row + c, v);
}
