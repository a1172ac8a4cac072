// Attention for rows of several tokens (prefill). A workgroup handles the query heads of one KV head for a tile of TOKENS
// tokens, at most 64 queries, and walks the keys page by page with a running maximum. A thread computes 4 queries x 4 keys
// of the scores, in slices of 32 of the head dim, then 4 queries x COLUMNS quads of the output, in slices of DEPTH keys.

const HEAD_QUADS: u32 = HEAD_DIM / 4u;
const SLICE: u32 = 32u;
const SLICES: u32 = (HEAD_DIM + SLICE - 1u) / SLICE;
// Quads of a row of values in workgroup memory.
const SPAN: u32 = 16u * COLUMNS;

// Holds in turn: a slice of queries and one of keys, both transposed; the maxima; a slice of weights and one of values.
var<workgroup> tile: array<vec4<f32>, 1024>;

// The first position that a query at `position` sees.
fn window_begin(position: u32) -> u32 {
    return max(select(0u, position + 1u - P.window, position + 1u > P.window), min(P.first, position));
}

// Elements d to d + 3 of query q of the tile.
fn query(t0: u32, kv: u32, q: u32, d: u32) -> vec4<f32> {
    let t = min(t0 + q / GROUP, P.tokens - 1u);
    return P.scale * q_v4(t * P.q_row + (kv * GROUP + q % GROUP) * HEAD_DIM + d);
}

// Block i of a slice: 4 x 4 of the queries, then of the keys of the page at `place`, transposed.
fn fetch(i: u32, slice: u32, t0: u32, kv: u32, place: u32) -> mat4x4<f32> {
    let d = slice * SLICE + i % 8u * 4u;
    let r = i / 8u % 16u * 4u;
    if d >= HEAD_DIM {
        return mat4x4<f32>();
    }
    if i < 128u {
        return transpose(mat4x4<f32>(query(t0, kv, r, d), query(t0, kv, r + 1u, d), query(t0, kv, r + 2u, d),
                                     query(t0, kv, r + 3u, d)));
    }
    let at = place + r * HEAD_DIM + d;
    return transpose(mat4x4<f32>(keys_v4(at), keys_v4(at + HEAD_DIM), keys_v4(at + 2u * HEAD_DIM),
                                 keys_v4(at + 3u * HEAD_DIM)));
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups);
    if index >= P.groups {
        return;
    }
    let kv = index % P.kv_heads;
    // The last tokens attend to the most keys, so they start first.
    let t0 = (P.groups / P.kv_heads - 1u - index / P.kv_heads) * TOKENS;
    let count = min(TOKENS, P.tokens - t0);
    let tm = thread / 16u;
    let tn = thread % 16u;
    // For each of the thread's 4 queries: the row of the batch and the range of visible positions.
    var rows = vec4<u32>(NONE);
    var begin = vec4<u32>();
    var end = vec4<u32>();
#for i 4
    if 4u * tm + $iu < count * GROUP {
        let t = t0 + (4u * tm + $iu) / GROUP;
        rows[$i] = ints_at(P.token_row + t);
        end[$i] = ints_at(P.positions + t) + 1u;
        begin[$i] = window_begin(end[$i] - 1u);
    }
#end
    var largest = vec4<f32>(LOWEST);
    // Over the thread's own keys only.
    var total = vec4<f32>();
#for c COLUMNS
    var acc$c = mat4x4<f32>();
