// The product of large quantised matrices with the 1 to 16 rows of a window; small ones go through product_row.cu
// (plans.py, `together`). Order of summation: ops.py, `product`.
//
// A warp takes a *tile* of 8 or 16 weight rows and a chunk of 256 columns: the raw blocks come to shared memory by
// asynchronous copies some chunks ahead, four lanes unpack a row, a matrix step multiplies with up to 8 activation rows
// at once, so weights are read once however many rows the window has. The chunks of a tile belong to the `ring` warps of
// a ring in turn: each computes its terms alone and then waits for the running sums of the chunk before it, adds its own
// in the order of the row and hands them on. The order is the order of the row, whatever the launch.
//
// Constants: TYPE a format, ROWS weight rows of a tile (8, 16), NT eights of activation rows (1, 2), WARPS of a block,
// STAGES of a warp, COPIES of the type's table. Several matrices of one type with the same input: out (n, rows) each.
#include "device.cuh"
#include "formats.cuh"
#include "items.cuh"
#include "own_scales.cuh"
#include "quantize.cuh"
#include "turned_row.cuh"

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
    const float* join;   // null, or (n,): out = fma(sigmoid(join[row]), y, out)
    int early;           // works beside the kernel before it (intrinsics.cuh)
    int n, cols, tiles, ring;
    int at_scales, at_sums, at_mail, at_own, at_grid, at_stages;  // parts of shared memory, bytes
    int input_pitch, scale_pitch, sum_pitch;
};

typedef TYPE F;
enum {
    TURNABLE = Turnable<F>::YES,  // whether a lane may take other words of a group (TurnedRow), where all rows lie alike
    CHUNK_BYTES = 256 / F::BLOCK * F::BYTES,
    PITCH = ((CHUNK_BYTES + 15 + 4 + 15) / 16 | 1) * 16,  // of a row in a stage; an odd number of 16s spreads the banks
    STAGE = ROWS * PITCH,
    GROUPS = 256 / F::GROUP,
    PER_SPAN = 32 / F::GROUP,
    LINES = 2 * NT,          // columns whose scales a lane needs
    PART = ROWS / 8 * LINES,  // sums of a lane: row g, then row g + 8
    OWN = GROUPS / 4,         // groups of a row whose scales a lane makes
    OWN_PITCH = (GROUPS * (1 + F::OFFSET) * 4 / 16 | 1) * 16
};

struct Mail {
    float sums[32][PART];
};

struct Tile {  // where the rows of a tile lie
    const u8* data;
    int row, rows, matrix;  // first row, rows of the matrix, its number
};

DEVICE Tile tile_of(const Arguments& a, int item) {
    int m = 0, before = 0;
    while (item >= a.matrix[m].last_tile) before = a.matrix[m++].last_tile;
    return Tile{a.matrix[m].data, (item - before) * ROWS, a.matrix[m].rows, m};
}

// Row r of the tile; past the end the last row again (its results are dropped).
DEVICE const u8* row_of(const Tile& tile, int r, int row_bytes) {
    return tile.data + min(tile.row + r, tile.rows - 1) * (long long)row_bytes;
}

// n rows of so many bytes that lie side by side, EACH at a time, to rows `pitch` apart.
template <int EACH>
DEVICE void copy_rows(u8* to, const u8* from, int n, int bytes, int pitch) {
    int row = 0, at = EACH * threadIdx.x;
    for (; row < n; at += EACH * 32 * WARPS) {
        for (; at >= bytes && row < n; at -= bytes) row++;
        if (row == n) break;
        const u8* own = from + row * (long long)bytes + at;
        if (EACH == 16) copy16(to + row * pitch + at, own);
        else copy4(to + row * pitch + at, own);
    }
}

