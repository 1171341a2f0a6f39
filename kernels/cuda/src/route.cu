// The experts of a row: the `used` best logits and their softmax. A warp a row.
//
// Shapes      logits (n, E) -> experts, weights (n, used), used <= 64
// Source      `ops.Kernels.route`
#include "route.cuh"

KERNEL void __launch_bounds__(128)
    route(const float* logits, int* experts, float* weights, int n, int n_experts, int used) {
    inputs_ready();
    const long long row = blockIdx.x * 4ll + (threadIdx.x >> 5);
    if (row < n) pick(logits + row * n_experts, n_experts, used, experts + row * used, weights + row * used);
}
