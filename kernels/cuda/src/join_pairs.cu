// The experts' outputs of a prompt joined in rank order: out = fma(weight, y, out) from 0.
//
// Constant USED, experts of a token: a thread asks for all of its numbers before it adds the first.
#include "device.cuh"

#ifndef USED
#define USED 10
#endif

// y (n * USED, rows), weights (n, USED) -> out (n, rows). Four rows a thread, `parts` blocks a token; rows % 4 == 0.
KERNEL __launch_bounds__(128) void join_pairs(const float* y, const float* weights, float* out, int rows, int parts) {
    inputs_ready();
    const int token = blockIdx.x / parts, at = 4 * ((blockIdx.x - token * parts) * 128 + threadIdx.x);
    if (at >= rows) return;
    y += (long long)token * USED * rows + at;
    weights += (long long)token * USED;
    float w[USED];
    float4 v[USED];
#pragma unroll
    for (int k = 0; k < USED; k++) w[k] = weights[k], v[k] = *(const float4*)(y + (long long)k * rows);
    float4 acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int k = 0; k < USED; k++) {
        acc.x = fmaf(w[k], v[k].x, acc.x);
        acc.y = fmaf(w[k], v[k].y, acc.y);
        acc.z = fmaf(w[k], v[k].z, acc.z);
        acc.w = fmaf(w[k], v[k].w, acc.w);
    }
    *(float4*)(out + (long long)token * rows + at) = acc;
}
