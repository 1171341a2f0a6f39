// The product of quantised weights with single rows of activations: a window of one row, and the experts of a window, whose
// pairs (row, rank) are taken one by one. Order of summation: ops.py, `product`.
//
// A block owns the same range of weight rows of every *source*: of each matrix, or of the expert of each pair. Its rows are
// cut into *pieces* of at most `piece` rows of one source, a piece into *units* of 8 items (items.cuh), a warp takes four
// units at a time, a lane an item. The raw bytes of a unit, which lie side by side in memory, come to shared memory by
// asynchronous copies DEPTH - 1 turns ahead. A lane puts the terms of its item into the table of the piece; when all units
// of a piece are there, one of the SUMMERS adds the terms, a lane a row, in the order of the row. So no lane waits for
// another but at the table, and the order is that of the row whatever the launch.
//
// Constants: TYPE a format, SPANS of an item, WARPS of a block, SUMMERS of them, DEPTH copies under way, COPIES of the type's
// table, ALIGNED = 1 when every block begins at a multiple of 16, and MODE:
//   DENSE    several matrices of one type with the same row; out (rows,) each
//   GATE_UP  out (pairs, rows) = silu(gate x) * (up x)
//   DOWN     the pairs' own inputs; out (n, rows) = weighted sum in rank order, from 0
//   PAIRS    one matrix; out (pairs, rows): for gate and up of different types
// Pairs go by their expert, so that those with the same one read its weights about the same time. An expert without an
// address is skipped; DOWN then takes the pair's output from `given`.
#include "device.cuh"
#include "formats.cuh"
#include "items.cuh"
#include "quantize.cuh"

#define DENSE 0
#define GATE_UP 1
#define DOWN 2
#define PAIRS 3
#define MATRICES 8

struct Matrix {
    const u8* data;
    float* out;
    int rows, last_tile;  // last_tile is not used here
};

struct Arguments {
    Matrix matrix[MATRICES];
    const float* x;      // (inputs, cols), or null: then q, d as quantize.cu leaves them
    const u8* q;
    const float* d;
    const float* join;   // DENSE: null, or (1,): out = fma(sigmoid(join[0]), y, out). DOWN: (n,), with `beside`
    const u64* first;    // addresses of the experts' gate or down
    const u64* second;   // of up
    const int* ids;      // (n, used)
    const float* weights;
    const float* given;  // (n * used, rows), or null
    const float* beside; // DOWN: null, or (n, rows): out = fma(sigmoid(join[row]), beside, out) at the end
    int early;           // works beside the kernel before it (intrinsics.cuh)
    int n, used, cols, matrices;
    int items, item_inverse;    // of a row; inverses: 2^32 / divisor, rounded up
    int units, unit_inverse;    // of a part of a piece
    int piece;                  // rows of a piece at most
    int regions, region_inverse;  // pieces that the table of terms holds
    int at_scales, at_sums, at_keys, at_parts, at_pieces, at_terms, at_grid, at_stages, at_y;  // parts of shared memory, bytes
    int input_pitch, scale_pitch, sum_pitch, term_pitch;
};

typedef TYPE F;
typedef Item<F> I;
enum {
    PARTS = F::BLOCK == 256 ? 8 / SPANS : 1,                         // items of a block
    ITEM_BYTES = F::BLOCK == 256 ? (int)F::BYTES : SPANS * 32 / F::BLOCK * F::BYTES,  // of the blocks of an item
    UNIT_BYTES = 8 / PARTS * ITEM_BYTES,
    UNIT_PITCH = (UNIT_BYTES + 15 + 4 + 15) / 16 * 16,               // at any alignment, and a word past it
    STAGE = 4 * UNIT_PITCH,
    TURNS = (UNIT_BYTES + 15 + 127) / 128,                           // eight lanes copy 16 bytes each
    WORKERS = WARPS - SUMMERS,
    ITEM_TERMS = SPANS * I::PER,
    INPUT = 32 * SPANS + 16,                                         // an odd number of 16s spreads the banks
    NEEDS_SUMS = F::OFFSET || I::FOLD,
    PER_SPAN = 32 / F::GROUP,
    MOST_REGIONS = 16,
    HALVES = MODE == GATE_UP ? 2 : 1  // gate, then up
};

struct Part {  // of a piece: its rows of one matrix (GATE_UP: of gate, then of up)
    const u8* from;
    int items;
    u32 place;  // input row, region, turn

    DEVICE int input() const { return place & 0xFF; }
    DEVICE int region() const { return place >> 8 & 0xF; }
    DEVICE int turn() const { return place >> 12; }
};

