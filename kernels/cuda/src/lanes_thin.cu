// The product of float matrices of few rows with many rows: the inputs are read once. Order of summation: ops.py, `lanes`.
//
// A warp computes 4 weight rows times 4 activation rows; lane l holds the chains 4 l to 4 l + 3 of all 16 sums. The inputs
// of a block's 16 rows and the weights pass through a ring of DEPTH stages of 128 columns in shared memory. Float16 and
// bfloat16 weights, and rows that are no whole number of fours, are read where they are.
//
// Constants: TYPE (F32, F16, BF16), VEC (4 when cols % 4 == 0, else 1). Arguments are those of lanes_prompt.cu.
#include "device.cuh"
#include "lanes.cuh"

#define MATRICES 8

enum { R = 4, C = 4, WARPS = 4, DEPTH = 4, TURN = 128, WHOLE = VEC == 4, COPIED = WHOLE && TYPE::BYTES == 4 };

static_assert(R == WARPS, "a warp copies a row of weights");

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

// A stage: inputs of all warps, and weights.
struct Stage {
    float4 x[WARPS][C][32], w[R][32];
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

KERNEL __launch_bounds__(32 * WARPS, 4) void lanes_thin(PARAMETER Arguments a) {
    __shared__ __align__(16) Stage stages[DEPTH];
    inputs_ready();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int tile = blockIdx.x % a.row_tiles, column0 = (blockIdx.x / a.row_tiles * WARPS + warp) * C;
    int m = 0, before = 0;
    while (tile >= a.matrix[m].last_tile) before = a.matrix[m++].last_tile;
    const int rows = a.matrix[m].rows, row0 = (tile - before) * R;
    auto weights = [&](int r) {
        return a.matrix[m].data + (long long)min(row0 + r, rows - 1) * a.cols * TYPE::BYTES;
    };
    const float* x[C];  // rows that are not there are the last one again
#pragma unroll
    for (int c = 0; c < C; c++) x[c] = a.x + (long long)min(column0 + c, a.n - 1) * a.cols;
    const u8* own = weights(warp);  // the row that this warp copies

    auto load = [&](int k, int slot) {
        if (k < a.cols) {
            if (WHOLE)
#pragma unroll
                for (int c = 0; c < C; c++) copy16(&stages[slot].x[warp][c][lane], x[c] + k);
            if (COPIED) copy16(&stages[slot].w[warp][lane], own + 4ll * k);
        }
        copies_commit();
    };
#pragma unroll
    for (int d = 0; d < DEPTH - 1; d++) load(4 * lane + d * TURN, d);
    float p[R * C][4] = {};
    int slot = 0;
#pragma unroll 1
    for (int first = 0; first < a.cols; first += TURN) {
        const int k = first + 4 * lane;
        copies_wait<DEPTH - 2>();
        __syncthreads();
        load(k + (DEPTH - 1) * TURN, (slot + DEPTH - 1) % DEPTH);
        if (k < a.cols) {
            float4 xs[C];
#pragma unroll
            for (int c = 0; c < C; c++) xs[c] = WHOLE ? stages[slot].x[warp][c][lane] : inputs4<VEC>(x[c], k, a.cols);
#pragma unroll
            for (int r = 0; r < R; r++) {
                const float4 w = COPIED ? stages[slot].w[r][lane] : weights4<TYPE, VEC>(weights(r), k, a.cols);
#pragma unroll
                for (int c = 0; c < C; c++) add_products<VEC>(p[r * C + c], w, xs[c], a.cols - k);
            }
        }
        slot = (slot + 1) % DEPTH;
    }
    __syncwarp();
    const float y = fold_all(p, lane);
    const int sum = lane / 2, row = row0 + sum / C, column = column0 + sum % C;
    if (lane & 1 || row >= rows || column >= a.n) return;
    float* out = a.matrix[m].out + (long long)column * rows + row;
    *out = a.join ? fmaf(sigmoid_f32(a.join[column]), y, *out) : y;
}
