// The product of quantised weights with the rows of a window. Order of summation: ops.py, `product`.
//
// Weights and rows of activations meet in *items* (items.cuh): a lane holds an item of a weight row and multiplies it with
// up to COLUMNS rows of activations, alone. A block owns the same range of weight rows of every *source*: of each matrix, or
// of the expert of each pair (row, rank); a pair is a source of its own, with one row of activations. The rows of a source
// are cut into *strips*, a strip by columns into *pieces*. A lane puts the terms of its item into the table of the piece;
// when the piece is there, the SUMMERS add its terms, a lane a sum, in the order of the row, and go on with the next piece.
// So a lane waits for others only at the table, and the order is that of the row whatever the launch.
//
// Raw bytes come to shared memory by asynchronous copies, DEPTH - 1 *turns* of a warp ahead. TALL = 0: a turn is four units
// of 8 items that lie side by side in memory, also across rows: for pieces of whole rows. TALL = 4, 8: a turn is so many
// rows of some blocks, so that lanes share their activations.
//
// Constants: TYPE a format, SPANS of an item, COLUMNS (1, 2, 4, 8), TALL, WARPS of a block, SUMMERS of them, DEPTH, blocks
// that a multiprocessor holds (BESIDE), COPIES of the type's table, ALIGNED = 1 when every block begins at a multiple of 16, and MODE:
//   DENSE    several matrices of one type with the same rows; out (n, rows) each
//   GATE_UP  out = silu(gate x) * (up x): of experts (pairs, rows), or of two matrices (n, rows)
//   DOWN     experts, the pairs' own inputs; out (n, rows) = weighted sum in rank order, from 0
//   PAIRS    experts, one matrix; out (pairs, rows): for gate and up of different types
// Pairs go by their expert, so that those with the same one read its weights about the same time. An expert without an
// address is skipped; DOWN then takes the pair's output from `given`.
#include "device.cuh"
#include "formats.cuh"
#include "items.cuh"
#include "quantize.cuh"
#include "gate.cuh"

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
    int turns, turn_inverse;      // of a piece's rows of one matrix; TALL = 0: units
    int strip;                    // rows of a strip at most
    int parts, part_inverse;      // pieces of a strip
    int part_items;               // items of a piece's row at most
    int groups, group_inverse;    // TALL: groups of so many rows in a strip
    int regions, region_inverse;  // pieces that the table of terms holds
    int readers;                  // summers that have sums
    int at_scales, at_sums, at_keys, at_strips, at_outs, at_terms, at_grid, at_stages, at_y;  // parts of shared memory, bytes
    int input_pitch, scale_pitch, sum_pitch, term_pitch;
};

typedef TYPE F;
#if COLUMNS == 1
typedef Item<F> I;
#else
typedef Plain<F> I;
#endif
enum {
    PARTS = F::BLOCK == 256 ? 8 / SPANS : 1,                                          // items of a block
    ITEM_BYTES = F::BLOCK == 256 ? (int)F::BYTES : SPANS * 32 / F::BLOCK * F::BYTES,  // of the blocks of an item
    UNIT_BYTES = 8 / PARTS * ITEM_BYTES,
    UNIT_PITCH = (UNIT_BYTES + 15 + 4 + 15) / 16 * 16,  // at any alignment, and a word past it
    BLOCKS = TALL ? 32 / TALL / PARTS : 0,              // TALL: of a row in a turn
    ROW_PITCH = ((BLOCKS * ITEM_BYTES + 15 + 4 + 15) / 16 | 1) * 16,  // an odd number of 16s spreads the banks
    STAGE = TALL ? TALL * ROW_PITCH : 4 * UNIT_PITCH,
    WORKERS = WARPS - SUMMERS,
    ITEM_TERMS = SPANS * I::PER,
    INPUT = 32 * SPANS + 16,
    NEEDS_SUMS = F::OFFSET || I::FOLD,
    PER_SPAN = 32 / F::GROUP,
    MOST_REGIONS = 16,
    HALVES = MODE == GATE_UP ? 2 : 1,  // gate, then up
    SUMS = MODE == GATE_UP ? 16 : 32   // of a summer, for each half
};

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
    const long long row_bytes = a.cols / F::BLOCK * F::BYTES;
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

DEVICE void store_input(const Arguments& a, u8* shared, int row, int o, uint2 words, float d, int group_sum) {
    const int span = o >> 2, u = o & 3, item = span / SPANS, s = span - item * SPANS;
    *(uint2*)(shared + row * a.input_pitch + item * INPUT + 32 * s + 8 * u) = words;
    if (u == 0) ((float*)(shared + a.at_scales))[row * a.scale_pitch + span] = d;
    if (NEEDS_SUMS && u < PER_SPAN) {
        int* sums = (int*)(shared + a.at_sums) + row * a.sum_pitch + span * PER_SPAN + u;
        *sums = F::OFFSET ? __float_as_int((float)group_sum) : group_sum;
    }
}

