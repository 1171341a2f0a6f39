// The experts' outputs of a prompt joined in rank order: out = fma(weight, y, out) from 0.
#include "device.cuh"

// y (n * used, rows), weights (n, used) -> out (n, rows). Four rows a thread; rows % 4 == 0.
KERNEL __launch_bounds__(256) void join_pairs(const float* y, const float* weights, float* out, int used,
                                                             int rows, long long total) {
    inputs_ready();
    const long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i >= total) return;
    const long long token = i / (rows / 4);
    const int at = (int)(i - token * (rows / 4)) * 4;
    float4 acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int k = 0; k < used; k++) {
        const float w = weights[token * used + k];
        const float4 v = *(const float4*)(y + (token * used + k) * rows + at);
        acc.x = fmaf(w, v.x, acc.x);
        acc.y = fmaf(w, v.y, acc.y);
        acc.z = fmaf(w, v.z, acc.z);
        acc.w = fmaf(w, v.w, acc.w);
    }
    *(float4*)(out + token * rows + at) = acc;
}
