// Weights as prompt_wide.cu reads them, unpacked once for all blocks: tiles of WIDE_ROWS rows, of each the steps of
// WIDE_STEP columns one after another, of each the halves and then the scales of its groups, those of rows g and g + 8 of
// sixteen together. A block takes a chunk of 256 columns of a tile. Rows behind the last one are the last one again.
//
// Constants: TYPE a format without offsets. Arguments: of the product, out: where to write; n: chunks of a row.
#include "device.cuh"
#include "formats.cuh"
#include "wide.cuh"

#define DENSE 0
#define GATE_UP 1
#define MODE DENSE
#define PARTS 1
#define COPIES 1
#define LIFTS 0

typedef TYPE F;
enum { BM = WIDE_ROWS, BN = 1 };  // the work of a block: a tile of rows, and a chunk in the place of columns

#include "prompt_unpack.cuh"

enum {
    AT_TABLE = BM * PITCH,
    WIDE_CODES = BM * WIDE_STEP * 2,
    WIDE_UNPACKED = WIDE_CODES + WIDE_STEP / F::GROUP * BM * 4
};

#include "prompt_table.cuh"

// A warp's 16 rows, two of each lane at p0 and p1, from span `first` of the chunk on: a step.
DEVICE void unpack_wide(const u8* p0, const u8* p1, u8* step, int first, Grid grid) {
    const int slab = threadIdx.x >> 5, g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
    u8* to = step + 2 * slab * WIDE_OCTET + t / 2 * 128 + g * 16 + (t & 1) * 8;
#pragma unroll
    for (int s = 0; s < 2; s++) {
        uint4 c;
        F::span(p0, first + s, t, grid, c.x, c.z);
        F::span(p1, first + s, t, grid, c.y, c.w);
        u8* low = to + 4 * s * 128;
        *(uint2*)low = halves(c.x);
        *(uint2*)(low + 2 * 128) = halves(c.z);
        *(uint2*)(low + WIDE_OCTET) = halves(c.y);
        *(uint2*)(low + WIDE_OCTET + 2 * 128) = halves(c.w);
    }
    if (t >= 2) return;
    float2* scales = (float2*)(step + WIDE_CODES) + slab * 8 + g;
#pragma unroll
    for (int k = 0; k < PER_SPAN; k++) {
        const int group = t * PER_SPAN + k, of = first * PER_SPAN + group;
        scales[group * (BM / 2)] = make_float2(F::scale(p0, of), F::scale(p1, of));
    }
}

KERNEL __launch_bounds__(THREADS) void prompt_wide_weights(PARAMETER Arguments a) {
    extern __shared__ __align__(16) u8 shared[];
    Work w;
    find_work(a, w);
    const int chunk = w.begin, row_bytes = a.pitch / F::BLOCK * F::BYTES, steps = a.cols / WIDE_STEP;
    fetch_rows(shared, w, row_bytes, Place{0, chunk}, 0);
    copies_commit();
    const Grid grid = fill_table(shared);
    const int slab = threadIdx.x >> 5, g = threadIdx.x >> 2 & 7, row = 16 * slab + g;
    const u32 at = chunk * CHUNK_BYTES;
    const u8* p0 = shared + row * PITCH + (((u32)(u64)row_of(w, 0, row, row_bytes) + at) & 15);
    const u8* p1 = shared + (row + 8) * PITCH + (((u32)(u64)row_of(w, 0, row + 8, row_bytes) + at) & 15);
    u8* out = (u8*)a.matrix[w.matrix].out + (u64)(u32)(w.row / BM * steps) * WIDE_UNPACKED;
    copies_wait<0>();
    inputs_ready();  // who read what was here before
    __syncthreads();
#pragma unroll 1
    for (int step = 4 * chunk; step < min(4 * chunk + 4, steps); step++)
        unpack_wide(p0, p1, out + (u64)(u32)step * WIDE_UNPACKED, 2 * (step & 3), grid);
}