// The words of thread u in the order of the items, from those in the order of the format.
DEVICE uint2 ordered(u32 x, u32 y) {
    if ((int)I::ORDER != PAIRED) return make_uint2(x, y);
    return make_uint2(permute(x, y, 0x5140), permute(x, y, 0x7362));
}

// Inputs as the items want them. A warp takes 32 octets of a row at a time.
DEVICE void inputs_to_shared(const Arguments& a, u8* shared, int inputs) {
    const int octets = a.cols / 8, turns = (octets + 31) / 32, lane = threadIdx.x & 31;
    for (int i = threadIdx.x >> 5; i < inputs * turns; i += WARPS) {
        const int row = i / turns, o = (i - row * turns) * 32 + lane, u = o & 3, here = min(o, octets - 1);
        u32 x, y;
        float d;
        if (a.x) {
            float v[8];
            load_octet(v, a.x + (long long)row * a.cols + 8 * here);
            const Octet octet = quantize_octet(v);
            d = octet.d;
            if ((int)F::ORDER == NATIVE) {  // octets 0, 1 and 2, 3 of a block: threads 0 to 3 take a word of either half
                const int from = (lane & ~3) + (u >> 1);
                const u32 low = __shfl_sync(~0u, octet.low, from), high = __shfl_sync(~0u, octet.high, from);
                const u32 low2 = __shfl_sync(~0u, octet.low, from + 2), high2 = __shfl_sync(~0u, octet.high, from + 2);
                x = u & 1 ? high : low, y = u & 1 ? high2 : low2;
            } else if ((int)F::ORDER == EVEN_ODD) {
                x = permute(octet.low, octet.high, 0x6420), y = permute(octet.low, octet.high, 0x7531);
            } else {
                x = octet.low, y = octet.high;
            }
        } else {
            const long long at = (long long)row * octets + here;
            const uint2 q = *(const uint2*)(a.q + 8 * at);
            x = q.x, y = q.y, d = a.d[at >> 2];
        }
        int sum = 0;
        if (NEEDS_SUMS) {
            int of_x = __dp4a((int)x, 0x01010101, 0), of_y = __dp4a((int)y, 0x01010101, 0);
            if (PER_SPAN == 1) of_x += of_y;
            of_x += __shfl_xor_sync(~0u, of_x, 1), of_y += __shfl_xor_sync(~0u, of_y, 1);
            of_x += __shfl_xor_sync(~0u, of_x, 2), of_y += __shfl_xor_sync(~0u, of_y, 2);
            sum = PER_SPAN == 2 && u == 1 ? of_y : of_x;
        }
        if (o < octets) store_input(a, shared, row, o, ordered(x, y), d, sum);
    }
}

#if HAS_TABLE
// The table with COPIES of each entry side by side; of an odd code c what items.cuh wants, (c - 1) / 2.
DEVICE void table_to_shared(u8* to) {
    enum { WORDS = F::LOOK == WORD ? 1 : 2, EACH = WORDS * COPIES, AT_ONCE = EACH % 4 == 0 ? 4 : EACH };
#pragma unroll 4
    for (int i = threadIdx.x * AT_ONCE; i < F::GRID * EACH; i += 32 * WARPS * AT_ONCE) {
        u32 words[2];
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            words[w] = table_words[i / EACH * WORDS + w];
            if (I::ODD_CODES) words[w] = (words[w] - 0x01010101u) >> 1;
        }
        if (AT_ONCE == 4) *(uint4*)(to + 4 * i) = make_uint4(words[0], words[WORDS - 1], words[0], words[WORDS - 1]);
        else
            for (int k = 0; k < AT_ONCE; k++) ((u32*)to)[i + k] = words[k % WORDS];
    }
}
#else
DEVICE void table_to_shared(u8*) {}
#endif

// A sum of terms in their order; those of the next eight are read while eight are added.
struct Eight {
    float t[8], d[8 / I::PER];