// A warp takes 32 octets of a row at a time, and reads AHEAD times first.
DEVICE void inputs_to_shared(const Arguments& a, u8* shared) {
    enum { AHEAD = 4 };
    const int octets = a.cols / 8, turns = (octets + 31) / 32, lane = threadIdx.x & 31;
    float* const d = (float*)(shared + a.at_scales);
    float* const sums = (float*)(shared + a.at_sums);
    const bool turnable = TURNABLE && a.cols / F::BLOCK * F::BYTES % 4 == 0;
    const auto turned = [&](int block) { return turnable && (block >> 3) * CHUNK_BYTES % 4 != 0; };
    if (!F::OFFSET && (!TURNABLE || CHUNK_BYTES % 4 == 0) && !a.x) {  // they lie as they are wanted: all are under way at once
        copy_rows<16>(shared, a.q, a.n, a.cols, a.input_pitch);
        copy_rows<4>(shared + a.at_scales, (const u8*)a.d, a.n, a.cols / 8, 4 * a.scale_pitch);
        copies_commit();
        copies_wait<0>();
        return;
    }
    int row = 0, turn = threadIdx.x >> 5;  // of the row
    const auto advance = [&]() {
        for (turn += WARPS; turn >= turns && row < a.n; turn -= turns) row++;
    };
    for (; turn >= turns && row < a.n; turn -= turns) row++;
    while (row < a.n) {
        int rows[AHEAD], at[AHEAD];
        float v[AHEAD][8], scale[AHEAD];
        uint2 q[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            rows[k] = row, at[k] = turn * 32 + lane;
            if (row >= a.n) break;
            const long long first = (long long)row * a.cols;
            if (a.x) {
                load_octet(v[k], a.x + first + 8 * min(at[k], octets - 1));
            } else if (at[k] < octets) {
                q[k] = *(const uint2*)(a.q + first + 8 * at[k]);
                scale[k] = a.d[row * (octets / 4) + (at[k] >> 2)];
            }
            advance();
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            const int o = at[k], block = o >> 2, u = o & 3;
            if (rows[k] >= a.n) break;
            u8* const to = shared + rows[k] * a.input_pitch;
            float* const own = sums + rows[k] * a.sum_pitch + block * PER_SPAN;
            if (a.x) {
                const Octet octet = quantize_octet(v[k]);
                if (o < octets && turned(block)) {
                    take_pair(to + 32 * block, u >> 1, 4 * (u & 1), octet.low);
                    take_pair(to + 32 * block, u >> 1, 4 * (u & 1) + 2, octet.high);
                } else if (o < octets) {
                    store_octet<F::ORDER>(to + 32 * block, u, octet);
                }
                if (o < octets && F::OFFSET) store_sums<F::GROUP>(own, u, octet);
                scale[k] = octet.d;
            } else if (o < octets) {
                if (turned(block)) take_pair(to + 32 * block, 0, 2 * u, q[k].x), take_pair(to + 32 * block, 1, 2 * u, q[k].y);
                else *(uint2*)(to + 8 * o) = q[k];
                if (F::OFFSET && u < PER_SPAN) own[u] = a.sums[(rows[k] * (octets / 4) + block) * PER_SPAN + u];
            }
            if (o < octets && u == 0) d[rows[k] * a.scale_pitch + block] = scale[k];
        }
    }
}

// The table with COPIES of each entry side by side. A thread reads an entry once, early (`Entries`), and stores 16 bytes of
// copies a turn, beginning at another place than its neighbours, so that their stores meet different banks.
#if HAS_TABLE
enum { WORDS = F::LOOK == WORD ? 1 : 2, OWN_ENTRIES = (F::GRID + 32 * WARPS - 1) / (32 * WARPS) };
struct Entries {
    u32 word[OWN_ENTRIES][WORDS];

    DEVICE Entries() {
#pragma unroll
        for (int i = 0; i < OWN_ENTRIES; i++)
#pragma unroll
            for (int w = 0; w < WORDS; w++)
                word[i][w] = table_words[min((int)threadIdx.x + i * 32 * WARPS, F::GRID - 1) * WORDS + w];
    }
    DEVICE void store(u8* to) const {
#pragma unroll
        for (int i = 0; i < OWN_ENTRIES; i++) {
            const int entry = threadIdx.x + i * 32 * WARPS;
            if (entry >= F::GRID) break;
            u8* own = to + entry * (COPIES * WORDS * 4);
            if (COPIES * WORDS < 4) {
                for (int k = 0; k < COPIES * WORDS; k++) ((u32*)own)[k] = word[i][k % WORDS];
                continue;
            }
            const uint4 four = make_uint4(word[i][0], word[i][1 % WORDS], word[i][0], word[i][1 % WORDS]);
            enum { TURNS = COPIES * WORDS / 4 > 0 ? COPIES * WORDS / 4 : 1 };
#pragma unroll
            for (int k = 0; k < TURNS; k++) ((uint4*)own)[(k + threadIdx.x) % TURNS] = four;
        }
    }
};
#else
struct Entries {
    DEVICE void store(u8*) const {}
};
#endif

