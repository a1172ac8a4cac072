// Gated delta rule, token by token with the state in registers; works for any chunk table. A workgroup handles one row of
// the batch and 32 columns of one head's state; 8 threads share a column and hold every eighth of its KEY elements.
// Queries and keys are normalised for a tile of 4 tokens at once. EACH: every row of the state has its own decay. With the decayed state S, k'S and q'S are summed together:
// the output is q'S + (q'k) delta.

const LANES: u32 = 8u;
const COLUMNS: u32 = 32u;
const HELD: u32 = (KEY + LANES - 1u) / LANES;
const TILE: u32 = 4u;

var<workgroup> keys: array<f32, KEY * TILE>;
var<workgroup> queries: array<f32, KEY * TILE>;
#if EACH
var<workgroup> decays: array<f32, KEY * TILE>;
#endif
var<workgroup> norms: array<f32, 256>;
var<workgroup> products: array<f32, 128>;
// Double-buffered by token parity, so that one barrier per token is enough.
var<workgroup> sums: array<vec2<f32>, 512>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups);
    if index >= P.groups {
        return;
    }
    let row = index / (P.heads * P.parts);
    let h = index / P.parts % P.heads;
    let column = index % P.parts * COLUMNS + thread % COLUMNS;
    let lane = thread / COLUMNS;
    let active_column = column < VALUE;
    let key_head = (P.first_head + h) / P.heads_per_key * KEY;
#if EACH
#else
    let a_neg = par_at(h);
    let dt_bias = par_at(P.par_row + h);
#endif
    var state: array<f32, HELD>;
    let entry = P.row_table + 4u * row;
    let first_chunk = ints_at(entry + 2u);
    var chunks = ints_at(entry + 3u);
    if ints_at(entry + 1u) == 0u || ints_at(entry + 1u) > P.longest {
        chunks = 0u;
    }
    for (var i = 0u; i < chunks; i++) {
        let chunk = P.chunk_table + 5u * (first_chunk + i);
        let start = ints_at(chunk + 1u);
        let len = ints_at(chunk + 2u);
        let src = ints_at(chunk + 3u);
        let dst = ints_at(chunk + 4u);
        if src != CARRY {
            for (var e = 0u; e < HELD; e++) {
                let d = lane + LANES * e;
                state[e] = 0.0;
                if src != 0u && active_column && d < KEY {
                    state[e] = pool_at(src * P.pool_row + (h * KEY + d) * VALUE + column);
                }
            }
        }
        for (var tile = 0u; tile < len; tile += TILE) {
            let count = min(TILE, len - tile);
            workgroupBarrier();
            // 32 threads per query and per key of the tile.
            let token = thread / 64u;
            let is_query = thread / 32u % 2u == 0u;
            let part = thread % 32u;
            var norm = 0.0;
            if token < count {
                let t = start + tile + token;
                for (var d = part; d < KEY; d += 32u) {
                    if is_query {
                        let x = q_at(t * P.q_row + key_head + d);
                        queries[token * KEY + d] = x;
                        norm += x * x;
                    } else {
                        let x = k_at(t * P.k_row + key_head + d);
                        keys[token * KEY + d] = x;
                        norm += x * x;
                    }
                }
            }
            norms[thread] = norm;
#if EACH
            for (var i = thread; i < count * KEY; i += 256u) {
                let d = h * KEY + i % KEY;
                let step = softplus(a_at((start + tile + i / KEY) * P.a_row + d) + par_at(P.par_row + d));
                decays[i] = exp(par_at(d) * step);
            }
#endif
            workgroupBarrier();
            var total = 0.0;
            for (var l = 0u; l < 32u; l++) {
                total += norms[thread / 32u * 32u + l];
            }
            let scale = select(1.0, P.query_scale, is_query) / sqrt(total + 1e-6);
            if token < count {
                for (var d = part; d < KEY; d += 32u) {
                    if is_query {
                        queries[token * KEY + d] *= scale;
                    } else {
                        keys[token * KEY + d] *= scale;
                    }
                }
            }
            workgroupBarrier();
            if is_query {
                var product = 0.0;
                if token < count {
                    for (var d = part; d < KEY; d += 32u) {
                        product += queries[token * KEY + d] * keys[token * KEY + d];
                    }
                }
                products[token * 32u + part] = product;
            }
            for (var j = 0u; j < count; j++) {
                let t = start + tile + j;
#if EACH
#else
                let decay = exp(a_neg * softplus(a_at(t * P.a_row + h) + dt_bias));
#endif
                let beta = P.beta_scale * sigmoid(b_at(t * P.b_row + h));
                var sum = vec2<f32>();
                for (var e = 0u; e < HELD; e++) {
                    let d = lane + LANES * e;
                    if d < KEY {
#if EACH
                        state[e] *= decays[j * KEY + d];
#else
                        state[e] *= decay;
#endif
                        sum += state[e] * vec2<f32>(keys[j * KEY + d], queries[j * KEY + d]);
                    }
                }
                let slot = (j & 1u) * 256u;
                sums[slot + thread] = sum;
                workgroupBarrier();
                var all = vec2<f32>();
                for (var l = 0u; l < LANES; l++) {
                    all += sums[slot + l * COLUMNS + thread % COLUMNS];
                }
                var value = 0.0;
                if active_column {
                    value = v_at(t * P.v_row + h * VALUE + column);
                }
                let delta = beta * (value - all.x);
                for (var e = 0u; e < HELD; e++) {
                    let d = lane + LANES * e;
                    if d < KEY {
                        state[e] += keys[j * KEY + d] * delta;
                    }
                }
                if lane == 0u && active_column {
                    var product = 0.0;
                    for (var l = 0u; l < 32u; l++) {
                        product += products[j * 32u + l];
                    }
                    out_set(t * P.out_row + h * VALUE + column, all.y + product * delta);
                }
            }
        }
        if dst != 0u && active_column {
            for (var e = 0u; e < HELD; e++) {
                let d = lane + LANES * e;
                if d < KEY {
                    pool_set(dst * P.pool_row + (h * KEY + d) * VALUE + column, state[e]);
                }
            }
        }
    }
    if lane == 0u && active_column {
        for (var t = row; t < P.tokens; t += P.rows) {
            if ints_at(P.token_row + t) == NONE {
                out_set(t * P.out_row + h * VALUE + column, 0.0);
            }
        }
    }
}
