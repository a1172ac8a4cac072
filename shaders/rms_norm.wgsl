// x += P.add_scale * add; out = x * rsqrt(mean(x²) + eps) * weight, with a gate before or after, or out += that. One workgroup of
// WG threads per group of P.len elements of a row; a thread holds HELD quads and loads all of them before it uses the first. With ROUNDS
// it also writes what matmul_round would make of `out`: eight threads of a subgroup hold 32 elements.

#if SUBGROUP
var<workgroup> sums: array<f32, (WG + SUBGROUP_SIZE - 1u) / SUBGROUP_SIZE>;
#else
var<workgroup> sums: array<f32, WG>;
#endif

// The sum over the workgroup, returned to every thread.
fn sum_all(thread: u32, part: f32) -> f32 {
#if SUBGROUP
    let of_subgroup = shuffled(part);
    if thread % SUBGROUP_SIZE == 0u {
        sums[thread / SUBGROUP_SIZE] = of_subgroup;
    }
    workgroupBarrier();
    var sum = 0.0;
    for (var i = 0u; i < (WG + SUBGROUP_SIZE - 1u) / SUBGROUP_SIZE; i++) {
        sum += sums[i];
    }
    return sum;
#else
    sums[thread] = part;
    workgroupBarrier();
    // 16 threads reduce, then every thread adds up their sums.
    if thread < 16u {
        for (var j = thread + 16u; j < WG; j += 16u) {
            sums[thread] += sums[j];
        }
    }
    workgroupBarrier();
    var sum = 0.0;
    for (var i = 0u; i < 16u; i++) {
        sum += sums[i];
    }
    return sum;
#endif
}

#if ODD
// Elements i to i + 3 of a group, 0 past its end.
fn within(i: u32, v: vec4<f32>) -> vec4<f32> {
    return select(vec4<f32>(), v, vec4<u32>(i, i + 1u, i + 2u, i + 3u) < vec4<u32>(P.len));
}
#endif

@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let index = group_index(group, groups);
    if index >= P.groups {
        return;
    }
    let t = index / P.parts;
    let first = index % P.parts * P.len;
#for i HELD
    let i$i = 4u * (lane + WG * $iu);
    var v$i = vec4<f32>();
    if i$i < P.len {
        v$i = x_v4(t * P.x_row + first + i$i);
    }
#if GATE
    var z$i = vec4<f32>();
    if i$i < P.len {
        z$i = z_v4(t * P.z_row + first + i$i);
    }
#endif
#end
    var sum = 0.0;
#for i HELD
#if ADD
    if i$i < P.len {
        v$i += P.add_scale * add_v4(t * P.add_row + first + i$i);
#if ODD
#for j 4
        if i$i + $ju < P.len {
            x_set(t * P.x_row + first + i$i + $ju, v$i[$j]);
        }
#end
#else
        x_set4(t * P.x_row + first + i$i, v$i);
#endif
    }
#endif
#if GATE_BEFORE
    v$i *= activate4(ACT, z$i);
#endif
#if ODD
    v$i = within(i$i, v$i);
#endif
    sum += dot(v$i, v$i);
#end
    let scale = 1.0 / sqrt(sum_all(lane, sum) / f32(P.len) + P.eps);
#for i HELD
    if i$i < P.len {
        v$i *= scale * weight_v4(select(first + i$i, i$i, P.shared_weight != 0u));
#if GATE_AFTER
        v$i *= activate4(ACT, z$i);
#endif
#if ACCUMULATE
        v$i += out_v4(t * P.out_row + first + i$i);
#endif
#if ODD
#for j 4
        if i$i + $ju < P.len {
            out_set(t * P.out_row + first + i$i + $ju, v$i[$j]);
        }
#end
#else
        out_set4(t * P.out_row + first + i$i, v$i);
#endif
    }
#if ROUNDS
    var most$i = larger(0u, v$i);
    most$i = max(most$i, subgroupShuffleXor(most$i, 1u));
    most$i = max(most$i, subgroupShuffleXor(most$i, 2u));
    most$i = max(most$i, subgroupShuffleXor(most$i, 4u));
    let by$i = rounding(most$i);
    let c$i = integers(v$i, by$i.x);
    var half$i = c$i.x + c$i.y + c$i.z + c$i.w;
    half$i += subgroupShuffleXor(half$i, 1u);
    half$i += subgroupShuffleXor(half$i, 2u);
    let other$i = subgroupShuffleXor(half$i, 4u);
    if i$i < P.len {
        let k = first + i$i;
        codes_set(t * P.codes_row + k / 4u, pack4xI8(c$i));
        if (lane & 7u) == 0u {
            let unit = vec4<f32>(by$i.y, by$i.y * f32(half$i), by$i.y * f32(other$i), 0.0);
            units_set4(t * P.units_row + k / 8u, bitcast<vec4<u32>>(unit));
        }
    }
#endif
#end
}