// Copies of a chunk of the rows of a tile to a stage, 16 bytes a lane: LANES neighbours a row, whole sectors at once. One
// instruction a row (cp.async.bulk) would take its addresses from uniform registers, so the lanes would issue it in turn.
struct RowCopies {
    enum {
        MOST = (CHUNK_BYTES + 30) / 16,
        LANES = MOST <= 8 ? 8 : MOST <= 16 ? 16 : 32,
        AT_ONCE = 32 / LANES,  // rows
        TURNS = ROWS / AT_ONCE
    };

    // `from`: this lane's first byte of the chunk in its first row, `past` bytes behind the chunk's end; rows: from that one
    // on. Rows past the last are not copied, and what comes of them is dropped.
    DEVICE static void begin(u8* to, const u8* from, int row_bytes, int rows, int past) {
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            if (i * AT_ONCE < rows && past < (int)((u64)from & 15)) copy16(to + i * (AT_ONCE * PITCH), (const u8*)((u64)from & ~15ull));
            from += AT_ONCE * row_bytes;
        }
    }
};

struct Columns {  // what a lane reads of the activations: inputs of column g, scales and sums of columns 2 t, 2 t + 1
    const u8* input[NT];
    const float* scales[LINES];
    const float* sums[LINES];
};

// The sums of codes of span s, one or two groups: sum[k][0, 1] row g and columns 2 t, 2 t + 1, sum[k][2, 3] row g + 8.
DEVICE void span_sums(int (&sum)[PER_SPAN][4], const u32 (&c)[4], const u8* input) {
    const uint2 b = *(const uint2*)input;
    if (F::GROUP == 32) {
        multiply32<ROWS>(sum[0], c, b.x, b.y);
    } else {
        multiply16<ROWS>(sum[0], c[0], c[1], b.x);
        multiply16<ROWS>(sum[PER_SPAN - 1], c[2], c[3], b.y);
    }
}

// The codes of a row's chunk, as lane t has them.
struct RowCodes {
    const u8* p;
    int t;
    Grid grid;

    DEVICE RowCodes(const u8* p, int t, Grid grid) : p(p), t(t), grid(grid) {}
    DEVICE void span(int s, u32& c0, u32& c1) const { F::span(p, s, t, grid, c0, c1); }
};

template <class Codes>
DEVICE void span_codes(u32 (&c)[4], const Codes (&rows)[2], int s) {
    c[1] = c[3] = 0;
    rows[0].span(s, c[0], c[2]);
    if (ROWS == 16) rows[1].span(s, c[1], c[3]);
}

// The products of a chunk, as sums by groups.
template <class Codes>
DEVICE void chunk_sums(int (&sums)[GROUPS][PART], const Codes (&rows)[2], const Columns& columns, int chunk, int spans) {
#pragma unroll
    for (int s = 0; s < 8; s++) {
        if (F::BLOCK < 256 && s == 4 && spans <= 4) break;  // what lies past a short chunk is computed and not added
        u32 c[4];
        span_codes(c, rows, s);
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            int sum[PER_SPAN][4];
            span_sums(sum, c, columns.input[nt] + 256 * chunk + 32 * s);
#pragma unroll
            for (int k = 0; k < PER_SPAN; k++)
#pragma unroll
                for (int h = 0; h < ROWS / 8; h++)
#pragma unroll
                    for (int i = 0; i < 2; i++) sums[s * PER_SPAN + k][h * LINES + 2 * nt + i] = sum[k][2 * h + i];
        }
    }
}

