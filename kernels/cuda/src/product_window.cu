// The product of quantised weights with the 1 to 16 rows of a window. Order of summation: ops.py, `product`.
//
// A warp takes a *tile* of 8 or 16 weight rows and a chunk of 256 columns: the raw blocks come to shared memory by
// asynchronous copies some chunks ahead, four lanes unpack a row, a matrix step multiplies with up to 8 activation rows
// at once, so weights are read once however many rows the window has. The chunks of a tile belong to the `ring` warps of
// a ring in turn: each computes its terms alone and then waits for the running sums of the chunk before it, adds its own
// in the order of the row and hands them on. The order is therefore the order of the row, whatever the launch.
//
// Constants: TYPE a format, ROWS weight rows of a tile (8, 16), NT eights of activation rows (1, 2), WARPS of a block,
// COPIES of the type's table, and MODE:
//   DENSE    several matrices of one type with the same input; out (n, rows) each
//   GATE_UP  experts: 8 rows of gate and 8 of up; out (pairs, rows) = silu(gate x) * (up x)
//   DOWN     experts, the pairs' own inputs; out (n, rows) = weighted sum in rank order, from 0
//   PAIRS    experts, one matrix; out (pairs, rows): for gate and up of different types
// A pair is (row, rank); pairs of the same expert share its weights. An expert without an address is skipped; DOWN then
// takes the pair's output from `given`.
#include "device.cuh"
#include "formats.cuh"
#include "quantize.cuh"
#include "experts.cuh"

#define DENSE 0
#define GATE_UP 1
#define DOWN 2
#define PAIRS 3
#define MATRICES 8

struct Matrix {
    const u8* data;
    float* out;
    int rows, last_tile;  // tiles of this matrix and all before it
};

struct Arguments {
    Matrix matrix[MATRICES];
    const float* x;      // (inputs, cols), or null: then q, d, sums as quantize.cu leaves them
    const u8* q;
    const float* d;
    const float* sums;
    const float* join;   // DENSE: null, or (n,): out = fma(sigmoid(join[row]), y, out)
    const u64* first;    // addresses of the experts' gate or down
    const u64* second;   // of up
    const int* ids;      // (n, used)
    const float* weights;
    const float* given;  // (n * used, rows), or null
    int n, used, cols, tiles, ring, stages;
    int at_scales, at_sums, at_lists, at_mail, at_grid, at_stages, at_y;  // parts of shared memory, bytes
    int input_pitch, scale_pitch, sum_pitch;
};

typedef TYPE F;
enum {
    CHUNK_BYTES = 256 / F::BLOCK * F::BYTES,
    PITCH = ((CHUNK_BYTES + 15 + 4 + 15) / 16 | 1) * 16,  // of a row in a stage; an odd number of 16s spreads the banks
    GROUPS = 256 / F::GROUP,
    COLUMNS = 8 * NT,
    PART = ROWS / 8 * 2 * NT  // sums of a lane
};

typedef Lists<COLUMNS> Experts;

struct Mail {
    float sums[32][PART];
};

struct Tile {  // where the rows of a tile lie
    const u8 *first, *second;
    int row, rows, matrix, expert;  // first row, rows of the matrix, number of the matrix, of the unique expert
};

DEVICE Tile tile_of(const Arguments& a, const Experts& lists, int item, int tiles) {
    Tile tile;
    tile.matrix = tile.expert = 0;
    if (MODE == DENSE) {
        int m = 0, before = 0;
        while (item >= a.matrix[m].last_tile) before = a.matrix[m++].last_tile;
        tile.matrix = m;
        tile.first = tile.second = a.matrix[m].data;
        tile.row = (item - before) * ROWS;
        tile.rows = a.matrix[m].rows;
    } else {
        int u = item / tiles;
        tile.expert = u;
        int e = lists.expert(u);
        tile.first = (const u8*)a.first[e];
        tile.second = MODE == GATE_UP ? (const u8*)a.second[e] : tile.first;
        tile.row = (item - u * tiles) * (MODE == GATE_UP ? 8 : ROWS);
        tile.rows = a.matrix[0].rows;
    }
    return tile;
}

