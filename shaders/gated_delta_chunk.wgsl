// Gated delta rule for long rows in the chunked form, keys of 64, 96 or 128. A workgroup handles one row of the batch and 32
// columns of one head's state, of which a thread holds 4 rows of a quad (with keys below 128, the last threads hold none), and
// walks the row's chunks. gated_delta_prepare.wgsl
// computed A, M and the inverses of the diagonal blocks of 16 of each chunk. With S the state before the chunk, per token t:
//     R_t = b_t (v_t - exp(c_t) k_t S),    D_t = R_t - sum over s < t of A_ts D_s,
//     out_t = exp(c_t) q_t S + sum over s <= t of M_ts D_s,    S = exp(c_end) S + sum over s of exp(c_end - c_s) k_s' D_s
// A thread of the first half holds R, then D, of 4 tokens and 4 columns; a thread of the second half holds their outputs.
// K, Q and S pass through workgroup memory in slices of 16 key elements, A, M, D and K in slices of 16 tokens; the next
// slice is fetched while one is used.
// EACH: exp(c) is a vector along the keys, which chunk_pairs_channel.wgsl left in `decays`, followed by k_s exp(c_end - c_s).

const WORDS: u32 = 152u;

// K and Q, or A and M: 128 rows of 4 quads; K: 16 tokens of 32 quads.
var<workgroup> wide: array<vec4<f32>, 512>;
// S, R or D: 16 rows of 8 quads.
var<workgroup> narrow: array<vec4<f32>, 128>;
var<workgroup> solved: array<vec4<f32>, 128>;
var<workgroup> inverse: array<vec4<f32>, 64>;
var<workgroup> scales: array<vec4<f32>, 64>;

fn prep_of(t: u32, h: u32, word: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(prep_v4((t * P.heads + h) * WORDS + word));
}

#if EACH
// A quad of exp(c_t) from element `i` of a key on or, with i from KEY on, of k_t exp(c_end - c_t).
fn decays_of(t: u32, h: u32, i: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(decays_v4((t * P.heads + h) * 2u * KEY + i));
}
#endif

// A quad of a key as it is added to the state: exp(c_end - c_t) is in it, or in the token's scales.
fn left_of(t: u32, h: u32, key: u32, quad: u32) -> vec4<f32> {
#if EACH
    return decays_of(t, h, KEY + quad);
#else
    return k_v4(t * P.k_row + key + quad);
#endif
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups);
    if index >= P.groups {
        return;
    }
    let row = index / (P.heads * BLOCKS);
    let h = index / BLOCKS % P.heads;
    let entry = P.row_table + 4u * row;
    let first = ints_at(entry);
    let tokens = ints_at(entry + 1u);
    let first_chunk = ints_at(entry + 2u);
    var chunks = ints_at(entry + 3u);
    if tokens <= P.short {
        chunks = 0u;
    }
    let last = first + max(tokens, 1u) - 1u;
    let key = (P.first_head + h) / P.heads_per_key * KEY;

    // Lane order: lanes next to each other, or two apart, read the same data.
    let sub = (thread & 1u) | ((thread >> 1u) & 6u);
    // The thread's part. State: rows 4 sr ..; R and outputs: tokens tm, tm + 16 ..; both: quad `sub` of the columns.
    let sr = thread / 64u * 8u + (((thread >> 1u) & 1u) | ((thread >> 3u) & 6u));
    let tm = ((thread >> 1u) & 1u) | ((thread >> 3u) & 14u);
    let side = thread / 128u;
    let held = 4u * sr < KEY;
    // The quad of a key that the thread fetches where 32 threads fetch one token.
    let quad = 4u * min(thread % 32u, KEY / 4u - 1u);
    let column = (h * BLOCKS + index % BLOCKS) * 32u + 4u * sub;
    let place = (h * KEY + 4u * sr) * VALUE + index % BLOCKS * 32u + 4u * sub;
#for p 4
    var state$p = vec4<f32>();
#end
    // Fetches the next slice. Tokens past the row's end repeat the last one; their results are not used.
    let quarter = thread / 4u;
    let word = 4u * (thread % 4u);
    var next = k_v4(min(first + quarter, last) * P.k_row + key + word);
    var more = q_v4(min(first + quarter, last) * P.q_row + key + word);
#if EACH
    var next_decay = decays_of(min(first + quarter, last), h, word);
#endif
    var next_inverse = vec4<f32>();
    var next_scales = prep_of(min(first + (thread & 63u), last), h, 144u);
#for i 4
    var y$i = v_v4(min(first + tm + 16u * $iu, last) * P.v_row + column);
