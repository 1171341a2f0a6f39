// Products of float weight rows with few activation rows, a thread for one of the 128 chains of `lanes`.
//
// A group of 128 threads takes ROWS weight rows and INPUTS activation rows; thread j holds the chains j of their sums. Every
// weight and every activation is read once a group, by the one thread that wants it: nothing goes through shared memory but
// the chains, to be folded. Weights are on their way before the activations are there. The groups of a block share its
// weight rows.
// Constants   TYPE (F32, F16, BF16), ROWS (1, 2, 4), INPUTS (1, 2, 4, 8) activation rows at once, GROUPS of a block,
//             STEPS elements of a chain under way; there are at least 128 STEPS columns
// Source      `lanes`
#pragma once
#include "rows.cuh"
#include "lanes.cuh"

constexpr int SPAN = LANES * STEPS;
constexpr int AT_ONCE = INPUTS < 2 ? 1 : 2;  // activation rows under way
constexpr int GROUP_WARPS = LANES / 32;

struct Chains {
    float all[GROUPS][INPUTS * ROWS][LANES];
};

struct WeightRows {
    const u8* row[ROWS];
    float held[ROWS][STEPS];

    // This thread's elements of the columns first to first + SPAN, all of which there are.
    DEVICE void load(int first) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const u8* from = row[r] + (long long)(first + threadIdx.x % LANES) * TYPE::BYTES;
#pragma unroll
            for (int i = 0; i < STEPS; i++) held[r][i] = TYPE::load1(from + i * LANES * TYPE::BYTES);
        }
    }
    // sums[c][r] goes on along these columns of input c; there are n inputs.
    DEVICE void add(float (&sums)[INPUTS][ROWS], const float* x, int n, int first, int cols) const {
#pragma unroll
        for (int c0 = 0; c0 < INPUTS; c0 += AT_ONCE) {
            float in[AT_ONCE][STEPS];
#pragma unroll
            for (int c = 0; c < AT_ONCE; c++) {
                const float* from = x + (long long)min(c0 + c, n - 1) * cols + first + threadIdx.x % LANES;
#pragma unroll
                for (int i = 0; i < STEPS; i++) in[c][i] = read_early(from + LANES * i);
            }
#pragma unroll
            for (int i = 0; i < STEPS; i++)
#pragma unroll
                for (int c = 0; c < AT_ONCE; c++)
#pragma unroll
                    for (int r = 0; r < ROWS; r++) sums[c0 + c][r] = fmaf(held[r][i], in[c][i], sums[c0 + c][r]);
        }
    }
    // The same from column `first` to the end.
    DEVICE void add_rest(float (&sums)[INPUTS][ROWS], const float* x, int n, int first, int cols) const {
#pragma unroll 1
        for (int k = first + threadIdx.x % LANES; k < cols; k += LANES) {
            float w[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; r++) w[r] = TYPE::load1(row[r] + (long long)k * TYPE::BYTES);
#pragma unroll
            for (int c = 0; c < INPUTS; c++) {
                const float in = read_early(x + (long long)min(c, n - 1) * cols + k);
#pragma unroll
                for (int r = 0; r < ROWS; r++) sums[c][r] = fmaf(w[r], in, sums[c][r]);
            }
        }
    }
};

// Which activation rows a group takes: INPUTS of them at `first`, then again `stride` later. There are n.
struct Inputs {
    const float* x;
    int n, first, stride;
};

// The products of a group's rows, of which the first columns are loaded: out(input, r, sum) in one lane for each. All groups
// of the block come, with the same n and stride.
template <class Out>
DEVICE void row_products(WeightRows& w, const Inputs& inputs, int cols, Chains& memory, const Out& out) {
    const int group = threadIdx.x / LANES, j = threadIdx.x % LANES, lane = j & 31, warp = j >> 5;
    constexpr int EACH = GROUP_WARPS / ROWS, FOLDS = (INPUTS + EACH - 1) / EACH;  // warps of a weight row, sums of a warp
#pragma unroll 1
    for (int base = 0; base < inputs.n; base += inputs.stride) {
        const int begin = min(base + inputs.first, inputs.n - 1), left = inputs.n - begin;
        const float* own = inputs.x + (long long)begin * cols;
        float sums[INPUTS][ROWS] = {};
        int first = 0;
#pragma unroll 1
        for (; first + SPAN <= cols; first += SPAN) {
            if (first || (base && cols >= 2 * SPAN)) w.load(first);
            w.add(sums, own, left, first, cols);
        }
        w.add_rest(sums, own, left, first, cols);
        if (base) __syncthreads();
#pragma unroll
        for (int c = 0; c < INPUTS; c++)
#pragma unroll
            for (int r = 0; r < ROWS; r++) memory.all[group][c * ROWS + r][j] = sums[c][r];
        __syncthreads();
        const int r = warp % ROWS, of_warp = warp / ROWS;
        float own_sum = 0.0f;
#pragma unroll
        for (int k = 0; k < FOLDS; k++) {
            const float* p = memory.all[group][min(k * EACH + of_warp, INPUTS - 1) * ROWS + r] + lane;
            const float sum = fold_warp((p[0] + p[64]) + (p[32] + p[96]));
            if (lane == k) own_sum = sum;
        }
        const int c = lane * EACH + of_warp;
        if (c < INPUTS && base + inputs.first + c < inputs.n) out(base + inputs.first + c, r, own_sum);
    }
}
