// The product of matrices of float weights with the rows of a window. chains.cuh says how.
//
// A block takes ROWS of the rows of all matrices; grid (those, parts of the activation rows).
// Constants   those of chains.cuh
// Shapes      x (n, cols); out (n, rows) of each matrix
#include "chains.cuh"

#define MATRICES 8

struct Matrix {
    const u8* data;
    float* out;
    int rows, last_row;  // rows of this matrix and all before it
};

struct Arguments {
    Matrix matrix[MATRICES];
    const float* x;
    const float* join;  // null, or (n,): out = fma(sigmoid(join[row]), y, out)
    int early;          // works beside the kernel before it (intrinsics.cuh)
    int n, cols, rows;  // rows of all matrices
};

// A row of all matrices: its matrix, and its place there.
struct Place {
    int matrix, row;

    DEVICE static Place of(const Arguments& a, int row) {
        int m = 0, before = 0;
        while (row >= a.matrix[m].last_row) before = a.matrix[m++].last_row;
        return {m, row - before};
    }
};

KERNEL void __launch_bounds__(LANES * GROUPS) chains_window(PARAMETER Arguments a) {
    if (a.early) next_may_come();
    __shared__ Chains memory;
    const int first = blockIdx.x * ROWS;
    WeightRows w;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const Place at = Place::of(a, min(first + r, a.rows - 1));
        w.row[r] = a.matrix[at.matrix].data + (long long)at.row * a.cols * TYPE::BYTES;
    }
    if (SPAN <= a.cols) w.load(0);
    if (!a.early) inputs_ready();
    const int part = blockIdx.y * GROUPS + threadIdx.x / LANES;
    const Inputs inputs = {a.x, a.n, part * INPUTS, static_cast<int>(gridDim.y) * GROUPS * INPUTS};
    row_products(w, inputs, a.cols, memory, [&](int input, int r, float sum) {
        if (first + r >= a.rows) return;
        const Place at = Place::of(a, first + r);
        float* out = a.matrix[at.matrix].out + (long long)input * a.matrix[at.matrix].rows + at.row;
        *out = a.join ? fmaf(sigmoid_f32(a.join[input]), sum, *out) : sum;
    });
    if (a.early) inputs_ready();
}
