// The convolution of a gated delta net and its gates: what every kernel of the layer computes alike.
//
// Constants   HEAD_SIZE = D elements of a head, TAPS of the convolution
#pragma once
#include "rows.cuh"

#ifndef HEAD_SIZE
#define HEAD_SIZE 128
#endif
#ifndef TAPS
#define TAPS 4
#endif

constexpr int D = HEAD_SIZE;
constexpr int PARTS = D / 32;  // elements of a lane when a warp takes a head

// The inputs of a segment: rows of this call, and before them the kept ones. `w` (channels, TAPS).
struct Window {
    const float *p, *w, *kept;
    int channels;
    Segment s;

    DEVICE static Window of(const float* p, const float* w, const float* conv, int channels, const Segment& s) {
        return {p, w, conv + static_cast<long long>(s.slot) * (TAPS - 1) * channels, channels, s};
    }
    // An input row of this call or before it.
    DEVICE const float* row(int source) const {
        return source >= s.begin ? p + static_cast<long long>(source) * channels
                                 : kept + static_cast<long long>(source - s.begin + TAPS - 1) * channels;
    }
    // The last inputs of the segment, oldest first: what is kept of the channels channel + 32 m.
    template <int N>
    DEVICE void last(float (&v)[TAPS - 1][N], int channel) const {
#pragma unroll
        for (int i = 0; i < TAPS - 1; i++)
#pragma unroll
            for (int m = 0; m < N; m++) v[i][m] = read_early(row(s.end - (TAPS - 1) + i) + channel + 32 * m);
    }
    // To the kept ones of the row that the state advances to, after all of them have been read.
    template <int N>
    DEVICE void keep(float* conv, int channel, const float (&v)[TAPS - 1][N]) const {
        float* to = conv + static_cast<long long>(s.to) * (TAPS - 1) * channels + channel;
#pragma unroll
        for (int i = 0; i < TAPS - 1; i++)
#pragma unroll
            for (int m = 0; m < N; m++) to[static_cast<long long>(i) * channels + 32 * m] = v[i][m];
    }
};

DEVICE void load_taps(float (&taps)[TAPS], const float* w) {
    if (TAPS == 4) {
        const float4 v = *reinterpret_cast<const float4*>(w);
        taps[0] = v.x, taps[1 % TAPS] = v.y, taps[2 % TAPS] = v.z, taps[3 % TAPS] = v.w;
    } else {
#pragma unroll
        for (int j = 0; j < TAPS; j++) taps[j] = w[j];
    }
}

// silu(sum_j w[j] * p[at - (TAPS - 1) + j]) of the channels channel + 32 m. All loads come first.
template <int N>
DEVICE void convolve(const Window& window, int at, int channel, float (&v)[N]) {
    float taps[N][TAPS], in[N][TAPS];
#pragma unroll
    for (int m = 0; m < N; m++) load_taps(taps[m], window.w + static_cast<long long>(channel + 32 * m) * TAPS);
#pragma unroll
    for (int j = 0; j < TAPS; j++) {
        const float* row = window.row(at - (TAPS - 1) + j) + channel;
#pragma unroll
        for (int m = 0; m < N; m++) in[m][j] = row[32 * m];
    }
#pragma unroll
    for (int m = 0; m < N; m++) {
        v[m] = taps[m][0] * in[m][0];
#pragma unroll
        for (int j = 1; j < TAPS; j++) v[m] = fmaf(taps[m][j], in[m][j], v[m]);
    }
#pragma unroll
    for (int m = 0; m < N; m++) v[m] = silu_f32(v[m]);
}

// Make a vector of a warp a unit vector times `scale`.
DEVICE void make_unit(float (&v)[PARTS], float scale) {
    float chains[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int m = 0; m < PARTS; m++) chains[m] = fmaf(v[m], v[m], chains[m]);
    const float r = 1.0f / sqrtf(fold_chains(chains) + 1e-6f);
#pragma unroll
    for (int m = 0; m < PARTS; m++) v[m] = (v[m] * r) * scale;
}

// (rms(v) with norm factors) * sigmoid(gate) of a vector of a warp.
DEVICE void gated_norm(float (&v)[PARTS], const float (&factor)[PARTS], const float (&gate)[PARTS], float eps) {
    float chains[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int m = 0; m < PARTS; m++) chains[m] = fmaf(v[m], v[m], chains[m]);
    const float r = rms_factor(fold_chains(chains), D, eps);
#pragma unroll
    for (int m = 0; m < PARTS; m++) v[m] = ((v[m] * r) * factor[m]) * sigmoid_f32(gate[m]);
}

DEVICE float query_scale() { return 1.0f / sqrtf(static_cast<float>(D)); }

DEVICE float decay_of(float w_a, float a, float w_dt) { return exp_f32(w_a * softplus_f32(a + w_dt)); }
