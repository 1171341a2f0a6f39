// The product of quantised weights with the pairs of a window, each of one row of activations and an expert, as a block does
// its part of it by matrix steps. Order of summation: ops.py, `product`.
//
// Rows are dealt as in row_job.cuh. A segment is cut into *tiles* of 16 rows (of GATE_UP 8 of gate and the same of up); a warp
// takes the tiles one after the other, brings their bytes to shared memory DEPTH tiles ahead, and waits for no other warp.
//
// A matrix step multiplies 16 rows with 8 columns. There is one row of activations, so column s has those of span s of a chunk
// of 256 and zeros else: eight steps, each with a span's weights, leave the sums of 16 rows and 8 spans. Activations are
// read once for 16 rows, where a lane that multiplies alone reads them for each. Lane r adds the terms of row r in their
// order, those of a chunk while the steps of the next one run, from a table that the warp has for itself.
//
// Constants: TYPE a format with groups of 32 and no offsets, ITEMS spans of a row, WARPS of a block, of which the first TILERS
// take tiles, DEPTH, BULK copies, COPIES of the type's table, MODE: GATE_UP, DOWN or PAIRS of row_job.cuh. A source may include this in a namespace of its own.
// Needs device.cuh, formats.cuh, items.cuh, own_scales.cuh, quantize.cuh.
#ifndef HERE
#define HERE 0
#endif

typedef TYPE F;
typedef Plain<F> I;
enum {
    TILE_ROWS = 16,
    CHUNK_BYTES = 256 / F::BLOCK * F::BYTES,
    ROW_BYTES = ITEMS * 32 / F::BLOCK * F::BYTES,
    FULL = ITEMS / 8,  // chunks of a row
    LEFT = ITEMS % 8,  // spans behind them
    // Activations lie as they are in a row.
    PER_SPAN = 1,
    EXTRA = 0,
    INPUT = 32,
    INPUT_PITCH = ITEMS * INPUT,
    SCALE_PITCH = ((ITEMS + 3) / 4 | 1) * 4,
    NEEDS_SUMS = 0,
    SUM_ITEM = 0,
    SUM_PITCH = 0,
    TERM_PITCH = 12,  // of a row's terms of a chunk, floats: rows in different banks
    TERMS = TILE_ROWS * TERM_PITCH
};

#include "bulk.cuh"
#include "segments.cuh"
#include "inputs.cuh"

enum {
    RUN_ROWS = TILE_ROWS / HALVES,
    RUN = (RUN_ROWS * ROW_BYTES + 15 + 15) / 16 * 16,  // rows of a matrix, at any alignment
    STAGE = HALVES * RUN
};

// Where a tile lies and goes. Lanes make those of 32 tiles at once and give them to each other.
struct Task {
    u64 from, second, out;
    u32 place;  // rows, and row of activations

    // Of tile `number`, if there are so many.
    DEVICE static Task of(const Arguments& a, const Segment* segments, int number, const Found& found) {
        Task task{};
        if (number >= found.turns) return task;
        const Segment& own = segments[segment_of(segments, found.segments, number)];
        const int before = (number - own.turn) * RUN_ROWS, rows = min((int)RUN_ROWS, own.rows - before);
        task.from = (u64)(own.from + before * ROW_BYTES), task.second = (u64)(own.second + before * ROW_BYTES);
        task.out = (u64)(own.out + before);
        task.place = (u32)rows | (u32)own.input << 8;
        return task;
    }
    DEVICE Task from_lane(int lane) const {
        Task task;
        task.from = __shfl_sync(~0u, from, lane), task.out = __shfl_sync(~0u, out, lane);
        task.second = HALVES == 2 ? __shfl_sync(~0u, second, lane) : 0;
        task.place = __shfl_sync(~0u, place, lane);
        return task;
    }
    DEVICE int rows() const { return (int)(place & 255); }
    DEVICE int input() const { return (int)(place >> 8); }
};

// Codes of span s of two rows, chunks of which begin at `low` and `high`, times activations b: added to c. Made with an address of
// shared memory that lanes do not have in common: what comes of it would lie in a register that they share.
template <class T>
struct Steps {
    Grid grid;

    DEVICE Steps(const void*, Grid grid) : grid(grid) {}
    DEVICE void add(int (&c)[4], const u8* low, const u8* high, int s, int t, u32 b0, u32 b1) const {
        u32 a[4];
        T::span(low, s, t, grid, a[0], a[2]);
        T::span(high, s, t, grid, a[1], a[3]);
        add_multiply32(c, a, b0, b1);
    }
};

