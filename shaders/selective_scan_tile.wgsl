// Selective scan for many tokens, one A and dt per head. A workgroup handles one row of the batch and ROWS rows of one
// head's state, which stays in registers. A thread holds 4 rows of VECTORS quads of N; LANES threads share those rows. B, C
// and x pass through workgroup memory in tiles of TILE tokens, each fetched during the previous one; sums over N are added
// up per tile.

const QUADS: u32 = STATE / 4u;
const ROW_QUADS: u32 = ROWS / 4u;
const WG: u32 = ROW_QUADS * LANES;

var<workgroup> bs: array<vec4<f32>, TILE * QUADS>;
var<workgroup> cs: array<vec4<f32>, TILE * QUADS>;
var<workgroup> xs: array<vec4<f32>, TILE * ROW_QUADS>;
var<workgroup> sums: array<vec4<f32>, TILE * WG>;
// dt and decay of a chunk's tokens.
var<workgroup> steps: array<vec2<f32>, PAGE>;

fn total(v: vec4<f32>) -> f32 {
    return v.x + v.y + v.z + v.w;
}

@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups);
    if index >= P.groups {
        return;
    }
    let row = index / (P.heads * PARTS);
    let h = index / PARTS % P.heads;
    let first_row = index % PARTS * ROWS;
    let lane = thread / ROW_QUADS;
    let quad = thread % ROW_QUADS;
    let bc = (P.first_head + h) / P.heads_per_group * STATE;
    let x_first = h * HEAD_DIM + first_row;
    let place = (h * HEAD_DIM + first_row + 4u * quad) * STATE;
    let a = par_at(h);
    let d = select(0.0, par_at(P.par_row + h), lane == 0u);
    let dt_bias = par_at(2u * P.par_row + h);
    let entry = P.row_table + 4u * row;
    let first = ints_at(entry);
    let tokens = ints_at(entry + 1u);
    let first_chunk = ints_at(entry + 2u);
    var chunks = ints_at(entry + 3u);
    if tokens == 0u || tokens > P.longest {
        chunks = 0u;
    }
    let last = first + max(tokens, 1u) - 1u;
#for p 4
#for v VECTORS
    var state$p_$v = vec4<f32>();
#end
#end
    // Tokens past the row's end repeat the last one; their results are not used.
#for i BC_FETCHES
    let bc_token$i = min((thread + $iu * WG) / QUADS, TILE - 1u);
    let bc_at$i = bc + 4u * ((thread + $iu * WG) % QUADS);
    var b$i = b_v4(min(first + bc_token$i, last) * P.b_row + bc_at$i);
    var c$i = c_v4(min(first + bc_token$i, last) * P.c_row + bc_at$i);
#end
#for i X_FETCHES
    let x_token$i = min((thread + $iu * WG) / ROW_QUADS, TILE - 1u);
    let x_at$i = x_first + 4u * ((thread + $iu * WG) % ROW_QUADS);
    var x$i = x_v4(min(first + x_token$i, last) * P.x_row + x_at$i);
#end
    for (var i = 0u; i < chunks; i++) {
        let chunk = P.chunk_table + 5u * (first_chunk + i);
        let start = ints_at(chunk + 1u);
        let len = ints_at(chunk + 2u);
        let src = ints_at(chunk + 3u);
        let dst = ints_at(chunk + 4u);
        if src != CARRY {
#for p 4
#for v VECTORS
            state$p_$v = vec4<f32>();
            if src != 0u {
                state$p_$v = pool_v4(src * P.pool_row + place + $pu * STATE + 4u * (lane + LANES * $vu));
            }
#end
#end
        }
        for (var j = thread; j < len; j += WG) {
            let dt = clamp(softplus(dt_at((start + j) * P.dt_row + h) + dt_bias), P.dt_low, P.dt_high);
            steps[j] = vec2<f32>(dt, exp(dt * a));
        }
        for (var tile = 0u; tile < len; tile += TILE) {
            let count = min(TILE, len - tile);
            let next = start + tile + count;
#for i BC_FETCHES
            if thread + $iu * WG < TILE * QUADS {
                bs[thread + $iu * WG] = b$i;
                cs[thread + $iu * WG] = c$i;
            }
            b$i = b_v4(min(next + bc_token$i, last) * P.b_row + bc_at$i);
            c$i = c_v4(min(next + bc_token$i, last) * P.c_row + bc_at$i);
#end
#for i X_FETCHES
            if thread + $iu * WG < TILE * ROW_QUADS {
                xs[thread + $iu * WG] = x$i;
            }
            x$i = x_v4(min(next + x_token$i, last) * P.x_row + x_at$i);
#end
            workgroupBarrier();
            for (var j = 0u; j < count; j++) {
                let step = steps[tile + j];
                let x = xs[j * ROW_QUADS + quad];
                let dtx = step.x * x;
#for p 4
                var sum$p = vec4<f32>();
#end
#for v VECTORS
                let b_$v = bs[j * QUADS + lane + LANES * $vu];
                let c_$v = cs[j * QUADS + lane + LANES * $vu];
#for p 4
                state$p_$v = step.y * state$p_$v + dtx[$p] * b_$v;
                sum$p += state$p_$v * c_$v;
#end
#end
                sums[j * WG + thread] =
                    d * x + vec4<f32>(total(sum0), total(sum1), total(sum2), total(sum3));
            }
            workgroupBarrier();
            for (var o = thread; o < count * ROW_QUADS; o += WG) {
                let j = o / ROW_QUADS;
                var y = vec4<f32>();
                for (var l = 0u; l < LANES; l++) {
                    y += sums[j * WG + l * ROW_QUADS + o % ROW_QUADS];
                }
                y_set4((start + tile + j) * P.y_row + x_first + 4u * (o % ROW_QUADS), y);
            }
        }
        if dst != 0u {
#for p 4
#for v VECTORS
            pool_set4(dst * P.pool_row + place + $pu * STATE + 4u * (lane + LANES * $vu), state$p_$v);
#end
#end
        }
    }
    for (var t = row; t < P.tokens; t += P.rows) {
        if lane == 0u && ints_at(P.token_row + t) == NONE {
            y_set4(t * P.y_row + x_first + 4u * quad, vec4<f32>());
        }
    }
}
