// The weights of a prompt's DENSE product, unpacked once: where many blocks of product_prompt.cu multiply the same rows,
// these only copy what they want of a step. A block takes a chunk of 256 columns of a tile of BM rows.
//
// What is written is what lies in shared memory there (prompt_unpack.cuh): UNPACKED bytes a step, the steps of a tile one after
// another, the tiles of a matrix too. Rows behind the last one are the last one again, and nobody stores their sums.
//
// Constants: TYPE a format, BM and LIFTS of the product. Arguments: of the product, out: where to write; n: chunks of a row.
#include "device.cuh"
#include "formats.cuh"

#define DENSE 0
#define GATE_UP 1
#define MODE DENSE
#define PARTS 1
#define COPIES 1

typedef TYPE F;
enum { BN = 1 };  // the work of a block: a tile of rows, and a chunk in the place of columns

#include "prompt_unpack.cuh"

enum { AT_TABLE = BM * PITCH };

#include "prompt_table.cuh"

KERNEL __launch_bounds__(THREADS) void prompt_unpack(PARAMETER Arguments a) {
    extern __shared__ __align__(16) u8 shared[];
    Work w;
    find_work(a, w);
    const int chunk = w.begin, row_bytes = a.pitch / F::BLOCK * F::BYTES, steps = (a.cols + STEP - 1) / STEP;
    fetch_rows(shared, w, row_bytes, Place{0, chunk}, 0);
    copies_commit();
    const Grid grid = fill_table(shared);
    const int row = 16 * (threadIdx.x >> 5) + (threadIdx.x >> 2 & 7);
    const u32 low = (u32)(u64)row_of(w, 0, row, row_bytes), high = (u32)(u64)row_of(w, 0, row + 8, row_bytes);
    u8* out = (u8*)a.matrix[w.matrix].out + (u64)(u32)(w.row / BM * steps) * UNPACKED;
    copies_wait<0>();
    inputs_ready();  // who read what was here before
    __syncthreads();
#pragma unroll 1
    for (int step = 2 * chunk; step < min(2 * chunk + 2, steps); step++)
        unpack_step(shared, out + (u64)(u32)step * UNPACKED, low, high, step, grid);
}
