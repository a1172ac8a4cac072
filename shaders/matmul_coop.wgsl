// out[m, n] = P.scale * Σ x[m, k] w[n, k] with cooperative matrices of 16 x 16: f16 factors, f32 sums. A workgroup computes a
// tile of BM x BN, each of its SM x SN subgroups XT x WT matrices of it, in slices of BK of K in workgroup memory. While one
// slice is used, the next AHEAD slices are loaded into registers; K is a multiple of AHEAD slices. x was packed by
// matmul_pack: f16 rows in whole tiles, each row scaled by a power of two. With SPLIT, K is cut into parts of P.k_part;
// matmul_sum adds up their sums, which are whole tiles.
// With PRECISE, x = high + low, each of 11 bits, and the product is one over segments of the length of K: low x times w, then high x
// times w. Small products come first, as tensor cores cut off the bits of a sum. Plain weights are f16 already; CODED ones are two parts
// too, and high x times low w is the first segment. There x has a factor of 2^-10 and w the inverse, so that w stays normal.

const BM: u32 = 16u * XT * SM;
const BN: u32 = 16u * WT * SN;
const WG: u32 = 32u * SM * SN;
const BAND: u32 = 8u;
const BK: u32 = 16u * STEPS;
// Threads per row of a slice; each moves 8 elements.
const TR: u32 = BK / 8u;
// Vectors of 4 elements per row of a slice, with padding that spreads the rows over the banks.
const ROW: u32 = BK / 4u + 2u;

// One slice, no double buffering: on the devices measured all workgroups of a multiprocessor share about 48 KiB, and a single
// resident workgroup stalls too much.
var<workgroup> tile: array<vec4<f16>, (BM + BN) * ROW>;
#if SPLIT
#else
var<workgroup> part: array<vec4<f32>, 64u * SM * SN>;
#endif

fn weights(w: vec2<u32>) -> vec4<f16> {
#if W_F16
    return vec4<f16>(f16x4(w));
#else
    return clamp(vec4<f16>(bf16x4(w)), vec4<f16>(-65504.0h), vec4<f16>(65504.0h));
#endif
}

// Eight weights of the row that starts at `row`. Coded ones are decoded to f16 as they are loaded: the slices ahead then take no more
// registers than others.
fn w_slice(row: u32, k: u32) -> vec4<u32> {
#if PRECISE
    let i = row + k % P.w_k;
#else
    let i = row + k;
#endif
#if CODED
    let w = w_v8(i);
    let a = clamp(w[0], vec4<f32>(-65504.0), vec4<f32>(65504.0));
    let b = clamp(w[1], vec4<f32>(-65504.0), vec4<f32>(65504.0));
#if PRECISE
    let high_a = high_part(a);
    let high_b = high_part(b);
    if k < P.w_k {
        return halves(1024.0 * (a - high_a), 1024.0 * (b - high_b));
    }
    return halves(high_a, high_b);
#else
    return halves(a, b);
#endif
#else
    return w_raw8(i);
#endif
}

// Eight elements of a row of x.
fn x_slice(m: u32, k: u32) -> vec4<u32> {
#if PRECISE
    // Another row block of the weight may have a segment more.
    let i = k + P.x_first;
#else
    let i = k;
#endif
    return bitcast<vec4<u32>>(packed_v4(m * P.packed_row + i / 2u));
}

@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    // Cooperative matrices need uniform control flow: a surplus group repeats the last one and stores nothing, or the same
    // sums again.
    let number = group_index(group, groups);
    let index = min(number, P.groups - 1u) % (P.m_tiles * P.n_tiles);
#if SPLIT
    let piece = min(number, P.groups - 1u) / (P.m_tiles * P.n_tiles);
    let k_first = piece * P.k_part;
    let k_end = min(k_first + P.k_part, P.k);
#else
    let k_first = 0u;
    let k_end = P.k;
    let rows = select(0u, P.m, number < P.groups);
#endif
    // Adjacent groups share rows of x and columns of w: bands of BAND tiles in m, m fastest within a band.
    let first = index / (BAND * P.n_tiles) * BAND;
    let high = min(BAND, P.m_tiles - first);
    let m0 = (first + (index - first * P.n_tiles) % high) * BM;
    let n0 = (index - first * P.n_tiles) / high * BN;
    let subgroup = thread / 32u;
    let lane = thread % 32u;
    let x_first = subgroup % SM * 16u * XT;
    let w_first = subgroup / SM * 16u * WT;
