// Quantised activations as prompt_wide.cu reads them: tiles of WIDE_COLUMNS rows, of each the steps of WIDE_STEP columns one
// after another, of each the halves and then the scales of two spans. Rows behind the last are the last one again.
//
// A warp takes a span of eight rows, a lane eight inputs. q (n, cols) int8 in any order, d (n, cols / 32).
#include "device.cuh"
#include "wide.cuh"

KERNEL __launch_bounds__(256) void prompt_wide_inputs(const u8* q, const float* d, u8* out, int n, int cols) {
    inputs_ready();
    const int spans = cols / 32, steps = cols / WIDE_STEP;
    const int octets = (n + WIDE_COLUMNS - 1) / WIDE_COLUMNS * (WIDE_COLUMNS / 8);
    const u32 unit = blockIdx.x * 8 + (threadIdx.x >> 5);
    const int octet = unit / spans, span = unit % spans, lane = threadIdx.x & 31;
    if (octet >= octets) return;
    const int row = min(8 * octet + (lane & 7), n - 1), piece = lane >> 3, half = piece >> 1;
    const u64 block = (u64)(u32)row * (u32)spans + span;
    const uint4 words = *(const uint4*)(q + 32 * block + 16 * (piece & 1));
    const uint2 low = halves(half ? words.y : words.x), high = halves(half ? words.w : words.z);
    const int tile = octet / (WIDE_COLUMNS / 8), of_tile = octet % (WIDE_COLUMNS / 8);
    u8* step = out + (u64)(u32)(tile * steps + span / 2) * WIDE_FETCHED;
    const int at = of_tile * WIDE_OCTET + (4 * (span & 1) + piece) * 128 + 16 * (lane & 7);
    *(uint4*)(step + at) = make_uint4(low.x, low.y, high.x, high.y);
    if (piece) return;
    // Of two octets the scales of a lane's columns, two of each, lie together.
    const int c = lane & 7, place = of_tile / 2 * 16 + c / 2 * 4 + (of_tile & 1) * 2 + (c & 1);
    ((float*)(step + WIDE_INPUTS))[(span & 1) * WIDE_COLUMNS + place] = d[block];
}
