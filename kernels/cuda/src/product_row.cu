// The product of quantised weights with the rows of a window. Order of summation: ops.py, `product`.
//
// A block owns the same range of weight rows of every *source*: of each matrix, or of the expert of each pair (row, rank); a
// pair is a source of its own, with one row of activations. The rows of a source are cut into *strips*, a strip by columns
// into *pieces*, a piece into *items* of some spans of a row. Warps take the items of all pieces in turns, bring their bytes
// to shared memory by asynchronous copies DEPTH - 1 turns ahead, and put their terms into a table of the piece
// (turn_items.cuh, turn_matrix.cuh). When the piece is there, one of the SUMMERS adds its terms, a lane CHAINS sums, in the
// order of the row; it has the pieces of a strip one after the other. So the order is that of the row, whatever the launch.
//
// Constants: TYPE a format, SPANS of an item, COLUMNS (1, 2, 4, 8) for the rows of activations, TALL rows of a turn (0 for 1
// or 2 columns), PITCH of a stage, PARTS lanes that share an item, WARPS of a block, SUMMERS of them, CHAINS, DEPTH, blocks
// that a multiprocessor's registers hold (BESIDE), COPIES of the type's table, ALIGNED = 1 when every block begins at a multiple of 16, and MODE:
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

// Terms of an item's row, all or half of them, and the scales of their activations.
struct Terms {
    enum { PARTS_OF_ITEM = ITEM_TERMS > 16 ? 2 : 1, ALL = ITEM_TERMS / PARTS_OF_ITEM, SCALES = SPANS / PARTS_OF_ITEM };

    float t[ALL], d[SCALES];

    template <int N>
    DEVICE static void read(float (&to)[N], const float* from) {
        if (N % 4 == 0) {
#pragma unroll
            for (int i = 0; i < N / 4; i++) {
                const float4 v = ((const float4*)from)[i];
                to[4 * i] = v.x, to[4 * i + 1] = v.y, to[4 * i + 2] = v.z, to[4 * i + 3] = v.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < N; i++) to[i] = from[i];
        }
    }
    // The i-th of a row.
    DEVICE void load(const float* terms, const float* scales, int i) {
        read(t, terms + i / PARTS_OF_ITEM * TERM_ITEM + i % PARTS_OF_ITEM * ALL);
        read(d, scales + i * SCALES);
    }
};

// The sums of a lane over the items of a piece, each in the order of its row. One sum waits for itself, so its next terms
// are read meanwhile; several go on in turn.
DEVICE void add_items(float (&sum)[CHAINS], const float* const (&terms)[CHAINS], const float* const (&scales)[2], int items) {
    const int count = items * Terms::PARTS_OF_ITEM;
    if (CHAINS == 1) {
        Terms next;
        next.load(terms[0], scales[0], 0);
#pragma unroll 2
        for (int i = 1; i <= count; i++) {
            const Terms now = next;
            if (i < count) next.load(terms[0], scales[0], i);
#pragma unroll
            for (int k = 0; k < Terms::ALL; k++) sum[0] = fmaf(now.t[k], now.d[k / I::PER], sum[0]);
        }
        return;
    }
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        Terms now[CHAINS];
#pragma unroll
        for (int c = 0; c < CHAINS; c++) now[c].load(terms[c], scales[c & 1], i);
#pragma unroll
        for (int k = 0; k < Terms::ALL; k++)
#pragma unroll
            for (int c = 0; c < CHAINS; c++) sum[c] = fmaf(now[c].t[k], now[c & 1].d[k / I::PER], sum[c]);
    }
}

DEVICE void finish(const Arguments& a, const Out& out, float sum, int half, int r, int column) {
    const float up = MODE == GATE_UP ? __shfl_down_sync(~0u, sum, 16) : 0.0f;
    if (r >= out.rows || half || (COLUMNS > 1 && column >= a.n)) return;
    float* to = out.to + (COLUMNS > 1 ? (long long)column * out.pitch + r : r);
    if (MODE == GATE_UP) *to = silu_f32(sum) * up;
    else *to = MODE == DENSE && a.join ? fmaf(sigmoid_f32(a.join[column]), sum, *to) : sum;
}

// One of the SUMMERS adds every SUMMERS-th strip, piece by piece; a lane CHAINS of its sums. `strips` of the block.
DEVICE void add_strips(const Arguments& a, const u8* shared, const Tables& tables, Gate* gates, int strips, int summer) {
    const int lane = threadIdx.x & 31, half = MODE == GATE_UP ? lane >> 4 : 0, most = a.strip * COLUMNS;
    for (int strip = summer; strip < (a.parts > 1 ? (strips + SUMMERS - 1) / SUMMERS * SUMMERS : strips); strip += SUMMERS) {
        const bool there = strip < strips;
        const Strip own = tables.strips[HALVES * (there ? strip : 0)];
        const float* scales[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = own.input + min(column_of_sum(lane % SUMS, i), COLUMNS > 1 ? a.n - 1 : 0);
            scales[i] = (const float*)(shared + a.at_scales) + row * a.scale_pitch;
        }
        float sum[CHAINS] = {};
        for (int part = 0; part < a.parts; part++) {
            const int piece = piece_of(a, strip, part), turn = divide(piece, a.regions, a.region_inverse);
            const int region = piece - turn * a.regions, first = part * a.part_items;
            gate_wait_read(&gates[region], turn);  // also by those who read nothing: the readings are counted in turn
            if (there) {
                const float* terms[CHAINS];
#pragma unroll
                for (int c = 0; c < CHAINS; c++) {
                    const int at = min(place_of_sum(a, row_of_sum(lane % SUMS, c), lane % SUMS, c), most - 1);
                    terms[c] = (const float*)(shared + a.at_terms) + ((region * HALVES + half) * most + at) * a.term_pitch;
                }
                gate_wait_full(&gates[region], turn, ARRIVALS * a.turns);
                const float* const of[2] = {scales[0] + first * SPANS, scales[1] + first * SPANS};
                add_items(sum, terms, of, min(a.part_items, a.items - first));
                __syncwarp();
            }
            if (lane == 0) gate_read(&gates[region]);
        }
        if (!there) return;
#pragma unroll
        for (int c = 0; c < CHAINS; c++)
            finish(a, tables.outs[strip], sum[c], half, row_of_sum(lane % SUMS, c), column_of_sum(lane % SUMS, c & 1));
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
    const int strips = count, all = pieces_of(a, strips) * (ARRIVALS * a.turns);

    u8* const stages = shared + a.at_stages + warp * (DEPTH * STAGE);
    const bool worker = warp < WORKERS;
    int number = first_number(warp, lane);
    auto load = [&](int number, int stage) {
        if (number < all) load_turn(a, tables.strips, strips, stages + stage * STAGE, number, lane);
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
        add_strips(a, shared, tables, gates, strips, warp - WORKERS);
    } else {
        const int copy = COPIES == 1 ? 0 : (F::LOOK == HALF ? lane >> 1 : lane) % COPIES;
        const Grid grid{shared + a.at_grid + copy * (F::LOOK == WORD ? 4 : 8)};
        int stage = 0;
        for (int first = AT_ONCE * warp; first < all; first += STEP, number += STEP) {
            copies_wait<DEPTH - 1>();
            __syncwarp();
            const Turn turn(a, tables.strips, strips, min(number, all - 1));
            const int filling = divide(turn.piece, a.regions, a.region_inverse), region = turn.piece - filling * a.regions;
            multiply_turn(a, shared, turn, stages + stage * STAGE, grid, region, lane, number < all, [&] {
                if (filling > 0) gate_wait_read(&gates[region], filling);
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
