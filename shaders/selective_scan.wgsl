// Selective scan, token by token with the state in registers; works for any chunk table. A workgroup handles one row of the
// batch and 256 / LANES rows of the state (rows are heads times head dims); LANES threads share a row of N and hold VECTORS
// quads of it each. Sums over N use subgroup shuffles, or workgroup memory for TILE tokens at once.

const STATE_ROWS: u32 = 256u / LANES;
const TILE: u32 = 8u;

#if SUBGROUP
#else
var<workgroup> sums: array<f32, 256u * TILE>;
#endif

// The output of a token for a row of the state; `y` is the contribution of the state.
fn finish(t: u32, r: u32, y: f32) {
#if PER_CHANNEL
    let d = par_at(STATE * P.par_row + r);
#else
    let d = par_at(P.par_row + r / HEAD_DIM);
#endif
    y_set(t * P.y_row + r, y + d * x_at(t * P.x_row + r));
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups);
    if index >= P.groups {
        return;
    }
    let row = index / P.parts;
    let part = index % P.parts;
    let lane = thread % LANES;
    // The row of the state and its head.
    let r = part * STATE_ROWS + thread / LANES;
    let active_row = r < P.state_rows;
    let h = min(r, P.state_rows - 1u) / HEAD_DIM;
    let bc = (P.first_head + h) / P.heads_per_group * STATE;
#if PER_CHANNEL
    let dt_bias = par_at((STATE + 1u) * P.par_row + h);
    var a: array<vec4<f32>, VECTORS>;
    for (var i = 0u; i < VECTORS; i++) {
        let n = 4u * (lane + LANES * i);
        a[i] = vec4<f32>(par_at(n * P.par_row + h), par_at((n + 1u) * P.par_row + h),
                         par_at((n + 2u) * P.par_row + h), par_at((n + 3u) * P.par_row + h));
    }
#else
    let a = par_at(h);
    let dt_bias = par_at(2u * P.par_row + h);
#endif
    var state: array<vec4<f32>, VECTORS>;
    let entry = P.row_table + 4u * row;
    let first_chunk = ints_at(entry + 2u);
    var chunks = ints_at(entry + 3u);
    if ints_at(entry + 1u) == 0u {
        chunks = 0u;
    }
    for (var i = 0u; i < chunks; i++) {
        let chunk = P.chunk_table + 5u * (first_chunk + i);
        let start = ints_at(chunk + 1u);
        let len = ints_at(chunk + 2u);
        let src = ints_at(chunk + 3u);
        let dst = ints_at(chunk + 4u);
        if src != CARRY {
            for (var v = 0u; v < VECTORS; v++) {
                state[v] = vec4<f32>();
                if src != 0u && active_row {
                    state[v] = pool_v4(src * P.pool_row + r * STATE + 4u * (lane + LANES * v));
                }
            }
        }
        for (var tile = 0u; tile < len; tile += TILE) {
            let count = min(TILE, len - tile);
            for (var j = 0u; j < count; j++) {
                let t = start + tile + j;
                var sum = vec4<f32>();
                if active_row {
                    let dt = clamp(softplus(dt_at(t * P.dt_row + h) + dt_bias), P.dt_low, P.dt_high);
                    let dtx = dt * x_at(t * P.x_row + r);
#if PER_CHANNEL
#else
                    let decay = exp(dt * a);
#endif
                    for (var v = 0u; v < VECTORS; v++) {
                        let n = bc + 4u * (lane + LANES * v);
#if PER_CHANNEL
                        let decay = exp(dt * a[v]);
#endif
                        state[v] = decay * state[v] + dtx * b_v4(t * P.b_row + n);
                        sum += state[v] * c_v4(t * P.c_row + n);
                    }
                }
                let y = sum.x + sum.y + sum.z + sum.w;
#if SUBGROUP
                let all = shuffled(y);
                if lane == 0u && active_row {
                    finish(t, r, all);
                }
#else
                sums[j * 256u + thread] = y;
#endif
            }
#if SUBGROUP
#else
            workgroupBarrier();
            for (var o = thread; o < count * STATE_ROWS; o += 256u) {
                let t = start + tile + o / STATE_ROWS;
                let q = o % STATE_ROWS;
                let target_row = part * STATE_ROWS + q;
                if target_row < P.state_rows {
                    var y = 0.0;
                    for (var l = 0u; l < LANES; l++) {
                        y += sums[o / STATE_ROWS * 256u + q * LANES + l];
                    }
                    finish(t, target_row, y);
                }
            }
            workgroupBarrier();
#endif
        }
        if dst != 0u && active_row {
            for (var v = 0u; v < VECTORS; v++) {
                pool_set4(dst * P.pool_row + r * STATE + 4u * (lane + LANES * v), state[v]);
            }
        }
    }
    if lane == 0u && active_row {
        for (var t = row; t < P.tokens; t += P.rows) {
            if ints_at(P.token_row + t) == NONE {
                y_set(t * P.y_row + r, 0.0);
            }
        }
    }
}
