// The gated delta net around its recurrence (gdn_scan.cu): convolution and gates before it, the gated norm after it.
//
// gdn_inputs   a warp a (row, head): c = silu(convolution); queries and keys to unit vectors; decay and strength
// gdn_output   a warp a (row, value head): y = (rms(o) with norm) * sigmoid(z)
// Shapes   c like p: (n, 2*K*D + V*D) queries, keys, values; decay, beta (n, V); o, z, y (n, V*D); ops.Gdn for the rest
#include "gdn_window.cuh"

// `heads` = 2 K + V vectors of d channels; kernel taps; scale = 1 / sqrt(d).
KERNEL void __launch_bounds__(128)
    gdn_inputs(const float* p, const float* conv_w, const float* conv, const float* b, const float* a, const float* w_a,
               const float* w_dt, const int* segments, float* c, float* decay, float* beta, int key_heads,
               int value_heads, int d, int kernel) {
    const int head = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31, row = blockIdx.y;
    if (head >= 2 * key_heads + value_heads) return;
    const int channels = (2 * key_heads + value_heads) * d;
    const Segment s = segment_of(segments, row);
    const float* kept = conv + static_cast<long long>(s.slot) * (kernel - 1) * channels;
    const int channel = head * d + lane;
    WarpVector v;
#pragma unroll
    for (int m = 0; m < 4; m++) v.x[m] = 0.0f;
#pragma unroll 4
    for (int j = 0; j < kernel; j++) {
        const float* x = window_row(p, kept, channels, s, row - (kernel - 1) + j, kernel) + channel;
        const float* w = conv_w + static_cast<long long>(channel) * kernel + j;
#pragma unroll
        for (int m = 0; m < 4; m++)
            if (32 * m < d) {
                const float tap = w[32 * m * kernel], in = x[32 * m];
                v.x[m] = j ? fmaf(tap, in, v.x[m]) : tap * in;
            }
    }
    float chains[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int m = 0; m < 4; m++)
        if (32 * m < d) {
            v.x[m] = silu_f32(v.x[m]);
            chains[m] = fmaf(v.x[m], v.x[m], chains[m]);
        }
    c += static_cast<long long>(row) * channels + channel;
    if (head < 2 * key_heads) {
        const float r = 1.0f / sqrtf(fold_chains(chains) + 1e-6f);
        const float scale = head < key_heads ? 1.0f / sqrtf(static_cast<float>(d)) : 1.0f;
#pragma unroll
        for (int m = 0; m < 4; m++)
            if (32 * m < d) c[32 * m] = (v.x[m] * r) * scale;
        return;
    }
#pragma unroll
    for (int m = 0; m < 4; m++)
        if (32 * m < d) c[32 * m] = v.x[m];
    if (lane == 0) {
        const int h = head - 2 * key_heads;
        const long long at = static_cast<long long>(row) * value_heads + h;
        decay[at] = exp_f32(w_a[h] * softplus_f32(a[at] + w_dt[h]));
        beta[at] = sigmoid_f32(b[at]);
    }
}

KERNEL void __launch_bounds__(128)
    gdn_output(const float* o, const float* z, const float* w, float* y, int vectors, int d, float eps) {
    const long long vector = blockIdx.x * 4ll + (threadIdx.x >> 5);
    if (vector >= vectors) return;
    const int lane = threadIdx.x & 31;
    o += vector * d;
    z += vector * d + lane;
    y += vector * d + lane;
    const WarpVector v = load_vector(o, d);
    const float r = rms_factor(sum_of_squares(v, d), d, eps);
#pragma unroll
    for (int m = 0; m < 4; m++)
        if (32 * m < d) y[32 * m] = ((v.x[m] * r) * w[lane + 32 * m]) * sigmoid_f32(z[32 * m]);
}
