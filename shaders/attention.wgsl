// Attention of one token and query head over the row's pages, with a running softmax. A workgroup of 64 threads: a thread
// per key of a page for the scores, a thread per element of the head for the values.

const PARTS: u32 = (HEAD_DIM + 63u) / 64u;

var<workgroup> query: array<vec4<f32>, HEAD_DIM / 4u>;
var<workgroup> weights: array<f32, 64>;
var<workgroup> tree: array<f32, 64>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let index = group_index(group, groups);
    if index >= P.groups {
        return;
    }
    let t = index / P.heads;
    let h = index % P.heads;
    let row = ints_at(P.token_row + t);
    if row == NONE {
        return;
    }
    let kv = h / P.heads_per_kv;
    let end = ints_at(P.positions + t) + 1u;
    let begin = select(0u, end - P.window, end > P.window);
    for (var d = lane; d < HEAD_DIM / 4u; d += 64u) {
        query[d] = P.scale * q_v4(t * P.q_row + h * HEAD_DIM + 4u * d);
    }
    workgroupBarrier();
    var acc: array<f32, PARTS>;
    var largest = LOWEST;
    var total = 0.0;
    for (var block = begin / PAGE; block * PAGE < end; block++) {
        let page = ints_at(P.page_table + row * P.pages + block);
        let position = block * PAGE + lane;
        var score = LOWEST;
        if position >= begin && position < end {
            let key = page * P.keys_row + (kv * PAGE + lane) * HEAD_DIM;
            var sum = vec4<f32>();
            for (var d = 0u; d < HEAD_DIM / 4u; d++) {
                sum += query[d] * keys_v4(key + 4u * d);
            }
            score = sum.x + sum.y + sum.z + sum.w;
        }
        tree[lane] = score;
        workgroupBarrier();
        for (var half = 32u; half > 0u; half /= 2u) {
            if lane < half {
                tree[lane] = max(tree[lane], tree[lane + half]);
            }
            workgroupBarrier();
        }
        let before = largest;
        largest = max(largest, tree[0]);
        let weight = select(0.0, exp(score - largest), position >= begin && position < end);
        weights[lane] = weight;
        workgroupBarrier();
        tree[lane] = weight;
        workgroupBarrier();
        for (var half = 32u; half > 0u; half /= 2u) {
            if lane < half {
                tree[lane] += tree[lane + half];
            }
            workgroupBarrier();
        }
        let rescale = exp(before - largest);
        total = total * rescale + tree[0];
        let first = select(0u, begin - block * PAGE, begin > block * PAGE);
        let last = min(PAGE, end - block * PAGE);
        let values = page * P.values_row + kv * PAGE * HEAD_DIM;
        for (var i = 0u; i < PARTS; i++) {
            let d = lane + 64u * i;
            if d < HEAD_DIM {
                var sum = acc[i] * rescale;
                for (var j = first; j < last; j++) {
                    sum += weights[j] * values_at(values + j * HEAD_DIM + d);
                }
                acc[i] = sum;
            }
        }
        workgroupBarrier();
    }
    let factor = select(0.0, 1.0 / total, total > 0.0);
    for (var i = 0u; i < PARTS; i++) {
        let d = lane + 64u * i;
        if d < HEAD_DIM {
            out_set(t * P.out_row + h * HEAD_DIM + d, acc[i] * factor);
        }
    }
}