    DEVICE void load(const float* terms, const float* scales) {
        const float4 u = *(const float4*)terms, v = *(const float4*)(terms + 4);
        t[0] = u.x, t[1] = u.y, t[2] = u.z, t[3] = u.w, t[4] = v.x, t[5] = v.y, t[6] = v.z, t[7] = v.w;
        if (I::PER == 4) {
            const float2 s = *(const float2*)scales;
            d[0] = s.x, d[1] = s.y;
        } else {
#pragma unroll
            for (int i = 0; i < 8 / I::PER; i += 4) {
                const float4 s = *(const float4*)(scales + i);
                d[i] = s.x, d[i + 1] = s.y, d[i + 2] = s.z, d[i + 3] = s.w;
            }
        }
    }
    DEVICE float add(float sum) const {
#pragma unroll
        for (int i = 0; i < 8; i++) sum = fmaf(t[i], d[i / I::PER], sum);
        return sum;
    }
};

DEVICE float add_row(float sum, const float* terms, const float* scales, int count) {
    const int eights = count / 8;
    Eight next;
    if (eights) next.load(terms, scales);
#pragma unroll 2
    for (int i = 0; i < eights; i++) {
        const Eight now = next;
        if (i + 1 < eights) next.load(terms + 8 * (i + 1), scales + 8 / I::PER * (i + 1));
        sum = now.add(sum);
    }
    for (int i = 8 * eights; i < count; i++) sum = fmaf(terms[i], scales[i / I::PER], sum);
    return sum;
}

DEVICE void finish(const Arguments& a, const Out& out, float sum, int half, int r, int column) {
    const float up = MODE == GATE_UP ? __shfl_down_sync(~0u, sum, 16) : 0.0f;
    if (r >= out.rows || half || (COLUMNS > 1 && column >= a.n)) return;
    float* to = out.to + (COLUMNS > 1 ? (long long)column * out.pitch + r : r);
    if (MODE == GATE_UP) *to = silu_f32(sum) * up;
    else *to = MODE == DENSE && a.join ? fmaf(sigmoid_f32(a.join[column]), sum, *to) : sum;
}

// One of the SUMMERS: its sums of all strips, piece by piece.
DEVICE void add_pieces(const Arguments& a, const u8* shared, const Tables& tables, Gate* gates, int pieces, int summer) {
    const int lane = threadIdx.x & 31, half = MODE == GATE_UP ? lane >> 4 : 0;
    const int at = SUMS * summer + lane % SUMS, r = at / COLUMNS, column = at % COLUMNS;
    if (SUMS * summer >= a.strip * COLUMNS) return;
    int turn = 0, region = 0, strip = 0, part = 0;
    float sum = 0.0f;
    for (int piece = 0; piece < pieces; piece++) {
        const Strip own = tables.strips[HALVES * strip];
        const int row = ((region * HALVES + half) * a.strip + min(r, own.rows - 1)) * COLUMNS + column, first = part * a.part_items;
        const float* scales = (const float*)(shared + a.at_scales) + (own.input + min(column, COLUMNS > 1 ? a.n - 1 : 0)) * a.scale_pitch;
        gate_wait_full(&gates[region], turn, HALVES * a.turns);
        sum = add_row(part ? sum : 0.0f, (const float*)(shared + a.at_terms) + row * a.term_pitch, scales + first * SPANS,
                      min(a.part_items, a.items - first) * ITEM_TERMS);
        __syncwarp();
        if (lane == 0) gate_read(&gates[region]);
        if (++region == a.regions) region = 0, turn++;
        if (++part < a.parts) continue;
        part = 0;
        finish(a, tables.outs[strip++], sum, half, r, column);
    }
}

// The pairs of the block's rows joined in rank order.
DEVICE void join_rows(const Arguments& a, const int* keys, const float* y) {
    const int rows = a.matrix[0].rows, begin = first_row(rows, blockIdx.x), own = first_row(rows, blockIdx.x + 1) - begin;
    for (int i = threadIdx.x; i < own * a.n; i += 32 * WARPS) {
        const int token = i / own, r = i - token * own;
        float acc = 0.0f;
        for (int k = 0; k < a.used; k++) {
            const int p = token * a.used + k;
            const float own_y = keys[p] != SKIPPED ? y[p * own + r] : a.given[(long long)p * rows + begin + r];
            acc = fmaf(a.weights[p], own_y, acc);
        }
        const long long at = (long long)token * rows + begin + r;
        a.matrix[0].out[at] = a.beside ? fmaf(sigmoid_f32(a.join[token]), a.beside[at], acc) : acc;
    }
}

// The compiler must have the value here.
#define KEEP_POINTER(x) asm volatile("" : "+l"(x))

struct Place {  // of a turn, or of a unit
    Strip strip;
    int piece, half, part, number;  // number: in the piece's rows of one matrix
};

