// Rows of a matrix as float32: code * scale + offset, one fma. Float types are converted exactly.
//
// Constants: TYPE a format of formats.cuh. A warp takes a chunk of 256 columns of a row through shared memory.
#include "device.cuh"
#include "formats.cuh"

typedef TYPE F;
enum { CHUNK_BYTES = 256 / F::BLOCK * F::BYTES, ROOM = (CHUNK_BYTES + 15 + 4 + 15) / 16 * 16, WARPS = 8 };

// Column of code i (0..7) of thread t in a span.
DEVICE int column_of(int t, int i) {
    if (F::ORDER == EIGHT) return 8 * t + i;
    if (F::ORDER == EVEN_ODD) return 8 * t + (i < 4 ? 2 * i : 2 * i - 7);
    return i < 4 ? 4 * t + i : 12 + 4 * t + i;
}

// rows (n,) of data (all rows of `cols`) -> out (n, cols).
KERNEL __launch_bounds__(32 * WARPS) void dequantize(const u8* data, const long long* rows, float* out, int n,
                                                                    int cols) {
    inputs_ready();
    __shared__ __align__(16) u8 raw[WARPS][ROOM];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, s = lane >> 2, t = lane & 3, chunks = (cols + 255) / 256;
    const long long item = blockIdx.x * (long long)WARPS + warp, row_bytes = cols / F::BLOCK * F::BYTES;
    const long long row = item / chunks;
    if (row >= n) return;
    const int chunk = (int)(item - row * chunks), bytes = min((long long)CHUNK_BYTES, row_bytes - chunk * CHUNK_BYTES);
    const u8* from = data + rows[row] * row_bytes + chunk * CHUNK_BYTES;
    const int shift = (int)((u64)from & 15);
    if (lane < (shift + bytes + 15) >> 4) copy16(raw[warp] + 16 * lane, from - shift + 16 * lane);
    copies_commit();
    copies_wait<0>();
    __syncwarp();
    if (256 * chunk + 32 * s >= cols) return;
    const u8* p = raw[warp] + shift;
#if HAS_TABLE
    const Grid grid{(const u8*)table_words};
#else
    const Grid grid{raw[warp]};
#endif
    u32 c[2];
    F::span(p, s, t, grid, c[0], c[1]);
    float* to = out + row * cols + 256 * chunk + 32 * s;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int k = column_of(t, i), g = (32 * s + k) / F::GROUP;
        const float code = (float)(i8)(c[i / 4] >> 8 * (i & 3));
        to[k] = F::OFFSET ? fmaf(code, F::scale(p, g), F::offset(p, g)) : code * F::scale(p, g);
    }
}
