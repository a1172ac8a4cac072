// The experts of a token and their weights: one workgroup of 64 threads per token. The k best are found one at a time; ties
// go to the lower expert, and NaN ranks last.

const RULE_SOFTMAX_TOP_K: u32 = 0u;
const RULE_TOP_K_SOFTMAX: u32 = 1u;
const RULE_SIGMOID: u32 = 2u;

// The values that rank the experts, and those that become their weights.
var<workgroup> rank: array<f32, EXPERTS>;
var<workgroup> score: array<f32, EXPERTS>;
// 0: candidate, 1: chosen, 2: in a dropped group.
var<workgroup> state: array<u32, EXPERTS>;
var<workgroup> group_rank: array<f32, GROUPS>;
var<workgroup> group_kept: array<u32, GROUPS>;
var<workgroup> best_value: array<f32, 64>;
var<workgroup> best_index: array<u32, 64>;

// The largest of all threads' values, and the sum of them.
fn all_max(lane: u32, value: f32) -> f32 {
    best_value[lane] = value;
    workgroupBarrier();
    var result = LOWEST;
    for (var i = 0u; i < 64u; i++) {
        result = max(result, best_value[i]);
    }
    workgroupBarrier();
    return result;
}

fn all_sum(lane: u32, value: f32) -> f32 {
    best_value[lane] = value;
    workgroupBarrier();
    var result = 0.0;
    for (var i = 0u; i < 64u; i++) {
        result += best_value[i];
    }
    workgroupBarrier();
    return result;
}

fn least_if_nan(x: f32) -> f32 {
    // Tests the bits, because compilers may fold x == x to true.
    return select(x, LOWEST, (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u);
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let t = group_index(group, groups);
    if t >= P.groups {
        return;
    }
    if ints_at(P.token_row + t) == NONE {
        for (var i = lane; i < TOP; i += 64u) {
            ids_set(t * P.ids_row + i, NONE);
            weights_set(t * P.weights_row + i, 0.0);
        }
        return;
    }
    for (var e = lane; e < EXPERTS; e += 64u) {
        var x = logits_at(t * P.logits_row + e);
        if RULE == RULE_SIGMOID {
            x = sigmoid(x);
        }
        score[e] = x;
#if BIAS
        rank[e] = least_if_nan(x + bias_at(e));
#else
        rank[e] = least_if_nan(x);
#endif
        state[e] = 0u;
    }
    workgroupBarrier();
    if KEPT < GROUPS {
        const SIZE = EXPERTS / GROUPS;
        for (var g = lane; g < GROUPS; g += 64u) {
            // The sum of the two best.
            var first = LOWEST;
            var second = LOWEST;
            for (var e = g * SIZE; e < (g + 1u) * SIZE; e++) {
                if rank[e] > first {
                    second = first;
                    first = rank[e];
                } else {
                    second = max(second, rank[e]);
                }
            }
            group_rank[g] = first + select(0.0, second, SIZE > 1u);
            group_kept[g] = 0u;
        }
        workgroupBarrier();
        if lane == 0u {
            for (var i = 0u; i < KEPT; i++) {
                var best = NONE;
                for (var g = 0u; g < GROUPS; g++) {
                    if group_kept[g] == 0u && (best == NONE || group_rank[g] > group_rank[min(best, GROUPS - 1u)]) {
                        best = g;
                    }
                }
                group_kept[min(best, GROUPS - 1u)] = 1u;
            }
        }
        workgroupBarrier();
        for (var e = lane; e < EXPERTS; e += 64u) {
            state[e] = select(2u, 0u, group_kept[e / SIZE] == 1u);
        }
        workgroupBarrier();
    }
    for (var i = 0u; i < TOP; i++) {
        var value = LOWEST;
        var best = NONE;
        for (var e = lane; e < EXPERTS; e += 64u) {
            if state[e] == 0u && (best == NONE || rank[e] > value) {
                value = rank[e];
                best = e;
            }
        }
        best_value[lane] = value;
        best_index[lane] = best;
        workgroupBarrier();
        for (var half = 32u; half > 0u; half /= 2u) {
            if lane < half {
                let other = best_index[lane + half];
                let mine = best_index[lane];
                let better = best_value[lane + half] > best_value[lane]
                    || (best_value[lane + half] == best_value[lane] && other < mine);
                if other != NONE && (mine == NONE || better) {
                    best_value[lane] = best_value[lane + half];
                    best_index[lane] = other;
                }
            }
            workgroupBarrier();
        }
        if lane == 0u && best_index[0] < EXPERTS {
            state[best_index[0]] = 1u;
        }
        workgroupBarrier();
    }
    // What the weights are divided by.
    var part = LOWEST;
    for (var e = lane; e < EXPERTS; e += 64u) {
        if RULE == RULE_SOFTMAX_TOP_K || state[e] == 1u {
            part = max(part, score[e]);
        }
    }
    let largest = all_max(lane, part);
    var everything = 0.0;
    var chosen = 0.0;
    for (var e = lane; e < EXPERTS; e += 64u) {
        if RULE != RULE_SIGMOID {
            score[e] = exp(score[e] - largest);
        }
        everything += score[e];
        chosen += select(0.0, score[e], state[e] == 1u);
    }
    let sum_all = all_sum(lane, everything);
    let sum_chosen = all_sum(lane, chosen);
    var factor = 1.0;
    if RULE == RULE_SOFTMAX_TOP_K {
        factor = 1.0 / select(sum_all, sum_chosen, RENORM);
    } else if RULE == RULE_TOP_K_SOFTMAX {
        factor = 1.0 / sum_chosen;
    } else {
        factor = P.scale / select(1.0, sum_chosen + P.sum_eps, RENORM);
    }
    for (var e = lane; e < EXPERTS; e += 64u) {
        if state[e] == 1u {
            var place = 0u;
            for (var other = 0u; other < e; other++) {
                place += select(0u, 1u, state[other] == 1u);
            }
            ids_set(t * P.ids_row + place, e);
            weights_set(t * P.weights_row + place, score[e] * factor);
        }
    }
}