// The same of eight rows: in the place of eight more of them lie the second words of a span, or those of the next one, of which
// the activations in turn make the other half of the results. Zeros there would be made again for each step.
template <class Codes>
DEVICE void chunk_sums_of_eight(int (&sums)[GROUPS][PART], const Codes& row, const Columns& columns, int chunk, int spans) {
#pragma unroll
    for (int s = 0; s < 8; s += 2) {
        if (F::BLOCK < 256 && s == 4 && spans <= 4) break;  // what lies past a short chunk is computed and not added
        u32 w[4];
        row.span(s, w[0], w[2]), row.span(s + 1, w[1], w[3]);
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const uint2 b = *(const uint2*)(columns.input[nt] + 256 * chunk + 32 * (s + k));
                int c[4], other[4];
                if (F::GROUP == 32) multiply32<16>(c, w, b.x, b.y);
                else multiply16<16>(c, w[k], w[2 + k], b.x), multiply16<16>(other, w[k], w[2 + k], b.y);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    sums[(s + k) * PER_SPAN][2 * nt + i] = c[F::GROUP == 32 ? 2 * k + i : i];
                    if (F::GROUP == 16) sums[(s + k) * PER_SPAN + PER_SPAN - 1][2 * nt + i] = other[2 + i];
                }
            }
    }
}

DEVICE void leave(float* to, const float (&own)[OWN]) {
    if (OWN == 4) *(float4*)to = make_float4(own[0], own[1], own[2 % OWN], own[3 % OWN]);
    else *(float2*)to = make_float2(own[0], own[1]);
}

DEVICE void take(float (&all)[GROUPS], const float* from) {
#pragma unroll
    for (int i = 0; i < GROUPS / 4; i++) {
        const float4 v = ((const float4*)from)[i];
        all[4 * i] = v.x, all[4 * i + 1] = v.y, all[4 * i + 2] = v.z, all[4 * i + 3] = v.w;
    }
}

// The terms of a chunk: products scaled, not yet by the activations' scales. `own`: the scales and offsets of row g of the
// tile, which are made here; those of row g + 8 are 8 OWN_PITCH further.
DEVICE void chunk_terms(float (&terms)[GROUPS][PART], u8* own, const u8* p0, const u8* p1, Grid grid, const Columns& columns,
                        int chunk, int t, int spans, bool turned) {
#pragma unroll
    for (int h = 0; h < ROWS / 8; h++) {
        const u8* p = h ? p1 : p0;
        float* to = (float*)(own + 8 * h * OWN_PITCH) + OWN * t;
        const OwnScales<F> made(p, t);
        leave(to, made.scale);
        if (F::OFFSET) leave(to + GROUPS, made.offset);
    }
    int sums[GROUPS][PART] = {};
    enum { EIGHT_ROWS = ROWS == 8 && ARCH >= 800 };  // older ones have steps of eight rows
    if (TURNABLE && turned) {
        const TurnedRow rows[] = {TurnedRow(p0, t, grid), TurnedRow(ROWS == 16 ? p1 : p0, t, grid)};
        if (EIGHT_ROWS) chunk_sums_of_eight(sums, rows[0], columns, chunk, spans);
        else chunk_sums(sums, rows, columns, chunk, spans);
    } else {
        const RowCodes rows[] = {RowCodes(p0, t, grid), RowCodes(ROWS == 16 ? p1 : p0, t, grid)};
        if (EIGHT_ROWS) chunk_sums_of_eight(sums, rows[0], columns, chunk, spans);
        else chunk_sums(sums, rows, columns, chunk, spans);
    }
    __syncwarp();
#pragma unroll
    for (int h = 0; h < ROWS / 8; h++) {
        float scales[GROUPS];
        take(scales, (const float*)(own + 8 * h * OWN_PITCH));
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const float lift = scales[g] * -MAGIC;
#pragma unroll
            for (int i = 0; i < LINES; i++) terms[g][h * LINES + i] = scaled(sums[g][h * LINES + i], scales[g], lift);
        }
    }
}