// Row r of the tile; past the end the last row again (its results are dropped).
DEVICE const u8* row_of(const Tile& tile, int r, long long row_bytes) {
    if (MODE == GATE_UP) return (r < 8 ? tile.first : tile.second) + min(tile.row + (r & 7), tile.rows - 1) * row_bytes;
    return tile.first + min(tile.row + r, tile.rows - 1) * row_bytes;
}

DEVICE void inputs_to_shared(const Arguments& a, u8* shared, int inputs) {
    const int octets = a.cols / 8, total = inputs * octets;
    u8* q = shared;
    float* d = (float*)(shared + a.at_scales);
    float* sums = (float*)(shared + a.at_sums);
    if (a.x) {
        for (int i = threadIdx.x; i < (total + 31) / 32 * 32; i += 32 * WARPS) {
            const int at = min(i, total - 1), row = at / octets, o = at - row * octets;
            float v[8];
            load_octet(v, a.x + (long long)row * a.cols + 8 * o);
            Octet octet = quantize_octet(v);
            if (i < total) {
                store_octet<F::ORDER>(q + row * a.input_pitch + 32 * (o >> 2), o & 3, octet);
                if ((o & 3) == 0) d[row * a.scale_pitch + (o >> 2)] = octet.d;
                if (F::OFFSET) store_sums<F::GROUP>(sums + row * a.sum_pitch + (o >> 2) * (32 / F::GROUP), o & 3, octet);
            }
        }
        return;
    }
    for (int i = threadIdx.x; i < total / 2; i += 32 * WARPS) {
        const int row = i / (octets / 2), o = i - row * (octets / 2);
        *(uint4*)(q + row * a.input_pitch + 16 * o) = *(const uint4*)(a.q + (long long)row * a.cols + 16 * o);
    }
    for (int i = threadIdx.x; i < total / 4; i += 32 * WARPS)
        d[i / (octets / 4) * a.scale_pitch + i % (octets / 4)] = a.d[i];
    if (F::OFFSET) {
        const int groups = a.cols / F::GROUP;
        for (int i = threadIdx.x; i < inputs * groups; i += 32 * WARPS)
            sums[i / groups * a.sum_pitch + i % groups] = a.sums[i];
    }
}

DEVICE void grid_to_shared(u8* to) {
#if HAS_TABLE
    enum { WORDS = F::LOOK == WORD ? 1 : 2 };
    for (int i = threadIdx.x; i < F::GRID * COPIES; i += 32 * WARPS) {
        const int entry = i / COPIES;
#pragma unroll
        for (int w = 0; w < WORDS; w++) ((u32*)to)[i * WORDS + w] = table_words[entry * WORDS + w];
    }
#endif
}

// The terms of a chunk: products scaled, not yet by the activations' scales.
DEVICE void chunk_terms(float (&terms)[GROUPS][PART], const u8* p0, const u8* p1, Grid grid, const u8* const (&input)[NT],
                        int t, int spans) {
#pragma unroll
    for (int s = 0; s < 8; s++) {
        if (F::BLOCK < 256 && s >= spans) continue;
        u32 c[4] = {0, 0, 0, 0};
        F::span(p0, s, t, grid, c[0], c[2]);
        if (ROWS == 16) F::span(p1, s, t, grid, c[1], c[3]);
#pragma unroll
        for (int k = 0; k < 32 / F::GROUP; k++) {
            const int g = s * (32 / F::GROUP) + k;
            const float scale0 = F::scale(p0, g), lift0 = scale0 * -MAGIC;
            const float scale1 = ROWS == 16 ? F::scale(p1, g) : 0.0f, lift1 = scale1 * -MAGIC;
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                const uint2 b = *(const uint2*)(input[nt] + 32 * s);
                int sum[4];
                if (F::GROUP == 32) multiply32<ROWS>(sum, c, b.x, b.y);
                else if (k == 0) multiply16<ROWS>(sum, c[0], c[1], b.x);
                else multiply16<ROWS>(sum, c[2], c[3], b.y);
                float* out = &terms[g][nt * (PART / NT)];
                out[0] = scaled(sum[0], scale0, lift0);
                out[1] = scaled(sum[1], scale0, lift0);
                if (ROWS == 16) out[2] = scaled(sum[2], scale1, lift1), out[3] = scaled(sum[3], scale1, lift1);
            }
        }
    }
}

