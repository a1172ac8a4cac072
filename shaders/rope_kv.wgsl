// Norm and rotary embedding of the heads of q and k; writes k and v into their pages. One workgroup per token and head;
// heads are numbered q, k, v.

var<workgroup> head: array<f32, HEAD_DIM>;
var<workgroup> sums: array<f32, 64>;
#if CODED
var<workgroup> largest: array<u32, 64>;
#endif

// The high 32 bits of a * b.
fn mul_high(a: u32, b: u32) -> u32 {
    let al = a & 0xffffu;
    let ah = a >> 16u;
    let bl = b & 0xffffu;
    let bh = b >> 16u;
    let mid = ah * bl + ((al * bl) >> 16u);
    let low = al * bh + (mid & 0xffffu);
    return ah * bh + (mid >> 16u) + (low >> 16u);
}

// (sin, cos) of x >= 0 to f32 accuracy for any position: the driver's may be off by 2^-11. The angle is reduced in fixed
// point: the mantissa times 1 / (2 pi), of which the fraction of a turn is kept.
fn sin_cos(x: f32) -> vec2<f32> {
    var r = x;
    var quadrant = 0u;
    if x > 0.75 {
        let bits = bitcast<u32>(x);
        let mantissa = (bits & 0x7fffffu) | 0x800000u;
        // x = mantissa * 2^-shift; the shift of 24 bits or less holds for 0.5 <= x < 2^24.
        let shift = 150u - min(bits >> 23u, 150u);
        let carried = mul_high(mantissa, 0x9391054au);
        let low = mantissa * 0x28be60dbu + carried;
        let high = mul_high(mantissa, 0x28be60dbu) + select(0u, 1u, low < carried);
        let turn = select((low >> shift) | (high << (32u - max(shift, 1u))), low, shift == 0u);
        quadrant = (turn + 0x20000000u) >> 30u;
        r = f32(bitcast<i32>(turn - (quadrant << 30u))) * 1.4629180792671596e-9;
    }
    let s = r * r;
    let sine = r + r * s * (-0.16666654611 + s * (8.3321608736e-3 - s * 1.9515295891e-4));
    let cosine = 1.0 - 0.5 * s + s * s * (4.166664568298827e-2 + s * (-1.388731625493765e-3 + s * 2.443315711809948e-5));
    switch quadrant & 3u {
        case 1u: { return vec2<f32>(cosine, -sine); }
        case 2u: { return vec2<f32>(-sine, -cosine); }
        case 3u: { return vec2<f32>(-cosine, sine); }
        default: { return vec2<f32>(sine, cosine); }
    }
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let index = group_index(group, groups);
    if index >= P.groups {
        return;
    }
    let all = P.heads + 2u * P.kv_heads;
    let t = index / all;
    let h = index % all;
    let row = ints_at(P.token_row + t);
    if row == NONE {
        return;
    }
    let position = ints_at(P.positions + t);
    let is_q = h < P.heads;
    let is_v = h >= P.heads + P.kv_heads;
    let kv = (h - P.heads) % P.kv_heads;
    for (var d = lane; d < HEAD_DIM; d += 64u) {
        if is_q {
            head[d] = q_at(t * P.q_row + h * HEAD_DIM + d);
        } else if is_v {
            head[d] = v_at(t * P.v_row + kv * HEAD_DIM + d);
        } else {
            head[d] = k_at(t * P.k_row + kv * HEAD_DIM + d);
        }
    }
    workgroupBarrier();
    if !is_v {
#if NORM
        var sum = 0.0;
        for (var d = lane; d < HEAD_DIM; d += 64u) {
            sum += head[d] * head[d];
        }
        sums[lane] = sum;
        workgroupBarrier();
        for (var half = 32u; half > 0u; half /= 2u) {
            if lane < half {
                sums[lane] += sums[lane + half];
            }
            workgroupBarrier();
        }
        let scale = 1.0 / sqrt(sums[0] / f32(HEAD_DIM) + P.eps);
        let which = select(1u, 0u, is_q);
        for (var d = lane; d < HEAD_DIM; d += 64u) {
            head[d] *= scale * norm_at(which * P.norm_row + d);
        }
        workgroupBarrier();
#endif
#if ROTATE
        for (var i = lane; i < P.pairs; i += 64u) {
            let turn = sin_cos(f32(position) * inv_freq_at(i));
            let a = head[i];
            let b = head[i + P.pairs];
            head[i] = a * turn.y - b * turn.x;
            head[i + P.pairs] = b * turn.y + a * turn.x;
        }
        workgroupBarrier();
#endif
    }
    let page = ints_at(P.page_table + row * P.pages + position / PAGE);
    let slot = page * P.keys_row + kv * HEAD_SPAN + position % PAGE * HEAD_DIM;
    let value_slot = page * P.values_row + kv * HEAD_SPAN + position % PAGE * HEAD_DIM;
#if CODED
    if !is_q {
        // As bits, which have the order of magnitudes, with infinity and NaN after all numbers.
        var bits = 0u;
        for (var d = lane; d < HEAD_DIM; d += 64u) {
            bits = max(bits, bitcast<u32>(head[d]) & 0x7fffffffu);
        }
        largest[lane] = bits;
        workgroupBarrier();
        for (var half = 32u; half > 0u; half /= 2u) {
            if lane < half {
                largest[lane] = max(largest[lane], largest[lane + half]);
            }
            workgroupBarrier();
        }
        bits = largest[0];
        for (var d = 4u * lane; d < HEAD_DIM; d += 256u) {
            let x = vec4<f32>(head[d], head[d + 1u], head[d + 2u], head[d + 3u]);
            if is_v {
                values_set_codes(value_slot + d, x, bits);
            } else {
                keys_set_codes(slot + d, x, bits);
            }
        }
        if lane == 0u {
            if is_v {
                values_set_scale(value_slot, bits);
            } else {
                keys_set_scale(slot, bits);
            }
        }
        return;
    }
#endif
    for (var d = lane; d < HEAD_DIM; d += 64u) {
#if CODED
        q_out_set(t * P.q_out_row + h * HEAD_DIM + d, head[d]);
#else
        if is_q {
            q_out_set(t * P.q_out_row + h * HEAD_DIM + d, head[d]);
        } else if is_v {
            values_set(value_slot + d, head[d]);
        } else {
            keys_set(slot + d, head[d]);
        }
#endif
    }
}
