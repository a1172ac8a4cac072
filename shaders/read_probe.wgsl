// Reads a whole buffer as fast as the device can: 16 vectors per thread, contiguous per workgroup. The sum is stored under a
// condition that never holds, so that the compiler cannot remove the reads.

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups);
    if index >= P.groups {
        return;
    }
    let first = 4u * (index * 4096u + thread);
#for i 16
    let v$i = src_v4(first + $iu * 1024u);
#end
    var sum = vec4<u32>();
#for i 16
    sum ^= v$i;
#end
    if (sum.x ^ sum.y ^ sum.z ^ sum.w) == 0x9e3779b9u && sum.x == P.src_row {
        out_set(0u, sum.x);
    }
}
