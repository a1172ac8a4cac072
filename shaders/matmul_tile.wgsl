// out[m, n] = P.scale * Σ x[m, k] w[n, k] for many rows. A workgroup computes a tile of BM x BN, every thread XQ x WQ blocks
// of 4 x 4 of it, in slices of BK of K that pass through workgroup memory, transposed. The next slice is fetched into
// registers while this one is used. With GROUPED, a row of the product is one choice of an expert: expert_order gives the
// rows and the expert of each tile.

const BN: u32 = 64u * WQ;
const TM: u32 = BM / (4u * XQ);
const WG: u32 = 16u * TM;
const XS: u32 = BM / 4u;
const WS: u32 = BN / 4u;
const X_BLOCKS: u32 = BM * BK / 16u;
const BLOCKS: u32 = X_BLOCKS + BN * BK / 16u;

var<workgroup> xs: array<vec4<f32>, BK * XS>;
var<workgroup> ws: array<vec4<f32>, BK * WS>;

#if GROUPED
var<workgroup> expert_of: u32;
var<private> w_first: u32;

// Offset of the row of x for row m of the product.
fn x_begin(m: u32) -> u32 {
    let choice = order_at(m);
    return select(choice / P.share, 0u, choice == NONE) * P.x_row;
}

fn w_begin(n: u32) -> u32 {
    return w_first + min(n, P.n - 1u) * P.k;
}
#else
fn x_begin(m: u32) -> u32 {
    return min(m, P.m - 1u) * P.x_row;
}

fn w_begin(n: u32) -> u32 {
    return min(n, P.n - 1u) * P.w_row;
}
#endif

// Block i of the slice that starts at k0: 4 rows of x or w of 4 elements, transposed. Rows past the end repeat the last one;
// their results are not stored.
fn fetch(i: u32, m0: u32, n0: u32, k0: u32) -> mat4x4<f32> {
    if i < X_BLOCKS {
        let k = k0 + i % (BK / 4u) * 4u;
        let m = m0 + i / (BK / 4u) * 4u;
        if k < P.k {
            return transpose(mat4x4<f32>(x_v4(x_begin(m) + k), x_v4(x_begin(m + 1u) + k), x_v4(x_begin(m + 2u) + k),
                                         x_v4(x_begin(m + 3u) + k)));
        }
    } else if i < BLOCKS {
        let k = k0 + (i - X_BLOCKS) % (BK / 4u) * 4u;
        let n = n0 + (i - X_BLOCKS) / (BK / 4u) * 4u;
        if k < P.k {
            return transpose(mat4x4<f32>(w_v4(w_begin(n) + k), w_v4(w_begin(n + 1u) + k), w_v4(w_begin(n + 2u) + k),
                                         w_v4(w_begin(n + 3u) + k)));
        }
    }
    return mat4x4<f32>();
}

// Columns are swizzled so that the threads that store a block's rows of K hit different banks.
fn column(k: u32, i: u32, width: u32) -> u32 {
    return i ^ ((k / 4u * (32u / BK)) & (width - 1u));
}

fn keep(i: u32, block: mat4x4<f32>) {
    if i < X_BLOCKS {
        let k = i % (BK / 4u) * 4u;
        let at = k * XS + column(k, i / (BK / 4u), XS);
#for j 4
        xs[at + $ju * XS] = block[$j];
#end
    } else if i < BLOCKS {
        let k = (i - X_BLOCKS) % (BK / 4u) * 4u;
        let at = k * WS + column(k, (i - X_BLOCKS) / (BK / 4u), WS);
#for j 4
        ws[at + $ju * WS] = block[$j];
#end
    }
}

@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups);
    if index >= P.groups {
        return;
    }
    // Adjacent groups share columns of w, which are then read from memory only once.
    let m0 = index % P.m_tiles * BM;
    let n0 = index / P.m_tiles * BN;
#if GROUPED
    if thread == 0u {
        expert_of = expert_at(index % P.m_tiles);
    }
    let expert = workgroupUniformLoad(&expert_of);
    if expert == NONE || expert < P.first || expert - P.first >= P.experts {
        return;
    }
    w_first = (expert - P.first) * P.w_row;
#endif
    let tm = thread / 16u;
    let tn = thread % 16u;
#for a XQ
#for c WQ
    var acc_$a_$c = mat4x4<f32>();
#end
#end
#for i FETCHES
    var next_$i = fetch(thread + $iu * WG, m0, n0, 0u);
#end
    for (var k0 = 0u; k0 < P.k; k0 += BK) {
        workgroupBarrier();
#for i FETCHES
        keep(thread + $iu * WG, next_$i);
#end
        workgroupBarrier();
        if k0 + BK < P.k {
#for i FETCHES
            next_$i = fetch(thread + $iu * WG, m0, n0, k0 + BK);
#end
        }
        for (var k = 0u; k < BK; k++) {
#for a XQ
            let x_$a = xs[k * XS + column(k, tm + $au * TM, XS)];
#end
#for c WQ
            let w_$c = ws[k * WS + column(k, tn + $cu * 16u, WS)];
#end
#for a XQ
#for c WQ
            acc_$a_$c[0] += x_$a.x * w_$c;
            acc_$a_$c[1] += x_$a.y * w_$c;
            acc_$a_$c[2] += x_$a.z * w_$c;
            acc_$a_$c[3] += x_$a.w * w_$c;
#end
#end
        }
    }
#for a XQ
#for c WQ
#for j 4
    store(m0 + 4u * (tm + $au * TM) + $ju, n0 + 4u * (tn + $cu * 16u), acc_$a_$c[$j]);
#end
#end
#end
}

fn store(m: u32, n: u32, sum: vec4<f32>) {
#if GROUPED
    let row = order_at(m);
    if row == NONE {
        return;
    }
#else
    let row = m;
    if m >= P.m {
        return;
    }
#endif
    for (var j = 0u; j < 4u && n + j < P.n; j++) {
        var v = P.scale * sum[j];
        let c = P.col + n + j;
#if COLUMNS
        v *= columns_at(c);
#endif
#if BIAS
        v += bias_at(c);
#endif
#if ACCUMULATE
        v += out_at(row * P.out_row + c);
#endif
#if PRODUCTS
        out_set(row * P.out_row + c, bitcast<u32>(v));
#else
        out_set(row * P.out_row + c, v);
#endif
    }
}
