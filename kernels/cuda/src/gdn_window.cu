// The delta rule in a window: few tokens a segment, convolved by every block for itself. gdn_output moves the kept inputs.
//
// Constants   HEAD_SIZE = D, TAPS, TOKENS of a segment at most
// Shapes   as in gdn.cu; state (slots, V, D, D), conv (slots, kernel - 1, channels), to another row or in place
// Source   gdn_columns.cuh; gdn_scan.cu does the same for prompts
#include "gdn_columns.cuh"

KERNEL void __launch_bounds__(THREADS, 8)
    gdn_window(const float* p, const float* conv_w, const float* conv, const float* b, const float* a, const float* w_a,
               const float* w_dt, float* state, const int* segments, float* o, int key_heads, int value_heads) {
    __shared__ Memory memory;
    const int head = blockIdx.y, column = blockIdx.x * COLUMNS, channels = (2 * key_heads + value_heads) * D;
    const Segment seg = segment_at(segments, blockIdx.z);
    const Work work = {Window::of(p, conv_w, conv, channels, seg), b, a, w_a, w_dt, key_heads, value_heads, head,
                       head % key_heads, column};
    o += (static_cast<long long>(seg.begin) * value_heads + head) * D + column + (threadIdx.x >> 3);
    advance(memory, state, work, [] { inputs_ready(); },
            [&](int t, float sum) { o[static_cast<long long>(t) * value_heads * D] = sum; });
}
