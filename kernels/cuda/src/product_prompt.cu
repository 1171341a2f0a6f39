// The product of quantised weights with many rows (a prompt). Order of summation: ops.py, `product`.
//
// A block computes BM weight rows times BN activation rows. It walks the row 128 columns a step: raw blocks arrive by
// asynchronous copies a chunk of 256 columns ahead, are unpacked to int8 in shared memory once, and all warps multiply
// with int8 matrix steps. While a step is multiplied the next one is unpacked: half of the warps begin with the one, half
// with the other, so that both kinds of work are there for every scheduler. An output has one accumulator, which adds the groups of the row one after another: the bits
// are those of product_window.cu. Activations come quantised (quantize.cu) in the order of the format.
//
// Constants: TYPE a format, BM and BN (64, 128), THREADS, BLOCKS of a multiprocessor, CHUNKS of raw bytes held (1, 2), COPIES
// of the table, SHARED bytes that plans.py asks for, and MODE:
//   DENSE    several matrices of one type with the same input; out (n, rows) each
//   GATE_UP  experts by tile list: BM / 2 rows of gate and of up; out (pairs, rows) = silu(gate x) * (up x)
//   PAIRS    experts by tile list, one matrix; out (pairs, rows)
// A tile list (group_rows.cu) has (expert, first, count) for each tile of at most BN pairs; pairs are sorted by expert.
#include "device.cuh"
#include "formats.cuh"

#define DENSE 0
#define GATE_UP 1
#define PAIRS 2
#define MATRICES 8

struct Matrix {
    const u8* data;
    float* out;
    int rows, last_tile;  // tiles of BM rows of this matrix and all before it
};

struct Arguments {
    Matrix matrix[MATRICES];
    const u8* q;         // (inputs, cols) int8 in the format's order
    const float* d;      // (inputs, cols / 32)
    const float* sums;   // (inputs, cols / GROUP), formats with offsets
    const float* join;   // DENSE: null, or (n,): out = fma(sigmoid(join[row]), y, out)
    const u64* first;    // addresses of the experts' gate or down
    const u64* second;   // of up
    const int* order;    // pairs sorted by expert
    const int4* tile_list;
    const int* n_tiles;
    int n, divide, cols, row_tiles;  // the input of a pair is pair / divide
};

typedef TYPE F;
enum {
    CHUNK_BYTES = 256 / F::BLOCK * F::BYTES,
    PITCH = ((CHUNK_BYTES + 15 + 4 + 15) / 16 | 1) * 16,  // of a row of raw bytes
    STEP = 128,
    PITCH8 = STEP + 32,              // of activations: 32 past a multiple of 128 spreads 4 rows over the banks
    PER_SPAN = 32 / F::GROUP,
    GROUPS = 4 * PER_SPAN,           // of a step
    ROWS4 = BM + 4,                  // of a line of scales
    TABLE = F::GRID * COPIES * (F::LOOK == WORD ? 4 : 8),
    CODES = BM * STEP,               // bytes of a step: int8, then float2 scales, then offsets
    SCALES = GROUPS * ROWS4 * 8,
    UNPACKED = CODES + SCALES + (F::OFFSET ? GROUPS * ROWS4 * 4 : 0),
    INPUTS = BN * PITCH8,            // bytes of a step: int8, then scales, then sums
    SUMS_AT = INPUTS + 4 * BN * 4,
    FETCHED = SUMS_AT + (F::OFFSET ? GROUPS * BN * 4 : 0),
    AT_UNPACKED = CHUNKS * BM * PITCH,
    AT_INPUTS = AT_UNPACKED + 2 * UNPACKED,
    AT_SOURCE = AT_INPUTS + 2 * FETCHED,
    AT_TABLE = AT_SOURCE + BN * 4,
    SHARED_BYTES = AT_TABLE + TABLE,
    WARPS_DOWN = BM / 32,
    WARPS_ACROSS = THREADS / 32 / WARPS_DOWN,
    NT = BN / WARPS_ACROSS / 8       // eights of columns of a warp
};

