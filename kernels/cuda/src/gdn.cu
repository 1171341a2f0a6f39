// The gated delta net after its recurrence: the gated norm.
//
// gdn_output   a warp RUN rows of a value head: y = (rms(o) with norm) * sigmoid(z); in a window, whose scan convolves for
//              itself, the warps of a segment's last row also move the kept inputs, and y is left as products want it
// Constants    HEAD_SIZE = D, TAPS, MOVES (0: the kept inputs are moved by gdn_scan.cu, and a warp has two rows)
// Shapes   p (n, 2*K*D + V*D); o, z, y (n, V*D); ops.Gdn for the rest
#include "gdn_window.cuh"
#include "formats.cuh"
#include "quantize_lane.cuh"
#include "forms.cuh"

// What a warp moves of the kept inputs of its segment: its value head, and the query and key head of the same number.
struct Kept {
    float v[3][TAPS - 1][PARTS];

    DEVICE static int channel(int part, int head, int key_heads) {
        return (part == 0 ? 2 * key_heads + head : part == 1 ? head : key_heads + head) * D + (threadIdx.x & 31);
    }
    DEVICE void load(const Window& window, int head, int key_heads) {
#pragma unroll
        for (int part = 0; part < 3; part++)
            if (part == 0 || head < key_heads) window.last(v[part], channel(part, head, key_heads));
    }
    DEVICE void store(const Window& window, float* conv, int head, int key_heads) const {
#pragma unroll
        for (int part = 0; part < 3; part++)
            if (part == 0 || head < key_heads) window.keep(conv, channel(part, head, key_heads), v[part]);
    }
};

constexpr int RUN = MOVES ? 1 : 2;  // as in gdn.py

// p, conv and segments are not used without MOVES. All but `o` was written before the kernel that made it.
KERNEL void __launch_bounds__(128)
    gdn_output(const float* o, const float* z, const float* w, float* y, const float* p, float* conv,
               const int* segments, PARAMETER Forms forms, int n, int key_heads, int value_heads, float eps) {
    const int head = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31, first = blockIdx.y * RUN;
    const bool works = head < value_heads;
    const u32 step = value_heads * D;
    const long long at = static_cast<long long>(first) * step + head * D + lane;
    float v[RUN][PARTS], gate[RUN][PARTS], factor[PARTS];
    Segment s = {0, 0, 0, 0};
    Window window = {};
    Kept kept;
    if (works) {
#pragma unroll
        for (int m = 0; m < PARTS; m++) factor[m] = w[lane + 32 * m];
#pragma unroll
        for (int r = 0; r < RUN; r++)
#pragma unroll
            for (int m = 0; m < PARTS; m++) gate[r][m] = first + r < n ? read_early(z + at + r * step + 32 * m) : 0.0f;
        if (MOVES) {
            s = segment_of(segments, first);
            window = Window::of(p, nullptr, conv, (2 * key_heads + value_heads) * D, s);
            if (first == s.end - 1) kept.load(window, head, key_heads);
        }
    }
    inputs_ready();
    if (!works) return;
#pragma unroll
    for (int r = 0; r < RUN; r++)
#pragma unroll
        for (int m = 0; m < PARTS; m++) v[r][m] = first + r < n ? o[at + r * step + 32 * m] : 0.0f;
    // One code for both rows: the second moves to the registers of the first.
#pragma unroll 1
    for (int r = 0; r < RUN; r++) {
        const int row = first + r;
        if (row >= n) break;
        gated_norm(v[0], factor, gate[0], eps);
        const long long vector = static_cast<long long>(row) * value_heads + head;
#pragma unroll
        for (int m = 0; m < PARTS; m++) y[vector * D + lane + 32 * m] = v[0][m];
        forms.leave(v[0], vector * PARTS, static_cast<long long>(n) * step);
#pragma unroll
        for (int m = 0; m < PARTS; m++) v[0][m] = v[RUN - 1][m], gate[0][m] = gate[RUN - 1][m];
    }
    if (MOVES && first == s.end - 1) kept.store(window, conv, head, key_heads);
}
static_assert(RUN <= 2, "a row and the last one");
