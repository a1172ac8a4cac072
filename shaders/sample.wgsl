// One token per output row, by the rule of core/src/sample.rs; one workgroup of 256 threads per output. Thresholds are found
// by radix selection, four bits at a time, on keys: the scores' bits mapped so that u32 order is score order. Sums have a
// fixed order. For a large vocabulary a first dispatch (FIND) takes the best of every PART ids, one workgroup each, and the
// second one reads its results (FOUND).

const LOWEST_KEY: u32 = 0x007fffffu;

var<workgroup> floats: array<f32, 256>;
var<workgroup> words: array<u32, 256>;
var<workgroup> bins: array<f32, 16u * 256u / 2u>;
var<workgroup> chosen: u32;
var<workgroup> shared_key: u32;
var<workgroup> shared_float: f32;

fn key_of(x: f32) -> u32 {
    // -0 and +0 get the same key.
    let raw = bitcast<u32>(x);
    let bits = select(raw, 0u, raw == 0x80000000u);
    return select(bits | 0x80000000u, ~bits, (bits & 0x80000000u) != 0u);
}

fn float_of(key: u32) -> f32 {
    return bitcast<f32>(select(~key, key & 0x7fffffffu, (key & 0x80000000u) != 0u));
}

fn minus_infinity() -> f32 {
    return float_of(LOWEST_KEY);
}