struct Columns {  // what a lane reads of the activations: inputs of column g, scales and sums of columns 2 t, 2 t + 1
    const u8* input[NT];
    const float* scales[2 * NT];
    const float* sums[2 * NT];
};

DEVICE void add_terms(float (&acc)[PART], const float (&terms)[GROUPS][PART], const float (&d)[2 * NT][8], const u8* p0,
                      const u8* p1, const Columns& columns, int chunk, int spans) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const int s = g * F::GROUP / 32;
        if (F::BLOCK < 256 && s >= spans) continue;
        float offset0 = 0.0f, offset1 = 0.0f;
        if (F::OFFSET) {
            offset0 = F::offset(p0, g);
            if (ROWS == 16) offset1 = F::offset(p1, g);
        }
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float scale = d[2 * nt + i][s];
                float& low = acc[nt * (PART / NT) + i];
                low = fmaf(terms[g][nt * (PART / NT) + i], scale, low);
                float sum = 0.0f;
                if (F::OFFSET) {
                    sum = columns.sums[2 * nt + i][chunk * GROUPS + g];
                    low = fmaf(sum * offset0, scale, low);
                }
                if (ROWS == 16) {
                    float& high = acc[nt * (PART / NT) + 2 + i];
                    high = fmaf(terms[g][nt * (PART / NT) + 2 + i], scale, high);
                    if (F::OFFSET) high = fmaf(sum * offset1, scale, high);
                }
            }
    }
}

DEVICE void take_sums(float (&acc)[PART], Mail* box, u32* flag, int lane) {
    wait_for(flag, 1);
#pragma unroll
    for (int i = 0; i < PART; i++) acc[i] = box->sums[lane][i];
    raise(flag, 0, lane);
}

DEVICE void hand_sums(const float (&acc)[PART], Mail* box, u32* flag, int lane) {
    wait_for(flag, 0);
#pragma unroll
    for (int i = 0; i < PART; i++) box->sums[lane][i] = acc[i];
    raise(flag, 1, lane);
}

// The finished sums of a tile to where they go: `y` is DOWN's table of pairs in shared memory.
DEVICE void finish(const Arguments& a, const float (&acc)[PART], const Tile& tile, const Experts& lists, float* y, int g,
                   int t) {
    const int row = tile.row + g, columns = MODE == DENSE ? a.n : lists.count(tile.expert);
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int column = 8 * nt + 2 * t + i;
            if (column >= columns) continue;
            const float low = acc[nt * (PART / NT) + i], high = ROWS == 16 ? acc[nt * (PART / NT) + 2 + i] : 0.0f;
            if (MODE == DENSE) {
                float* out = a.matrix[tile.matrix].out + (long long)column * tile.rows;
                if (a.join) {
                    const float weight = sigmoid_f32(a.join[column]);
                    if (row < tile.rows) out[row] = fmaf(weight, low, out[row]);
                    if (ROWS == 16 && row + 8 < tile.rows) out[row + 8] = fmaf(weight, high, out[row + 8]);
                } else {
                    if (row < tile.rows) out[row] = low;
                    if (ROWS == 16 && row + 8 < tile.rows) out[row + 8] = high;
                }
            } else if (MODE == GATE_UP) {
                if (row < tile.rows) a.matrix[0].out[(long long)lists.member(tile.expert, column) * tile.rows + row] = silu_f32(low) * high;
            } else if (MODE == PAIRS) {
                float* out = a.matrix[0].out + (long long)lists.member(tile.expert, column) * tile.rows;
                if (row < tile.rows) out[row] = low;
                if (ROWS == 16 && row + 8 < tile.rows) out[row + 8] = high;
            } else {
                y[lists.member(tile.expert, column) * ROWS + g] = low;
                if (ROWS == 16) y[lists.member(tile.expert, column) * ROWS + g + 8] = high;
            }
        }
}

