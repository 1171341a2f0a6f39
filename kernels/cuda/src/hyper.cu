// Hyper-connections around their products: streams normed, gates activated, streams mixed, a block's output added.
//
// hyper_norm   [x = fma(beta, y, x) when beta is given,] normed = rms(x) per stream; a block of 128 threads a stream
// hyper_gate   a = silu(a * scale) in place; beta = 2 * sigmoid(inject * scale)
// hyper_gate_inject   the same with the products of a float32 inject matrix in it, for windows: the first n * C blocks make
//              one beta each, lanes(w * normed) over C * H, the others take LANES values of a each
// hyper_mean   u = (sum_c sigmoid(gates[c]) * normed[c]) * scale, c ascending, first a product, then fma
// hyper_add    x = fma(beta, y, x)
// Shapes   x, normed, gates (n, C, H), y and u (n, H), beta and inject (n, C), H a multiple of 4
// Cost     each reads and writes its arrays once; hyper_norm reads x a second time from the cache
#include "rows.cuh"

KERNEL void __launch_bounds__(LANES)
    hyper_norm(float* x, const float* beta, const float* y, const float* w, float* normed, int width, int streams,
               float eps) {
    __shared__ float buffer[LANES];
    const long long row = blockIdx.x;
    x += row * width;
    normed += row * width;
    w += row % streams * width;
    float chain = 0.0f;
    if (beta) {
        const float strength = beta[row];
        y += row / streams * width;
#pragma unroll 4
        for (int i = threadIdx.x; i < width; i += LANES) {
            const float v = fmaf(strength, y[i], x[i]);
            x[i] = v;
            chain = fmaf(v, v, chain);
        }
    } else {
#pragma unroll 4
        for (int i = threadIdx.x; i < width; i += LANES) chain = fmaf(x[i], x[i], chain);
    }
    const float r = rms_factor(fold_block(chain, buffer), width, eps);
#pragma unroll 4
    for (int i = threadIdx.x; i < width; i += LANES) normed[i] = (x[i] * r) * w[i];
}

KERNEL void __launch_bounds__(256)
    hyper_gate(float* a, long long n_a, const float* inject, float* beta, long long n_beta, float scale) {
    const long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i < n_a)
        a[i] = silu_f32(a[i] * scale);
    else if (i - n_a < n_beta)
        beta[i - n_a] = 2.0f * sigmoid_f32(inject[i - n_a] * scale);
}

KERNEL void __launch_bounds__(LANES)
    hyper_gate_inject(float* a, long long n_a, const float* normed, const float* w, float* beta, int n_beta, int streams,
                      int cols, float scale) {
    __shared__ float buffer[LANES];
    const int unit = blockIdx.x;
    if (unit >= n_beta) {
        const long long i = static_cast<long long>(unit - n_beta) * LANES + threadIdx.x;
        if (i < n_a) a[i] = silu_f32(a[i] * scale);
        return;
    }
    normed += static_cast<long long>(unit / streams) * cols;
    w += static_cast<long long>(unit % streams) * cols;
    float chain = 0.0f;
#pragma unroll 8
    for (int i = threadIdx.x; i < cols; i += LANES) chain = fmaf(w[i], normed[i], chain);
    const float sum = fold_block(chain, buffer);
    if (threadIdx.x == 0) beta[unit] = 2.0f * sigmoid_f32(sum * scale);
}

DEVICE float4 gated(float4 gate, float4 v) {
    return make_float4(sigmoid_f32(gate.x) * v.x, sigmoid_f32(gate.y) * v.y, sigmoid_f32(gate.z) * v.z,
                       sigmoid_f32(gate.w) * v.w);
}

DEVICE float4 add_gated(float4 gate, float4 v, float4 sum) {
    return make_float4(fmaf(sigmoid_f32(gate.x), v.x, sum.x), fmaf(sigmoid_f32(gate.y), v.y, sum.y),
                       fmaf(sigmoid_f32(gate.z), v.z, sum.z), fmaf(sigmoid_f32(gate.w), v.w, sum.w));
}

// A thread makes four values of one row. `quarter` = H / 4.
KERNEL void __launch_bounds__(128)
    hyper_mean(const float4* gates, const float4* normed, float4* u, int quarter, int streams, float scale) {
    const int i = blockIdx.x * 128 + threadIdx.x;
    if (i >= quarter) return;
    const long long row = blockIdx.y;
    gates += row * streams * quarter + i;
    normed += row * streams * quarter + i;
    float4 sum = gated(gates[0], normed[0]);
#pragma unroll 3
    for (int c = 1; c < streams; c++) sum = add_gated(gates[c * quarter], normed[c * quarter], sum);
    u[row * quarter + i] = make_float4(sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale);
}

KERNEL void __launch_bounds__(128)
    hyper_add(float4* x, const float* beta, const float4* y, int quarter, int streams) {
    const int i = blockIdx.x * 128 + threadIdx.x;
    if (i >= quarter) return;
    const long long row = blockIdx.y;
    const float4 v = y[row * quarter + i];
    x += row * streams * quarter + i;
    beta += row * streams;
    for (int c = 0; c < streams; c++) {
        float4 old = x[c * quarter];
        const float b = beta[c];
        old.x = fmaf(b, v.x, old.x);
        old.y = fmaf(b, v.y, old.y);
        old.z = fmaf(b, v.z, old.z);
        old.w = fmaf(b, v.w, old.w);
        x[c * quarter] = old;
    }
}
