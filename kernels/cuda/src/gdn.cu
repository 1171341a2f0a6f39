// The gated delta net after its recurrence: the gated norm.
//
// gdn_output   a warp a (row, value head): y = (rms(o) with norm) * sigmoid(z); in a window, whose scan convolves for
//              itself, the warps of a segment's last row also move the kept inputs, and y is left as products want it
// Constants    HEAD_SIZE = D, TAPS, MOVES (0: the kept inputs are moved by gdn_scan.cu; 32 registers a thread, not 72)
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

// p, conv and segments are not used without MOVES. All but `o` was written before the kernel that made it.
KERNEL void __launch_bounds__(128)
    gdn_output(const float* o, const float* z, const float* w, float* y, const float* p, float* conv,
               const int* segments, PARAMETER Forms forms, int n, int key_heads, int value_heads, float eps) {
    const u32 vector = blockIdx.x * 4 + (threadIdx.x >> 5);
    const int row = static_cast<int>(vector / static_cast<u32>(value_heads));
    const int head = static_cast<int>(vector - static_cast<u32>(row) * value_heads);
    const bool works = row < n;
    const int lane = threadIdx.x & 31;
    const long long at = static_cast<long long>(vector) * D + lane;
    float v[PARTS], gate[PARTS], factor[PARTS];
    Segment s = {0, 0, 0, 0};
    Window window = {};
    Kept kept;
    if (works) {
#pragma unroll
        for (int m = 0; m < PARTS; m++) gate[m] = read_early(z + at + 32 * m), factor[m] = w[lane + 32 * m];
        if (MOVES) {
            s = segment_of(segments, row);
            window = Window::of(p, nullptr, conv, (2 * key_heads + value_heads) * D, s);
            if (row == s.end - 1) kept.load(window, head, key_heads);
        }
    }
    inputs_ready();
    if (!works) return;
#pragma unroll
    for (int m = 0; m < PARTS; m++) v[m] = o[at + 32 * m];
    gated_norm(v, factor, gate, eps);
#pragma unroll
    for (int m = 0; m < PARTS; m++) y[at + 32 * m] = v[m];
    forms.leave(v, static_cast<long long>(vector) * PARTS, static_cast<long long>(n) * value_heads * D);
    if (MOVES && row == s.end - 1) kept.store(window, conv, head, key_heads);
}