KERNEL __launch_bounds__(32 * WARPS) void product_window(PARAMETER Arguments a) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ u32 flags[WARPS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int pairs = a.n * a.used, chunks = (a.cols + 255) / 256;
    const long long row_bytes = a.cols / F::BLOCK * F::BYTES;
    const Experts lists{(int*)(shared + a.at_lists), pairs};
    if (threadIdx.x < WARPS) flags[threadIdx.x] = 0;
    if (MODE != DENSE) lists.build(a.ids, a.first);

    // The items of this ring: item, then + step, below items.
    const int ring = warp / a.ring, place = warp - ring * a.ring, rings = WARPS / a.ring;
    const int first_tile = MODE == DOWN ? (int)((long long)a.tiles * blockIdx.x / gridDim.x) : 0;
    const int tiles = MODE == DOWN ? (int)((long long)a.tiles * (blockIdx.x + 1) / gridDim.x) - first_tile : a.tiles;
    const int items = MODE == DENSE ? a.tiles : tiles * lists.unique();
    const int begin = MODE == DOWN ? ring : ring * gridDim.x + blockIdx.x;
    const int step = MODE == DOWN ? rings : rings * gridDim.x;

    // Copies run `stages - 1` chunks ahead: lane l copies pieces of row l / LANES_A_ROW.
    enum { LANES_A_ROW = 32 / ROWS, PIECES = (CHUNK_BYTES + 30) / 16 };
    u8* stage_base = shared + a.at_stages + warp * a.stages * (ROWS * PITCH);
    const int copy_row = lane / LANES_A_ROW, copy_piece = lane % LANES_A_ROW;
    int load_item = begin, load_chunk = place, load_stage = 0;
    const u8* load_row = 0;
    int loaded_item = -1;
    auto load = [&]() {
        while (load_chunk >= chunks) load_chunk -= chunks, load_item += step;
        if (load_item < items) {
            if (load_item != loaded_item) {
                Tile tile = tile_of(a, lists, load_item, tiles);
                if (MODE == DOWN) tile.row += first_tile * ROWS;
                load_row = row_of(tile, copy_row, row_bytes);
                loaded_item = load_item;
            }
            const u8* from = load_row + load_chunk * (long long)CHUNK_BYTES;
            const int shift = (int)((u64)from & 15);
            const int bytes = min((int)CHUNK_BYTES, (int)(row_bytes - load_chunk * CHUNK_BYTES));
            const int pieces = (shift + bytes + 15) >> 4;
            u8* to = stage_base + load_stage * (ROWS * PITCH) + copy_row * PITCH;
#pragma unroll
            for (int i = 0; i < (PIECES + LANES_A_ROW - 1) / LANES_A_ROW; i++) {
                const int piece = copy_piece + i * LANES_A_ROW;
                if (piece < pieces) copy16(to + 16 * piece, from - shift + 16 * piece);
            }
        }
        copies_commit();
        load_chunk += a.ring;
        load_stage = load_stage + 1 == a.stages ? 0 : load_stage + 1;
    };
    for (int i = 1; i < a.stages; i++) load();

    grid_to_shared(shared + a.at_grid);
    inputs_to_shared(a, shared, MODE == DOWN ? pairs : a.n);
    __syncthreads();

    const int copy = COPIES == 1 ? 0 : (F::LOOK == HALF ? lane >> 1 : lane) % COPIES;
    const Grid grid{shared + a.at_grid + copy * (F::LOOK == WORD ? 4 : 8)};
    Mail* mail = (Mail*)(shared + a.at_mail);
    const int next = ring * a.ring + (place + 1 == a.ring ? 0 : place + 1);
    float* y = (float*)(shared + a.at_y);

    Columns columns;
    auto look_at = [&](const Tile& tile) {  // the tile's columns: activation rows by number
        const int n = MODE == DENSE ? a.n : lists.count(tile.expert);
        auto input_row = [&](int column) {
            if (column >= n) column = n - 1;
            return MODE == DENSE ? column : lists.member(tile.expert, column) / (MODE == DOWN ? 1 : a.used);
        };
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            columns.input[nt] = shared + input_row(8 * nt + g) * a.input_pitch + 8 * t;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = input_row(8 * nt + 2 * t + i);
                columns.scales[2 * nt + i] = (const float*)(shared + a.at_scales) + row * a.scale_pitch;
                columns.sums[2 * nt + i] = (const float*)(shared + a.at_sums) + row * a.sum_pitch;
            }
        }
    };

    Tile tile;
    int item = begin, chunk = place, stage = 0, seen_item = -1;
    u32 low = 0, high = 0;  // address bits of rows g and g + 8
    float acc[PART];
    for (;;) {
        while (chunk >= chunks) chunk -= chunks, item += step;
        if (item >= items) break;
        if (item != seen_item) {
            tile = tile_of(a, lists, item, tiles);
            if (MODE == DOWN) tile.row += first_tile * ROWS;
            low = (u32)(u64)row_of(tile, g, row_bytes);
            if (ROWS == 16) high = (u32)(u64)row_of(tile, g + 8, row_bytes);
            if (MODE != DENSE || seen_item < 0) look_at(tile);
            seen_item = item;
        }
        load();
        if (a.stages == 1) copies_wait<0>();
        else if (a.stages == 2) copies_wait<1>();
        else if (a.stages == 3) copies_wait<2>();
        else copies_wait<3>();
        __syncwarp();

        const u8* from = stage_base + stage * (ROWS * PITCH) + g * PITCH;
        const u8* p0 = from + ((low + chunk * CHUNK_BYTES) & 15);
        const u8* p1 = from + 8 * PITCH + ((high + chunk * CHUNK_BYTES) & 15);
        const int spans = min(8, a.cols / 32 - 8 * chunk);
        float terms[GROUPS][PART], d[2 * NT][8];
        const u8* input[NT];
#pragma unroll
        for (int nt = 0; nt < NT; nt++) input[nt] = columns.input[nt] + 256 * chunk;
        chunk_terms(terms, p0, p1, grid, input, t, spans);
#pragma unroll
        for (int i = 0; i < GROUPS * PART; i++) KEEP(terms[i / PART][i % PART]);
#pragma unroll
        for (int c = 0; c < 2 * NT; c++) {
            const float4 u = *(const float4*)(columns.scales[c] + 8 * chunk), v = *(const float4*)(columns.scales[c] + 8 * chunk + 4);
            d[c][0] = u.x, d[c][1] = u.y, d[c][2] = u.z, d[c][3] = u.w, d[c][4] = v.x, d[c][5] = v.y, d[c][6] = v.z, d[c][7] = v.w;
        }

        if (chunk == 0) {
#pragma unroll
            for (int i = 0; i < PART; i++) acc[i] = 0.0f;
        } else if (a.ring > 1) {
            take_sums(acc, mail + warp, &flags[warp], lane);
        }
        add_terms(acc, terms, d, p0, p1, columns, chunk, spans);
        if (chunk + 1 == chunks) finish(a, acc, tile, lists, y + (MODE == DOWN ? (tile.row / ROWS - first_tile) * pairs * ROWS : 0), g, t);
        else if (a.ring > 1) hand_sums(acc, mail + next, &flags[next], lane);
        __syncwarp();  // the stage is free for the copies of the next turn
        chunk += a.ring;
        stage = stage + 1 == a.stages ? 0 : stage + 1;
    }
    if (MODE != DOWN) return;
    __syncthreads();
    for (int i = threadIdx.x; i < tiles * a.n * ROWS; i += 32 * WARPS) {  // join the pairs of the block's tiles
        const int r = i % ROWS, token = i / ROWS % a.n, at = i / ROWS / a.n, row = (first_tile + at) * ROWS + r;
        const int rows = a.matrix[0].rows;
        if (row >= rows) continue;
        a.matrix[0].out[(long long)token * rows + row] =
            join_pairs(lists, a.weights, a.given, token, a.used, row, rows,
                       [&](int p) { return y[(at * pairs + p) * ROWS + r]; });
    }
}