DEVICE void add_terms(float (&acc)[PART], const float (&terms)[GROUPS][PART], const float (&d)[LINES][8], const u8* own,
                      const Columns& columns, int chunk, int spans) {
    float offsets[ROWS / 8][GROUPS];
#pragma unroll
    for (int h = 0; h < ROWS / 8; h++)
        if (F::OFFSET) take(offsets[h], (const float*)(own + 8 * h * OWN_PITCH) + GROUPS);
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const int s = g / PER_SPAN;
        if (F::BLOCK < 256 && s >= spans) continue;
#pragma unroll
        for (int h = 0; h < ROWS / 8; h++)
#pragma unroll
            for (int i = 0; i < LINES; i++) {
                float& sum = acc[h * LINES + i];
                sum = fmaf(terms[g][h * LINES + i], d[i][s], sum);
                if (F::OFFSET) sum = fmaf(columns.sums[i][chunk * GROUPS + g] * offsets[h][g], d[i][s], sum);
            }
    }
}

DEVICE void take_sums(float (&acc)[PART], Mail* mail, Box* box, u32 turn, int lane) {
    box_wait_full(box, turn);
#pragma unroll
    for (int i = 0; i < PART; i++) acc[i] = mail->sums[lane][i];
    box_empty(box, lane);
}

DEVICE void hand_sums(const float (&acc)[PART], Mail* mail, Box* box, u32 turn, int lane) {
    box_wait_empty(box, turn);
#pragma unroll
    for (int i = 0; i < PART; i++) mail->sums[lane][i] = acc[i];
    box_fill(box, lane);
}

// The finished sums of a tile to where they go.
DEVICE void finish(const Arguments& a, const float (&acc)[PART], const Tile& tile, int g, int t) {
#pragma unroll
    for (int i = 0; i < LINES; i++) {
        const int column = 8 * (i / 2) + 2 * t + i % 2;
        if (column >= a.n) continue;
        float* out = a.matrix[tile.matrix].out + (long long)column * tile.rows;
        const float weight = a.join ? sigmoid_f32(a.join[column]) : 0.0f;
#pragma unroll
        for (int h = 0; h < ROWS / 8; h++) {
            const int row = tile.row + 8 * h + g;
            const float sum = acc[h * LINES + i];
            if (row < tile.rows) out[row] = a.join ? fmaf(weight, sum, out[row]) : sum;
        }
    }
}

