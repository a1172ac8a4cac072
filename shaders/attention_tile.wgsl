// Attention of many tokens: a workgroup takes the query heads of one KV head for a tile of TOKENS tokens, 64 queries or
// fewer. 4 threads share a query and hold every fourth quad of it and of its result; keys and values pass through
// workgroup memory KEYS at a time. Taken where rows have several tokens.

const HEAD_QUADS: u32 = HEAD_DIM / 4u;
const HELD: u32 = HEAD_DIM / 16u;

var<workgroup> keys_tile: array<vec4<f32>, KEYS * HEAD_QUADS>;
var<workgroup> values_tile: array<vec4<f32>, KEYS * HEAD_QUADS>;
var<workgroup> products: array<f32, 256u * KEYS>;

// The first position that a query at `position` sees.
fn window_begin(position: u32) -> u32 {
    return select(0u, position + 1u - P.window, position + 1u > P.window);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups);
    if index >= P.groups {
        return;
    }
    let kv = index % P.kv_heads;
    let t0 = index / P.kv_heads * TOKENS;
    let count = min(TOKENS, P.tokens - t0);
    let q = thread / 4u;
    let lane = thread % 4u;
    let t = t0 + q / GROUP;
    let column = (kv * GROUP + q % GROUP) * HEAD_DIM;
    var my_row = NONE;
    var begin = 0u;
    var end = 0u;
    var query: array<vec4<f32>, HELD>;
    var acc: array<vec4<f32>, HELD>;
    if q < count * GROUP {
        my_row = ints_at(P.token_row + t);
    }
    if my_row != NONE {
        let position = ints_at(P.positions + t);
        begin = window_begin(position);
        end = position + 1u;
        for (var i = 0u; i < HELD; i++) {
            query[i] = P.scale * q_v4(t * P.q_row + column + 4u * (lane + 4u * i));
        }
    }
    var largest = LOWEST;
    var total = 0.0;
    // The tile's tokens row by row: they share pages.
    var first = 0u;
    while first < count {
        let row = ints_at(P.token_row + t0 + first);
        var last = first + 1u;
        while last < count {
            if ints_at(P.token_row + t0 + last) != row {
                break;
            }
            last++;
        }
        if row != NONE {
            let low = window_begin(ints_at(P.positions + t0 + first));
            let high = ints_at(P.positions + t0 + last - 1u) + 1u;
            for (var k0 = low / KEYS * KEYS; k0 < high; k0 += KEYS) {
                let page = ints_at(P.page_table + row * P.pages + k0 / PAGE);
                let place = (kv * PAGE + k0 % PAGE) * HEAD_DIM;
                workgroupBarrier();
                for (var i = thread; i < KEYS * HEAD_QUADS; i += 256u) {
                    // Nobody wrote what lies outside of the range.
                    var k = vec4<f32>();
                    var v = vec4<f32>();
                    let position = k0 + i / HEAD_QUADS;
                    if position >= low && position < high {
                        k = keys_v4(page * P.keys_row + place + 4u * i);
                        v = values_v4(page * P.values_row + place + 4u * i);
                    }
                    keys_tile[i] = k;
                    values_tile[i] = v;
                }
                workgroupBarrier();
                for (var j = 0u; j < KEYS; j++) {
                    var sum = vec4<f32>();
                    for (var i = 0u; i < HELD; i++) {
                        sum += query[i] * keys_tile[j * HEAD_QUADS + lane + 4u * i];
                    }
                    products[j * 256u + thread] = sum.x + sum.y + sum.z + sum.w;
                }
                workgroupBarrier();
                if my_row == row {
                    var scores: array<f32, KEYS>;
                    let before = largest;
                    for (var j = 0u; j < KEYS; j++) {
                        let at = j * 256u + 4u * q;
                        scores[j] = products[at] + products[at + 1u] + products[at + 2u] + products[at + 3u];
                        if k0 + j >= begin && k0 + j < end {
                            largest = max(largest, scores[j]);
                        }
                    }
                    let rescale = exp(before - largest);
                    total *= rescale;
                    for (var i = 0u; i < HELD; i++) {
                        acc[i] *= rescale;
                    }
                    for (var j = 0u; j < KEYS; j++) {
                        let weight = select(0.0, exp(scores[j] - largest), k0 + j >= begin && k0 + j < end);
                        total += weight;
                        for (var i = 0u; i < HELD; i++) {
                            acc[i] += weight * values_tile[j * HEAD_QUADS + lane + 4u * i];
                        }
                    }
                }
            }
        }
        first = last;
    }
    if my_row != NONE {
        let factor = select(0.0, 1.0 / total, total > 0.0);
        for (var i = 0u; i < HELD; i++) {
            out_set4(t * P.out_row + column + 4u * (lane + 4u * i), acc[i] * factor);
        }
    }
}
