// out[m, n] = P.scale * Σ x[m, k] w[n, k] for few rows. A team of LANES threads shares ROWS weight rows and splits K; every
// thread handles eight elements of K at a time for all MR rows of x, with DEEP loads per weight row in flight. A workgroup
// computes WG / LANES * ROWS columns of MR rows. With WIDE, for coded weights, it is two runs of 16 elements. With DOTS
// too, x is what matmul_round or the norm before made of it, and products of codes are exact integers.
//
// Fusion:
//   NORM      x is normalised as it is read: u = x * act(z) * rsqrt(mean((x * act(z))²) + eps) * norm.
//   KEEP      the first team also writes u.
//   ACTIVATE  also writes mid = act(out); with SIDES = 2, mid = act(first half of out) * second half of out.
//   CONV      P.channels columns of the single token are convolved with the inputs in its state, as in conv1d.

const SPAN: u32 = 8u * LANES;
const TEAMS: u32 = WG / LANES;

// a + x · w. For several rows a chain of fma is fastest; a single row is limited by memory latency and uses a shorter chain.
fn mac8(a: f32, x: mat2x4<f32>, w: mat2x4<f32>) -> f32 {
    if MR == 1u {
        let p = x[0] * w[0] + x[1] * w[1];
        return a + (p.x + p.y + p.z + p.w);
    }
    let b = fma(x[0].w, w[0].w, fma(x[0].z, w[0].z, fma(x[0].y, w[0].y, fma(x[0].x, w[0].x, a))));
    return fma(x[1].w, w[1].w, fma(x[1].z, w[1].z, fma(x[1].y, w[1].y, fma(x[1].x, w[1].x, b))));
}

#if DOTS
// The sum of 16 products.
fn dot16(c: vec4<u32>, x: vec4<u32>) -> f32 {
    return f32(dot4I8Packed(c.x, x.x) + dot4I8Packed(c.y, x.y) + dot4I8Packed(c.z, x.z) + dot4I8Packed(c.w, x.w));
}
#else
#if WIDE
// The sum of 16 products.
fn dot16(c: mat4x4<f32>, x: mat2x4<f32>, y: mat2x4<f32>) -> f32 {
    let p = fma(c[3], y[1], fma(c[2], y[0], fma(c[1], x[1], c[0] * x[0])));
    return p.x + p.y + p.z + p.w;
}

fn sum16(x: mat2x4<f32>, y: mat2x4<f32>) -> f32 {
    let p = x[0] + x[1] + y[0] + y[1];
    return p.x + p.y + p.z + p.w;
}
#endif
#endif

#if NORM
// Elements k to k + 7 of row m before the norm.
fn gated(m: u32, k: u32) -> mat2x4<f32> {
    let x = x_v8(m * P.x_row + k);
#if GATE
    let z = z_v8(m * P.z_row + k);
    return mat2x4<f32>(x[0] * activate4(GATE_ACT, z[0]), x[1] * activate4(GATE_ACT, z[1]));
#else
    return x;
#endif
}

fn scaled(x: mat2x4<f32>, k: u32) -> mat2x4<f32> {
    let g = norm_v8(k);
    return mat2x4<f32>(x[0] * g[0], x[1] * g[1]);
}
#endif

#if SUBGROUP
// A partial sum per subgroup of a team.
const PARTS: u32 = (LANES + SUBGROUP_SIZE - 1u) / SUBGROUP_SIZE;
const LAST_PARTS: u32 = PARTS;
#else
const PARTS: u32 = LANES;
const LAST_PARTS: u32 = min(PARTS, 16u);
#endif
var<workgroup> sums: array<f32, TEAMS * PARTS * MR>;

// Reduces the teams' sums of row m for `team_sum`. All threads must call it, and a barrier must follow.
fn collect(thread: u32, m: u32, part: f32) {
    let lane = thread % LANES;
    let at = (thread / LANES * MR + m) * PARTS;
#if SUBGROUP
    let sum = shuffled(part);
    if lane % SUBGROUP_SIZE == 0u {
        sums[at + lane / SUBGROUP_SIZE] = sum;
    }
#else
    sums[at + lane] = part;
#endif
}

