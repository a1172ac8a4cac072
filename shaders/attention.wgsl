// Attention for rows of few tokens (decode). A workgroup handles one token, HEADS query heads of one KV head and P.per
// consecutive pages; it walks the pages with a running softmax. If the pages of a token are split over workgroups
// (PARTIAL), attention_merge combines the partial results.

const QUADS: u32 = HEAD_DIM / 4u;
// Threads that hold the same quad of a head, each for a different key of the page.
const TEAMS: u32 = 256u / QUADS;

var<workgroup> query: array<vec4<f32>, HEADS * QUADS>;
var<workgroup> scores: array<f32, 256>;
var<workgroup> weights: array<f32, 256>;
var<workgroup> factors: array<f32, HEADS>;
var<workgroup> parts: array<vec4<f32>, 256>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups);
    if index >= P.groups {
        return;
    }
    let split = index % P.splits;
    let item = index / P.splits;
    let t = item / (P.heads / HEADS);
    let head = item % (P.heads / HEADS) * HEADS;
    let kv = head / P.heads_per_kv;
    let row = ints_at(P.token_row + t);
    if row == NONE {
        return;
    }
    let end = ints_at(P.positions + t) + 1u;
    let begin = max(select(0u, end - P.window, end > P.window), min(P.first, end - 1u));
    let first_page = max(split * P.per, begin / PAGE);
    let last_page = min(split * P.per + P.per, (end + PAGE - 1u) / PAGE);
    for (var i = thread; i < HEADS * QUADS; i += 256u) {
        query[i] = P.scale * q_v4(t * P.q_row + head * HEAD_DIM + 4u * i);
    }
    workgroupBarrier();
    // 4 threads share a key.
    let key = thread / 4u;
    let lane = thread % 4u;
    let quad = thread % QUADS;
    let team = thread / QUADS;
    // The softmax of one head's keys: 64 threads each.
    let my_head = thread / PAGE;
    var largest = LOWEST;
    var total = 0.0;
#for h HEADS
    var acc$h = vec4<f32>();
#end
    for (var block = first_page; block < last_page; block++) {
        let page = ints_at(P.page_table + row * P.pages + block);
        let low = block * PAGE;
        let keys_first = page * P.keys_row + kv * HEAD_SPAN + key * HEAD_DIM + 4u * lane;
        let values_first = page * P.values_row + kv * HEAD_SPAN + team * HEAD_DIM + 4u * quad;
        // Positions outside the range are uninitialised. `&`, not `&&`: with a branch per operand, every load triples
        // SwiftShader's compile time.
        let seen = (low + key >= begin) & (low + key < end);
#for i HELD
        var k$i = vec4<f32>();
        if seen & (4u * $iu + lane < QUADS) {
            k$i = keys_v4(keys_first + 16u * $iu);
        }
#end
#for j LOADS
        var v$j = vec4<f32>();
        let key$j = team + TEAMS * $ju;
        if (team < TEAMS) & (key$j < PAGE) & (low + key$j >= begin) & (low + key$j < end) {
            v$j = values_v4(values_first + TEAMS * $ju * HEAD_DIM);
        }
#end
#for h HEADS
        var product$h = 0.0;
#for i HELD
        // A quad past the end is multiplied by a zero key.
        product$h += dot(k$i, query[$hu * QUADS + min(4u * $iu + lane, QUADS - 1u)]);
#end
#end
#if SUBGROUP
#for h HEADS
        let sum$h = shuffled(product$h);
        if lane == $hu {
            scores[$hu * PAGE + key] = select(LOWEST, sum$h, seen);
        }
#end
#else
        var products = vec4<f32>();
#for h HEADS
        products[$h] = product$h;
#end
        parts[thread] = products;
        workgroupBarrier();
        if lane < HEADS {
            var sum = 0.0;
            for (var i = 0u; i < 4u; i++) {
                sum += parts[4u * key + i][lane];
            }
            scores[lane * PAGE + key] = select(LOWEST, sum, seen);
        }
#endif
        workgroupBarrier();
        if my_head < HEADS {
            let before = largest;
            for (var i = 0u; i < PAGE; i++) {
                largest = max(largest, scores[my_head * PAGE + i]);
            }
            let position = low + thread % PAGE;
            let weight = select(0.0, exp(scores[thread] - largest), position >= begin && position < end);
            let factor = exp(before - largest);
            total = total * factor + weight;
            weights[thread] = weight;
            if thread % PAGE == 0u {
                factors[my_head] = factor;
            }
        }
        workgroupBarrier();
#for h HEADS
        acc$h *= factors[$h];
#for j LOADS
        acc$h += weights[$hu * PAGE + min(key$j, PAGE - 1u)] * v$j;
#end
#end
    }
    workgroupBarrier();
    weights[thread] = total;
    if thread % PAGE == 0u && my_head < HEADS {
        factors[my_head] = largest;
    }
#for h HEADS
    parts[thread] = acc$h;
    workgroupBarrier();
    if thread < QUADS {
        var sum = vec4<f32>();
        for (var i = 0u; i < TEAMS; i++) {
            sum += parts[i * QUADS + thread];
        }
        var weight = 0.0;
        for (var i = 0u; i < PAGE; i++) {
            weight += weights[$hu * PAGE + i];
        }
#if PARTIAL
        let at = ((t * P.heads + head + $hu) * P.splits + split) * P.partial_row;
        partial_set4(at + 4u * thread, bitcast<vec4<u32>>(sum));
        if thread == 0u {
            partial_set4(at + HEAD_DIM, bitcast<vec4<u32>>(vec4<f32>(factors[$h], weight, 0.0, 0.0)));
        }
#else
        let factor = select(0.0, 1.0 / weight, weight > 0.0);
        out_set4(t * P.out_row + (head + $hu) * HEAD_DIM + 4u * thread, sum * factor);
#endif
    }
    workgroupBarrier();
#end
}
