// out[m, n] = P.scale * Σ x[m, k] w[n, k] without barriers: a thread computes ROWS columns of MR rows. For software devices,
// where a barrier costs as much as a hundred multiplications.

fn dot8(x: mat2x4<f32>, w: mat2x4<f32>) -> f32 {
    let p = x[0] * w[0] + x[1] * w[1];
    return p.x + p.y + p.z + p.w;
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups);
    if index >= P.groups {
        return;
    }
    let item = index * 64u + thread;
    let first = item % P.columns * ROWS;
    let first_m = item / P.columns * MR;
    if first_m >= P.m {
        return;
    }
    // Rows past the end repeat the last one and are not stored.
#for r ROWS
    let row$r = min(first + $ru, P.n - 1u) * P.w_row;
#for m MR
    var acc$r_$m = 0.0;
#end
#end
#for m MR
    let x$m = min(first_m + $mu, P.m - 1u) * P.x_row;
#end
#if EIGHT
    for (var k = 0u; k < P.k; k += 8u) {
#for r ROWS
        let w$r = w_unpack(w_raw8(row$r + k));
#end
#for m MR
        let v$m = x_v8(x$m + k);
#for r ROWS
        acc$r_$m += dot8(v$m, w$r);
#end
#end
    }
#else
    for (var k = 0u; k < P.k; k += 4u) {
#for r ROWS
        let w$r = w_v4(row$r + k);
#end
#for m MR
        let v$m = x_v4(x$m + k);
#for r ROWS
        acc$r_$m += dot(v$m, w$r);
#end
#end
    }
#endif
#for m MR
#for r ROWS
    store(first_m + $mu, first + $ru, P.scale * acc$r_$m);
#end
#end
}

fn store(m: u32, n: u32, value: f32) {
    if m >= P.m || n >= P.n {
        return;
    }
    var v = value;
    let c = P.col + n;
#if COLUMNS
    v *= columns_at(c);
#endif
#if BIAS
    v += bias_at(c);
#endif
#if ACCUMULATE
    v += out_at(m * P.out_row + c);
#endif
    out_set(m * P.out_row + c, v);
}
