// chunk_pairs.wgsl for the delta rule with a decay per key channel: K K' and Q K' for all pairs of tokens of a chunk, with the
// decays inside. d_t[c] is the decay of channel c at token t, P_t[c] the product of d from the chunk's first token to t.
// Per head and token t, where gated_delta_prepare.wgsl puts A and M and in `decays`:
//     64 words  sum over c of k_t k_s d_(s+1) .. d_t, for s <= t (blocks of later tokens are not written)
//     64 words  the same of q_t
//     KEY words P_t
//     KEY words k_t d_(t+1) .. d_end
// Nothing is divided and no logarithms are summed: every factor is a product of decays, so at most 1. Within a diagonal
// block of 16 x 16, a thread multiplies its key by the decays of one token after the other. Between blocks, a row decays from the
// start of its block, a column to the end of its own, and both by the blocks in between.
// One workgroup per chunk and head; channels pass through workgroup memory in slices of 16.

const WORDS: u32 = 152u;

// Keys, then queries, of 64 tokens of 4 quads: as they are, then decayed from the start of their block.
var<workgroup> rows: array<vec4<f32>, 512>;
// Decays, then keys that are decayed to the end of their block. Decayed rows and columns are swizzled as in chunk_pairs.wgsl.
var<workgroup> columns: array<vec4<f32>, 256>;
// Decays of the 4 blocks.
var<workgroup> blocks: array<vec4<f32>, 16>;

fn decay4(a: vec4<f32>, a_neg: vec4<f32>, bias: vec4<f32>) -> vec4<f32> {
    let x = a + bias;
    return exp(a_neg * vec4<f32>(softplus(x.x), softplus(x.y), softplus(x.z), softplus(x.w)));
}

@compute @workgroup_size(256)
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
    // The thread's token, its place in a block of 16, and its quad of a slice.
    let t = thread / 4u;
    let r = t & 15u;
    let block = t / 16u;
    let lane = thread & 3u;
    // Tokens past the end of the chunk repeat the last one without a decay; their results are not used.
    let at = start + min(t, len - 1u);
    let key = (P.first_head + h) / P.heads_per_key * KEY + 4u * lane;
    let channel = h * KEY + 4u * lane;
    let kept = (at * P.heads + h) * 2u * KEY + 4u * lane;
    // Between blocks, 16 threads multiply one of 6 pairs of blocks, with K (side 0) or Q (side 1), 4 x 4 products each; the last
    // 64 threads have none.
    let side = thread / 96u;
    let pair = thread / 16u % 6u;
    let row_block = 1u + select(0u, 1u, pair > 0u) + select(0u, 1u, pair > 2u);
    let column_block = pair - row_block * (row_block - 1u) / 2u;
    let tr = (thread >> 2u) & 3u;
#for a 4
    // Column t of the diagonal block of K K' and of Q K', over the thread's channels; products of 4 columns between blocks.
    var kk$a = vec4<f32>();
    var qk$a = vec4<f32>();
    var sum$a = vec4<f32>();
#end
    for (var n = 0u; n < KEY; n += 16u) {
        let k = k_v4(at * P.k_row + key + n);
        let q = q_v4(at * P.q_row + key + n);
        let decay = decay4(a_v4(at * P.a_row + channel + n), par_v4(channel + n), par_v4(P.par_row + channel + n));
        workgroupBarrier();
        rows[thread] = k;
        rows[thread + 256u] = q;
        columns[thread] = select(vec4<f32>(1.0), decay, t < len);
        workgroupBarrier();
        // The key decayed up to a later token; decays from the start of the block up to token t.
        var left = vec4<f32>();
        var grown = vec4<f32>(1.0);
#for a 4
#for b 4
        {
            let i = 4u * $au + $bu;
            let other = 64u * block + 4u * i + lane;
            let d = columns[other];
            left = select(left * d, k, i == r);
            grown *= select(vec4<f32>(1.0), d, i <= r);
            kk$a[$b] += dot(left, rows[other]);
            qk$a[$b] += dot(left, rows[other + 256u]);
        }
#end
#end
        workgroupBarrier();
        rows[4u * t + (lane ^ (t & 3u))] = k * grown;
        rows[4u * t + (lane ^ (t & 3u)) + 256u] = q * grown;
        columns[4u * t + (lane ^ (r / 4u))] = left;
        if r == 15u {
            blocks[4u * block + lane] = grown;
        }
        workgroupBarrier();
        for (var b = 0u; b < 4u; b++) {
            let whole = blocks[4u * b + lane];
            grown *= select(vec4<f32>(1.0), whole, b < block);
            left *= select(vec4<f32>(1.0), whole, b > block);
        }
        if t < len {
            decays_set4(kept + n, bitcast<vec4<u32>>(grown));
            decays_set4(kept + KEY + n, bitcast<vec4<u32>>(left));
        }
        if side < 2u {
            for (var part = 0u; part < 4u; part++) {
                var between = vec4<f32>(1.0);
                for (var b = column_block + 1u; b < row_block; b++) {
                    between *= blocks[4u * b + part];
                }
                let c = transpose(mat4x4<f32>(
#for j 4
                    between * columns[64u * column_block + 16u * lane + 4u * $ju + (part ^ lane)],
#end
                ));
#for i 4
                let x$i = rows[256u * side + 64u * row_block + 4u * tr + 16u * $iu + (part ^ tr)];
                sum$i += x$i.x * c[0];
                sum$i += x$i.y * c[1];
                sum$i += x$i.z * c[2];
                sum$i += x$i.w * c[3];
#end
            }
        }
    }
    let unit = (start * P.heads + h) * WORDS;
    if side < 2u {
#for i 4
        {
            let row = 16u * row_block + tr + 4u * $iu;
            if row < len {
                prep_set4(unit + row * P.heads * WORDS + 64u * side + 16u * column_block + 4u * lane, bitcast<vec4<u32>>(sum$i));
            }
        }
#end
    }
    // The diagonal blocks, column by column: the 4 threads of a token add theirs.
    for (var turn = 0u; turn < 4u; turn++) {
        workgroupBarrier();
        if lane == turn {
#for a 4
            if turn > 0u {
                kk$a += columns[4u * t + $au];
                qk$a += rows[4u * t + $au];
            }
            columns[4u * t + $au] = kk$a;
            rows[4u * t + $au] = qk$a;
#end
        }
    }
    workgroupBarrier();
    if t < len {
        let mirror = 64u * block + 16u * lane + r / 4u;
        let place = unit + t * P.heads * WORDS + 16u * block + 4u * lane;
        var k_row = vec4<f32>();
        var q_row = vec4<f32>();
#for j 4
        k_row[$j] = columns[mirror + 4u * $ju][r & 3u];
        q_row[$j] = rows[mirror + 4u * $ju][r & 3u];
#end
        prep_set4(place, bitcast<vec4<u32>>(k_row));
        prep_set4(place + 64u, bitcast<vec4<u32>>(q_row));
    }
}
