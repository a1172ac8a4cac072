// The rules of lanes over their logits, see core/src/ops/adjust.rs. One workgroup of 256 threads per output and TILE ids.

const MINUS_INFINITY: u32 = 0xff800000u;

// Bits of the bias of each id of the tile; minus infinity: it may not come yet.
var<workgroup> biases: array<u32, TILE>;

fn is_nan(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u;
}

fn float_of(bits: u32) -> f32 {
    return bitcast<f32>(bits);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups);
    if index >= P.groups {
        return;
    }
    let o = index / P.tiles;
    let token = ints_at(P.output_token + o);
    if token == NONE {
        return;
    }
    let first = index % P.tiles * TILE;
    let last = min(first + TILE, P.vocab);
    let lane = ints_at(P.output_lane + o);
    let rules = lane * P.rules_row;
    let flags = rules_at(rules);
    if (flags & RULED) == 0u {
        for (var id = first + thread; id < last; id += 256u) {
            out_set(o * P.out_row + id, logits_at(o * P.logits_row + id));
        }
        return;
    }
    for (var i = thread; i < TILE; i += 256u) {
        biases[i] = 0u;
    }
    workgroupBarrier();
    let position = ints_at(P.positions + token) + 1u;
    let entries = rules_at(rules + ENTRIES);
    for (var e = thread; e < entries; e += 256u) {
        let entry = rules + HEADER + 3u * e;
        let id = rules_at(entry);
        if id >= first && id < last {
            biases[id - first] = select(rules_at(entry + 1u), MINUS_INFINITY, position < rules_at(entry + 2u));
        }
    }
    workgroupBarrier();
    let penalty = bitcast<f32>(rules_at(rules + REPETITION));
    let frequency = bitcast<f32>(rules_at(rules + FREQUENCY));
    let presence = bitcast<f32>(rules_at(rules + PRESENCE));
    for (var id = first + thread; id < last; id += 256u) {
        var x = logits_at(o * P.logits_row + id);
        let bias = biases[id - first];
        var denied = is_nan(x) || bias == MINUS_INFINITY;
        if (flags & MASKED) != 0u {
            denied = denied || ((rules_at(rules + P.mask + id / 32u) >> (id & 31u)) & 1u) == 0u;
        }
        if denied {
            out_set(o * P.out_row + id, float_of(MINUS_INFINITY));
            continue;
        }
        x += bitcast<f32>(bias);
        if penalty != 1.0 && ((seen_at(lane * P.seen_row + id / 32u) >> (id & 31u)) & 1u) == 1u {
            x = select(x * penalty, x / penalty, x > 0.0);
        }
        if (flags & COUNTED) != 0u {
            let n = rules_at(rules + P.counts + id);
            if n > 0u {
                x = (x - frequency * f32(n)) - presence;
            }
        }
        out_set(o * P.out_row + id, x);
    }
}
