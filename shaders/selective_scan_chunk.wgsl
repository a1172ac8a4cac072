// Selective scan for long rows in the chunked form, one A and dt per head. A workgroup handles one row of the batch and 32
// rows of one head's state, of which a thread holds 8 rows of a quad of N, and walks the row's chunks:
//     y_t = exp(a_t) C_t S' + sum over s <= t of M_ts x_s,    M_ts = C_t B_s exp(a_t - a_s) dt_s, and D where s = t
//     S   = exp(a_end) S + sum over s of x_s' (B_s exp(a_end - a_s) dt_s)
// where a is the running sum of dt A, so no exponent is positive. chunk_pairs.wgsl computed C B'. C and S pass through
// workgroup memory in slices of 32 of N, B and M in slices of 16 tokens; C, B, x and C B' of the next slice are fetched
// while one is used. With N of 256, B comes in halves of 8 tokens: 16 would take all of the workgroup memory that WebGPU
// promises. A thread computes 8 x 4 outputs over one of PARTS parts of N; the parts are added up at the end.

const WG: u32 = STATE;
const QUADS: u32 = STATE / 4u;
const LOG2E: f32 = 1.44269504;

// C: 64 tokens of 8 quads, swizzled so that adjacent rows lie in different banks; B: 16 or 8 tokens of QUADS; outputs of
// other parts.
var<workgroup> wide: array<vec4<f32>, 512>;
// S: 32 rows of 8 quads; M: 64 tokens of 4 quads.
var<workgroup> narrow: array<vec4<f32>, 256>;
var<workgroup> xs: array<vec4<f32>, 128>;
// Per token: dt A, its running sum within the block of 8, and dt with the running sum within the chunk.
var<workgroup> logs: array<f32, 64>;
var<workgroup> blocks: array<f32, 64>;
var<workgroup> steps: array<vec2<f32>, 64>;

@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups);
    if index >= P.groups {
        return;
    }
    let row = index / (P.heads * BLOCKS);
    let h = index / BLOCKS % P.heads;
    let x_first = (h * BLOCKS + index % BLOCKS) * 32u;
    let entry = P.row_table + 4u * row;
    let first = ints_at(entry);
    let tokens = ints_at(entry + 1u);
    let first_chunk = ints_at(entry + 2u);
    var chunks = ints_at(entry + 3u);
    if tokens <= P.short {
        chunks = 0u;
    }
    let last = first + max(tokens, 1u) - 1u;
    let a = par_at(h) * LOG2E;
    let d = par_at(P.par_row + h);
    let dt_bias = par_at(2u * P.par_row + h);
    let g = (P.first_head + h) / P.heads_per_group;
    let pair_first = (g - P.first_group) * 64u;

    // Lane order: lanes next to each other, or two apart, read the same data.
    let sub = (thread & 1u) | ((thread >> 1u) & 6u);
    // The thread's part. State: rows 8 sp .. and quad sq of N; outputs: tokens tm, tm + 8 .. and quad `sub` of x.
    let sp = ((thread >> 1u) & 1u) | ((thread >> 3u) & 2u);
    let slice = thread / 32u;
    let sq = 8u * slice + sub;
    let tm = ((thread >> 1u) & 1u) | ((thread >> 3u) & 6u);
    let part = thread / 64u;
    let place = (x_first + 8u * sp) * STATE + 4u * sq;
#for p 4
    var lo$p = vec4<f32>();
    var hi$p = vec4<f32>();
#end
    // The next slice: C or B, C B', and x. Tokens past the row's end repeat the last one; their results are not used.
    let c_token = thread / 8u;
    let c_at = g * STATE + 4u * (thread % 8u);
    let b_token = thread / QUADS;
    let b_at = g * STATE + 4u * (thread % QUADS);
#for j C_FETCHES
    var next$j = c_v4(min(first + c_token + $ju * (WG / 8u), last) * P.c_row + c_at);
    var pairs$j = vec4<f32>();
    var x$j = vec4<f32>();