KERNEL __launch_bounds__(32 * WARPS, 1) void product_window(PARAMETER Arguments a) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ Box boxes[WARPS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int chunks = (a.cols + 255) / 256, row_bytes = a.cols / F::BLOCK * F::BYTES;
    if (lane == 0) box_init(&boxes[warp]);
    if (a.early) next_may_come();
    const Entries entries;

    // The items of this ring: item, then + step, below items.
    const int ring = warp / a.ring, place = warp - ring * a.ring, rings = WARPS / a.ring;
    const int items = ring >= rings ? 0 : a.tiles;  // left-over warps rest
    const int begin = ring * gridDim.x + blockIdx.x, step = rings * gridDim.x;

    // Copies run STAGES - 1 chunks ahead.
    u8* const stages = shared + a.at_stages + warp * (STAGES * STAGE);
    const int copy_row = lane / RowCopies::LANES, copy_byte = 16 * (lane % RowCopies::LANES);  // this lane's first ones
    u8* const copy_to = stages + copy_row * PITCH + copy_byte;
    int load_item = begin, load_chunk = place, load_stage = 0, loaded_item = -1, load_rows = 0;  // rows: from this lane's first on
    const u8* load_from = 0;  // of this lane's first row, its first byte
    auto load = [&]() {
        while (load_chunk >= chunks) load_chunk -= chunks, load_item += step;
        if (load_item < items) {
            if (load_item != loaded_item) {
                const Tile tile = tile_of(a, load_item);
                load_from = tile.data + ((tile.row + copy_row) * (long long)row_bytes + copy_byte);
                load_rows = tile.rows - tile.row - copy_row;
                loaded_item = load_item;
            }
            const int at = load_chunk * CHUNK_BYTES;
            const int bytes = F::BLOCK == 256 ? (int)CHUNK_BYTES : min((int)CHUNK_BYTES, row_bytes - at);
            RowCopies::begin(copy_to + load_stage, load_from + at, row_bytes, load_rows, copy_byte - bytes);
        }
        copies_commit();
        load_chunk += a.ring;
        load_stage = load_stage == (STAGES - 1) * STAGE ? 0 : load_stage + STAGE;
    };
#pragma unroll 1
    for (int i = 1; i < STAGES; i++) load();

    if (!a.early) inputs_ready();
    inputs_to_shared(a, shared);
    entries.store(shared + a.at_grid);
    __syncthreads();
    if (!a.early) trace_mark(2);

    const int copy = COPIES == 1 ? 0 : (F::LOOK == HALF ? lane >> 1 : lane) % COPIES;
    const Grid grid{shared + a.at_grid + copy * (F::LOOK == WORD ? 4 : 8)};
    Mail* const mail = (Mail*)(shared + a.at_mail);
    const int next = place + 1 == a.ring ? warp - place : warp + 1;
    u8* const own = shared + a.at_own + (warp * ROWS + g) * OWN_PITCH;

    Columns columns;  // activation rows by number, past the last the last again
#pragma unroll
    for (int nt = 0; nt < NT; nt++) columns.input[nt] = shared + min(8 * nt + g, a.n - 1) * a.input_pitch + 8 * t;
#pragma unroll
    for (int i = 0; i < LINES; i++) {
        const int row = min(8 * (i / 2) + 2 * t + i % 2, a.n - 1);
        columns.scales[i] = (const float*)(shared + a.at_scales) + row * a.scale_pitch;
        columns.sums[i] = (const float*)(shared + a.at_sums) + row * a.sum_pitch;
    }

    Tile tile;
    int item = begin, chunk = place, stage = 0, seen_item = -1;
    u32 low = 0, high = 0;  // address bits of rows g and g + 8
    u32 taken = 0, handed = 0;
    float acc[PART];
    for (;;) {
        while (chunk >= chunks) chunk -= chunks, item += step;
        if (item >= items) break;
        if (item != seen_item) {
            tile = tile_of(a, item);
            low = (u32)(u64)row_of(tile, g, row_bytes);
            if (ROWS == 16) high = (u32)(u64)row_of(tile, g + 8, row_bytes);
            seen_item = item;
        }
        load();
        copies_wait<STAGES - 1>();
        __syncwarp();

        const u8* from = stages + stage + g * PITCH;
        const u8* p0 = from + ((low + chunk * CHUNK_BYTES) & 15);
        const u8* p1 = from + 8 * PITCH + ((high + chunk * CHUNK_BYTES) & 15);
        const int spans = min(8, a.cols / 32 - 8 * chunk);
        float terms[GROUPS][PART], d[LINES][8];
        chunk_terms(terms, own, p0, p1, grid, columns, chunk, t, spans, row_bytes % 4 == 0);
#pragma unroll
        for (int i = 0; i < GROUPS * PART; i++) KEEP(terms[i / PART][i % PART]);
#pragma unroll
        for (int i = 0; i < LINES; i++) {
            const float4 u = *(const float4*)(columns.scales[i] + 8 * chunk);
            const float4 v = *(const float4*)(columns.scales[i] + 8 * chunk + 4);
            d[i][0] = u.x, d[i][1] = u.y, d[i][2] = u.z, d[i][3] = u.w;
            d[i][4] = v.x, d[i][5] = v.y, d[i][6] = v.z, d[i][7] = v.w;
        }
        if (chunk == 0) {
#pragma unroll
            for (int i = 0; i < PART; i++) acc[i] = 0.0f;
        } else if (a.ring > 1) {
            take_sums(acc, mail + warp, &boxes[warp], taken++, lane);
        }
        if (F::BLOCK == 256 || spans == 8) add_terms(acc, terms, d, own, columns, chunk, 8);
        else add_terms(acc, terms, d, own, columns, chunk, spans);
        if (chunk + 1 == chunks) finish(a, acc, tile, g, t);
        else if (a.ring > 1) hand_sums(acc, mail + next, &boxes[next], handed++, lane);
        __syncwarp();  // the stage is free for the copies of the next turn
        chunk += a.ring;
        stage = stage == (STAGES - 1) * STAGE ? 0 : stage + STAGE;
    }
    if (a.early) inputs_ready();
    else trace_mark(3);
}
