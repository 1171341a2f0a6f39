// Quantised activations as prompt_wide.cu reads them: tiles of WIDE_COLUMNS rows, of each the steps of WIDE_STEP columns one
// after another, of each the halves and then the scales of two spans. Rows behind the last are the last one again.
//
// A warp takes four spans of eight rows, a lane eight inputs of each. q (n, cols) int8 in any order, d (n, cols / 32).
#include "device.cuh"
#include "wide.cuh"

KERNEL __launch_bounds__(256) void prompt_wide_inputs(const u8* q, const float* d, u8* out, int n, int cols) {
    enum { SPANS = 4 };
    inputs_ready();
    const int spans = cols / 32, steps = cols / WIDE_STEP, parts = (spans + SPANS - 1) / SPANS;
    const int octets = (n + WIDE_COLUMNS - 1) / WIDE_COLUMNS * (WIDE_COLUMNS / 8);
    const u32 unit = blockIdx.x * 8 + (threadIdx.x >> 5);
    const int octet = unit / parts, first = unit % parts * SPANS, lane = threadIdx.x & 31;
    if (octet >= octets) return;
    const int row = min(8 * octet + (lane & 7), n - 1), piece = lane >> 3, half = piece >> 1;
    const u64 block = (u64)(u32)row * (u32)spans + first;
    const u8* from = q + 32 * block + 16 * (piece & 1);
    uint4 words[SPANS];
#pragma unroll
    for (int s = 0; s < SPANS; s++)
        if (first + s < spans) words[s] = *(const uint4*)(from + 32 * s);
    const float scale = d[block + min(piece, spans - 1 - first)];
    const int tile = octet / (WIDE_COLUMNS / 8), of_tile = octet % (WIDE_COLUMNS / 8);
    u8* begin = out + (u64)(u32)(tile * steps + first / 2) * WIDE_FETCHED;
    u8* to = begin + of_tile * WIDE_OCTET + piece * 128 + 16 * (lane & 7);
#pragma unroll
    for (int s = 0; s < SPANS; s++) {
        if (first + s >= spans) break;
        const uint2 low = halves(half ? words[s].y : words[s].x), high = halves(half ? words[s].w : words[s].z);
        *(uint4*)(to + (s >> 1) * WIDE_FETCHED + (s & 1) * 512) = make_uint4(low.x, low.y, high.x, high.y);
    }
    if (first + piece >= spans) return;
    // Of two octets the scales of a lane's columns, two of each, lie together.
    const int c = lane & 7, place = of_tile / 2 * 16 + c / 2 * 4 + (of_tile & 1) * 2 + (c & 1);
    float* scales = (float*)(begin + (piece >> 1) * WIDE_FETCHED + WIDE_INPUTS);
    scales[(piece & 1) * WIDE_COLUMNS + place] = scale;
}
