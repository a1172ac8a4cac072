// Per chunk and head, the inputs of gated_delta_chunk.wgsl, computed from K K' and Q K' of chunk_pairs.wgsl. With k and q
// normalised and c the running sum of the decays' logarithms, per token t:
//     64 words  -A_ts = -b_t (k_t k_s) exp(c_t - c_s), without the diagonal blocks of 16
//     64 words  M_ts = (q_t k_s) exp(c_t - c_s)
//     16 words  the token's row of the inverse of I + A within its diagonal block
//      4 words  factors of k_t and q_t for the state before the chunk, of k_t for the state after it; b_t
//      4 words  the decay of the whole chunk
// EACH: every channel has its own decay. chunk_pairs_channel.wgsl computed the products with the decays inside and put them where A
// and M go, so all decays here are 1.

const WORDS: u32 = 152u;
const LOG2E: f32 = 1.44269504;

var<workgroup> gates: array<f32, 64>;
var<workgroup> sums: array<f32, 64>;
var<workgroup> betas: array<f32, 64>;
var<workgroup> k_norms: array<f32, 64>;
var<workgroup> q_norms: array<f32, 64>;
// -A in the diagonal blocks: 64 rows of 4 quads.
var<workgroup> diagonal: array<vec4<f32>, 256>;

@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups);
    if index >= P.groups {
        return;
    }
    let h = index % P.heads;
    let chunk = P.chunk_table + 5u * (index / P.heads);
    let start = ints_at(chunk + 1u);
    let len = ints_at(chunk + 2u);
    if len == 0u || ints_at(P.row_table + 4u * ints_at(chunk) + 1u) <= P.short {
        return;
    }
    let key = (P.first_head + h) / P.heads_per_key;
#if EACH
    let pair = h * WORDS;
#else
    let pair = (key - P.first_key) * 64u;
#endif
    let t = thread & 63u;
    // Tokens past the chunk's end repeat the last one; their results are not stored.
    let at = start + min(t, len - 1u);
    if thread < 64u {
#if EACH
        gates[t] = 0.0;
#else
        // exp2(-150) is already 0 in f32; larger running sums would lose precision for later tokens.
        gates[t] = max(par_at(h) * LOG2E * softplus(a_at(at * P.a_row + h) + par_at(P.par_row + h)), -150.0);
#endif
        betas[t] = P.beta_scale * sigmoid(b_at(at * P.b_row + h));
        k_norms[t] = inverseSqrt(bitcast<f32>(kk_at(at * P.kk_row + pair + at - start)) + 1e-6);
    } else {
        var sum = vec4<f32>();
        for (var q = 0u; q < KEY; q += 4u) {
            let v = q_v4(at * P.q_row + key * KEY + q);
            sum += v * v;
        }
        q_norms[t] = P.query_scale * inverseSqrt(sum.x + sum.y + sum.z + sum.w + 1e-6);
    }
    workgroupBarrier();
    if thread < 64u {
        var sum = 0.0;
        for (var s = 0u; s < 64u; s++) {
            sum += select(0.0, gates[s], s <= t);
        }
        sums[t] = sum;
    }
    workgroupBarrier();
    let unit = (start * P.heads + h) * WORDS;
    // A quad of a row of A or M.
    let s = (4u * thread) & 63u;
    let k_row = vec4<f32>(k_norms[s], k_norms[s + 1u], k_norms[s + 2u], k_norms[s + 3u]);
    let sum_row = vec4<f32>(sums[s], sums[s + 1u], sums[s + 2u], sums[s + 3u]);
    let columns = vec4<u32>(s, s + 1u, s + 2u, s + 3u);
    for (var r = thread / 32u; r < 64u; r += 4u) {
        let decays = k_row * exp2(min(vec4<f32>(sums[r]) - sum_row, vec4<f32>()));
        if (thread & 16u) == 0u {
            var below = vec4<f32>();
            if r < len {
                let a = bitcast<vec4<f32>>(kk_v4((start + r) * P.kk_row + pair + s)) * decays * (-betas[r] * k_norms[r]);
                below = select(below, a, columns < vec4<u32>(r));
            }
            let inside = s / 16u == r / 16u;
            if inside {
                diagonal[4u * r + s / 4u % 4u] = below;
            }
            if r < len {
                prep_set4(unit + r * P.heads * WORDS + s, bitcast<vec4<u32>>(select(below, vec4<f32>(), inside)));
            }
        } else if r < len {
            let m = bitcast<vec4<f32>>(qk_v4((start + r) * P.qk_row + pair + s)) * decays * q_norms[r];
            let upto = select(vec4<f32>(), m, columns <= vec4<u32>(r));
            prep_set4(unit + r * P.heads * WORDS + 64u + s, bitcast<vec4<u32>>(upto));
        }
    }
    workgroupBarrier();
    if thread < len {
        // One row of a block's inverse, computed from its end.
        let block = t & 48u;
        var x: array<f32, 16>;
        for (var back = 0u; back < 16u; back++) {
            let c = 15u - back;
            var sum = select(0.0, 1.0, c == (t & 15u));
            for (var r = c + 1u; r < 16u; r++) {
                sum += x[r] * diagonal[4u * (block + r) + c / 4u][c & 3u];
            }
            x[c] = sum;
        }
        let place = unit + t * P.heads * WORDS + 128u;
#for q 4
        prep_set4(place + 4u * $qu, bitcast<vec4<u32>>(vec4<f32>(x[4u * $qu], x[4u * $qu + 1u], x[4u * $qu + 2u], x[4u * $qu + 3u])));
#end
        let sum = sums[t];
        let all = sums[len - 1u];
        let k = betas[t] * k_norms[t];
        let scales = vec4<f32>(-k * exp2(sum), q_norms[t] * exp2(sum), k_norms[t] * exp2(all - sum), betas[t]);
        prep_set4(place + 16u, bitcast<vec4<u32>>(scales));
        prep_set4(place + 20u, bitcast<vec4<u32>>(vec4<f32>(exp2(all))));
    }
}
