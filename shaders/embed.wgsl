// out[t] = P.scale * table[id(t)] for the ids of one row block. One workgroup per token.

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let t = group_index(group, groups);
    if t >= P.groups || ints_at(P.token_row + t) == NONE {
        return;
    }
    var id = ints_at(t);
    if (id & FROM_DEVICE) != 0u {
        id = last_at(id & ~FROM_DEVICE);
    }
    if id < P.first || id - P.first >= P.count {
        return;
    }
    let row = (id - P.first) * P.table_row;
    for (var i = 4u * lane; i < P.width; i += 256u) {
        out_set4(t * P.out_row + i, P.scale * table_v4(row + i));
    }
}