// The sum of row m over the thread's team.
fn team_sum(thread: u32, m: u32) -> f32 {
    let at = (thread / LANES * MR + m) * PARTS;
    var sum = 0.0;
    for (var i = 0u; i < LAST_PARTS; i++) {
        sum += sums[at + i];
    }
    return sum;
}

// If a team has many partial sums, 16 threads per row reduce them to 16.
fn narrow(thread: u32) {
#if SUBGROUP
#else
    let lane = thread % LANES;
    for (var i = lane; i < 16u * MR; i += LANES) {
        let at = (thread / LANES * MR + i / 16u) * PARTS;
        for (var j = i % 16u + 16u; j < LANES; j += 16u) {
            sums[at + i % 16u] += sums[at + j];
        }
    }
    workgroupBarrier();
#endif
}

@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups);
    if index >= P.groups {
        return;
    }
    let lane = thread % LANES;
    let first = (index * TEAMS + thread / LANES) * (ROWS / SIDES);
#for r ROWS
    // Rows past the end repeat the last one and are not stored.
    let row$r = (min(first + $ru / SIDES, P.n - 1u) + $ru % SIDES * P.n) * P.w_row;
#for m MR
    var acc$r_$m = 0.0;
#end
#end
#if NORM
#for m MR
    var square$m = 0.0;
#end
#endif
#if WIDE
    for (var k = 32u * lane; k < P.k; k += 32u * LANES) {
        let at = w_runs(k);
#for r ROWS
        let f$r = w_wide(row$r + k);
#end
#for m MR
#for h 2
#if DOTS
        let x$m_$h = x_v4($mu * P.x_row + at[$h] / 4u);
        let unit$m_$h = bitcast<vec4<f32>>(units_v4($mu * P.units_row + at[$h] / 32u * 4u));
        let total$m_$h = select(unit$m_$h.y, unit$m_$h.z, (at[$h] & 16u) != 0u);
#for r ROWS
        acc$r_$m += f$r.scale[$h] * unit$m_$h.x * dot16(f$r.c$h, x$m_$h) - f$r.offset[$h] * total$m_$h;
#end
#else
#for e 2
#if NORM
        let v$m_$h_$e = gated($mu, at[$h] + 8u * $eu);
        square$m = mac8(square$m, v$m_$h_$e, v$m_$h_$e);
        let x$m_$h_$e = scaled(v$m_$h_$e, at[$h] + 8u * $eu);
#else
        let x$m_$h_$e = x_v8($mu * P.x_row + at[$h] + 8u * $eu);
#endif
#end
        let total$m_$h = sum16(x$m_$h_0, x$m_$h_1);
#for r ROWS
        acc$r_$m += f$r.scale[$h] * dot16(w_floats(f$r.c$h), x$m_$h_0, x$m_$h_1) - f$r.offset[$h] * total$m_$h;
#end
#endif
#end
#end
    }
#else
#if EIGHT
    var k = 8u * lane;
    for (; k + SPAN * (DEEP - 1u) < P.k; k += SPAN * DEEP) {
#for i DEEP
#for r ROWS
        let w$i_$r = w_raw8(row$r + k + SPAN * $iu);
#end
#end
#for i DEEP
#for r ROWS
        let f$i_$r = w_unpack(w$i_$r);
#end
#for m MR
#if NORM
        let v$i_$m = gated($mu, k + SPAN * $iu);
        square$m = mac8(square$m, v$i_$m, v$i_$m);
        let x$i_$m = scaled(v$i_$m, k + SPAN * $iu);
#else
        let x$i_$m = x_v8($mu * P.x_row + k + SPAN * $iu);
#endif
#for r ROWS
        acc$r_$m = mac8(acc$r_$m, x$i_$m, f$i_$r);
#end
#end
#end
    }
#if REST
    for (; k < P.k; k += SPAN) {
#for r ROWS
        let f$r = w_unpack(w_raw8(row$r + k));
#end
#for m MR
#if NORM
        let v$m = gated($mu, k);
        square$m = mac8(square$m, v$m, v$m);
        let x$m = scaled(v$m, k);
#else
        let x$m = x_v8($mu * P.x_row + k);
#endif
#for r ROWS
        acc$r_$m = mac8(acc$r_$m, x$m, f$r);
#end
#end
    }
