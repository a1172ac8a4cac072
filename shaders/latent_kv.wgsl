// Norm of the latents and their write into pages, with the part of the keys that all heads share. One workgroup per token.

var<workgroup> sums: array<f32, 64>;

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
    for (var d = lane; d < LATENT; d += 64u) {
        latents_set(latent + d, kv_at(start + d) * scale * weight_at(d));
    }
    let tail = page * P.tails_row + position % PAGE * SHARED;
    for (var d = lane; d < SHARED; d += 64u) {
        tails_set(tail + d, kv_at(start + LATENT + d));
    }
}
