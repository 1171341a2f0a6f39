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

KERNEL void __launch_bounds__(128)
    gdn_inputs(const float* p, const float* conv_w, const float* conv, const float* b, const float* a, const float* w_a,
               const float* w_dt, const int* segments, float* c, float* decay, float* beta, int key_heads,
               int value_heads, int n) {
    inputs_ready();
    const int head = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31, first = blockIdx.y * RUN;
    if (head >= 2 * key_heads + value_heads) return;
    const int channels = (2 * key_heads + value_heads) * D, channel = head * D + lane, rows = min(RUN, n - first);
    c += static_cast<long long>(first) * channels + head * D;
    const Segment segment = segment_of(segments, first);
    if (first + RUN <= segment.end) {
        const Window window = Window::of(p, conv_w, conv, channels, segment);
        float taps[PARTS][TAPS], in[TAPS - 1 + RUN][PARTS];
#pragma unroll
        for (int m = 0; m < PARTS; m++) load_taps(taps[m], conv_w + static_cast<long long>(channel + 32 * m) * TAPS);
#pragma unroll
        for (int i = 0; i < TAPS - 1 + RUN; i++) {
            const float* row = window.row(first - (TAPS - 1) + i) + channel;
#pragma unroll
            for (int m = 0; m < PARTS; m++) in[i][m] = row[32 * m];
        }
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
            leave(v, head, key_heads, c + static_cast<long long>(r) * channels);
        }
    } else {
        for (int r = 0; r < rows; r++) {
            const Window window = Window::of(p, conv_w, conv, channels, segment_of(segments, first + r));
            float v[PARTS];
            convolve(window, first + r, channel, v);
            leave(v, head, key_heads, c + static_cast<long long>(r) * channels);
        }
    }
    const int h = head - 2 * key_heads;
    if (h < 0 || lane >= rows) return;
    const long long at = static_cast<long long>(first + lane) * value_heads + h;
    decay[at] = decay_of(w_a[h], a[at], w_dt[h]);
    beta[at] = sigmoid_f32(b[at]);
}
