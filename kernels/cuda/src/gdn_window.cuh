// The convolution of a gated delta net and its gates: what every kernel of the layer computes alike.
#pragma once
#include "rows.cuh"

// The inputs of a segment: rows of this call, and before them the kept ones. `w` (channels, kernel).
struct Window {
    const float *p, *w, *kept;
    int channels, kernel;
    Segment s;

    DEVICE static Window of(const float* p, const float* w, const float* conv, int channels, int kernel, const Segment& s) {
        return {p, w, conv + static_cast<long long>(s.slot) * (kernel - 1) * channels, channels, kernel, s};
    }
    // An input row of this call or before it.
    DEVICE const float* row(int source) const {
        return source >= s.begin ? p + static_cast<long long>(source) * channels
                                 : kept + static_cast<long long>(source - s.begin + kernel - 1) * channels;
    }
    // silu(sum_j w[j] * p[row - (kernel - 1) + j]) of one channel.
    DEVICE float convolved(int at, int channel) const {
        float sum = 0.0f;
#pragma unroll 4
        for (int j = 0; j < kernel; j++) {
            const float tap = w[static_cast<long long>(channel) * kernel + j], in = row(at - (kernel - 1) + j)[channel];
            sum = j ? fmaf(tap, in, sum) : tap * in;
        }
        return silu_f32(sum);
    }
    // The last inputs of the segment, oldest first, to the kept ones of the row that the state advances to. One channel
    // is moved by one thread, in this order: it may overwrite what it has read.
    DEVICE void keep(float* conv, int channel) const {
        float* to = conv + static_cast<long long>(s.to) * (kernel - 1) * channels + channel;
        for (int i = 0; i < kernel - 1; i++)
            to[static_cast<long long>(i) * channels] = row(s.end - (kernel - 1) + i)[channel];
    }
};

// A query or key of d elements by one warp: convolved, and made a unit vector times `scale`.
DEVICE WarpVector unit_vector(const Window& window, int at, int channel, int d, float scale) {
    WarpVector v;
    float chains[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int m = 0; m < 4; m++)
        if (32 * m < d) {
            v.x[m] = window.convolved(at, channel + (threadIdx.x & 31) + 32 * m);
            chains[m] = fmaf(v.x[m], v.x[m], chains[m]);
        }
    const float r = 1.0f / sqrtf(fold_chains(chains) + 1e-6f);
#pragma unroll
    for (int m = 0; m < 4; m++)
        if (32 * m < d) v.x[m] = (v.x[m] * r) * scale;
    return v;
}

DEVICE float query_scale(int d) { return 1.0f / sqrtf(static_cast<float>(d)); }

DEVICE float decay_of(float w_a, float a, float w_dt) { return exp_f32(w_a * softplus_f32(a + w_dt)); }
