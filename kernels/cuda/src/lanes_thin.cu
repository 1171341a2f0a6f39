// The product of float matrices of few rows with many rows: the inputs are read once. Order of summation: ops.py, `lanes`.
//
// A warp computes 4 weight rows times 4 activation rows; lane l holds the chains 4 l to 4 l + 3 of all 16 sums. A lane
// copies its own inputs to shared memory, DEPTH turns ahead, and reads them back: nobody waits for another. The warps of a
// block read the same weights at about the same time, from the L1.
//
// Constants: TYPE (F32, F16, BF16), VEC (4 when cols % 4 == 0, else 1). Arguments are those of lanes_prompt.cu.
#include "device.cuh"
#include "lanes.cuh"

#define MATRICES 8

enum { R = 4, C = 4, WARPS = 4, DEPTH = 4, TURN = 128 };

struct Matrix {
    const u8* data;
    float* out;
    int rows, last_tile;  // tiles of R rows of this matrix and all before it
};

struct Arguments {
    Matrix matrix[MATRICES];
    const float* x;     // (n, cols)
    const float* join;  // null, or (n,): out = fma(sigmoid(join[row]), y, out)
    const u64 *first, *second;
    const int* order;
    const int4* tile_list;
    const int* n_tiles;
    int n, divide, cols, row_tiles, each;
};

// Inputs of a warp under way: DEPTH turns of C rows. A lane reads what it has copied itself.
struct Ring {
    float4 at[DEPTH][C][32];
};

// v[16][4]: lane l gives its chains of 16 sums and gets the sum l / 2, folded as `lanes` says.
DEVICE float fold_all(float (&v)[R * C][4], int lane) {
#pragma unroll
    for (int s = 16; s >= 2; s >>= 1) {
        const bool upper = lane & s;
#pragma unroll
        for (int o = 0; o < s / 2; o++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float mine = upper ? v[o + s / 2][i] : v[o][i], theirs = upper ? v[o][i] : v[o + s / 2][i];
                v[o][i] = mine + __shfl_xor_sync(~0u, theirs, s);
            }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) v[0][i] = v[0][i] + __shfl_xor_sync(~0u, v[0][i], 1);
    return (v[0][0] + v[0][2]) + (v[0][1] + v[0][3]);
}

KERNEL __launch_bounds__(32 * WARPS, 3) void lanes_thin(PARAMETER Arguments a) {
    __shared__ __align__(16) Ring rings[WARPS];
    inputs_ready();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int tile = blockIdx.x % a.row_tiles, column0 = (blockIdx.x / a.row_tiles * WARPS + warp) * C;
    int m = 0, before = 0;
    while (tile >= a.matrix[m].last_tile) before = a.matrix[m++].last_tile;
    const int rows = a.matrix[m].rows, row0 = (tile - before) * R;
    if (column0 >= a.n) return;
    const u8* w[R];
#pragma unroll
    for (int r = 0; r < R; r++) w[r] = a.matrix[m].data + (long long)min(row0 + r, rows - 1) * a.cols * TYPE::BYTES;
    const float* x[C];
#pragma unroll
    for (int c = 0; c < C; c++) x[c] = a.x + (long long)min(column0 + c, a.n - 1) * a.cols;

    Ring& ring = rings[warp];
    auto load = [&](int k, int slot) {
        if (VEC == 4 && k < a.cols)
#pragma unroll
            for (int c = 0; c < C; c++) copy16(&ring.at[slot][c][lane], x[c] + k);
        copies_commit();
    };
#pragma unroll
    for (int d = 0; d < DEPTH - 1; d++) load(4 * lane + d * TURN, d);
    float p[R * C][4] = {};
    float4 next[R];
    auto weights = [&](int k) {
#pragma unroll
        for (int r = 0; r < R; r++) next[r] = weights4<TYPE, VEC>(w[r], k, a.cols);
    };
    if (4 * lane < a.cols) weights(4 * lane);
    int slot = 0;
#pragma unroll 1
    for (int k = 4 * lane; k < a.cols; k += TURN) {
        copies_wait<DEPTH - 2>();
        float4 now[R], xs[C];
#pragma unroll
        for (int c = 0; c < C; c++) xs[c] = VEC == 4 ? ring.at[slot][c][lane] : inputs4<VEC>(x[c], k, a.cols);
#pragma unroll
        for (int r = 0; r < R; r++) now[r] = next[r];
        load(k + (DEPTH - 1) * TURN, (slot + DEPTH - 1) % DEPTH);
        if (k + TURN < a.cols) weights(k + TURN);
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int c = 0; c < C; c++) add_products<VEC>(p[r * C + c], now[r], xs[c], a.cols - k);
        slot = (slot + 1) % DEPTH;
    }
    __syncwarp();
    const float y = fold_all(p, lane);
    const int sum = lane / 2, row = row0 + sum / C, column = column0 + sum % C;
    if (lane & 1 || row >= rows || column >= a.n) return;
    float* out = a.matrix[m].out + (long long)column * rows + row;
    *out = a.join ? fmaf(sigmoid_f32(a.join[column]), y, *out) : y;
}
