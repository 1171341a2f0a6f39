// A product of quantised weights with the rows of a window as a block does its part of it. Order of summation: ops.py, `product`.
//
// The rows of all *sources* - matrices, or the expert of each pair (row, rank) - lie side by side, and a block has an equal
// part of them: a few *segments* (segments.cuh), cut into *strips* of some rows, a strip into *turns* (turns.cuh). Warps take
// the turns one after the other, bring their bytes to shared memory DEPTH turns ahead (bulk.cuh), and put their terms into a
// table of the strip. The warp whose turn is the last of a strip to end adds its terms, a lane a sum, in the order of the
// row: nobody waits, except for a place in the table when the block has more strips than fit. So the order is that of the
// row, whatever the launch.
//
// Constants: TYPE a format, SPANS of an item, ITEMS of a row, COLUMNS (1, 2, 4, 8) for the rows of activations, PARTS lanes
// that share an item, WARPS of a block, DEPTH, BULK copies, COPIES of the type's table, ALIGNED = 1 when every block of weights
// begins at a multiple of 16, HERE = 1 when DENSE makes the outputs of a block of DOWN and leaves them in shared memory, and MODE:
//   DENSE    several matrices of one type with the same rows of activations; out (n, rows) each
//   GATE_UP  out = silu(gate x) * (up x): of experts (pairs, rows), or of two matrices (n, rows)
//   DOWN     experts, the pairs' own inputs; out (n, rows) = weighted sum in rank order, from 0
//   PAIRS    experts, one matrix; out (pairs, rows): for gate and up of different types
// An expert without an address is skipped; DOWN then takes the pair's output from `given`.
//
// A source may include this for several jobs, each in a namespace of its own. Needs device.cuh, formats.cuh, items.cuh,
// quantize.cuh.
#ifndef HERE
#define HERE 0
#endif
#ifndef TILED
#define TILED 0
#endif

typedef TYPE F;
#if COLUMNS == 1
typedef Item<F> I;
#else
typedef Plain<F> I;
#endif
#define ODD_QUADS(words) ((((words) + 3) / 4 | 1) * 4)
enum {
    ITEM_BYTES = SPANS * 32 / F::BLOCK * F::BYTES,
    ITEM_TERMS = SPANS * I::PER,
    NEEDS_SUMS = F::OFFSET || I::FOLD,
    PER_SPAN = 32 / F::GROUP,
    // From item to item in a row of inputs (bytes), of their sums, of terms: odd numbers of 16 bytes spread the banks. Of
    // terms twice as many do well enough: they are written once.
    INPUT = 32 * SPANS + 16,
    SUM_ITEM = SPANS * PER_SPAN % 4 ? SPANS * PER_SPAN : (SPANS * PER_SPAN / 4 | 1) * 4,
    TERM_ITEM = ITEM_TERMS % 16 ? ITEM_TERMS : ITEM_TERMS + 4,
    EXTRA = ITEMS > 8 && ITEMS % 8 ? 7 : 0,  // items that lie behind a row of inputs once more (turns.cuh)
    // From row to row.
    INPUT_PITCH = (ITEMS + EXTRA) * INPUT,
    SUM_PITCH = ODD_QUADS((ITEMS + EXTRA) * SUM_ITEM),
    SCALE_PITCH = ODD_QUADS(ITEMS * SPANS),
    TERM_PITCH = ODD_QUADS(ITEMS * TERM_ITEM),
    TURN_ITEMS = 32 / PARTS,
    ROW_BYTES = ITEMS * ITEM_BYTES
};

#include "bulk.cuh"
#include "segments.cuh"
#include "turns.cuh"
#include "inputs.cuh"

enum {
    SUMS = MODE == GATE_UP ? 16 : 32,  // of a strip, for each half
    SUMMED = 1 << 30                   // of a strip's turns: it is done
};

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

// A sum over the items of a row, in their order. It waits for itself, so its next terms are read meanwhile, behind the last
// item those of whatever lies there: a read that depended on the end would cost a copy of every term.
DEVICE float add_items(const float* terms, const float* scales) {
    enum { COUNT = ITEMS * Terms::PARTS_OF_ITEM };
    float sum = 0.0f;
    Terms now;
    now.load(terms, scales, 0);
#pragma unroll 2
    for (int i = 1; i <= COUNT; i++) {
        Terms next;
        next.load(terms, scales, i);
#pragma unroll
        for (int k = 0; k < Terms::ALL; k++) sum = fmaf(now.t[k], now.d[k / I::PER], sum);
        now = next;
    }
    return sum;
}

// The sums of the strip of turn `number`, whose terms are there, to where they go.
DEVICE void add_strip(const Arguments& a, const u8* shared, const Segment* segments, int count, int number,
                      const float* table) {
    const Turn turn(a, segments, count, number);
    const Segment& segment = segments[turn.segment];
    const int region = turn.strip - divide(turn.strip, a.regions, a.region_inverse) * a.regions;
    const float* terms = table + region * (HALVES * COLUMNS) * a.strip * TERM_PITCH;
    const int lane = threadIdx.x & 31, half = MODE == GATE_UP ? lane >> 4 : 0, i = lane % SUMS;
    const int r = i / COLUMNS, column = i % COLUMNS, row = turn.input + min(column, COLUMNS > 1 ? a.n - 1 : 0);
    const float* own = terms + (half * a.strip * COLUMNS + min(i, turn.rows * COLUMNS - 1)) * TERM_PITCH;
    const float sum = add_items(own, (const float*)(shared + a.at_scales) + row * SCALE_PITCH);
    const float up = MODE == GATE_UP ? __shfl_down_sync(~0u, sum, 16) : 0.0f;
    if (r >= turn.rows || half || (COLUMNS > 1 && column >= a.n)) return;
    float* to = segment.out + turn.before + r + (COLUMNS > 1 ? (long long)column * segment.pitch : 0);
    if (MODE == GATE_UP) *to = silu_f32(sum) * up;
    else *to = MODE == DENSE && a.join ? fmaf(sigmoid_f32(a.join[column]), sum, *to) : sum;
}

