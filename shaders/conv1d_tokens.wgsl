// Causal convolution for many tokens: a thread handles four channels of RUN consecutive tokens. Taps reach back through the
// tokens of the same row, then into the row's initial state. conv1d_states writes the states in a later dispatch, because
// it may overwrite the initial ones.

fn kernel(c: u32, tap: u32) -> vec4<f32> {
    let at = c * P.weight_row + tap;
    return vec4<f32>(weight_at(at), weight_at(at + P.weight_row), weight_at(at + 2u * P.weight_row),
                     weight_at(at + 3u * P.weight_row));
}

// The input `back` tokens before token t of a row whose first token is `first`.
fn input(t: u32, back: u32, first: u32, src: u32, c: u32) -> vec4<f32> {
    if t >= first + back {
        return x_v4((t - back) * P.x_row + c);
    }
    if src == 0u {
        return vec4<f32>();
    }
    let at = src * P.pool_row + c * BACK + BACK - (first + back - t);
    return vec4<f32>(pool_at(at), pool_at(at + BACK), pool_at(at + 2u * BACK), pool_at(at + 3u * BACK));
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let index = group_index(group, groups) * 64u + lane;
    let quads = P.channels / 4u;
    if index >= (P.tokens + RUN - 1u) / RUN * quads {
        return;
    }
    let t0 = index / quads * RUN;
    let c = index % quads * 4u;
    var taps: array<vec4<f32>, TAPS>;
    var seen: array<vec4<f32>, TAPS>;
#for j TAPS
    taps[$j] = kernel(c, $ju);
#end
    let bias = kernel(c, TAPS);
    var row = NONE;
    for (var t = t0; t < min(t0 + RUN, P.tokens); t++) {
        let before = row;
        row = ints_at(P.token_row + t);
        if row == NONE {
            out_set4(t * P.out_row + c, vec4<f32>());
            continue;
        }
        if row != before {
            let entry = P.row_table + 4u * row;
            let first = ints_at(entry);
            let src = ints_at(P.chunk_table + 5u * ints_at(entry + 2u) + 3u);
#for j BACK
            seen[$j + 1] = input(t, BACK - $ju, first, src, c);
#end
        }
        var v = bias;
#for j BACK
        seen[$j] = seen[$j + 1];
        v += taps[$j] * seen[$j];
#end
        seen[BACK] = x_v4(t * P.x_row + c);
        v += taps[BACK] * seen[BACK];
        out_set4(t * P.out_row + c, activate4(ACT, v));
    }
}
