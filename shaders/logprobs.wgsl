// Counts and log probabilities of sampled tokens, see core/src/ops/logprobs.rs; workgroups of 256 threads. A first dispatch (FIND)
// takes of every PART ids of an output, one workgroup each, the largest logit, the sum of exp(x - largest) and the most likely
// tokens; the second one joins the parts of an output. Sums have a fixed order. Keys are the logits' bits mapped so that u32
// order is their order; NaN counts as minus infinity.

const LOWEST_KEY: u32 = 0x007fffffu;
const INFINITE_KEY: u32 = 0xff800000u;

var<workgroup> floats: array<f32, 256>;
var<workgroup> words: array<u32, 256>;
var<workgroup> ids_of: array<u32, 256>;
var<workgroup> shared_word: u32;
var<workgroup> shared_id: u32;

fn key_of(x: f32) -> u32 {
    // -0 and +0 get the same key.
    let raw = bitcast<u32>(x);
    let bits = select(raw, 0u, raw == 0x80000000u);
    let key = select(bits | 0x80000000u, ~bits, (bits & 0x80000000u) != 0u);
    return select(key, LOWEST_KEY, (raw & 0x7fffffffu) > 0x7f800000u);
}

fn float_of(key: u32) -> f32 {
    return bitcast<f32>(select(~key, key & 0x7fffffffu, (key & 0x80000000u) != 0u));
}

fn sum_all(thread: u32, value: f32) -> f32 {
    floats[thread] = value;
    workgroupBarrier();
    for (var half = 128u; half > 0u; half /= 2u) {
        if thread < half {
            floats[thread] += floats[thread + half];
        }
        workgroupBarrier();
    }
    let result = floats[0];
    workgroupBarrier();
    return result;
}

// The largest key of all threads in words[0] and its id in ids_of[0]; the lowest id among equals.
fn best_of_all(thread: u32, key: u32, id: u32) {
    words[thread] = key;
    ids_of[thread] = id;
    workgroupBarrier();
    for (var half = 128u; half > 0u; half /= 2u) {
        if thread < half {
            let other = words[thread + half];
            let b = ids_of[thread + half];
            if other > words[thread] || (other == words[thread] && b < ids_of[thread]) {
                words[thread] = other;
                ids_of[thread] = b;
            }
        }
        workgroupBarrier();
    }
}

#if FIND
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups);
    if index >= P.groups {
        return;
    }
    let o = index / P.parts;
    if ints_at(P.output_token + o) == NONE {
        return;
    }
    let top = rules_at(ints_at(P.output_lane + o) * P.rules_row + TOP);
    if top == 0u || ids_at(o * P.ids_row) == NONE {
        return;
    }
    let first = index % P.parts * PART + thread;
#for i LOADS
    var key$i = 0u;
    if first + 256u * $iu < P.vocab {
        key$i = key_of(logits_at(o * P.logits_row + first + 256u * $iu));
    }
#end
    let at = index * PART_WORDS;
    // Round 0 finds the largest for the sum, and is the first of the most likely.
    for (var round = 0u; round < max(top - 1u, 1u); round++) {
        var key = 0u;
        var id = NONE;
#for i LOADS
        if key$i > key {
            key = key$i;
            id = first + 256u * $iu;
        }
#end
        best_of_all(thread, key, id);
        if thread == 0u {
            shared_word = words[0];
            shared_id = ids_of[0];
        }
        let largest = workgroupUniformLoad(&shared_word);
        let best = workgroupUniformLoad(&shared_id);
        if round == 0u {
            var part = 0.0;
            let top_logit = float_of(largest);
            if largest > LOWEST_KEY && largest < INFINITE_KEY {
#for i LOADS
                if key$i > LOWEST_KEY {
                    part += exp(float_of(key$i) - top_logit);
                }
#end
            }
            let sum = sum_all(thread, part);
            if thread == 0u {
                parts_set(at, largest);
                parts_set(at + 1u, bitcast<u32>(sum));
            }
        }
        if thread == 0u {
            parts_set(at + 2u + 2u * round, largest);
            parts_set(at + 3u + 2u * round, best);
        }
        // Taken.
#for i LOADS
        if first + 256u * $iu == best {
            key$i = 0u;
        }
#end
    }
}
#else
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let o = group_index(group, groups);
    if o >= P.groups {
        return;
    }
    if ints_at(P.output_token + o) == NONE {
        return;
    }
    let token = ids_at(o * P.ids_row);
    if token == NONE {
        return;
    }
    let rules = ints_at(P.output_lane + o) * P.rules_row;
    if thread == 0u {
        shared_word = rules_at(rules + TOP);
        if (rules_at(rules) & COUNTED) != 0u {
            let count = rules + P.counts + token;
            rules_set(count, rules_at(count) + 1u);
        }
    }
    let top = workgroupUniformLoad(&shared_word);
    if top == 0u {
        return;
    }
    let n = top - 1u;
    let parts = o * P.parts * PART_WORDS;
    // The largest logit, then the sum over the parts.
    var key = 0u;
    for (var i = thread; i < P.parts; i += 256u) {
        key = max(key, parts_at(parts + i * PART_WORDS));
    }
    best_of_all(thread, key, 0u);
    if thread == 0u {
        shared_word = words[0];
    }
    let largest = workgroupUniformLoad(&shared_word);
    let finite = largest < INFINITE_KEY;
    let top_logit = float_of(largest);
    var part = 0.0;
    if finite {
        for (var i = thread; i < P.parts; i += 256u) {
            let most = parts_at(parts + i * PART_WORDS);
            if most > LOWEST_KEY {
                part += bitcast<f32>(parts_at(parts + i * PART_WORDS + 1u)) * exp(float_of(most) - top_logit);
            }
        }
    }
    let log_sum = log(sum_all(thread, part));
    let report = o * P.report_row;
    if thread == 0u {
        let x = key_of(logits_at(o * P.logits_row + token));
        var value = float_of(LOWEST_KEY);
        if finite && x > LOWEST_KEY {
            value = (float_of(x) - top_logit) - log_sum;
        }
        report_set(report, value);
    }
    // The candidates that follow the last one taken, in the order of falling keys and then rising ids.
    var last_key = NONE;
    var last_id = 0u;
    for (var round = 0u; round < n; round++) {
        var best = 0u;
        var best_id = NONE;
        for (var i = thread; i < P.parts * n; i += 256u) {
            let at = parts + i / n * PART_WORDS + 2u + i % n * 2u;
            let k = parts_at(at);
            let id = parts_at(at + 1u);
            let follows = k < last_key || (k == last_key && id > last_id);
            if follows && (k > best || (k == best && id < best_id)) {
                best = k;
                best_id = id;
            }
        }
        best_of_all(thread, best, best_id);
        if thread == 0u {
            shared_word = words[0];
            shared_id = ids_of[0];
        }
        last_key = workgroupUniformLoad(&shared_word);
        last_id = workgroupUniformLoad(&shared_id);
        if thread == 0u {
            let found = finite && last_key > LOWEST_KEY;
            report_set(report + 1u + 2u * round, select(-1.0, f32(last_id), found));
            report_set(report + 2u + 2u * round, select(0.0, (float_of(last_key) - top_logit) - log_sum, found));
        }
    }
}
#endif
