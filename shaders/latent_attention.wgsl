// Attention over latents. A workgroup handles one token and one head and walks the pages with a running softmax; 2 threads
// share the score of a key, and a thread holds every 128th quad of the result.

const QUADS: u32 = LATENT / 4u;
const TAIL_QUADS: u32 = SHARED / 4u;

var<workgroup> query: array<vec4<f32>, QUADS>;
var<workgroup> tail: array<vec4<f32>, TAIL_QUADS>;
var<workgroup> parts: array<f32, 128>;
var<workgroup> weights: array<f32, 64>;

@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups);
    if index >= P.groups {
        return;
    }
    let t = index / P.heads;
    let head = index % P.heads;
    let row = ints_at(P.token_row + t);
    if row == NONE {
        return;
    }
    let end = ints_at(P.positions + t) + 1u;
    for (var i = thread; i < QUADS; i += 128u) {
        query[i] = P.scale * q_v4(t * P.q_row + head * LATENT + 4u * i);
    }
    let tail_first = t * P.queries_row + (head + 1u) * P.width - SHARED;
    for (var i = thread; i < TAIL_QUADS; i += 128u) {
        tail[i] = P.scale * queries_v4(tail_first + 4u * i);
    }
    workgroupBarrier();
    let key = thread / 2u;
    let side = thread % 2u;
    var largest = LOWEST;
    var total = 0.0;
#for h HELD
    var acc$h = vec4<f32>();
#end
    for (var block = 0u; block * PAGE < end; block++) {
        let page = ints_at(P.page_table + row * P.pages + block);
        let count = min(PAGE, end - block * PAGE);
        let latents = page * P.latents_row;
        var product = 0.0;
        // Positions past the end are uninitialised.
        if key < count {
            for (var i = side; i < QUADS; i += 2u) {
                product += dot(latents_v4(latents + key * LATENT + 4u * i), query[i]);
            }
            for (var i = side; i < TAIL_QUADS; i += 2u) {
                product += dot(tails_v4(page * P.tails_row + key * SHARED + 4u * i), tail[i]);
            }
        }
        parts[thread] = product;
        workgroupBarrier();
        let before = largest;
        for (var i = 0u; i < count; i++) {
            largest = max(largest, parts[2u * i] + parts[2u * i + 1u]);
        }
        if thread < PAGE {
            weights[thread] = select(0.0, exp(parts[2u * thread] + parts[2u * thread + 1u] - largest), thread < count);
        }
        workgroupBarrier();
        let factor = exp(before - largest);
        total *= factor;
        for (var i = 0u; i < count; i++) {
            total += weights[i];
        }
#for h HELD
        let quad$h = thread + 128u * $hu;
        acc$h *= factor;
        if quad$h < QUADS {
            for (var i = 0u; i < count; i++) {
                acc$h += weights[i] * latents_v4(latents + i * LATENT + 4u * quad$h);
            }
        }
#end
    }
    let factor = select(0.0, 1.0 / total, total > 0.0);
#for h HELD
    if thread + 128u * $hu < QUADS {
        out_set4(t * P.out_row + head * LATENT + 4u * (thread + 128u * $hu), acc$h * factor);
    }
#end
}