struct Piece {
    float* out;  // of its first row; DOWN: in the block's table
    int rows, unused;
};

DEVICE int divide(int a, int by, int inverse) { return by == 1 ? a : (int)__umulhi((u32)a, (u32)inverse); }

DEVICE int first_row(int rows, int block) { return (int)((u32)rows * (u32)block / gridDim.x); }

struct Tables {
    Part* parts;
    Piece* pieces;
    int* keys;  // the pairs' experts, SKIPPED where one is not there
    float* y;   // DOWN: (pairs, rows of the block)
};

#define SKIPPED 0x7FFFFFFF

// Enter piece `number`: `rows` from `row` on of the matrices at first and second, for an input row.
DEVICE void enter_piece(const Arguments& a, const Tables& to, int number, const u8* first, const u8* second, int row, int rows,
                        int input, float* out) {
    const int turn = divide(number, a.regions, a.region_inverse), region = number - turn * a.regions;
    const long long at = (long long)row * (a.cols / F::BLOCK * F::BYTES);
    const u32 place = input | region << 8 | turn << 12;
    to.parts[HALVES * number] = Part{first + at, rows * a.items, place};
    if (MODE == GATE_UP) to.parts[HALVES * number + 1] = Part{second + at, rows * a.items, place};
    to.pieces[number] = Piece{out, rows, 0};
}