static_assert(SHARED_BYTES == SHARED, "plans.py asks for another size than this layout has");

// What a block works on.
struct Work {
    const u8 *first, *second;
    int matrix, row, rows;         // first weight row of the block, rows of the matrix
    int begin, count;              // columns: activation rows, or places in `order`
};

DEVICE bool find_work(const Arguments& a, Work& w) {
    const int row_tile = blockIdx.x % a.row_tiles, column_tile = blockIdx.x / a.row_tiles;
    w.matrix = 0;
    int before = 0, e = 0;
    if (MODE == DENSE) {
        while (row_tile >= a.matrix[w.matrix].last_tile) before = a.matrix[w.matrix++].last_tile;
        w.begin = column_tile * BN;
        w.count = min((int)BN, a.n - w.begin);
        w.first = w.second = a.matrix[w.matrix].data;
    } else {
        if (column_tile >= *a.n_tiles) return false;
        const int4 tile = a.tile_list[column_tile];
        e = tile.x;
        w.begin = tile.y;
        w.count = tile.z;
        w.first = (const u8*)a.first[e];
        w.second = MODE == GATE_UP ? (const u8*)a.second[e] : w.first;
        if (!w.first) return false;
    }
    w.row = (row_tile - before) * (MODE == GATE_UP ? BM / 2 : BM);
    w.rows = a.matrix[w.matrix].rows;
    return true;
}

// Row r of the block's tile. GATE_UP: 16 rows of gate, then the same 16 of up, so that one thread has both.
DEVICE const u8* row_of(const Work& w, int r, int row_bytes) {
    if (MODE == GATE_UP) {
        const int row = min(w.row + (r >> 5) * 16 + (r & 15), w.rows - 1);
        return (r & 16 ? w.second : w.first) + row * (long long)row_bytes;
    }
    return w.first + min(w.row + r, w.rows - 1) * (long long)row_bytes;
}

// Asynchronous copies of the raw bytes of one chunk of all rows; LANES neighbours copy a row, 16 bytes each.
DEVICE void fetch_rows(u8* raw, const Work& w, int row_bytes, int chunk) {
    enum {
        MOST = (CHUNK_BYTES + 30) / 16,
        LANES = MOST <= 8 ? 8 : MOST <= 16 ? 16 : 32,
        AT_ONCE = THREADS / LANES  // rows
    };
    const int first = threadIdx.x / LANES, piece = 16 * (threadIdx.x % LANES), at = chunk * CHUNK_BYTES;
    const int bytes = F::BLOCK == 256 ? (int)CHUNK_BYTES : min((int)CHUNK_BYTES, row_bytes - at);
#pragma unroll
    for (int i = 0; i < BM / AT_ONCE; i++) {
        const int row = first + i * AT_ONCE;
        const u8* from = row_of(w, row, row_bytes) + at;
        const int shift = (int)((u64)from & 15);
        if (piece < shift + bytes) copy16(raw + row * PITCH + piece, from - shift + piece);
    }
}

