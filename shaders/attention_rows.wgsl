// Attention without barriers, for software devices: a thread handles one query head of one token and walks all its keys with
// a running softmax. Adjacent threads of a workgroup are tokens of one head, which read the same keys.

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups);
    if index >= P.groups {
        return;
    }
    let item = index * 64u + thread;
    let t = item % P.tokens;
    let head = item / P.tokens;
    if head >= P.heads {
        return;
    }
    let row = ints_at(P.token_row + t);
    if row == NONE {
        return;
    }
    let kv = head / P.heads_per_kv;
    let end = ints_at(P.positions + t) + 1u;
    let begin = max(select(0u, end - P.window, end > P.window), min(P.first, end - 1u));
#for i QUADS
    let q$i = P.scale * q_v4(t * P.q_row + head * HEAD_DIM + 4u * $iu);
    var acc$i = vec4<f32>();
#end
    var largest = LOWEST;
    var total = 0.0;
    for (var block = begin / PAGE; block * PAGE < end; block++) {
        let page = ints_at(P.page_table + row * P.pages + block);
        let keys_first = page * P.keys_row + kv * HEAD_SPAN;
        let values_first = page * P.values_row + kv * HEAD_SPAN;
        let last = min(PAGE, end - block * PAGE);
        for (var key = max(begin, block * PAGE) - block * PAGE; key < last; key++) {
            var products = vec4<f32>();
#for i QUADS
            products += q$i * keys_v4(keys_first + key * HEAD_DIM + 4u * $iu);
#end
            let score = products.x + products.y + products.z + products.w;
            let most = max(largest, score);
            let factor = exp(largest - most);
            let weight = exp(score - most);
            largest = most;
            total = total * factor + weight;
#for i QUADS
            acc$i = acc$i * factor + weight * values_v4(values_first + key * HEAD_DIM + 4u * $iu);
#end
        }
    }
#for i QUADS
    out_set4(t * P.out_row + head * HEAD_DIM + 4u * $iu, acc$i / total);
#end
}
