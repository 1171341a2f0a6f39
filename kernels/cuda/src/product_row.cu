// The product of quantised weights with the rows of a window. Order of summation: ops.py, `product`.
//
// A block owns the same range of weight rows of every *source*: of each matrix, or of the expert of each pair (row, rank); a
// pair is a source of its own, with one row of activations. The rows of a source are cut into *strips*, a strip by columns
// into *pieces*, a piece into *items* of some spans of a row. Warps take the items of all pieces in turns, bring their bytes
// to shared memory by asynchronous copies DEPTH - 1 turns ahead, and put their terms into a table of the piece
// (turn_items.cuh, turn_matrix.cuh). When the piece is there, the SUMMERS add its terms, a lane a sum, in the order of the
// row, and go on with the next piece. So the order is that of the row, whatever the launch.
//
// Constants: TYPE a format, SPANS of an item, COLUMNS (1, 2, 4, 8) for the rows of activations, TALL rows of a turn (0 for 1
// or 2 columns), WARPS of a block, SUMMERS of them, DEPTH, blocks that a multiprocessor holds (BESIDE), COPIES of the type's
// table, ALIGNED = 1 when every block begins at a multiple of 16, and MODE:
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
#include "strips.cuh"

typedef TYPE F;
#if COLUMNS == 1
typedef Item<F> I;
#else
typedef Plain<F> I;
#endif
enum {
    WORKERS = WARPS - SUMMERS,
    PARTS = F::BLOCK == 256 && COLUMNS <= 2 ? 2 : 1,  // lanes that share an item
    ITEM_BYTES = SPANS * 32 / F::BLOCK * F::BYTES,
    ITEM_TERMS = SPANS * I::PER,
    NEEDS_SUMS = F::OFFSET || I::FOLD,
    PER_SPAN = 32 / F::GROUP,
    // From item to item in a row of inputs (bytes), of their sums, of terms: odd numbers of 16 bytes spread the banks.
    INPUT = 32 * SPANS + 16,
    SUM_ITEM = SPANS * PER_SPAN % 4 ? SPANS * PER_SPAN : (SPANS * PER_SPAN / 4 | 1) * 4,
    TERM_ITEM = ITEM_TERMS % 4 ? ITEM_TERMS : (ITEM_TERMS / 4 | 1) * 4,
    MOST_REGIONS = 16,
    SUMS = MODE == GATE_UP ? 16 : 32  // of a summer, for each half
};

#include "inputs.cuh"
#if COLUMNS <= 2
#include "turn_items.cuh"
#else
#include "turn_matrix.cuh"
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

DEVICE float add_row(float sum, const float* terms, const float* scales, int items) {
    enum { WHOLE = ITEM_TERMS % 8 == 0, OF_ITEM = WHOLE ? ITEM_TERMS / 8 : 1, STEP = WHOLE ? TERM_ITEM : 8 };
    static_assert(WHOLE || (int)TERM_ITEM == (int)ITEM_TERMS, "terms of items that are no whole eights lie without gaps");
    const int count = items * ITEM_TERMS, eights = count / 8;
    const auto at = [&](int i) { return terms + (i / OF_ITEM * STEP + i % OF_ITEM * 8); };
    Eight next;
    if (eights) next.load(terms, scales);
#pragma unroll 2
    for (int i = 0; i < eights; i++) {
        const Eight now = next;
        if (i + 1 < eights) next.load(at(i + 1), scales + 8 / I::PER * (i + 1));
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
    if (SUMS * summer >= a.strip * COLUMNS) return;
    const int sum_at = SUMS * summer + lane % SUMS, at = min(sum_at, a.strip * COLUMNS - 1), column = column_of_sum(a, at);
    const int r = at == sum_at ? row_of_sum(a, at) : a.strip;  // past the last: a sum that is dropped
    int turn = 0, region = 0, strip = 0, part = 0;
    float sum = 0.0f;
    for (int piece = 0; piece < pieces; piece++) {
        const Strip own = tables.strips[HALVES * strip];
        const int row = (region * HALVES + half) * (a.strip * COLUMNS) + at, first = part * a.part_items;
        const float* scales = (const float*)(shared + a.at_scales) + (own.input + min(column, COLUMNS > 1 ? a.n - 1 : 0)) * a.scale_pitch;
        gate_wait_full(&gates[region], turn, ARRIVALS * a.turns);
        sum = add_row(part ? sum : 0.0f, (const float*)(shared + a.at_terms) + row * a.term_pitch, scales + first * SPANS,
                      min(a.part_items, a.items - first));
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

KERNEL __launch_bounds__(32 * WARPS, BESIDE) void product_row(PARAMETER Arguments a) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ Gate gates[MOST_REGIONS];
    __shared__ int count;
    enum { STEP = AT_ONCE * WORKERS };
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const Tables tables{(Strip*)(shared + a.at_strips), (Out*)(shared + a.at_outs), (int*)(shared + a.at_keys),
                        (float*)(shared + a.at_y)};
    if (threadIdx.x < a.regions) gate_init(&gates[threadIdx.x], ARRIVALS * a.turns);
    if (threadIdx.x == 0) count = 0;
    if (a.early) next_may_come();
    else if ((MODE == GATE_UP && a.ids) || MODE == PAIRS) inputs_ready();  // the picks say which weights
    find_strips(a, tables, &count);  // DOWN: the picks are older than the kernel before
    __syncthreads();
    const int pieces = count * a.parts, all = pieces * (ARRIVALS * a.turns);

    u8* const stages = shared + a.at_stages + warp * (DEPTH * STAGE);
    const bool worker = warp < WORKERS;
    int number = first_number(warp, lane);
    auto load = [&](int number, int stage) {
        if (number < all) load_turn(a, tables.strips, stages + stage * STAGE, number, lane);
        copies_commit();
    };
    if (worker) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) load(number + i * STEP, i);
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
            const Turn turn(a, tables.strips, min(number, all - 1));
            const int filling = divide(turn.piece, a.regions, a.region_inverse), region = turn.piece - filling * a.regions;
            multiply_turn(a, shared, turn, stages + stage * STAGE, grid, region, lane, number < all, [&] {
                if (filling > 0) gate_wait_read(&gates[region], filling, a.readers);
            });
            __syncwarp();  // the terms are there, and the stage is free
            if (ends_turn(lane) && number < all) gate_filled(&gates[region]);
            load(number + DEPTH * STEP, stage);
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