// Asynchronous copies of the activations of one step: int8, scales and sums. Past the row's end nothing is copied.
// `source`: where each column's row begins, in int8.
DEVICE void fetch_inputs(u8* shared, const Arguments& a, int step) {
    const u32* source = (const u32*)(shared + AT_SOURCE);
    const int piece = 16 * (threadIdx.x & 7), s = threadIdx.x & 3;
    if (STEP * step + piece < a.cols) {
        const u8* from = a.q + STEP * step + piece;
        u8* to = shared + AT_INPUTS + (step & 1) * FETCHED + (threadIdx.x >> 3) * PITCH8 + piece;
#pragma unroll
        for (int i = 0; i < BN * 8 / THREADS; i++)
            copy16(to + i * (THREADS / 8) * PITCH8, from + source[(threadIdx.x >> 3) + i * (THREADS / 8)]);
    }
    if (STEP * step + 32 * s < a.cols) {
        const float* from = a.d + 4 * step + s;
        float* to = (float*)(shared + AT_INPUTS + (step & 1) * FETCHED + INPUTS) + s * BN + (threadIdx.x >> 2);
#pragma unroll
        for (int i = 0; i < BN * 4 / THREADS; i++)
            copy4(to + i * (THREADS / 4), from + source[(threadIdx.x >> 2) + i * (THREADS / 4)] / 32);
    }
    if (F::OFFSET) {
        const int g = threadIdx.x % GROUPS, c = threadIdx.x / GROUPS;
        if (STEP * step + F::GROUP * g < a.cols) {
            const float* from = a.sums + GROUPS * step + g;
            float* to = (float*)(shared + AT_INPUTS + (step & 1) * FETCHED + SUMS_AT) + g * BN + c;
#pragma unroll
            for (int i = 0; i < BN * GROUPS / THREADS; i++)
                copy4(to + i * (THREADS / GROUPS), from + source[c + i * (THREADS / GROUPS)] / F::GROUP);
        }
    }
}

// Half a chunk of every row to int8, scales and offsets. The int8 lie as the matrix step wants them: for 16 rows and a
// span 512 bytes, 16 a lane (the words of rows g and g + 8, twice). low, high: address bits of the thread's two rows.
DEVICE void unpack_step(u8* shared, u32 low, u32 high, int step, int spans, Grid grid) {
    enum { LANES = BM * 2, SHARE = 4 * LANES / THREADS };  // a pair of rows has LANES / (BM / 2) threads or twice that
    const int lane = threadIdx.x % LANES, part = threadIdx.x / LANES * SHARE, upper = 4 * (step & 1);
    const int slab = lane >> 5, g = lane >> 2 & 7, t = lane & 3, row = 16 * slab + g;
    const u32 at = (step >> 1) * CHUNK_BYTES;
    const u8* raw = shared + (CHUNKS == 2 && step & 2 ? BM * PITCH : 0);
    const u8* p0 = raw + row * PITCH + ((low + at) & 15);
    const u8* p1 = raw + (row + 8) * PITCH + ((high + at) & 15);
    u8* unpacked = shared + AT_UNPACKED + (step & 1) * UNPACKED;
    u8* to = unpacked + slab * (16 * STEP) + (lane & 31) * 16;
    uint4 c[SHARE];  // stored at the end: a store between loads would make them again
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
        const int s = part + i;
        if (F::BLOCK < 256 && s >= spans) break;
        F::span(p0, upper + s, t, grid, c[i].x, c[i].z);
        F::span(p1, upper + s, t, grid, c[i].y, c[i].w);
    }
#pragma unroll
    for (int i = 0; i < SHARE; i++) *(uint4*)(to + 512 * (part + i)) = c[i];
    if (part > 0 || (F::BLOCK < 256 && t >= spans)) return;
    float2* scales = (float2*)(unpacked + CODES) + row;
    float* offsets = (float*)(unpacked + CODES + SCALES) + row;
#pragma unroll
    for (int k = 0; k < PER_SPAN; k++) {
        const int g = t * PER_SPAN + k;
        const float scale0 = F::scale(p0, upper * PER_SPAN + g), scale1 = F::scale(p1, upper * PER_SPAN + g);
        scales[g * ROWS4] = make_float2(scale0, scale0 * -MAGIC);
        scales[g * ROWS4 + 8] = make_float2(scale1, scale1 * -MAGIC);
        if (F::OFFSET) {
            offsets[g * ROWS4] = F::offset(p0, upper * PER_SPAN + g);
            offsets[g * ROWS4 + 8] = F::offset(p1, upper * PER_SPAN + g);
        }
    }
}

