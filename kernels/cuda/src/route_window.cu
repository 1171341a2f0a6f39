// The router of a window: logits of all experts and of the shared one, then each row's picks, in one launch.
//
// A block takes ROWS of the rows of both matrices (chains.cuh); its groups share the activation rows. The last block to end
// picks.
// Constants   those of chains.cuh, PER_LANE as in route.cuh
// Shapes      router (E, cols), shared (1, cols), x (n, cols) -> logits (n, E), shared_logits (n,), experts and weights
//             (n, used)
// Source      `lanes` and `ops.Kernels.route`
#define TRACES_ENTRY
#include "chains.cuh"
#include "route.cuh"

KERNEL void __launch_bounds__(LANES * GROUPS)
    route_window(const u8* router, const u8* shared, const float* x, float* logits, float* shared_logits, int* experts,
                 float* weights, u32* ended, int n, int n_experts, int cols, int used) {
    trace_entry();
    constexpr int WARPS = GROUPS * GROUP_WARPS;
    __shared__ Chains chains;
    __shared__ PickMemory picks[WARPS];
    const int warp = threadIdx.x >> 5, first = blockIdx.x * ROWS;
    WeightRows w;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        w.row[r] = first + r < n_experts ? router + static_cast<long long>(first + r) * cols * TYPE::BYTES : shared;
    if (SPAN <= cols) w.load(0);

    inputs_ready();
    const Inputs inputs = {x, n, warp / GROUP_WARPS * INPUTS, GROUPS * INPUTS};
    row_products(w, inputs, cols, chains, [&](int input, int r, float sum) {
        if (first + r < n_experts)
            logits[static_cast<long long>(input) * n_experts + first + r] = sum;
        else if (first + r == n_experts)
            shared_logits[input] = sum;
    });
    trace_mark(2);
    if (!last_block(ended, gridDim.x)) return;
    trace_mark(3);
    for (int r = warp; r < n; r += WARPS)
        pick(logits + static_cast<long long>(r) * n_experts, n_experts, {used, experts + r * used, weights + r * used},
             picks[warp]);
    trace_mark(4);
}
