// Rows of a matrix of a float type as float32, exactly.
//
// Constants: TYPE (F32, F16, BF16). A warp takes 256 columns of a row.
#include "device.cuh"
#include "lanes.cuh"

// rows (n,) of data -> out (n, cols).
KERNEL __launch_bounds__(256) void float_rows(const u8* data, const long long* rows, float* out, int n, int cols) {
    inputs_ready();
    const int lane = threadIdx.x & 31, chunks = (cols + 255) / 256;
    const long long item = blockIdx.x * 8ll + (threadIdx.x >> 5), row = item / chunks;
    if (row >= n) return;
    const u8* from = data + rows[row] * (long long)cols * TYPE::BYTES;
    const int first = (int)(item - row * chunks) * 256 + lane;
    for (int k = first; k < min(first - lane + 256, cols); k += 32)
        out[row * cols + k] = TYPE::load1(from + (long long)k * TYPE::BYTES);
}