DEVICE Place place_of(const Arguments& a, const Strip* strips, int number) {
    Place p;
    const int rows = divide(number, a.turns, a.turn_inverse);
    p.number = number - rows * a.turns;
    p.half = MODE == GATE_UP ? rows & 1 : 0;
    p.piece = rows / HALVES;
    const int strip = TALL ? divide(p.piece, a.parts, a.part_inverse) : p.piece;
    p.part = TALL ? p.piece - strip * a.parts : 0;
    p.strip = strips[strip * HALVES + p.half];
    return p;
}

// `bytes` from an address to a stage, 16 at a time by LANES neighbours.
template <int LANES, int MOST>
DEVICE void copy_bytes(u8* to, const u8* from, int bytes, int lane) {
    const int shift = (int)((u64)from & 15), end = shift + bytes - 16 * lane;
    from += 16 * lane - shift;
    KEEP_POINTER(from);  // the addresses of the turns are this one and a constant
    to += 16 * lane;
#pragma unroll
    for (int i = 0; i < (MOST + 15 + 16 * LANES - 1) / (16 * LANES); i++)
        if (16 * LANES * i < end) copy16(to + 16 * LANES * i, from + 16 * LANES * i);
}

struct Turn {  // what a warp works on: of the lane
    const u8* stages;  // of the warp
    int lane, row_bytes;

    // TALL: first row in the strip and first block in the row of a turn.
    DEVICE int row(const Arguments& a, const Place& p) const {
        return (p.number - divide(p.number, a.groups, a.group_inverse) * a.groups) * TALL;
    }
    DEVICE int block(const Arguments& a, const Place& p) const {
        return p.part * a.part_items / PARTS + divide(p.number, a.groups, a.group_inverse) * BLOCKS;
    }

    DEVICE void load(const Arguments& a, const Strip* strips, int number, int all, int stage) const {
        u8* const to = (u8*)stages + stage * STAGE;
        if (number < all) {
            const Place p = place_of(a, strips, number);
            if (TALL) {
                const int row = this->row(a, p), block = this->block(a, p), rows = p.strip.rows - row;
                const int blocks = min((int)BLOCKS, min(a.items, (p.part + 1) * a.part_items) / PARTS - block);
                const u8* from = p.strip.from + ((long long)row * row_bytes + block * ITEM_BYTES);
#pragma unroll
                for (int r = 0; r < TALL; r++, from += row_bytes)
                    if (r < rows) copy_bytes<32, BLOCKS * ITEM_BYTES>(to + r * ROW_PITCH, from, blocks * ITEM_BYTES, lane);
            } else {
                const int left = p.strip.rows * a.items - 8 * p.number;
                copy_bytes<8, UNIT_BYTES>(to + (lane >> 3) * UNIT_PITCH, p.strip.from + p.number * UNIT_BYTES,
                                          min((int)UNIT_BYTES, left * ITEM_BYTES / PARTS), lane & 7);
            }
        }
        copies_commit();
    }
};

struct Mine {  // the item of a lane
    const u8* p;   // its bytes
    int r, item;   // row in the strip, item in the row
    bool there;
};

DEVICE Mine item_of(const Arguments& a, const Turn& turn, const Place& p, int stage) {
    const int lane = turn.lane;
    const u8* const at = turn.stages + stage * STAGE;
    Mine m;
    if (TALL) {
        const int own = lane % (TALL ? TALL : 1), part = lane / (TALL ? TALL : 1), block = turn.block(a, p);
        m.r = turn.row(a, p) + own;
        m.item = block * PARTS + part;
        m.there = m.r < p.strip.rows && m.item < min(a.items, (p.part + 1) * a.part_items);
        const u32 shift = ((u32)(u64)p.strip.from + m.r * turn.row_bytes + block * ITEM_BYTES) & 15;
        m.p = at + own * ROW_PITCH + shift + part / PARTS * ITEM_BYTES;
    } else {
        const int item = 8 * p.number + (lane & 7);
        m.r = divide(item, a.items, a.item_inverse);
        m.item = item - m.r * a.items;
        m.there = m.r < p.strip.rows;
        const u32 shift = ((u32)(u64)p.strip.from + p.number * UNIT_BYTES) & 15;
        m.p = at + (lane >> 3) * UNIT_PITCH + shift + (lane & 7) / PARTS * ITEM_BYTES;
    }
    return m;
}

DEVICE void store_terms(float* to, const float (&terms)[ITEM_TERMS]) {
    if (ITEM_TERMS % 4 == 0) {
#pragma unroll
        for (int i = 0; i < ITEM_TERMS / 4; i++)
            ((float4*)to)[i] = make_float4(terms[4 * i], terms[4 * i + 1], terms[4 * i + 2], terms[4 * i + 3]);
    } else {
#pragma unroll
        for (int i = 0; i < ITEM_TERMS; i++) to[i] = terms[i];
    }
}

