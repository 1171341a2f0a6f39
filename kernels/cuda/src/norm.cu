// rms_norm: y = (x * r) * w, r = 1 / sqrt(lanes(x * x) / n + eps).
//
// One block of 128 threads a row, thread j is chain j of `lanes`. The second read of the row comes from the cache.
// Row i takes the factors w[i mod groups].
#include "rows.cuh"

KERNEL void __launch_bounds__(LANES)
    rms_norm(const float* x, const float* w, float* y, int n, int groups, float eps) {
    inputs_ready();
    __shared__ float buffer[LANES];
    const long long row = blockIdx.x;
    x += row * n;
    y += row * n;
    w += row % groups * n;
    float chain = 0.0f;
#pragma unroll 4
    for (int i = threadIdx.x; i < n; i += LANES) chain = fmaf(x[i], x[i], chain);
    const float r = rms_factor(fold_block(chain, buffer), n, eps);
#pragma unroll 4
    for (int i = threadIdx.x; i < n; i += LANES) y[i] = (x[i] * r) * w[i];
}