// One step: every group of its spans, in order.
DEVICE void multiply_step(float (&acc)[2][NT][4], const u8* shared, int step, int spans, int wm, int wn, int g, int t) {
    const u8* unpacked = shared + AT_UNPACKED + (step & 1) * UNPACKED;
    const u8* inputs = shared + AT_INPUTS + (step & 1) * FETCHED;
    const u8* codes = unpacked + 2 * wm * (16 * STEP) + (4 * g + t) * 16;
    const u8* q = inputs + (8 * NT * wn + g) * PITCH8 + 8 * t;
    const float* d = (const float*)(inputs + INPUTS) + 8 * NT * wn + 2 * t;
    const float* sums = (const float*)(inputs + SUMS_AT) + 8 * NT * wn + 2 * t;
    const float2* scales = (const float2*)(unpacked + CODES) + 32 * wm + g;
    const float* offsets = (const float*)(unpacked + CODES + SCALES) + 32 * wm + g;
#pragma unroll 1
    for (int s = 0; s < (F::BLOCK < 256 ? spans : 4); s++) {
        u32 w[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 c = *(const uint4*)(codes + i * (16 * STEP) + 512 * s);
            w[i][0] = c.x, w[i][1] = c.y, w[i][2] = c.z, w[i][3] = c.w;
        }
        float2 scale[PER_SPAN][4];
        float offset[PER_SPAN][4];
#pragma unroll
        for (int k = 0; k < PER_SPAN; k++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                scale[k][i] = scales[(s * PER_SPAN + k) * ROWS4 + 8 * i];
                offset[k][i] = F::OFFSET ? offsets[(s * PER_SPAN + k) * ROWS4 + 8 * i] : 0.0f;
            }
#pragma unroll
        for (int j = 0; j < NT; j++) {
            const uint2 b = *(const uint2*)(q + 8 * j * PITCH8 + 32 * s);
            const float2 db = *(const float2*)(d + s * BN + 8 * j);
#pragma unroll
            for (int k = 0; k < PER_SPAN; k++) {
                float2 sum = make_float2(0.0f, 0.0f);
                if (F::OFFSET) sum = *(const float2*)(sums + (s * PER_SPAN + k) * BN + 8 * j);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    int c[4];
                    if (F::GROUP == 32) multiply32<16>(c, w[i], b.x, b.y);
                    else if (k == 0) multiply16<16>(c, w[i][0], w[i][1], b.x);
                    else multiply16<16>(c, w[i][2], w[i][3], b.y);
                    float(&out)[4] = acc[i][j];
                    const float2 low = scale[k][2 * i], high = scale[k][2 * i + 1];
                    out[0] = fmaf(scaled(c[0], low.x, low.y), db.x, out[0]);
                    out[1] = fmaf(scaled(c[1], low.x, low.y), db.y, out[1]);
                    out[2] = fmaf(scaled(c[2], high.x, high.y), db.x, out[2]);
                    out[3] = fmaf(scaled(c[3], high.x, high.y), db.y, out[3]);
                    if (F::OFFSET) {
                        out[0] = fmaf(sum.x * offset[k][2 * i], db.x, out[0]);
                        out[1] = fmaf(sum.y * offset[k][2 * i], db.y, out[1]);
                        out[2] = fmaf(sum.x * offset[k][2 * i + 1], db.x, out[2]);
                        out[3] = fmaf(sum.y * offset[k][2 * i + 1], db.y, out[3]);
                    }
                }
            }
        }
    }
}

DEVICE void store_tile(const Arguments& a, const float (&acc)[2][NT][4], const Work& w, int wm, int wn, int g, int t) {
    float* out = a.matrix[w.matrix].out;
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int column = 8 * (NT * wn + j) + 2 * t + c;
            if (column >= w.count) continue;
            const int at = MODE == DENSE ? w.begin + column : a.order[w.begin + column];
            float* line = out + (long long)at * w.rows;
            if (MODE == GATE_UP) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int row = w.row + 16 * wm + 8 * h + g;
                    if (row < w.rows) line[row] = silu_f32(acc[0][j][2 * h + c]) * acc[1][j][2 * h + c];
                }
                continue;
            }
            const bool joins = MODE == DENSE && a.join;
            const float weight = joins ? sigmoid_f32(a.join[at]) : 0.0f;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = w.row + 32 * wm + 8 * i + g;
                const float y = acc[i >> 1][j][2 * (i & 1) + c];
                if (row < w.rows) line[row] = joins ? fmaf(weight, y, line[row]) : y;
            }
        }
}