#for a XT
#for c WT
    var sum_$a_$c = coop_mat16x16<f32, C>();
#end
#end
    let row = thread / TR;
    let offset = thread % TR * 8u;
    let to = row * ROW + thread % TR * 2u;
#for i W_LOADS
    let w_at_$i = min(n0 + row + $iu * (WG / TR), P.n - 1u) * P.w_row + offset;
#end
#for p AHEAD
#for i X_LOADS
    var x_$p_$i = x_slice(m0 + row + $iu * (WG / TR), k_first + $pu * BK + offset);
#end
#for i W_LOADS
    var w_$p_$i = w_slice(w_at_$i, k_first + $pu * BK);
#end
#end
    for (var k = k_first; k < k_end; k += BK * AHEAD) {
#for p AHEAD
        workgroupBarrier();
#for i X_LOADS
        tile[to + $iu * (WG / TR) * ROW] = vec4<f16>(f16x4(x_$p_$i.xy));
        tile[to + $iu * (WG / TR) * ROW + 1u] = vec4<f16>(f16x4(x_$p_$i.zw));
#end
#for i W_LOADS
        tile[(BM + $iu * (WG / TR)) * ROW + to] = weights(w_$p_$i.xy);
        tile[(BM + $iu * (WG / TR)) * ROW + to + 1u] = weights(w_$p_$i.zw);
#end
        workgroupBarrier();
        let next_$p = k + (AHEAD + $pu) * BK;
        if next_$p < k_end {
#for i X_LOADS
            x_$p_$i = x_slice(m0 + row + $iu * (WG / TR), next_$p + offset);
#end
#for i W_LOADS
            w_$p_$i = w_slice(w_at_$i, next_$p);
#end
        }
#for s STEPS
#for a XT
        let a_$p_$s_$a = coopLoadT<coop_mat16x16<f16, A>>(&tile[(x_first + $au * 16u) * ROW + $su * 4u], ROW);
#end
#for c WT
        let b_$p_$s_$c = coopLoad<coop_mat16x16<f16, B>>(&tile[(BM + w_first + $cu * 16u) * ROW + $su * 4u], ROW);
#end
#for a XT
#for c WT
        sum_$a_$c = coopMultiplyAdd(a_$p_$s_$a, b_$p_$s_$c, sum_$a_$c);
#end
#end
#end
#end
    }
#for a XT
#for c WT
#if SPLIT
    sums_store(sum_$a_$c, (piece * P.m_tiles * BM + m0 + x_first + $au * 16u) * P.sums_row + n0 + w_first + $cu * 16u);
#else
    workgroupBarrier();
    coopStoreT(sum_$a_$c, &part[subgroup * 64u], 4u);
    workgroupBarrier();
    if m0 + x_first + $au * 16u + lane / 2u < rows {
        store(subgroup * 64u + lane * 2u, m0 + x_first + $au * 16u + lane / 2u, n0 + w_first + $cu * 16u + lane % 2u * 8u);
    }
#endif
#end
#end
}

#if SPLIT
#else
// 8 columns of a row.
fn store(at: u32, m: u32, n: u32) {
    let scale = P.scale * unit_at(4u * m);
    for (var i = 0u; i < 2u; i++) {
        let c = n + 4u * i;
        var v = scale * part[at + i];
#if WHOLE
        if c < P.n {
#if COLUMNS
            v *= columns_v4(P.col + c);
#endif
#if BIAS
            v += bias_v4(P.col + c);
#endif
#if ACCUMULATE
            v += out_v4(m * P.out_row + P.col + c);
#endif
            out_set4(m * P.out_row + P.col + c, v);
        }
#else
        for (var j = 0u; j < 4u && c + j < P.n; j++) {
            let to = m * P.out_row + P.col + c + j;
            var y = v[j];
#if COLUMNS
            y *= columns_at(P.col + c + j);
#endif
#if BIAS
            y += bias_at(P.col + c + j);
#endif
#if ACCUMULATE
            y += out_at(to);
#endif
            out_set(to, y);
        }
#endif
    }
}
#endif
