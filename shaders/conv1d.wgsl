// Causal convolution for few tokens per row (decode, verification): a thread walks the tokens of one row and channel in
// order, keeps the last inputs in registers and writes the states as it passes them.

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let index = group_index(group, groups) * 64u + lane;
    if index >= P.rows * P.channels {
        return;
    }
    let row = index / P.channels;
    let c = index % P.channels;
    let entry = P.row_table + 4u * row;
    let tokens = ints_at(entry + 1u);
    if tokens > 0u {
        var window: array<f32, TAPS>;
        var taps: array<f32, TAPS>;
        for (var j = 0u; j < TAPS; j++) {
            taps[j] = weight_at(c * P.weight_row + j);
        }
        let bias = weight_at(c * P.weight_row + TAPS);
        let first_chunk = ints_at(entry + 2u);
        let chunks = ints_at(entry + 3u);
        for (var i = 0u; i < chunks; i++) {
            let chunk = P.chunk_table + 5u * (first_chunk + i);
            let start = ints_at(chunk + 1u);
            let len = ints_at(chunk + 2u);
            let src = ints_at(chunk + 3u);
            let dst = ints_at(chunk + 4u);
            if i == 0u && src != 0u {
                for (var j = 0u; j + 1u < TAPS; j++) {
                    window[j + 1u] = pool_at(src * P.pool_row + c * (TAPS - 1u) + j);
                }
            }
            for (var t = start; t < start + len; t++) {
                var v = bias;
                for (var j = 0u; j + 1u < TAPS; j++) {
                    window[j] = window[j + 1u];
                    v += taps[j] * window[j];
                }
                window[TAPS - 1u] = x_at(t * P.x_row + c);
                v += taps[TAPS - 1u] * window[TAPS - 1u];
                out_set(t * P.out_row + c, activate(ACT, v));
            }
            if dst != 0u && len > 0u {
                for (var j = 0u; j + 1u < TAPS; j++) {
                    pool_set(dst * P.pool_row + c * (TAPS - 1u) + j, window[j + 1u]);
                }
            }
        }
    }
    for (var t = row; t < P.tokens; t += P.rows) {
        if ints_at(P.token_row + t) == NONE {
            out_set(t * P.out_row + c, 0.0);
        }
    }
}
