// Norm of the latents and their write into pages, with the part of the keys that all heads share. One workgroup per token.

var<workgroup> sums: array<f32, 64>;
#if CODED
// Of the latent and of the shared part.
var<workgroup> largest: array<vec2<u32>, 64>;
#endif

// Element d of the latent that begins at `start`.
fn normed(start: u32, d: u32, scale: f32) -> f32 {
    return kv_at(start + d) * scale * weight_at(d);
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let t = group_index(group, groups);
    if t >= P.groups {
        return;
    }
    let row = ints_at(P.token_row + t);
    if row == NONE {
        return;
    }
    let position = ints_at(P.positions + t);
    let page = ints_at(P.page_table + row * P.pages + position / PAGE);
    let start = t * P.kv_row;
    var sum = 0.0;
    for (var d = lane; d < LATENT; d += 64u) {
        let x = kv_at(start + d);
        sum += x * x;
    }
    sums[lane] = sum;
    workgroupBarrier();
    var all = 0.0;
    for (var l = 0u; l < 64u; l++) {
        all += sums[l];
    }
    let scale = 1.0 / sqrt(all / f32(LATENT) + P.eps);
    let latent = page * P.latents_row + position % PAGE * LATENT;
    let tail = page * P.tails_row + position % PAGE * SHARED;
    let shared_start = start + LATENT;
#if CODED
    // As bits, which have the order of magnitudes, with infinity and NaN after all numbers.
    var bits = vec2<u32>();
    for (var d = lane; d < LATENT; d += 64u) {
        bits.x = max(bits.x, bitcast<u32>(normed(start, d, scale)) & 0x7fffffffu);
    }
    for (var d = lane; d < SHARED; d += 64u) {
        bits.y = max(bits.y, bitcast<u32>(kv_at(shared_start + d)) & 0x7fffffffu);
    }
    largest[lane] = bits;
    workgroupBarrier();
    for (var l = 0u; l < 64u; l++) {
        bits = max(bits, largest[l]);
    }
    for (var d = 4u * lane; d < LATENT; d += 256u) {
        let x = vec4<f32>(normed(start, d, scale), normed(start, d + 1u, scale), normed(start, d + 2u, scale),
                          normed(start, d + 3u, scale));
        latents_set_codes(latent + d, x, bits.x);
    }
    for (var d = 4u * lane; d < SHARED; d += 256u) {
        let at = shared_start + d;
        tails_set_codes(tail + d, vec4<f32>(kv_at(at), kv_at(at + 1u), kv_at(at + 2u), kv_at(at + 3u)), bits.y);
    }
    if lane == 0u {
        latents_set_scale(latent, bits.x);
        tails_set_scale(tail, bits.y);
    }
#else
    for (var d = lane; d < LATENT; d += 64u) {
        latents_set(latent + d, normed(start, d, scale));
    }
    for (var d = lane; d < SHARED; d += 64u) {
        tails_set(tail + d, kv_at(shared_start + d));
    }
#endif
}