KERNEL __launch_bounds__(THREADS, BLOCKS) void product_prompt(PARAMETER Arguments a) {
    inputs_ready();
    extern __shared__ __align__(16) u8 shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int wm = warp % WARPS_DOWN, wn = warp / WARPS_DOWN;
    const int row_bytes = a.cols / F::BLOCK * F::BYTES;
    const int steps = (a.cols + STEP - 1) / STEP;
    Work w;
    if (!find_work(a, w)) return;

    for (int c = threadIdx.x; c < BN; c += THREADS) {
        const int column = w.begin + min(c, w.count - 1);
        ((u32*)(shared + AT_SOURCE))[c] = (u32)(MODE == DENSE ? column : a.order[column] / a.divide) * a.cols;
    }
    const int my_row = 16 * (threadIdx.x % (BM * 2) >> 5) + g;
    const u32 low = (u32)(u64)row_of(w, my_row, row_bytes), high = (u32)(u64)row_of(w, my_row + 8, row_bytes);
#if HAS_TABLE
    enum { WORDS = F::LOOK == WORD ? 1 : 2 };
    for (int i = threadIdx.x; i < F::GRID * COPIES; i += THREADS)
        for (int k = 0; k < WORDS; k++) ((u32*)(shared + AT_TABLE))[i * WORDS + k] = table_words[i / COPIES * WORDS + k];
#endif
    const int copy = COPIES == 1 ? 0 : (F::LOOK == HALF ? lane >> 1 : lane) % COPIES;
    const Grid grid{shared + AT_TABLE + copy * (F::LOOK == WORD ? 4 : 8)};
    __syncthreads();
    const int chunks = (steps + 1) / 2;
    auto spans_of = [&](int step) { return min(4, a.cols / 32 - 4 * step); };
    auto fetch_chunk = [&](int chunk) {
        if (chunk < chunks) fetch_rows(shared + (CHUNKS == 2 && chunk & 1 ? BM * PITCH : 0), w, row_bytes, chunk);
    };
    fetch_chunk(0);
    if (CHUNKS == 2) fetch_chunk(1);
    fetch_inputs(shared, a, 0);
    copies_commit();
    copies_wait<0>();
    __syncthreads();
    unpack_step(shared, low, high, 0, spans_of(0), grid);
    __syncthreads();

    const bool busy = 8 * NT * wn < w.count;  // a warp whose columns are all past the tile's end only helps to unpack
    const bool unpacks_first = (wm + wn) & 1;
    float acc[2][NT][4] = {};
    for (int step = 0; step < steps; step++) {
        const int next = step + 1;
        if (next < steps) fetch_inputs(shared, a, next);
        if (step & 1) {  // the chunk of the step before is unpacked: its place takes the one after the next
            if (CHUNKS == 2) {
                fetch_chunk((step >> 1) + 2);
            } else if (next < steps) {
                fetch_chunk(next >> 1);
                copies_commit();
                copies_wait<0>();
                __syncthreads();
            }
        }
        copies_commit();
        if (unpacks_first && next < steps) unpack_step(shared, low, high, next, spans_of(next), grid);
        if (busy) multiply_step(acc, shared, step, spans_of(step), wm, wn, g, t);
        if (!unpacks_first && next < steps) unpack_step(shared, low, high, next, spans_of(next), grid);
        copies_wait<0>();
        __syncthreads();
    }
    if (busy) store_tile(a, acc, w, wm, wn, g, t);
}