// The pieces of the block; their number at `count`, which is 0 before. Ends without a barrier.
DEVICE void find_pieces(const Arguments& a, const Tables& to, int* count) {
    if (MODE == DENSE) {
        int before = 0;
        for (int m = 0; m < a.matrices; m++) {
            const int row = first_row(a.matrix[m].rows, blockIdx.x), rows = first_row(a.matrix[m].rows, blockIdx.x + 1) - row;
            const int own = (rows + a.piece - 1) / a.piece;
            for (int i = threadIdx.x; i < own; i += 32 * WARPS) {
                const int at = i * a.piece;
                enter_piece(a, to, before + i, a.matrix[m].data, 0, row + at, min(a.piece, rows - at), 0,
                            a.matrix[m].out + row + at);
            }
            before += own;
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
    const int own = (rows + a.piece - 1) / a.piece;
    float* out = MODE == DOWN ? to.y + p * rows : a.matrix[0].out + (long long)p * all + row;
    for (int i = 0; i < own; i++) {
        const int at = i * a.piece;
        enter_piece(a, to, before * own + i, (const u8*)first, (const u8*)second, row + at, min(a.piece, rows - at),
                    MODE == DOWN ? p : p / a.used, out + at);
    }
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
        const int row = MODE == DENSE ? 0 : i / turns, o = (i - row * turns) * 32 + lane, u = o & 3, here = min(o, octets - 1);
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

DEVICE float sum_of_row(const float* terms, const float* scales, int count) {
    const int eights = count / 8;
    float sum = 0.0f;
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

// Rows of the finished pieces, in the order of the pieces.
DEVICE void sum_pieces(const Arguments& a, const u8* shared, const Tables& tables, Gate* gates, int count, int begin) {
    const int lane = threadIdx.x & 31, half = MODE == GATE_UP ? lane >> 4 : 0, r = MODE == GATE_UP ? lane & 15 : lane;
    for (int number = begin; number < count; number += SUMMERS) {
        const Piece piece = tables.pieces[number];
        const Part part = tables.parts[HALVES * number];
        const int row = (part.region() * HALVES + half) * a.piece + min(r, piece.rows - 1);
        gate_wait_full(&gates[part.region()], part.turn(), HALVES * a.units);
        const float sum = sum_of_row((const float*)(shared + a.at_terms) + row * a.term_pitch,
                                     (const float*)(shared + a.at_scales) + part.input() * a.scale_pitch, a.items * ITEM_TERMS);
        gate_empty(&gates[part.region()], lane);
        const float up = MODE == GATE_UP ? __shfl_down_sync(~0u, sum, 16) : 0.0f;
        if (r >= piece.rows || half) continue;
        float* out = piece.out + r;
        if (MODE == GATE_UP) *out = silu_f32(sum) * up;
        else *out = MODE == DENSE && a.join ? fmaf(sigmoid_f32(a.join[0]), sum, *out) : sum;
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

struct Place {  // of a unit: its bytes, items before it in its part, items of the part
    Part part;
    const u8* from;
    int item, half;
};

DEVICE Place place_of(const Arguments& a, const Part* parts, int number) {
    const int part = divide(number, a.units, a.unit_inverse), j = number - part * a.units;
    Place p;
    p.part = parts[part];
    p.from = p.part.from + j * UNIT_BYTES;
    p.item = 8 * j;
    p.half = MODE == GATE_UP ? part & 1 : 0;
    return p;
}

KERNEL __launch_bounds__(32 * WARPS, 2) void product_row(PARAMETER Arguments a) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ Gate gates[MOST_REGIONS];
    __shared__ int count;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane >> 3, own = lane & 7;
    const Tables tables{(Part*)(shared + a.at_parts), (Piece*)(shared + a.at_pieces), (int*)(shared + a.at_keys),
                        (float*)(shared + a.at_y)};
    if (threadIdx.x < a.regions) gate_init(&gates[threadIdx.x], HALVES * a.units);
    if (threadIdx.x == 0) count = 0;
    if (a.early) next_may_come();
    else if (MODE == GATE_UP || MODE == PAIRS) inputs_ready();  // the picks say which weights
    find_pieces(a, tables, &count);  // DOWN: the picks are older than the kernel before
    __syncthreads();
    const int units = count * (HALVES * a.units);

    // Turn by turn, a group of eight lanes copies its unit.
    u8* const stages = shared + a.at_stages + warp * (DEPTH * STAGE) + group * UNIT_PITCH;
    auto load = [&](int number, int stage) {
        if (number < units) {
            const Place place = place_of(a, tables.parts, number);
            const int shift = (int)((u64)place.from & 15), left = place.part.items - place.item;
            const int end = shift + min((int)UNIT_BYTES, left * ITEM_BYTES / PARTS) - 16 * own;  // of the unit, for this lane
            const u8* from = place.from + (16 * own - shift);
            KEEP_POINTER(from);  // the addresses of the turns are this one and a constant
            u8* to = stages + stage * STAGE + 16 * own;
#pragma unroll
            for (int i = 0; i < TURNS; i++)
                if (128 * i < end) copy16(to + 128 * i, from + 128 * i);
        }
        copies_commit();
    };
    const bool worker = warp < WORKERS;
    int number = 4 * warp + group;  // of the unit
    if (worker) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) load(number + i * (4 * WORKERS), i);
    }
    table_to_shared(shared + a.at_grid);
    if ((MODE == DENSE || MODE == DOWN) && !a.early) inputs_ready();
    inputs_to_shared(a, shared, MODE == DOWN ? a.n * a.used : a.n);
    __syncthreads();

    if (!worker) {
        sum_pieces(a, shared, tables, gates, count, warp - WORKERS);
    } else {
        const int copy = COPIES == 1 ? 0 : (F::LOOK == HALF ? lane >> 1 : lane) % COPIES;
        const Grid grid{shared + a.at_grid + copy * (F::LOOK == WORD ? 4 : 8)};
        const u8* const at_own = stages + own / PARTS * ITEM_BYTES;
        int stage = 0;
        for (int first = 4 * warp; first < units; first += 4 * WORKERS, number += 4 * WORKERS) {
            copies_wait<DEPTH - 1>();
            __syncwarp();
            const Place place = place_of(a, tables.parts, min(number, units - 1));
            const Part& part = place.part;
            const int item = place.item + own, r = divide(item, a.items, a.item_inverse), in_row = item - r * a.items;
            const u8* q = shared + part.input() * a.input_pitch + in_row * INPUT;
            const auto* sums = (const typename I::Sum*)(shared + a.at_sums) + part.input() * a.sum_pitch + in_row * (SPANS * PER_SPAN);
            float terms[ITEM_TERMS];
            I::template run<SPANS>(terms, at_own + (stage * STAGE + (int)((u64)place.from & 15)),
                                   PARTS == 1 ? 0 : own % PARTS * SPANS, grid, q, sums);

            Gate* gate = &gates[part.region()];
            if (part.turn() > 0) gate_wait_empty(gate, part.turn());
            if (number < units && item < part.items) {
                const int row = (part.region() * HALVES + place.half) * a.piece + r;
                float* to = (float*)(shared + a.at_terms) + row * a.term_pitch + in_row * ITEM_TERMS;
                if (ITEM_TERMS % 4 == 0) {
#pragma unroll
                    for (int i = 0; i < ITEM_TERMS / 4; i++)
                        ((float4*)to)[i] = make_float4(terms[4 * i], terms[4 * i + 1], terms[4 * i + 2], terms[4 * i + 3]);
                } else {
#pragma unroll
                    for (int i = 0; i < ITEM_TERMS; i++) to[i] = terms[i];
                }
            }
            __syncwarp();  // the terms are there, and the stage is free
            if (own == 0 && number < units) gate_arrive(gate);
            load(number + DEPTH * (4 * WORKERS), stage);
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