// What other warps of the block have written is there, and what this one has.
DEVICE void share_block() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }

// Until a strip is summed: its place in the table is then free. A warp that only asked would take its turns from those that add.
DEVICE void wait_summed(const u32* arrived) {
    for (;;) {
        u32 seen;
        asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(seen) : "r"((u32)__cvta_generic_to_shared(arrived)) : "memory");
        if (seen == SUMMED) return;
        rest(50);
    }
}

// The work of a block. Whole blocks call, and where it says so a barrier comes first.
struct Job {
    enum { JOINS = MODE == DOWN, AHEAD = DEPTH };

    const Arguments& a;
    u8* const shared;
    Segment* const segments;
    u32* const arrived;  // turns of each strip
    Finder finder;
    Runs runs;
    int warp, lane;
    Task task;    // of the warp's turn `planned` + lane
    u32 planned;

    // `barriers`: DEPTH of each warp.
    DEVICE Job(const Arguments& a, u8* shared, u64* barriers)
        : a(a), shared(shared), segments((Segment*)(shared + a.at_segments)), arrived((u32*)(shared + a.at_arrived)),
          finder{a, segments, (int*)(shared + a.at_keys), (float*)(shared + a.at_y), {}},
          runs(barriers + (BULK ? (threadIdx.x >> 5) * DEPTH : 0)), warp(threadIdx.x >> 5), lane(threadIdx.x & 31) {
        for (int i = threadIdx.x; i < a.strips; i += 32 * WARPS) arrived[i] = 0;
    }
    DEVICE u8* stages() const { return shared + a.at_stages + warp * (DEPTH * STAGE); }

    // The lanes' tasks are those of the warp's turns from this one on.
    DEVICE void plan(const Found& found, u32 run) {
        planned = run;
        task = Task::of(a, segments, warp + (int)(run + lane) * WARPS, found);
    }
    // Turn `run` of the warp, which is planned, is sent for.
    DEVICE void load(u32 run) {
        const int of = (int)(run - planned), items = __shfl_sync(~0u, task.items(), of);
        const u64 from = __shfl_sync(~0u, task.from, of);
        if (items) {
            const int shift = (int)(from & 15);
            const int bytes = (shift + items * (int)ITEM_BYTES + 15) & ~15;
            runs.begin<STAGE>(run, stages() + run % DEPTH * STAGE, (const u8*)(from - shift), bytes);
        }
        runs.commit();
    }
    // The first bytes are sent for. After a barrier behind finder.find().
    DEVICE void begin(const Found& found) {
        plan(found, 0);
#pragma unroll
        for (int i = 0; i < DEPTH; i++) load(i);
    }
    // Whether its turns can be planned before the experts of the only row are known: all of them at once, since `work` would
    // plan later ones from segments without addresses.
    DEVICE static bool foresees(const Arguments& a, const Found& found) {
        return a.n == 1 && a.used <= 32 && found.turns <= (31 - DEPTH) * WARPS;
    }

    // The same as `begin` of turns that were planned from expect_pairs: no warp waits for another. False, and nothing is sent
    // for, where an expert is not there.
    DEVICE bool begin_foreseen() {
        bool all;
        const Places places(a, all);
        if (!all) return false;
        task.from = places.address(task.from);
#pragma unroll
        for (int i = 0; i < DEPTH; i++) load(i);
        return true;
    }
    // All turns. After a barrier behind the inputs and the table.
    DEVICE void work(const Found& found) {
        const int copy = COPIES == 1 ? 0 : (F::LOOK == HALF ? lane >> 1 : lane) % COPIES;
        const Grid grid{shared + a.at_grid + copy * (F::LOOK == WORD ? 4 : 8)};
        float* const table = (float*)(shared + a.at_terms);
        for (u32 run = 0;; run++) {
            if (run + DEPTH - planned >= 32) plan(found, run);
            const Task now = task.from_lane((int)(run - planned));
            if (!now.items()) break;
            const int strip = now.of_strip();
            if (strip >= a.regions) wait_summed(arrived + strip - a.regions);
            runs.wait(run);
            multiply_turn(a, shared, now, stages() + run % DEPTH * STAGE, grid, table + now.terms, lane);
            __syncwarp();  // the terms are there, and the stage is free
            u32 before = 0;
            if (lane == 0) {
                share_block();
                before = atomicAdd(arrived + strip, 1u);
            }
            load(run + DEPTH);
            if (__shfl_sync(~0u, before, 0) + 1 == now.turns()) {
                share_block();
                add_strip(a, shared, segments, found.segments, warp + (int)run * WARPS, table);
                __syncwarp();
                if (lane == 0) {
                    share_block();
                    atomicExch(arrived + strip, (u32)SUMMED);
                }
            }
        }
#if !BULK
        copies_wait<0>();
#endif
    }
};
