// Experts of float weights with the 1 to 16 rows of a window. Order of summation: ops.py, `lanes`. Dense matrices:
// chains_window.cu.
//
// A warp computes one weight row (two for GATE_UP) for up to 8 activation rows at once: lane l holds the chains 4 l to
// 4 l + 3 of each sum, reads four neighbouring weights a load and folds at the end. Activations come through the cache.
//
// Constants: TYPE (F32, F16, BF16), INPUTS activation rows at once (1, 8), VEC (4 when cols % 4 == 0, else 1), WARPS, and
// MODE as in product_row.cu: GATE_UP, DOWN, PAIRS.
#include "device.cuh"
#include "lanes.cuh"
#include "experts.cuh"

#define GATE_UP 1
#define DOWN 2
#define PAIRS 3
#define MATRICES 8
#define COLUMNS 16
#define AHEAD (INPUTS == 1 ? 20 : 8)  // loads of a weight row under way: all of 2560 columns, or what registers leave

struct Matrix {
    const u8* data;
    float* out;
    int rows, last_tile;  // rows of this matrix and all before it
};

struct Arguments {
    Matrix matrix[MATRICES];
    const float* x;      // (inputs, cols)
    const float* join;   // (n,), with `beside`
    const u64* first;    // addresses of the experts' gate or down
    const u64* second;   // of up
    const int* ids;      // (n, used)
    const float* weights;
    const float* given;  // (n * used, rows), or null
    const float* beside; // DOWN: null, or (n, rows): out = fma(sigmoid(join[row]), beside, out) at the end
    int early;           // works beside the kernel before it (intrinsics.cuh)
    int n, used, cols, tiles;  // tiles: rows of an expert
};

// out[c] = sum of one weight row with inputs x[c], in lane 0.
DEVICE void row_sums(float (&out)[INPUTS], const u8* row, const float* const (&x)[INPUTS], int cols, int lane) {
    float p[INPUTS][4] = {};
    for (int at = 4 * lane; at < cols; at += 128 * AHEAD) {
        float4 w[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (at + 128 * i < cols) w[i] = weights4<TYPE, VEC>(row, at + 128 * i, cols);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int k = at + 128 * i;
            if (k >= cols) break;
#pragma unroll
            for (int c = 0; c < INPUTS; c++) add_products<VEC>(p[c], w[i], inputs4<VEC>(x[c], k, cols), cols - k);
        }
    }
    __syncwarp();
#pragma unroll
    for (int c = 0; c < INPUTS; c++) out[c] = fold_lanes(make_float4(p[c][0], p[c][1], p[c][2], p[c][3]));
}

KERNEL __launch_bounds__(32 * WARPS, 1) void lanes_window(PARAMETER Arguments a) {
    if (a.early) next_may_come();
    else inputs_ready();
    extern __shared__ __align__(16) int shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, pairs = a.n * a.used;
    const long long row_bytes = (long long)a.cols * TYPE::BYTES;
    const Lists<COLUMNS> lists{shared, pairs};
    float* y = (float*)(shared + 1 + pairs * (4 + COLUMNS));  // DOWN: [rows of the block][pairs]
    lists.build(a.ids, a.first);

    const int first_row = MODE == DOWN ? (int)((long long)a.tiles * blockIdx.x / gridDim.x) : 0;
    const int rows = MODE == DOWN ? (int)((long long)a.tiles * (blockIdx.x + 1) / gridDim.x) - first_row : a.tiles;
    const int items = rows * lists.unique();
    const int begin = MODE == DOWN ? warp : warp * gridDim.x + blockIdx.x, step = MODE == DOWN ? WARPS : WARPS * gridDim.x;
    for (int item = begin; item < items; item += step) {
        const int u = item / rows, row = first_row + item % rows, columns = lists.count(u);
        const u8 *first = (const u8*)a.first[lists.expert(u)], *second = 0;
        if (MODE == GATE_UP) second = (const u8*)a.second[lists.expert(u)] + row * row_bytes;
        first += row * row_bytes;
        for (int c0 = 0; c0 < columns; c0 += INPUTS) {
            const float* x[INPUTS];
#pragma unroll
            for (int c = 0; c < INPUTS; c++) {
                const int input = lists.member(u, min(c0 + c, columns - 1)) / (MODE == DOWN ? 1 : a.used);
                x[c] = a.x + (long long)input * a.cols;
            }
            float low[INPUTS], high[INPUTS];
            row_sums(low, first, x, a.cols, lane);
            if (MODE == GATE_UP) row_sums(high, second, x, a.cols, lane);
            if (lane) continue;
#pragma unroll
            for (int c = 0; c < INPUTS; c++) {
                const int column = c0 + c;
                if (column >= columns) break;
                if (MODE == GATE_UP) {
                    a.matrix[0].out[(long long)lists.member(u, column) * rows + row] = silu_f32(low[c]) * high[c];
                } else if (MODE == PAIRS) {
                    a.matrix[0].out[(long long)lists.member(u, column) * rows + row] = low[c];
                } else {
                    y[(row - first_row) * pairs + lists.member(u, column)] = low[c];
                }
            }
        }
    }
    if (a.early) inputs_ready();
    if (MODE != DOWN) return;
    __syncthreads();
    for (int i = threadIdx.x; i < rows * a.n; i += 32 * WARPS) {
        const int token = i / rows, r = i % rows, row = first_row + r;
        const long long to = (long long)token * a.tiles + row;
        const float sum = join_pairs(lists, a.weights, a.given, token, a.used, row, a.tiles,
                                     [&](int p) { return y[r * pairs + p]; });
        a.matrix[0].out[to] = a.beside ? fmaf(sigmoid_f32(a.join[token]), a.beside[to], sum) : sum;
    }
}