// The terms of a lane's item, when its place in the table is free.
DEVICE void multiply(const Arguments& a, u8* shared, const Place& p, const Mine& mine, Gate* gates, Grid grid, int region,
                     int turn) {
    const int first = F::BLOCK == 256 ? mine.item % PARTS * SPANS : 0, item = min(mine.item, a.items - 1);
    const u8* q = shared + p.strip.input * a.input_pitch + item * INPUT;
    const auto* sums = (const typename I::Sum*)(shared + a.at_sums) + p.strip.input * a.sum_pitch + item * (SPANS * PER_SPAN);
    const int row = ((region * HALVES + p.half) * a.strip + mine.r) * COLUMNS;
    float* to = (float*)(shared + a.at_terms) + row * a.term_pitch + (mine.item - p.part * a.part_items) * ITEM_TERMS;
    float terms[ITEM_TERMS];
#if COLUMNS == 1
    I::template run<SPANS>(terms, mine.p, first, grid, q, sums);
    if (turn > 0) gate_wait_read(&gates[region], turn, a.readers);
    if (mine.there) store_terms(to, terms);
#else
    const Codes<F, SPANS> codes(mine.p, first, grid);
    if (turn > 0) gate_wait_read(&gates[region], turn, a.readers);
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        if (c >= a.n) break;
        codes.terms(terms, q + c * a.input_pitch, sums + c * a.sum_pitch);
        if (mine.there) store_terms(to + c * a.term_pitch, terms);
    }
#endif
}

KERNEL __launch_bounds__(32 * WARPS, BESIDE) void product_row(PARAMETER Arguments a) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ Gate gates[MOST_REGIONS];
    __shared__ int count;
    enum { AT_ONCE = TALL ? 1 : 4, STEP = AT_ONCE * WORKERS };
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const Tables tables{(Strip*)(shared + a.at_strips), (Out*)(shared + a.at_outs), (int*)(shared + a.at_keys),
                        (float*)(shared + a.at_y)};
    if (threadIdx.x < a.regions) gate_init(&gates[threadIdx.x], HALVES * a.turns);
    if (threadIdx.x == 0) count = 0;
    if (a.early) next_may_come();
    else if ((MODE == GATE_UP && a.ids) || MODE == PAIRS) inputs_ready();  // the picks say which weights
    find_strips(a, tables, &count);  // DOWN: the picks are older than the kernel before
    __syncthreads();
    const int pieces = count * a.parts, all = pieces * (HALVES * a.turns);

    const Turn turn{shared + a.at_stages + warp * (DEPTH * STAGE), lane, a.cols / F::BLOCK * F::BYTES};
    const bool worker = warp < WORKERS;
    int number = AT_ONCE * warp + (TALL ? 0 : lane >> 3);
    if (worker) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) turn.load(a, tables.strips, number + i * STEP, all, i);
    }
    table_to_shared(shared + a.at_grid);
    if ((MODE == DENSE || (MODE == GATE_UP && !a.ids) || MODE == DOWN) && !a.early) inputs_ready();
    inputs_to_shared(a, shared, MODE == DOWN ? a.n * a.used : a.n);
    __syncthreads();

    if (!worker) {
        add_pieces(a, shared, tables, gates, pieces, warp - WORKERS);
    } else {
        const int copy = COPIES == 1 ? 0 : (F::LOOK == HALF ? lane >> 1 : lane) % COPIES;
        const Grid grid{shared + a.at_grid + copy * (F::LOOK == WORD ? 4 : 8)};
        int stage = 0;
        for (int first = AT_ONCE * warp; first < all; first += STEP, number += STEP) {
            copies_wait<DEPTH - 1>();
            __syncwarp();
            const Place place = place_of(a, tables.strips, min(number, all - 1));
            const int filling = divide(place.piece, a.regions, a.region_inverse), region = place.piece - filling * a.regions;
            Mine mine = item_of(a, turn, place, stage);
            mine.there &= number < all;
            multiply(a, shared, place, mine, gates, grid, region, filling);
            __syncwarp();  // the terms are there, and the stage is free
            if ((TALL ? lane : lane & 7) == 0 && number < all) gate_filled(&gates[region]);
            turn.load(a, tables.strips, number + DEPTH * STEP, all, stage);
            stage = stage + 1 == DEPTH ? 0 : stage + 1;
        }
        copies_wait<0>();
    }
    if (a.early) inputs_ready();
    if (MODE == DOWN) {
        __syncthreads();
        join_rows(a, tables.keys, tables.y);
    }
}
