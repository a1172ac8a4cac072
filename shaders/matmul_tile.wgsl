// out[m, n] = P.scale * Σ x[m, k] w[n, k] for many rows: a workgroup makes a tile of BM x 64, every thread 4 x 4 of it,
// over slices of 16 of K that pass through workgroup memory, transposed.

const BN: u32 = 64u;
const BK: u32 = 16u;
const WG: u32 = BM * BN / 16u;

var<workgroup> xs: array<vec4<f32>, BK * BM / 4u>;
var<workgroup> ws: array<vec4<f32>, BK * BN / 4u>;

@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups);
    if index >= P.groups {
        return;
    }
    // Neighbouring groups share the columns of a weight, which are read from memory once then.
    let m0 = index % P.m_tiles * BM;
    let n0 = index / P.m_tiles * BN;
    let tm = thread / 16u;
    let tn = thread % 16u;
    var acc0 = vec4<f32>();
    var acc1 = vec4<f32>();
    var acc2 = vec4<f32>();
    var acc3 = vec4<f32>();
    for (var k0 = 0u; k0 < P.k; k0 += BK) {
        // A thread loads 4 x 4 blocks, 4 rows of 4 elements of K, and stores them transposed.
        for (var i = thread; i < BM; i += WG) {
            let m = m0 + i % (BM / 4u) * 4u;
            let k = k0 + i / (BM / 4u) * 4u;
            var r = array<vec4<f32>, 4>();
            if k < P.k {
                for (var j = 0u; j < 4u; j++) {
                    if m + j < P.m {
                        r[j] = x_v4((m + j) * P.x_row + k);
                    }
                }
            }
            for (var j = 0u; j < 4u; j++) {
                xs[(i / (BM / 4u) * 4u + j) * (BM / 4u) + i % (BM / 4u)] = vec4<f32>(r[0][j], r[1][j], r[2][j], r[3][j]);
            }
        }
        for (var i = thread; i < BN; i += WG) {
            let n = n0 + i % (BN / 4u) * 4u;
            let k = k0 + i / (BN / 4u) * 4u;
            var r = array<vec4<f32>, 4>();
            if k < P.k {
                for (var j = 0u; j < 4u; j++) {
                    if n + j < P.n {
                        r[j] = w_v4((n + j) * P.w_row + k);
                    }
                }
            }
            for (var j = 0u; j < 4u; j++) {
                ws[(i / (BN / 4u) * 4u + j) * (BN / 4u) + i % (BN / 4u)] = vec4<f32>(r[0][j], r[1][j], r[2][j], r[3][j]);
            }
        }
        workgroupBarrier();
        for (var k = 0u; k < BK; k++) {
            let x = xs[k * (BM / 4u) + tm];
            let w = ws[k * (BN / 4u) + tn];
            acc0 += x.x * w;
            acc1 += x.y * w;
            acc2 += x.z * w;
            acc3 += x.w * w;
        }
        workgroupBarrier();
    }
    let m = m0 + 4u * tm;
    let n = n0 + 4u * tn;
    store(m, n, acc0);
    store(m + 1u, n, acc1);
    store(m + 2u, n, acc2);
    store(m + 3u, n, acc3);
}

fn store(m: u32, n: u32, sum: vec4<f32>) {
    if m >= P.m {
        return;
    }
    for (var j = 0u; j < 4u && n + j < P.n; j++) {
        var v = P.scale * sum[j];
        let c = P.col + n + j;
#if BIAS
        v += bias_at(c);
#endif
#if ACCUMULATE
        v += out_at(m * P.out_row + c);
#endif
        out_set(m * P.out_row + c, v);
    }
}
