// The recurrent state of all delta net layers behind the first tokens of a window, from what their products have left.
//
// A block is some columns of a value head of one layer, as in gdn_window.cu, and makes no output. It moves the kept inputs of
// its columns as well: of the value head, and of the query and key head of the same number. A segment without rows: nothing
// happens.
// Constants   HEAD_SIZE = D, TAPS, TOKENS of the segment at most
// Shapes   of each layer as in gdn.cu; one segment (1, 3), whose state goes to another row than it comes from
// Source   gdn_columns.cuh
#include "gdn_columns.cuh"

constexpr int LAYERS = 48;  // as in gdn_again.py

struct Layer {
    const float *p, *b, *a, *conv_w, *w_a, *w_dt;
    float *conv, *state;
};

struct Layers {
    Layer layer[LAYERS];
};

KERNEL void __launch_bounds__(THREADS, 8)
    gdn_again(PARAMETER Layers layers, const int* segments, int key_heads, int value_heads) {
    inputs_ready();
    __shared__ Memory memory;
    const Segment seg = segment_at(segments, 0);
    if (seg.begin >= seg.end) return;
    const Layer& own = layers.layer[blockIdx.z];
    const int head = blockIdx.y, column = blockIdx.x * COLUMNS, channels = (2 * key_heads + value_heads) * D;
    const Work work = {Window::of(own.p, own.conv_w, own.conv, channels, seg), own.b, own.a, own.w_a, own.w_dt,
                       key_heads, value_heads, head, head % key_heads, column};
    const int part = threadIdx.x / COLUMNS, lane = threadIdx.x % COLUMNS;
    if (part == 0 || (part < 3 && head < key_heads)) {
        const int of_head = part == 0 ? 2 * key_heads + head : part == 1 ? head : key_heads + head;
        const int channel = of_head * D + column + lane;
        float kept[TAPS - 1][1];
        work.window.last(kept, channel);
        work.window.keep(own.conv, channel, kept);
    }
    advance(memory, own.state, work, [] {}, [](int, float) {});
}
