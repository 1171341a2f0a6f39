// What the products of prompts share: arguments, what a block works on, the type's table.
//
// A tile list (group_rows.cu) has (expert, first, count) for each tile of pairs; pairs are sorted by expert.
#pragma once

#define DENSE 0
#define GATE_UP 1
#define PAIRS 2
#define MIX 3
#define MATRICES 8

struct Matrix {
    const u8* data;
    float* out;
    int rows, last_tile;  // runs of this matrix and all before it
};

struct Arguments {
    Matrix matrix[MATRICES];
    const u8* q;         // (inputs, cols) int8 in the order that the kernel wants
    const float* d;      // (inputs, cols / 32)
    const float* sums;   // (inputs, cols / GROUP), formats with offsets
    const float* join;   // DENSE: null, or (n,): out = fma(sigmoid(join[row]), y, out)
    const u64* first;    // addresses of the experts' gate or down
    const u64* second;   // of up
    const int* order;    // pairs sorted by expert
    const int4* tile_list;
    const int* n_tiles;
    float* next_d;       // GATE_UP, quantised: scales and sums beside the int8 in matrix[0].out
    float* next_sums;
    const float* x;        // MIX: streams (n, STREAMS, rows), the r of each, factors (STREAMS, rows) of their norm
    const float* factors;
    const float* norm;
    int n, divide, cols, row_tiles, run;  // the input of a pair is pair / divide; runs of all matrices; tiles of a run
};

// What a block works on.
struct Work {
    const u8 *first, *second;
    int matrix, row, rows, tiles;  // first weight row of the block, rows of the matrix, tiles of the run
    int begin, count;              // columns: activation rows, or places in `order`
};

// COLUMNS and ROWS of a tile. False for a block past the list. The address of an expert that is not there is 0: nothing
// waits for it here.
template <int COLUMNS, int ROWS>
DEVICE bool find_work(const Arguments& a, Work& w) {
    const int row_tile = blockIdx.x % a.row_tiles, column_tile = blockIdx.x / a.row_tiles;
    w.matrix = 0;
    int before = 0;
    if (MODE == DENSE || MODE == MIX) {
        while (row_tile >= a.matrix[w.matrix].last_tile) before = a.matrix[w.matrix++].last_tile;
        w.begin = column_tile * COLUMNS;
        w.count = min(COLUMNS, a.n - w.begin);
        w.first = w.second = a.matrix[w.matrix].data;
    } else {
        const int tiles = *a.n_tiles;
        const int4 tile = a.tile_list[column_tile];  // read together: past the list is memory without meaning
        if (column_tile >= tiles) return false;
        w.begin = tile.y;
        w.count = tile.z;
        w.first = (const u8*)a.first[tile.x];
        w.second = MODE == GATE_UP ? (const u8*)a.second[tile.x] : w.first;
    }
    w.row = (row_tile - before) * a.run * ROWS;
    w.rows = a.matrix[w.matrix].rows;
    w.tiles = min(a.run, (w.rows - w.row + ROWS - 1) / ROWS);
    return true;
}

// A step, or a chunk, of a tile of the run.
struct Place {
    int tile, at;

    DEVICE Place after(int length) const { return at + 1 == length ? Place{tile + 1, 0} : Place{tile, at + 1}; }
};

// The type's table, and the lane's copy of it.
template <class F, int THREADS>
DEVICE Grid fill_table(u8* shared) {
#if HAS_TABLE
    enum { WORDS = F::LOOK == WORD ? 1 : 2 };
    u32* table = (u32*)shared;
    for (int i = threadIdx.x; i < F::GRID * COPIES; i += THREADS)
        for (int k = 0; k < WORDS; k++) table[i * WORDS + k] = table_words[i / COPIES * WORDS + k];
#endif
    const int lane = threadIdx.x & 31, copy = COPIES == 1 ? 0 : (F::LOOK == HALF ? lane >> 1 : lane) % COPIES;
    return Grid{shared + copy * (F::LOOK == WORD ? 4 : 8)};
}

#ifdef NEXT_ORDER
// A tile of silu(gate x) * (up x) in shared memory, `LINE` floats a column and OCTETS eights of rows, quantised as
// quantize.cu does it.
template <int COLUMNS, int OCTETS, int LINE, int THREADS>
DEVICE void store_quantized(const Arguments& a, const Work& w, const float* tile) {
    enum { SUM_OF = NEXT_SUMS ? NEXT_SUMS : 32 };
    u8* q = (u8*)a.matrix[0].out;
    for (int first = 0; first < w.count * OCTETS; first += THREADS) {
        const int i = first + threadIdx.x, column = i / OCTETS, u = i % OCTETS, row = w.row + 8 * u;
        float v[8];
        load_octet(v, tile + min(column, COLUMNS - 1) * LINE + 8 * u);
        const Octet octet = quantize_octet(v);
        if (column >= w.count || row >= w.rows) continue;
        const long long block = (long long)a.order[w.begin + column] * (w.rows / 32) + row / 32;
        store_octet<NEXT_ORDER>(q + 32 * block, u & 3, octet);
        if ((u & 3) == 0) a.next_d[block] = stored_scale<NEXT_ORDER>(octet.d);
        if (NEXT_SUMS) store_sums<SUM_OF>(a.next_sums + block * (32 / SUM_OF), u & 3, octet);
    }
}
#endif
