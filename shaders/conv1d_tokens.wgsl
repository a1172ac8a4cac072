// Causal convolution of many tokens: a thread per token and channel. Taps reach back through the tokens of the same row,
// then into the state that the row starts from. The states are written by conv1d_states, later: it may overwrite them.

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let index = group_index(group, groups) * 64u + lane;
    if index >= P.tokens * P.channels {
        return;
    }
    let t = index / P.channels;
    let c = index % P.channels;
    let row = ints_at(P.token_row + t);
    if row == NONE {
        out_set(t * P.out_row + c, 0.0);
        return;
    }
    let entry = P.row_table + 4u * row;
    let first = ints_at(entry);
    let src = ints_at(P.chunk_table + 5u * ints_at(entry + 2u) + 3u);
    var v = weight_at(c * P.weight_row + TAPS);
    for (var j = 0u; j < TAPS; j++) {
        let back = TAPS - 1u - j;
        var u = 0.0;
        if t >= first + back {
            u = x_at((t - back) * P.x_row + c);
        } else if src != 0u {
            u = pool_at(src * P.pool_row + c * (TAPS - 1u) + TAPS - 1u - (first + back - t));
        }
        v += weight_at(c * P.weight_row + j) * u;
    }
    out_set(t * P.out_row + c, activate(ACT, v));
}