#end
    var next_dt = dt_at(min(first + (thread & 63u), last) * P.dt_row + h);
    var start = first;
    var chunk = P.chunk_table + 5u * first_chunk;
    var next_len = ints_at(chunk + 2u);
    var next_src = ints_at(chunk + 3u);
    var next_dst = ints_at(chunk + 4u);
    for (var i = 0u; i < chunks; i++) {
        let len = next_len;
        let src = next_src;
        let dst = next_dst;
        // The entry past a row's last is not used.
        chunk += select(0u, 5u, i + 1u < chunks);
        next_len = ints_at(chunk + 2u);
        next_src = ints_at(chunk + 3u);
        next_dst = ints_at(chunk + 4u);
        if src != CARRY {
#for p 4
            lo$p = vec4<f32>();
            hi$p = vec4<f32>();
            if src != 0u {
                lo$p = pool_v4(src * P.pool_row + place + $pu * STATE);
                hi$p = pool_v4(src * P.pool_row + place + ($pu + 4u) * STATE);
            }
#end
        }
        var dt = 0.0;
        if thread < 64u {
            if thread < len {
                dt = clamp(softplus(next_dt + dt_bias), P.dt_low, P.dt_high);
            }
            // exp2(-150) is already 0 in f32; larger running sums would lose precision for later tokens.
            logs[thread] = max(dt * a, -150.0);
        }
#for i 4
        var ya$i = vec4<f32>();
        var yb$i = vec4<f32>();
#end
        for (var n = 0u; n < STATE / 32u; n++) {
            workgroupBarrier();
#for j C_FETCHES
            {
                let t = c_token + $ju * (WG / 8u);
                wide[8u * t + ((thread ^ t) & 7u)] = next$j;
            }
#end
            if slice == n {
#for p 4
                narrow[64u * sp + 8u * $pu + (sub ^ (2u * sp))] = lo$p;
                narrow[64u * sp + 8u * $pu + 32u + (sub ^ (2u * sp + 1u))] = hi$p;
#end
            }
            workgroupBarrier();
            if n + 1u < STATE / 32u {
#for j C_FETCHES
                next$j = c_v4(min(start + c_token + $ju * (WG / 8u), last) * P.c_row + c_at + 32u * (n + 1u));
#end
            } else {
#for j B_FETCHES
                next$j = b_v4(min(start + b_token + $ju * 4u, last) * P.b_row + b_at);
#end
#for j PAIR_FETCHES
                pairs$j = bitcast<vec4<f32>>(pairs_v4(min(start + (thread + $ju * WG) / 4u, last) * P.pairs_row
                                                      + pair_first + 4u * (thread % 4u)));
#end
#for j X_FETCHES
                x$j = x_v4(min(start + (thread + $ju * WG) / 8u, last) * P.x_row + x_first + 4u * (thread % 8u));
#end
            }
            if thread < 64u {
                let block = thread & 56u;
                if n == 0u {
                    var sum = 0.0;
#for j 8
                    sum += select(0.0, logs[block + $ju], $ju <= (thread & 7u));
#end
                    blocks[thread] = sum;
                } else if n == 1u {
                    var sum = blocks[thread];
#for j 7
                    sum += select(0.0, blocks[8u * $ju + 7u], 8u * $ju < block);
#end
                    steps[thread] = vec2<f32>(dt, sum);
                }
            }
#for k PART_QUADS
            {
                let q = part * PART_QUADS + $ku;
                let s = transpose(mat4x4<f32>(
#for j 4
                    narrow[8u * (4u * sub + $ju) + (q ^ sub)],
#end
                ));
#for i 4
                let ca$i = wide[8u * tm + 64u * $iu + (q ^ tm)];
                let cb$i = wide[8u * tm + 64u * $iu + 256u + (q ^ tm)];
#for j 4
                ya$i += ca$i[$j] * s[$j];
                yb$i += cb$i[$j] * s[$j];
#end
#end
            }
#end
        }
        workgroupBarrier();
        let all = steps[63].y;
#for i 4
        ya$i *= exp2(steps[tm + 8u * $iu].y);
        yb$i *= exp2(steps[tm + 8u * $iu + 32u].y);
#end
        let decay = exp2(all);
#for p 4
        lo$p *= decay;
        hi$p *= decay;
#end
        for (var s0 = 0u; s0 < len; s0 += 16u) {
            workgroupBarrier();
#for j B_FETCHES
            {
                let step = steps[s0 + b_token + $ju * 4u];
                wide[thread + $ju * WG] = next$j * (step.x * exp2(all - step.y));
            }
#end
#for j PAIR_FETCHES
            {
                let t = (thread + $ju * WG) / 4u;
                let s = s0 + 4u * (thread % 4u);
                let sum = steps[t].y;
                var m = vec4<f32>();
#for e 4
                let step$e = steps[s + $eu];
                m[$e] = select(0.0, pairs$j[$e] * (step$e.x * exp2(min(sum - step$e.y, 0.0))), s + $eu <= t);
                m[$e] += select(0.0, d, s + $eu == t);
#end
                narrow[thread + $ju * WG] = m;
            }
#end
#for j X_FETCHES
            if thread + $ju * WG < 128u {
                xs[thread + $ju * WG] = x$j;
            }
#end
            workgroupBarrier();
#if FOUR_PARTS
            // The second half of B follows the first.
#for j B_FETCHES
            next$j = b_v4(min(start + s0 + 8u + b_token + $ju * 4u, last) * P.b_row + b_at);
#end
#for t B_TOKENS
            {
                let b = wide[$tu * QUADS + sq];
                let x_lo = xs[8u * $tu + 2u * sp];
                let x_hi = xs[8u * $tu + 2u * sp + 1u];
#for p 4
                lo$p += x_lo[$p] * b;
                hi$p += x_hi[$p] * b;
#end
            }
#end
            workgroupBarrier();
#for j B_FETCHES
            {
                let step = steps[s0 + 8u + b_token + $ju * 4u];
                wide[thread + $ju * WG] = next$j * (step.x * exp2(all - step.y));
            }
#end
            workgroupBarrier();
#endif
            if s0 + 16u < len {
                let ahead = start + s0 + 16u;
#for j B_FETCHES
                next$j = b_v4(min(ahead + b_token + $ju * 4u, last) * P.b_row + b_at);
#end
#for j PAIR_FETCHES
                pairs$j = bitcast<vec4<f32>>(pairs_v4(min(start + (thread + $ju * WG) / 4u, last) * P.pairs_row
                                                      + pair_first + s0 + 16u + 4u * (thread % 4u)));
#end
#for j X_FETCHES
                x$j = x_v4(min(ahead + (thread + $ju * WG) / 8u, last) * P.x_row + x_first + 4u * (thread % 8u));
#end
            } else {
#for j C_FETCHES
                next$j = c_v4(min(start + len + c_token + $ju * (WG / 8u), last) * P.c_row + c_at);
#end
                next_dt = dt_at(min(start + len + (thread & 63u), last) * P.dt_row + h);
            }
            for (var k = 0u; k < 4u / PARTS; k++) {
                let q = part * (4u / PARTS) + k;
#for j 4
                let x_$j = xs[32u * q + 8u * $ju + sub];
#end
                // Later tokens do not affect earlier ones.
                if s0 < 32u {
#for i 4
                    let ma$i = narrow[4u * tm + 32u * $iu + q];
#for j 4
                    ya$i += ma$i[$j] * x_$j;
#end
#end
                }
#for i 4
                let mb$i = narrow[4u * tm + 32u * $iu + 128u + q];
#for j 4
                yb$i += mb$i[$j] * x_$j;
#end
#end
            }
#for t B_TOKENS
            {
                let t = 16u - B_TOKENS + $tu;
                let b = wide[$tu * QUADS + sq];
                let x_lo = xs[8u * t + 2u * sp];
                let x_hi = xs[8u * t + 2u * sp + 1u];
#for p 4
                lo$p += x_lo[$p] * b;
                hi$p += x_hi[$p] * b;
#end
            }
#end
        }
        if dst != 0u {
#for p 4
            pool_set4(dst * P.pool_row + place + $pu * STATE, lo$p);
            pool_set4(dst * P.pool_row + place + ($pu + 4u) * STATE, hi$p);
#end
        }
        let y_first = start * P.y_row + x_first + 4u * sub;
#if TWO_PARTS
        // Each part finishes half of the tokens.
        workgroupBarrier();
#for i 4
        wide[(thread ^ 64u) + 128u * $iu] = select(yb$i, ya$i, part == 1u);
#end
        workgroupBarrier();
#for i 4
        let t$i = tm + 8u * $iu + 32u * part;
        if t$i < len {
            y_set4(y_first + t$i * P.y_row, select(ya$i, yb$i, part == 1u) + wide[thread + 128u * $iu]);
        }
#end
#else
#if FOUR_PARTS
        // Of the parts 0 and 1, and of 2 and 3, one adds up the first half of the tokens and the other the second. Then each of
        // these sums is split between the two parts that have it.
        let even = (part & 1u) == 0u;
        let upper = part / 2u;
        let lane = 64u * upper + (thread & 63u);
        workgroupBarrier();
        if !even {
#for i 4
            wide[lane + 128u * $iu] = ya$i;
#end
        }
        workgroupBarrier();
        if even {
#for i 4
            ya$i += wide[lane + 128u * $iu];
#end
        }
        workgroupBarrier();
        if even {
#for i 4
            wide[lane + 128u * $iu] = yb$i;
#end
        }
        workgroupBarrier();
        if !even {
#for i 4
            ya$i = yb$i + wide[lane + 128u * $iu];
#end
        }
        workgroupBarrier();
        wide[thread ^ 128u] = select(ya2, ya0, upper == 1u);
        wide[(thread ^ 128u) + 256u] = select(ya3, ya1, upper == 1u);
        workgroupBarrier();
        let t0 = tm + 16u * upper + select(32u, 0u, even);
        if t0 < len {
            y_set4(y_first + t0 * P.y_row, select(ya0, ya2, upper == 1u) + wide[thread]);
        }
        if t0 + 8u < len {
            y_set4(y_first + (t0 + 8u) * P.y_row, select(ya1, ya3, upper == 1u) + wide[thread + 256u]);
        }
#else
#for i 4
        if tm + 8u * $iu < len {
            y_set4(y_first + (tm + 8u * $iu) * P.y_row, ya$i);
        }
        if tm + 8u * $iu + 32u < len {
            y_set4(y_first + (tm + 8u * $iu + 32u) * P.y_row, yb$i);
        }
#end
#endif
#endif
        start += len;
    }
    // Padding.
    for (var t = row * WG + thread; t < P.tokens; t += P.rows * WG) {
        if ints_at(P.token_row + t) == NONE {
            for (var q = 0u; q < 8u; q++) {
                y_set4(t * P.y_row + x_first + 4u * q, vec4<f32>());
            }
        }
    }
}