template <>
struct Steps<IQ3_S_CARD> {
    u32 fields;  // in a register, where the compiler would make it again for each word

    DEVICE Steps(const void* shared, Grid) : fields(0xF0F0F0F0u + unknown_zero(shared)) {}
    DEVICE void add(int (&c)[4], const u8* low, const u8* high, int s, int t, u32 b0, u32 b1) const {
        const int at = 8 + 16 * s + 4 * t;
        const u32 of_low = *(const u32*)(low + at), of_high = *(const u32*)(high + at);
        const u32 a[4] = {(of_low << 4 & fields) ^ 0x88888888u, (of_high << 4 & fields) ^ 0x88888888u,
                          (of_low & fields) ^ 0x88888888u, (of_high & fields) ^ 0x88888888u};
        add_multiply32(c, a, b0, b1);
    }
};

// The halves of the table apart, as items.cuh has them: the steps add them.
template <>
struct Steps<IQ4_NL_CARD> {
    Nibbles codes;

    DEVICE Steps(const void* shared, Grid) : codes(shared) {}
    DEVICE void look(u32& first, u32& last, u32 w, int half) const {
        const u32 fields = half ? w ^ 0x88888888u : w;
        first = permute(codes.table[2 * half], codes.table[2 * half + 1], fields);
        last = permute(codes.table[2 * half], codes.table[2 * half + 1], fields >> 16);
    }
    DEVICE void add(int (&c)[4], const u8* low, const u8* high, int s, int t, u32 b0, u32 b1) const {
        const int at = 72 * (s >> 2) + 8 + 16 * (s & 3) + 4 * t;
        const u32 of_low = *(const u32*)(low + at), of_high = *(const u32*)(high + at);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 a[4];
            look(a[0], a[2], of_low, half);
            look(a[1], a[3], of_high, half);
            add_multiply32(c, a, b0, b1);
        }
    }
};

// What a lane has for all tiles: t, the steps, and for each span whether its column, lane / 4, is that span's: all bits or none.
struct Own {
    int t;
    Steps<F> steps;
    u32 column[8];

    DEVICE Own(int lane, Steps<F> steps) : t(lane & 3), steps(steps) {
#pragma unroll
        for (int s = 0; s < 8; s++) column[s] = lane >> 2 == s ? ~0u : 0;
    }
};

// A tile in shared memory, as a lane multiplies it.
struct Tile {
    const u8 *low, *high;  // a chunk of rows g and g + 8
    const u8* q;           // the lane's activations of a chunk
    const float* d;        // the row's scales
    float* to;             // the lane's terms in the first of two tables of TERMS
    const float* from;     // there the terms of row r, which it adds
    int table;             // 0, or TERMS: where those of the chunk go
    float sum;

    // The sums of SPANS_ spans of a chunk, scaled, to the table; then comes the next chunk.
    template <int SPANS_>
    DEVICE void multiply(const Own& own) {
        const uint2 x = *(const uint2*)q;
        int even[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS}, odd[4] = {};  // two chains wait less than one
#pragma unroll
        for (int s = 0; s < SPANS_; s++)
            own.steps.add(s & 1 ? odd : even, low, high, s, own.t, x.x & own.column[s], x.y & own.column[s]);
        const OwnScales<F> first(low, own.t), last(high, own.t);
        float* terms = to + table;
        *(float2*)terms = make_float2(term(even[0] + odd[0], first.scale[0]), term(even[1] + odd[1], first.scale[1]));
        terms += 8 * TERM_PITCH;
        *(float2*)terms = make_float2(term(even[2] + odd[2], last.scale[0]), term(even[3] + odd[3], last.scale[1]));
        low += CHUNK_BYTES, high += CHUNK_BYTES, q += 256, table ^= TERMS;
    }
    // The terms of the chunk before in row r.
    template <int SPANS_>
    DEVICE void add() {
        const float4 *terms = (const float4*)(from + (table ^ TERMS)), *scales = (const float4*)d;
#pragma unroll
        for (int i = 0; i < (SPANS_ + 3) / 4; i++) {
            const float4 v = terms[i], s = scales[i];
            sum = fmaf(v.x, s.x, sum);
            if (4 * i + 1 < SPANS_) sum = fmaf(v.y, s.y, sum);
            if (4 * i + 2 < SPANS_) sum = fmaf(v.z, s.z, sum);
            if (4 * i + 3 < SPANS_) sum = fmaf(v.w, s.w, sum);
        }
        d += 8;
    }
    // Lanes that differ by 16 have the same sum.
    DEVICE void work(const Own& own) {
        enum { LAST = LEFT ? LEFT : 8 };
        if (FULL) multiply<8>(own);
        else multiply<LAST>(own);
        __syncwarp();
#pragma unroll 1
        for (int c = 1; c < FULL; c++) {
            add<8>();
            multiply<8>(own);
            __syncwarp();
        }
        if (FULL && LEFT) {
            add<8>();
            multiply<LAST>(own);
            __syncwarp();
        }
        add<LAST>();
    }
};

