// The work of a block: strips of rows, found by all its threads, and the arguments of the kernel. Needs device.cuh.
#pragma once

#define DENSE 0
#define GATE_UP 1
#define DOWN 2
#define PAIRS 3
#define MATRICES 8
#define SKIPPED 0x7FFFFFFF

struct Matrix {
    const u8* data;
    float* out;
    int rows, last_tile;  // last_tile is not used here
};

struct Arguments {
    Matrix matrix[MATRICES];  // GATE_UP of matrices: gate, up
    const float* x;       // (inputs, cols), or null: then q, d as quantize.cu leaves them
    const u8* q;
    const float* d;
    const float* join;    // DENSE: null, or (n,): out = fma(sigmoid(join[row]), y, out). DOWN: (n,), with `beside`
    const u64* first;     // addresses of the experts' gate or down
    const u64* second;    // of up
    const int* ids;       // (n, used), or null: no experts
    const float* weights;
    const float* given;   // (n * used, rows), or null
    const float* beside;  // DOWN: null, or (n, rows): out = fma(sigmoid(join[row]), beside, out) at the end
    int early;            // works beside the kernel before it (intrinsics.cuh)
    int n, used, cols, matrices;
    int items, item_inverse;      // of a row; inverses: 2^32 / divisor, rounded up
    int turns, turn_inverse;      // of a piece; COLUMNS <= 2: units of a piece's rows of one matrix
    int strip;                    // rows of a strip at most
    int parts, part_inverse;      // pieces of a strip
    int part_items;               // items of a piece's row at most
    int groups, group_inverse;    // COLUMNS > 2: turns of a strip's height
    int regions, region_inverse;  // pieces that the table of terms holds
    int at_scales, at_sums, at_keys, at_strips, at_outs, at_terms, at_grid, at_stages, at_y;  // parts of shared memory, bytes
    int input_pitch, scale_pitch, sum_pitch, term_pitch;
};

enum { HALVES = MODE == GATE_UP ? 2 : 1 };  // gate, then up

struct Strip {  // rows of one matrix (GATE_UP: gate, then up)
    const u8* from;
    int rows, input;  // input: the row of activations of a pair
};

struct Out {
    float* to;  // of the strip's first row
    int rows, pitch;  // floats between rows of activations
};

DEVICE int divide(int a, int by, int inverse) { return by == 1 ? a : (int)__umulhi((u32)a, (u32)inverse); }

DEVICE int first_row(int rows, int block) { return (int)((u32)rows * (u32)block / gridDim.x); }

struct Tables {
    Strip* strips;
    Out* outs;
    int* keys;  // the pairs' experts, SKIPPED where one is not there
    float* y;   // DOWN: (pairs, rows of the block)
};

// Enter the strips of rows [row, row + rows) of the matrices at first and second, from strip `number` on.
DEVICE void enter_strips(const Arguments& a, const Tables& to, int number, int begin, int step, const u8* first, const u8* second,
                         int row, int rows, int input, float* out, int pitch) {
    const long long row_bytes = a.cols / TYPE::BLOCK * TYPE::BYTES;
    for (int i = begin; i * a.strip < rows; i += step) {
        const int at = i * a.strip, own = min(a.strip, rows - at);
        to.strips[HALVES * (number + i)] = Strip{first + (row + at) * row_bytes, own, input};
        if (MODE == GATE_UP) to.strips[HALVES * (number + i) + 1] = Strip{second + (row + at) * row_bytes, own, input};
        to.outs[number + i] = Out{out + at, own, pitch};
    }
}

// The strips of the block; their number at `count`, which is 0 before. Ends without a barrier.
DEVICE void find_strips(const Arguments& a, const Tables& to, int* count) {
    if (MODE == DENSE || (MODE == GATE_UP && !a.ids)) {
        int before = 0;
        for (int m = 0; m < a.matrices; m++) {
            const Matrix& matrix = a.matrix[m];
            const int row = first_row(matrix.rows, blockIdx.x), rows = first_row(matrix.rows, blockIdx.x + 1) - row;
            enter_strips(a, to, before, threadIdx.x, 32 * WARPS, matrix.data, a.matrix[1].data, row, rows, 0, matrix.out + row,
                         matrix.rows);
            before += (rows + a.strip - 1) / a.strip;
        }
        if (threadIdx.x == 0) *count = before;
        return;
    }
    const int pairs = a.n * a.used, padded = (pairs + 3) & ~3, p = threadIdx.x, all = a.matrix[0].rows;
    const int row = first_row(all, blockIdx.x), rows = first_row(all, blockIdx.x + 1) - row;
    u64 first = 0, second = 0;
    int key = SKIPPED;
    if (p < padded) {
        const int e = p < pairs ? __ldcg(a.ids + p) : -1;
        if (e >= 0) first = a.first[e], second = MODE == GATE_UP ? a.second[e] : 0;
        if (first) key = e;
        to.keys[p] = key;
    }
    __syncthreads();
    if (key == SKIPPED) return;
    int before = 0;
    for (int i = 0; i < padded; i += 4) {
        const int4 k = *(const int4*)(to.keys + i);
        before += (k.x < key || (k.x == key && i < p)) + (k.y < key || (k.y == key && i + 1 < p)) +
                  (k.z < key || (k.z == key && i + 2 < p)) + (k.w < key || (k.w == key && i + 3 < p));
    }
    const int own = (rows + a.strip - 1) / a.strip;
    enter_strips(a, to, before * own, 0, 1, (const u8*)first, (const u8*)second, row, rows, MODE == DOWN ? p : p / a.used,
                 MODE == DOWN ? to.y + p * rows : a.matrix[0].out + (long long)p * all + row, 0);
    atomicAdd(count, own);
}

