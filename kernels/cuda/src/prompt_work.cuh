// What a launch of a prompt's product is given, and what a block of it works on. Needs device.cuh and, of its source: MODE, BN
// columns of a tile, ROWS of a tile in each matrix. A tile list (group_rows.cu) has (expert, first, count) for each tile of at
// most BN pairs; pairs are sorted by expert.
#pragma once

#define MATRICES 8

struct Matrix {
    const u8* data;
    float* out;
    int rows, last_tile;  // runs of this matrix and all before it
};

struct Arguments {
    Matrix matrix[MATRICES];
    const u8* q;         // (inputs, pitch) int8 in the format's order
    const float* d;      // (inputs, pitch / 32)
    const float* sums;   // (inputs, pitch / GROUP), formats with offsets
    const float* join;   // DENSE: null, or (n,): out = fma(sigmoid(join[row]), y, out)
    const u64* first;    // addresses of the experts' gate or down
    const u64* second;   // of up
    const int* order;    // pairs sorted by expert
    const int4* tile_list;
    const int* n_tiles;
    float* next_d;       // GATE_UP, quantised: scales and sums beside the int8 in matrix[0].out
    float* next_sums;
    int n, divide, cols, row_tiles, run;  // the input of a pair is pair / divide; runs of all matrices; tiles of a run
    int pitch, apart;    // columns from a row to the next, of weights and inputs; from a matrix's inputs to the next one's
};

// What a block works on.
struct Work {
    const u8 *first, *second;
    int matrix, row, rows, tiles;  // first weight row of the block, rows of the matrix, tiles of the run
    int begin, count;              // columns: activation rows, or places in `order`
};

// False for a block past the list. The address of an expert that is not there is 0: nothing waits for it here.
DEVICE bool find_work(const Arguments& a, Work& w) {
    const int row_tile = blockIdx.x % a.row_tiles, column_tile = blockIdx.x / a.row_tiles;
    w.matrix = 0;
    int before = 0;
    if (MODE == DENSE) {
        while (row_tile >= a.matrix[w.matrix].last_tile) before = a.matrix[w.matrix++].last_tile;
        w.begin = column_tile * BN;
        w.count = min((int)BN, a.n - w.begin);
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
