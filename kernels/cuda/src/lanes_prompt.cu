// The product of float weights with many rows (a prompt). Order of summation: ops.py, `lanes`.
//
// A warp computes 8 weight rows times 4 activation rows; lane l holds the chains 4 l to 4 l + 3 of all 32 sums. Eight warps
// of a block share 16 rows and 16 columns through the cache. The fold gives each lane one finished sum.
//
// Constants: TYPE (F32, F16, BF16), VEC (4 when cols % 4 == 0, else 1), MODE as in product_prompt.cu: DENSE, GATE_UP (4
// rows of gate and 4 of up a warp), PAIRS.
#include "device.cuh"
#include "lanes.cuh"

#define DENSE 0
#define GATE_UP 1
#define PAIRS 2
#define MATRICES 8

enum { R = 8, C = 4, BM = 16, BN = 16, THREADS = 256, OWN = MODE == GATE_UP ? R / 2 : R };

struct Matrix {
    const u8* data;
    float* out;
    int rows, last_tile;  // tiles of BM rows (GATE_UP: BM / 2) of this matrix and all before it
};

struct Arguments {
    Matrix matrix[MATRICES];
    const float* x;      // (inputs, cols)
    const float* join;   // DENSE: null, or (n,): out = fma(sigmoid(join[row]), y, out)
    const u64* first;    // addresses of the experts' gate or down
    const u64* second;   // of up
    const int* order;    // pairs sorted by expert
    const int4* tile_list;  // (expert, first, count) of at most BN pairs
    const int* n_tiles;
    int n, divide, cols, row_tiles;  // the input of a pair is pair / divide
};

// v[32][4]: lane l gives its chains of 32 sums and gets the sum l, folded as `lanes` says.
DEVICE float fold_all(float (&v)[32][4], int lane) {
#pragma unroll
    for (int s = 16; s >= 1; s >>= 1) {
        const bool upper = lane & s;
#pragma unroll
        for (int o = 0; o < s; o++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float mine = upper ? v[o + s][i] : v[o][i], theirs = upper ? v[o][i] : v[o + s][i];
                v[o][i] = mine + __shfl_xor_sync(~0u, theirs, s);
            }
    }
    return (v[0][0] + v[0][2]) + (v[0][1] + v[0][3]);
}

KERNEL __launch_bounds__(THREADS, 1) void lanes_prompt(PARAMETER Arguments a) {
    inputs_ready();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const long long row_bytes = (long long)a.cols * TYPE::BYTES;
    const int row_tile = blockIdx.x % a.row_tiles, column_tile = blockIdx.x / a.row_tiles;
    int m = 0, before = 0, begin = column_tile * BN, count = min((int)BN, a.n - begin);
    const u8 *first, *second = 0;
    if (MODE == DENSE) {
        while (row_tile >= a.matrix[m].last_tile) before = a.matrix[m++].last_tile;
        first = a.matrix[m].data;
    } else {
        if (column_tile >= *a.n_tiles) return;
        const int4 tile = a.tile_list[column_tile];
        begin = tile.y, count = tile.z;
        first = (const u8*)a.first[tile.x];
        if (MODE == GATE_UP) second = (const u8*)a.second[tile.x];
        if (!first) return;
    }
    const int rows = a.matrix[m].rows, row0 = ((row_tile - before) * 2 + (warp & 1)) * OWN, column0 = (warp >> 1) * C;
    if (column0 >= count || row0 >= rows) return;

    const u8* w[R];
#pragma unroll
    for (int r = 0; r < R; r++) {
        const u8* base = r < OWN ? first : second;
        w[r] = base + min(row0 + (r < OWN ? r : r - OWN), rows - 1) * row_bytes;
    }
    const float* x[C];
#pragma unroll
    for (int c = 0; c < C; c++) {
        const int column = begin + min(column0 + c, count - 1);
        const int input = MODE == DENSE ? column : a.order[column] / a.divide;
        x[c] = a.x + (long long)input * a.cols;
    }
    float p[R * C][4] = {};
    float4 xs[C], ws[R];  // of the next turn: loaded while this one is computed
    auto load = [&](int k) {
#pragma unroll
        for (int c = 0; c < C; c++) xs[c] = inputs4<VEC>(x[c], k, a.cols);
#pragma unroll
        for (int r = 0; r < R; r++) ws[r] = weights4<TYPE, VEC>(w[r], k, a.cols);
    };
    if (4 * lane < a.cols) load(4 * lane);
#pragma unroll 1
    for (int k = 4 * lane; k < a.cols; k += 128) {
        float4 x_now[C], w_now[R];
#pragma unroll
        for (int c = 0; c < C; c++) x_now[c] = xs[c];
#pragma unroll
        for (int r = 0; r < R; r++) w_now[r] = ws[r];
        if (k + 128 < a.cols) load(k + 128);
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int c = 0; c < C; c++) add_products<VEC>(p[r * C + c], w_now[r], x_now[c], a.cols - k);
    }
    __syncwarp();
    float y = fold_all(p, lane);
    const int r = lane / C, column = column0 + lane % C, row = row0 + r;
    if (MODE == GATE_UP) {  // lanes 0-15 have the gates, 16-31 the ups of the same sums
        const float up = __shfl_down_sync(~0u, y, 16);
        y = silu_f32(y) * up;
    }
    if (r >= OWN || row >= rows || column >= count) return;
    const int at = MODE == DENSE ? begin + column : a.order[begin + column];
    float* out = a.matrix[m].out + (long long)at * rows + row;
    *out = MODE == DENSE && a.join ? fmaf(sigmoid_f32(a.join[at]), y, *out) : y;
}