#end
    for (var i = 0u; i < chunks; i++) {
        let chunk = P.chunk_table + 5u * (first_chunk + i);
        let start = ints_at(chunk + 1u);
        let len = ints_at(chunk + 2u);
        let src = ints_at(chunk + 3u);
        let dst = ints_at(chunk + 4u);
        if src != CARRY {
#for p 4
            state$p = vec4<f32>();
            if src != 0u && held {
                state$p = pool_v4(src * P.pool_row + place + $pu * VALUE);
            }
#end
        }
#if EACH
        let decay = decays_of(start + len - 1u, h, min(4u * sr, KEY - 4u));
#else
        let decay = prep_of(start, h, 148u);
#endif
        if thread < 64u {
            scales[thread] = select(vec4<f32>(), next_scales, thread < len);
        }
        workgroupBarrier();
#for i 4
        y$i *= select(0.0, scales[tm + 16u * $iu].w, side == 0u);
#end
        for (var n = 0u; n < KEY / 16u; n++) {
            workgroupBarrier();
#if EACH
            next *= next_decay;
            more *= next_decay;
#endif
            wide[thread] = next * scales[quarter].x;
            wide[thread + 256u] = more * scales[quarter].y;
            if sr / 4u == n {
#for p 4
                narrow[32u * (sr & 3u) + 8u * $pu + sub] = state$p;
#end
            }
            workgroupBarrier();
            if n + 1u < KEY / 16u {
                let col = key + 16u * (n + 1u) + word;
                next = k_v4(min(start + quarter, last) * P.k_row + col);
                more = q_v4(min(start + quarter, last) * P.q_row + col);
#if EACH
                next_decay = decays_of(min(start + quarter, last), h, col - key);
#endif
            } else {
                next = prep_of(min(start + quarter, last), h, word);
                more = prep_of(min(start + quarter, last), h, 64u + word);
                next_inverse = prep_of(min(start + quarter, last), h, 128u + word);
            }
            for (var q = 0u; q < 4u; q++) {
#for j 4
                let s$j = narrow[32u * q + 8u * $ju + sub];
#end
#for i 4
                let m$i = wide[256u * side + 4u * tm + 64u * $iu + q];
#for j 4
                y$i += m$i[$j] * s$j;
#end
#end
            }
        }
        for (var s0 = 0u; s0 < len; s0 += 16u) {
            workgroupBarrier();
            wide[thread] = next;
            wide[thread + 256u] = more;
            if side == 0u {
                if thread < 64u {
                    inverse[thread] = next_inverse;
                }
                let early = (s0 & 16u) == 0u;
                narrow[8u * tm + sub] = select(select(y3, y2, early), select(y1, y0, early), s0 < 32u);
            }
            workgroupBarrier();
            if s0 + 16u < len {
                next = prep_of(min(start + quarter, last), h, s0 + 16u + word);
                more = prep_of(min(start + quarter, last), h, s0 + 80u + word);
                next_inverse = prep_of(min(start + s0 + 16u + quarter, last), h, 128u + word);
            } else {
                next = left_of(min(start + thread / 32u, last), h, key, quad);
                more = left_of(min(start + thread / 32u + 8u, last), h, key, quad);
            }
            if side == 0u {
                var d = vec4<f32>();
                for (var q = 0u; q < 4u; q++) {
                    let t = inverse[4u * tm + q];
#for j 4
                    d += t[$j] * narrow[32u * q + 8u * $ju + sub];
#end
                }
                solved[8u * tm + sub] = d;
                if s0 == 0u {
                    y0 = d;
                } else if s0 == 16u {
                    y1 = d;
                } else if s0 == 32u {
                    y2 = d;
                } else {
                    y3 = d;
                }
            }
            workgroupBarrier();
            for (var q = 0u; q < 4u; q++) {
#for j 4
                let d$j = solved[32u * q + 8u * $ju + sub];
#end
                // Later tokens do not affect earlier ones.
                if s0 < 32u {
#for i 2
                    let m$i = wide[256u * side + 4u * tm + 64u * $iu + q];
#for j 4
                    y$i += m$i[$j] * d$j;
#end
#end
                }
                let m2 = wide[256u * side + 4u * tm + 128u + q];
                let m3 = wide[256u * side + 4u * tm + 192u + q];
#for j 4
                y2 += m2[$j] * d$j;
                y3 += m3[$j] * d$j;
#end
            }
        }
        if side == 1u {
#for i 4
            if tm + 16u * $iu < len {
                out_set4((start + tm + 16u * $iu) * P.out_row + column, y$i);
            }
#end
        }
#for p 4
        state$p *= decay[$p];
#end
        for (var s0 = 0u; s0 < len; s0 += 16u) {
            workgroupBarrier();
            wide[thread] = next;
            wide[thread + 256u] = more;
            if side == 0u {
                let early = (s0 & 16u) == 0u;
                let d = select(select(y3, y2, early), select(y1, y0, early), s0 < 32u);
                narrow[8u * tm + sub] = d * scales[s0 + tm].z;
            }
            workgroupBarrier();
            if s0 + 16u < len {
                let ahead = start + s0 + 16u + thread / 32u;
                next = left_of(min(ahead, last), h, key, quad);
                more = left_of(min(ahead + 8u, last), h, key, quad);
            } else {
                let ahead = start + len;
                next = k_v4(min(ahead + quarter, last) * P.k_row + key + word);
                more = q_v4(min(ahead + quarter, last) * P.q_row + key + word);
#if EACH
                next_decay = decays_of(min(ahead + quarter, last), h, word);
#endif
                next_scales = prep_of(min(ahead + (thread & 63u), last), h, 144u);
#for i 4
                y$i = v_v4(min(ahead + tm + 16u * $iu, last) * P.v_row + column);
#end
            }
            for (var s = 0u; s < 16u; s++) {
                let d = narrow[8u * s + sub];
                let k = wide[32u * s + sr];
#for p 4
                state$p += k[$p] * d;
#end
            }
        }
        if dst != 0u && held {
#for p 4
            pool_set4(dst * P.pool_row + place + $pu * VALUE, state$p);
#end
        }
    }
    for (var t = row * 256u + thread; t < P.tokens; t += P.rows * 256u) {
        if ints_at(P.token_row + t) == NONE {
            for (var q = 0u; q < 8u; q++) {
                out_set4(t * P.out_row + column - 4u * sub + 4u * q, vec4<f32>());
            }
        }
    }
}
