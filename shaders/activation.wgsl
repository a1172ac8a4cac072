// out = act(gate) * up * sigmoid(row_gate). One thread per four elements.

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let i = group_index(group, groups) * 256u + lane;
    let quads = P.width / 4u;
    if i >= P.tokens * quads {
        return;
    }
    let t = i / quads;
    let c = i % quads * 4u;
    var v = activate4(ACT, gate_v4(t * P.gate_row + c));
#if UP
    v *= up_v4(t * P.up_row + c);
#endif
#if ROW_GATE
    v *= sigmoid(row_gate_at(t * P.row_gate_row));
#endif
    out_set4(t * P.out_row + c, v);
}
