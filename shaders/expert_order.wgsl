// Sorts the choices of all tokens by expert into tiles of BM choices with one expert each. One workgroup in all. The order
// within an expert is unspecified; the rest of its last tile is NONE, and so is the expert of unused tiles.

const WG: u32 = 256u;
const HELD: u32 = (EXPERTS + WG - 1u) / WG;

// First how often each expert was chosen, then the position of its next choice.
var<workgroup> counts: array<atomic<u32>, EXPERTS>;
var<workgroup> sums: array<u32, WG>;

fn id_of(choice: u32) -> u32 {
    return ids_at(choice / P.choices * P.ids_row + choice % P.choices);
}

@compute @workgroup_size(WG)
fn main(@builtin(local_invocation_index) thread: u32) {
    for (var e = thread; e < EXPERTS; e += WG) {
        atomicStore(&counts[e], 0u);
    }
    workgroupBarrier();
    for (var i = thread; i < P.entries; i += WG) {
        let id = id_of(i);
        if id != NONE {
            atomicAdd(&counts[id], 1u);
        }
    }
    workgroupBarrier();
    // Number of tiles of the experts before this thread's.
    var mine = 0u;
    for (var e = thread * HELD; e < min((thread + 1u) * HELD, EXPERTS); e++) {
        mine += (atomicLoad(&counts[e]) + BM - 1u) / BM;
    }
    sums[thread] = mine;
    workgroupBarrier();
    for (var step = 1u; step < WG; step *= 2u) {
        let before = select(0u, sums[max(thread, step) - step], thread >= step);
        workgroupBarrier();
        sums[thread] += before;
        workgroupBarrier();
    }
    var tile = sums[thread] - mine;
    for (var e = thread * HELD; e < min((thread + 1u) * HELD, EXPERTS); e++) {
        let count = atomicLoad(&counts[e]);
        let end = tile + (count + BM - 1u) / BM;
        atomicStore(&counts[e], tile * BM);
        for (var i = tile * BM + count; i < end * BM; i++) {
            order_set(i, NONE);
        }
        for (; tile < end; tile++) {
            expert_set(tile, e);
        }
    }
    for (var i = sums[WG - 1u] + thread; i < P.tiles; i += WG) {
        expert_set(i, NONE);
    }
    workgroupBarrier();
    for (var i = thread; i < P.entries; i += WG) {
        let id = id_of(i);
        if id != NONE {
            order_set(atomicAdd(&counts[id], 1u), i);
        }
    }
}