#endif
#else
    for (var k = 4u * lane; k < P.k; k += 4u * LANES) {
#for r ROWS
        let w$r = w_v4(row$r + k);
#for m MR
        acc$r_$m += dot(w$r, x_v4($mu * P.x_row + k));
#end
#end
    }
#endif
#endif
    // The factor of the output row that this thread stores.
    var factor = P.scale;
#if NORM
#if ACROSS
#for m MR
    collect(thread, $mu, square$m);
#end
    workgroupBarrier();
    narrow(thread);
#for m MR
    let scale$m = 1.0 / sqrt(team_sum(thread, $mu) / f32(P.k) + P.eps);
#end
    workgroupBarrier();
#else
#for m MR
    let scale$m = 1.0 / sqrt(shuffled(square$m) / f32(P.k) + P.eps);
#end
#endif
#for m MR
    if lane == $mu {
        factor *= scale$m;
    }
#if KEEP
    if first == 0u {
        for (var k = 8u * lane; k < P.k; k += SPAN) {
            let u = scaled(gated($mu, k), k);
            u_set4($mu * P.u_row + k, scale$m * u[0]);
            u_set4($mu * P.u_row + k + 4u, scale$m * u[1]);
        }
    }
#endif
#end
#endif
    var sum = 0.0;
    var before = 0.0;
#for r ROWS
#if ACROSS
#for m MR
    collect(thread, $mu, acc$r_$m);
#end
    workgroupBarrier();
    narrow(thread);
    if lane < MR {
        sum = team_sum(thread, lane);
    }
    workgroupBarrier();
#else
#for m MR
    let sum$r_$m = shuffled(acc$r_$m);
    if lane == $mu {
        sum = sum$r_$m;
    }
#end
#endif
    if lane < MR && first + $ru / SIDES < P.n {
        before = store(lane, first + $ru / SIDES, $ru % SIDES, factor * sum, before);
    }
#end
}

// Stores column n of one half and returns it; `before` is the same column of the previous half.
fn store(m: u32, n: u32, half: u32, value: f32, before: f32) -> f32 {
    var v = value;
    let c = P.col + half * P.n + n;
#if COLUMNS
    v *= columns_at(c);
#endif
#if BIAS
    v += bias_at(c);
#endif
#if ACCUMULATE
    v += out_at(m * P.out_row + c);
#endif
    out_set(m * P.out_row + c, v);
#if ACTIVATE
    if SIDES == 1u {
        mid_set(m * P.mid_row + n, activate(ACT, v));
    } else if half == 1u {
        mid_set(m * P.mid_row + n, activate(ACT, before) * v);
    }
#endif
#if CONV
    if n >= P.first_channel && n - P.first_channel < P.channels {
        convolve(n - P.first_channel, v);
    }
#endif
    return v;
}

#if CONV
// The convolution of channel c for the only token of row 0; 0 for padding.
fn convolve(c: u32, x: f32) {
    if ints_at(P.row_table + 1u) == 0u {
        mid_set(c, 0.0);
        return;
    }
    let chunk = P.chunk_table + 5u * ints_at(P.row_table + 2u);
    let src = ints_at(chunk + 3u);
    let dst = ints_at(chunk + 4u);
    var window: array<f32, TAPS>;
    if src != 0u {
        for (var j = 0u; j + 1u < TAPS; j++) {
            window[j] = pool_at(src * P.pool_row + c * (TAPS - 1u) + j);
        }
    }
    window[TAPS - 1u] = x;
    var v = taps_at(c * P.taps_row + TAPS);
    for (var j = 0u; j < TAPS; j++) {
        v += taps_at(c * P.taps_row + j) * window[j];
    }
    mid_set(c, activate(ACT, v));
    if dst != 0u {
        for (var j = 0u; j + 1u < TAPS; j++) {
            pool_set(dst * P.pool_row + c * (TAPS - 1u) + j, window[j + 1u]);
        }
    }
}
#endif
