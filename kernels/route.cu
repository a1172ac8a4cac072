// Experts of each token and their weights, a warp per token. Constants as in route.cuh.

constexpr int WARPS = 4;

#include "route.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS) ENTRY(PARAMETERS) {
    let_next_start();
    __shared__ float choices[WARPS][KIND == 2 && GROUPS > 1 ? E : 1], ranks[WARPS][GROUPS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    i64 t = blockIdx.x * WARPS + warp;
    bool in = t < st.tokens, padding = in && st.token_row(t) == NONE;
    float extra[PER];
    load_extra(bias, extra);
    wait_for_inputs();
    if (!in) return;
    u32 *my_ids = ids + t * ids_stride;
    float *my_weights = weights + t * weights_stride;
    if (padding) {
        if (lane < TOP) {
            my_ids[lane] = NONE;
            my_weights[lane] = 0.f;
        }
        return;
    }
    choose(logits + t * logits_stride, extra, sum_eps, scale, my_ids, my_weights, choices[warp], ranks[warp]);
}