// The work of a block. Whole blocks call, and where it says so a barrier comes first.
struct Job {
    enum { JOINS = MODE == DOWN, AHEAD = DEPTH };

    const Arguments& a;
    u8* const shared;
    Segment* const segments;
    Finder finder;
    Runs runs;
    int warp, lane;
    Task task;  // the warp's tile `planned` + lane
    u32 planned;

    // `barriers`: DEPTH of each warp.
    DEVICE Job(const Arguments& a, u8* shared, u64* barriers)
        : a(a), shared(shared), segments((Segment*)(shared + a.at_segments)),
          finder{a, segments, (int*)(shared + a.at_keys), (float*)(shared + a.at_y), {}},
          runs(barriers + (BULK ? (threadIdx.x >> 5) * DEPTH : 0)), warp(threadIdx.x >> 5), lane(threadIdx.x & 31) {}
    DEVICE u8* stage(u32 run) const { return shared + a.at_stages + (warp * DEPTH + run % DEPTH) * STAGE; }

    // The lanes' tasks are those of the warp's tiles from this one on.
    DEVICE void plan(const Found& found, u32 run) {
        planned = run;
        task = Task::of(a, segments, warp + (int)(run + lane) * TILERS, found);
    }
    // Tile `run` of the warp, which is planned, is sent for.
    DEVICE void load(u32 run) {
        const Task next = task.from_lane((int)(run - planned));
        if (next.rows()) {
            const int shift = (int)(next.from & 15), other = (int)(next.second & 15), bytes = next.rows() * ROW_BYTES + 15;
            const int first = (shift + bytes) & ~15, second = HALVES == 2 ? (other + bytes) & ~15 : 0;
            runs.expect(run, first + second);
            runs.piece<RUN>(run, stage(run), (const u8*)(next.from - shift), first);
            if (HALVES == 2) runs.piece<RUN>(run, stage(run) + RUN, (const u8*)(next.second - other), second);
        }
        runs.commit();
    }
    // The first bytes are sent for. After a barrier behind finder.find().
    DEVICE void begin(const Found& found) {
        if (warp >= TILERS) return;
        plan(found, 0);
#pragma unroll
        for (int i = 0; i < DEPTH; i++) load(i);
    }
    DEVICE Tile tile(const Task& now, u32 run) const {
        const int g = lane >> 2, t = lane & 3;
        const u8 *own = stage(run) + g * ROW_BYTES, *low = own + (now.from & 15);
        float* const terms = (float*)(shared + a.at_terms) + warp * (2 * TERMS);
        return Tile{
            low,
            HALVES == 2 ? own + RUN + (now.second & 15) : low + 8 * ROW_BYTES,
            shared + now.input() * INPUT_PITCH + 32 * g + 8 * t,
            (const float*)(shared + a.at_scales) + now.input() * SCALE_PITCH,
            terms + g * TERM_PITCH + 2 * t,
            terms + (lane & 15) * TERM_PITCH,
            0,
            0.0f,
        };
    }
    // All tiles. After a barrier behind the inputs and the table.
    DEVICE void work(const Found& found) {
        if (warp >= TILERS) return;
        const int copy = COPIES == 1 ? 0 : (F::LOOK == HALF ? lane >> 1 : lane) % COPIES;
        const Own own(lane, Steps<F>(shared + lane, Grid{shared + a.at_grid + copy * (F::LOOK == WORD ? 4 : 8)}));
        for (u32 run = 0;; run++) {
            if (run + DEPTH - planned >= 32) plan(found, run);
            const Task now = task.from_lane((int)(run - planned));
            if (!now.rows()) break;
            runs.wait(run);
            Tile each = tile(now, run);
            each.work(own);
            const float sum = each.sum;
            __syncwarp();  // the stage and the tables are free
            load(run + DEPTH);
            const float up = HALVES == 2 ? __shfl_down_sync(~0u, sum, 8) : 0.0f;
            if (lane < now.rows()) ((float*)now.out)[lane] = HALVES == 2 ? silu_f32(sum) * up : sum;
        }
#if !BULK
        copies_wait<0>();
#endif
    }
};