// The penalised logit of a token; NaN counts as minus infinity.
fn score(o: u32, lane: u32, id: u32, penalty: f32) -> f32 {
    var x = logits_at(o * P.logits_row + id);
    if (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u {
        return minus_infinity();
    }
    if penalty != 1.0 && ((seen_at(lane * P.seen_row + id / 32u) >> (id & 31u)) & 1u) == 1u {
        x = select(x * penalty, x / penalty, x > 0.0);
    }
    return x;
}

fn mix_bits(x: u32) -> u32 {
    var h = x;
    h = (h ^ (h >> 16u)) * 0x85ebca6bu;
    h = (h ^ (h >> 13u)) * 0xc2b2ae35u;
    return h ^ (h >> 16u);
}

fn uniform_number(seed_low: u32, seed_high: u32, position: u32) -> f32 {
    var h = mix_bits(seed_low ^ 0x9e3779b9u);
    h = mix_bits(h ^ seed_high) + 0x7f4a7c15u;
    h = mix_bits(h ^ position) + 0x165667b1u;
    return f32(mix_bits(h) >> 8u) / 16777216.0;
}

// Histogram over the next four bits of keys with a known prefix: the number of scores or, with `weighted`, the sum of their
// weights. Thread i of the first 16 returns bin i. Scores below `least` are skipped.
fn histogram(o: u32, lane: u32, thread: u32, penalty: f32, prefix: u32, shift: u32, least: u32, scale: f32, largest: f32,
             weighted: bool) {
    var mine: array<f32, 16>;
    for (var id = thread; id < P.vocab; id += 256u) {
        let x = score(o, lane, id, penalty);
        let key = key_of(x);
        let above = select((key ^ prefix) >> (shift + 4u), 0u, shift == 28u);
        if key >= least && above == 0u {
            let w = select(1.0, exp((x - largest) * scale), weighted);
            let bin = (key >> shift) & 15u;
            for (var b = 0u; b < 16u; b++) {
                mine[b] += select(0.0, w, b == bin);
            }
        }
    }
    // Half of the bins at a time, to stay within 16 KiB.
    for (var part = 0u; part < 2u; part++) {
        for (var b = 0u; b < 8u; b++) {
            bins[b * 256u + thread] = mine[part * 8u + b];
        }
        workgroupBarrier();
        for (var half = 128u; half > 0u; half /= 2u) {
            if thread < half {
                for (var b = 0u; b < 8u; b++) {
                    bins[b * 256u + thread] += bins[b * 256u + thread + half];
                }
            }
            workgroupBarrier();
        }
        if thread < 8u {
            floats[part * 8u + thread] = bins[thread * 256u];
        }
        workgroupBarrier();
    }
}

// The largest key such that the scores with this or a larger key number (or weigh) at least `target`.
fn find_key(o: u32, lane: u32, thread: u32, penalty: f32, least: u32, scale: f32, largest: f32, weighted: bool,
            target_sum: f32) -> u32 {
    var prefix = 0u;
    var above = 0.0;
    for (var level = 0u; level < 8u; level++) {
        let shift = 28u - 4u * level;
        histogram(o, lane, thread, penalty, prefix, shift, least, scale, largest, weighted);
        if thread == 0u {
            // If rounding puts the target out of reach: the lowest bin that is not empty.
            var bin = 0u;
            var sum = above;
            for (var b = 16u; b > 0u; b--) {
                if floats[b - 1u] > 0.0 {
                    bin = b - 1u;
                    if sum + floats[b - 1u] >= target_sum {
                        break;
                    }
                    sum += floats[b - 1u];
                }
            }
            // Out of reach: the count above the lowest bin is kept.
            if bin < 15u {
                sum = above;
                for (var b = 15u; b > bin; b--) {
                    sum += floats[b];
                }
            } else {
                sum = above;
            }
            shared_key = prefix | (bin << shift);
            shared_float = sum;
        }
        prefix = workgroupUniformLoad(&shared_key);
        above = workgroupUniformLoad(&shared_float);
    }
    return prefix;
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

// Stores the largest key of all threads in words[0] and its id in floats[0]; ties go to the lowest id.
fn best_of_all(thread: u32, largest: u32, best: u32) {
    words[thread] = largest;
    floats[thread] = bitcast<f32>(best);
    workgroupBarrier();
    for (var half = 128u; half > 0u; half /= 2u) {
        if thread < half {
            let other = words[thread + half];
            let a = bitcast<u32>(floats[thread]);
            let b = bitcast<u32>(floats[thread + half]);
            if other > words[thread] || (other == words[thread] && other != LOWEST_KEY && b < a) {
                words[thread] = other;
                floats[thread] = bitcast<f32>(b);
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
    let lane = ints_at(P.output_lane + o);
    let penalty = bitcast<f32>(lanes_at(lane * P.lanes_row + 3u));
    let first = index % P.parts * PART + thread;
    var largest = LOWEST_KEY;
    var best = 0u;
#for i LOADS
    var key$i = 0u;
    if first + 256u * $iu < P.vocab {
        key$i = key_of(score(o, lane, first + 256u * $iu, penalty));
    }
#end
#for i LOADS
    if key$i > largest {
        largest = key$i;
        best = first + 256u * $iu;
    }
#end
    best_of_all(thread, largest, best);
    if thread == 0u {
        parts_set4(4u * index, vec4<u32>(words[0], bitcast<u32>(floats[0]), 0u, 0u));
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
    let token = ints_at(P.output_token + o);
    if token == NONE {
        return;
    }
    let lane = ints_at(P.output_lane + o);
    let parameters = lane * P.lanes_row;
    let temperature = bitcast<f32>(lanes_at(parameters));
    let top_p = bitcast<f32>(lanes_at(parameters + 1u));
    let min_p = bitcast<f32>(lanes_at(parameters + 2u));
    let penalty = bitcast<f32>(lanes_at(parameters + 3u));
    let top_k = lanes_at(parameters + 4u);

    // The largest score; ties go to the lowest id.
    var largest = LOWEST_KEY;
    var best = 0u;
#if FOUND
    for (var i = thread; i < P.parts; i += 256u) {
        let found = parts_v4(4u * (o * P.parts + i));
        if found.x > largest {
            largest = found.x;
            best = found.y;
        }
    }
#else
    for (var id = thread; id < P.vocab; id += 1024u) {
        // Four loads in flight.
        var keys: array<u32, 4>;
        for (var i = 0u; i < 4u; i++) {
            if id + 256u * i < P.vocab {
                keys[i] = key_of(score(o, lane, id + 256u * i, penalty));
            }
        }
        for (var i = 0u; i < 4u; i++) {
            if keys[i] > largest {
                largest = keys[i];
                best = id + 256u * i;
            }
        }
    }
#endif
    best_of_all(thread, largest, best);
    if thread == 0u {
        chosen = bitcast<u32>(floats[0]);
        shared_key = words[0];
    }
    largest = workgroupUniformLoad(&shared_key);
    best = workgroupUniformLoad(&chosen);
    let infinite = largest == LOWEST_KEY || largest == 0xff800000u;
    if infinite && thread == 0u {
        chosen = NONE;
    }
    if temperature > 0.0 && !infinite {
        let top = float_of(largest);
        let scale = 1.0 / temperature;
        var least = LOWEST_KEY;
        if top_k > 0u && top_k < P.vocab {
            least = find_key(o, lane, thread, penalty, 0u, scale, top, false, f32(top_k));
        }
        if top_p < 1.0 {
            var part = 0.0;
            for (var id = thread; id < P.vocab; id += 256u) {
                let x = score(o, lane, id, penalty);
                part += select(0.0, exp((x - top) * scale), key_of(x) >= least);
            }
            let total = sum_all(thread, part);
            least = find_key(o, lane, thread, penalty, least, scale, top, true, top_p * total);
        }
        if min_p > 0.0 {
            let floor_key = key_of(top + log(min_p) * temperature);
            least = max(least, select(largest, floor_key, min_p < 1.0));
        }
        // Each thread takes a block of consecutive ids, so that the running sum is in the order of ids.
        let block = (P.vocab + 255u) / 256u;
        let first = min(thread * block, P.vocab);
        let last = min(first + block, P.vocab);
        var part = 0.0;
        for (var id = first; id < last; id++) {
            let x = score(o, lane, id, penalty);
            part += select(0.0, exp((x - top) * scale), key_of(x) >= least);
        }
        floats[thread] = part;
        workgroupBarrier();
        if thread == 0u {
            var sum = 0.0;
            for (var i = 0u; i < 256u; i++) {
                sum += floats[i];
            }
            let position = ints_at(P.positions + token) + 1u;
            let target_sum = uniform_number(lanes_at(parameters + 5u), lanes_at(parameters + 6u), position) * sum;
            // The block in which the sum passes the target; after rounding it may be the last block that is not empty.
            var before = 0.0;
            var found = 0u;
            var start = 0.0;
            for (var i = 0u; i < 256u; i++) {
                if floats[i] > 0.0 {
                    found = i;
                    start = before;
                    before += floats[i];
                    if before > target_sum {
                        break;
                    }
                }
            }
            var running = start;
            for (var id = found * block; id < min(found * block + block, P.vocab); id++) {
                let x = score(o, lane, id, penalty);
                if key_of(x) >= least {
                    chosen = id;
                    running += exp((x - top) * scale);
                    if running > target_sum {
                        break;
                    }
                }
            }
        }
    }
    if thread == 0u {
        let id = chosen;
        ids_set(o * P.ids_row, id);
        if id != NONE {
            seen_or(lane * P.seen_row + id / 32u, 1u << (id & 31u));
        }
        // If a lane has several outputs, the last one counts.
        var follows = false;
        if o + 1u < P.groups {
            follows = ints_at(P.output_token + o + 1u) != NONE && ints_at(P.output_lane + o + 1u) == lane;
        }
        if !follows {
            last_set(lane * P.last_row, id);
        }
    }
}
#endif
