// The experts of a row: the `used` best logits and their softmax. A warp a row.
//
// Shapes      logits (n, E) -> experts, weights (n, used), used <= 64
// Source      `ops.Kernels.route`
#include "route.cuh"

KERNEL void __launch_bounds__(128)
    route(const float* logits, int* experts, float* weights, int n, int n_experts, int used) {
    __shared__ PickMemory memory[4];
    inputs_ready();
    const int warp = threadIdx.x >> 5;
    const long long row = blockIdx.x * 4ll + warp;
    if (row < n) pick(logits + row * n_experts, n_experts, {used, experts + row * used, weights + row * used}, memory[warp]);
}
