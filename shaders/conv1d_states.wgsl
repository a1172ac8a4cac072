// The states after a convolution: one thread per chunk and channel stores the last inputs before the chunk's end. It reads
// all of them before it writes, so a row of one chunk may be updated in place.

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let index = group_index(group, groups) * 64u + lane;
    if index >= P.chunks * P.channels {
        return;
    }
    let chunk = P.chunk_table + 5u * (index / P.channels);
    let c = index % P.channels;
    let len = ints_at(chunk + 2u);
    let dst = ints_at(chunk + 4u);
    if len == 0u || dst == 0u {
        return;
    }
    let end = ints_at(chunk + 1u) + len;
    let entry = P.row_table + 4u * ints_at(chunk);
    let first = ints_at(entry);
    let src = ints_at(P.chunk_table + 5u * ints_at(entry + 2u) + 3u);
    var state: array<f32, TAPS>;
    for (var j = 0u; j + 1u < TAPS; j++) {
        // The input `back` tokens before the chunk's end.
        let back = TAPS - 1u - j;
        if end >= first + back {
            state[j] = x_at((end - back) * P.x_row + c);
        } else if src != 0u {
            state[j] = pool_at(src * P.pool_row + c * (TAPS - 1u) + TAPS - 1u - (first + back - end));
        }
    }
    for (var j = 0u; j + 1u < TAPS; j++) {
        pool_set(dst * P.pool_row + c * (TAPS - 1u) + j, state[j]);
    }
}