#end
    // Row by row, because tokens of one row share pages.
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
            for (var k0 = low / PAGE * PAGE; k0 < high; k0 += PAGE) {
                let page = ints_at(P.page_table + row * P.pages + k0 / PAGE);
                let keys_at = page * P.keys_row + kv * HEAD_SPAN;
                let values_at = page * P.values_row + kv * HEAD_SPAN;
                var next = fetch(thread, 0u, t0, kv, keys_at);
                // One vector per query, of 4 keys.
                var s = mat4x4<f32>();
                for (var slice = 0u; slice < SLICES; slice++) {
                    workgroupBarrier();
                    // Columns are swizzled so that threads storing together hit different banks.
                    let at = thread / 128u * 512u + thread % 8u * 64u + ((thread / 8u % 16u) ^ (thread % 8u));
#for j 4
                    tile[at + $ju * 16u] = next[$j];
#end
                    workgroupBarrier();
                    if slice + 1u < SLICES {
                        next = fetch(thread, slice + 1u, t0, kv, keys_at);
                    }
                    for (var d = 0u; d < SLICE; d++) {
                        let q = tile[d * 16u + (tm ^ (d / 4u))];
                        let k = tile[512u + d * 16u + (tn ^ (d / 4u))];
#for i 4
                        s[$i] += q[$i] * k;
#end
                    }
                }
                let keys = k0 + 4u * tn + vec4<u32>(0u, 1u, 2u, 3u);
                var most = largest;
#for i 4
                let seen$i = (keys >= vec4<u32>(begin[$i])) & (keys < vec4<u32>(end[$i])) & vec4<bool>(rows[$i] == row);
                let shown$i = select(vec4<f32>(LOWEST), s[$i], seen$i);
                most[$i] = max(most[$i], max(max(shown$i.x, shown$i.y), max(shown$i.z, shown$i.w)));
#end
                workgroupBarrier();
                tile[thread] = most;
                workgroupBarrier();
                for (var j = 0u; j < 16u; j++) {
                    most = max(most, tile[16u * tm + j]);
                }
                let rescale = exp(largest - most);
                largest = most;
                total *= rescale;
                // One vector per key, of 4 queries.
#for i 4
                s[$i] = select(vec4<f32>(), exp(s[$i] - most[$i]), seen$i);
                total[$i] += s[$i].x + s[$i].y + s[$i].z + s[$i].w;
#for c COLUMNS
                acc$c[$i] *= rescale[$i];
#end
#end
                let weights = transpose(s);
                for (var base = 0u; base < PAGE; base += DEPTH) {
                    workgroupBarrier();
                    if 4u * tn >= base && 4u * tn < base + DEPTH {
#for j 4
                        tile[(4u * tn + $ju - base) * 16u + tm] = weights[$j];
#end
                    }
                    for (var i = thread; i < DEPTH * SPAN; i += 256u) {
                        // Positions outside the range are uninitialised.
                        var v = vec4<f32>();
                        let key = base + i / SPAN;
                        if k0 + key >= low && k0 + key < high && i % SPAN < HEAD_QUADS {
                            v = values_v4(values_at + key * HEAD_DIM + 4u * (i % SPAN));
                        }
                        tile[DEPTH * 16u + i] = v;
                    }
                    workgroupBarrier();
                    for (var k = 0u; k < DEPTH; k++) {
                        let w = tile[k * 16u + tm];
#for c COLUMNS
                        let v$c = tile[DEPTH * 16u + k * SPAN + tn + $cu * 16u];
#for i 4
                        acc$c[$i] += w[$i] * v$c;
#end
#end
                    }
                }
            }
        }
        first = last;
    }
    workgroupBarrier();
    tile[thread] = total;
    workgroupBarrier();
    var sum = vec4<f32>();
    for (var j = 0u; j < 16u; j++) {
        sum += tile[16u * tm + j];
    }
#for i 4
    if rows[$i] != NONE {
        let factor = select(0.0, 1.0 / sum[$i], sum[$i] > 0.0);
        let q = 4u * tm + $iu;
        let to = (t0 + q / GROUP) * P.out_row + (kv * GROUP + q % GROUP) * HEAD_DIM;
#for c COLUMNS
        if tn + $cu * 16u < HEAD_QUADS {
            out_set4(to + 4u * (tn + $cu * 16u), factor * acc$c[$i]);
        }
#end
    }
#end
}
