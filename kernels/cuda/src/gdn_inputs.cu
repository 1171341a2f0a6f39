// The convolution of a delta net's inputs in a prompt, and its gates: what gdn_scan.cu takes.
//
// gdn_inputs   a warp has RUN consecutive rows of a head: c = silu(convolution); queries and keys to unit vectors; decay and
//              strength. The inputs of a run are read together, once where the run lies in one segment
// Constants    HEAD_SIZE = D, TAPS
// Shapes   c like p: (n, 2*K*D + V*D) queries, keys, values; decay, beta (n, V);
//          ops.Gdn for the rest
#include "gdn_window.cuh"

constexpr int RUN = 8;  // as in gdn.py

// A row's elements of a head, to c.
DEVICE void leave(float (&v)[PARTS], int head, int key_heads, float* c) {
    const int lane = threadIdx.x & 31;
    if (head < 2 * key_heads) make_unit(v, head < key_heads ? query_scale() : 1.0f);
#pragma unroll
    for (int m = 0; m < PARTS; m++) c[lane + 32 * m] = v[m];
}

// The decay and the strength of a head's row, one for a lane: read first and made later.
struct Gates {
    bool here;
    long long at;
    float a = 0.0f, b = 0.0f, factor = 0.0f, shift = 0.0f;

    DEVICE Gates(const float* of_a, const float* of_b, const float* w_a, const float* w_dt, int h, int value_heads,
                 int first, int rows) {
        const int lane = threadIdx.x & 31;
        here = h >= 0 && lane < rows, at = static_cast<long long>(first + lane) * value_heads + h;
        if (here) a = of_a[at], b = of_b[at], factor = w_a[h], shift = w_dt[h];
    }
    DEVICE void leave(float* decay, float* beta) const {
        if (here) decay[at] = decay_of(factor, a, shift), beta[at] = sigmoid_f32(b);
    }
};

KERNEL void __launch_bounds__(128)
    gdn_inputs(const float* p, const float* conv_w, const float* conv, const float* b, const float* a, const float* w_a,
               const float* w_dt, const int* segments, float* c, float* decay, float* beta, int key_heads,
               int value_heads, int n) {
    inputs_ready();
    const int head = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31, first = blockIdx.y * RUN;
    if (head >= 2 * key_heads + value_heads) return;
    const int channels = (2 * key_heads + value_heads) * D, channel = head * D + lane, rows = min(RUN, n - first);
    c += static_cast<long long>(first) * channels + head * D;
    // What does not depend on the segment is read before it is known.
    const Gates gates(a, b, w_a, w_dt, head - 2 * key_heads, value_heads, first, rows);
    float in[TAPS - 1 + RUN][PARTS];
    const auto load = [&](int i, const float* row) {
#pragma unroll
        for (int m = 0; m < PARTS; m++) in[i][m] = row[channel + 32 * m];
    };
    if (first + RUN <= n) {
        const float* run = p + static_cast<long long>(first) * channels;
#pragma unroll
        for (int r = 0; r < RUN; r++) load(TAPS - 1 + r, run + r * channels);
    }
    const Segment segment = segment_of(segments, first);
    if (first + RUN <= segment.end) {
        const Window window = Window::of(p, conv_w, conv, channels, segment);
        float taps[PARTS][TAPS];
#pragma unroll
        for (int m = 0; m < PARTS; m++) load_taps(taps[m], conv_w + static_cast<long long>(channel + 32 * m) * TAPS);
#pragma unroll
        for (int i = 0; i < TAPS - 1; i++) load(i, window.row(first - (TAPS - 1) + i));
        gates.leave(decay, beta);
#pragma unroll
        for (int r = 0; r < RUN; r++) {
            float v[PARTS];
#pragma unroll
            for (int m = 0; m < PARTS; m++) {
                v[m] = taps[m][0] * in[r][m];
#pragma unroll
                for (int j = 1; j < TAPS; j++) v[m] = fmaf(taps[m][j], in[r + j][m], v[m]);
                v[m] = silu_f32(v[m]);
            }
            leave(v, head, key_heads, c + r * channels);
        }
    } else {
        gates.leave(decay, beta);
        for (int r = 0; r < rows; r++) {
            const Window window = Window::of(p, conv_w, conv, channels, segment_of(segments, first + r));
            float v[PARTS];
            convolve(window, first + r, channel, v);
            leave(v, head, key_heads, c + r * channels);
        }
    }
}
