// The product of quantised weights with many rows (a prompt). Order of summation: ops.py, `product`.
//
// A block computes BM weight rows times up to BN activation rows, a warp 16 MT rows times 8 NT columns: its weights and
// scales are read from shared memory once for all of its columns, its activations once for all of its rows. The block
// walks the row 128 columns a step: raw blocks arrive by asynchronous copies a chunk of 256 columns ahead and are
// unpacked to int8 in shared memory once. While a step is multiplied the next one is unpacked: half of the warps begin
// with the one, half with the other, so that both kinds of work are there for every scheduler; of four warps every
// scheduler has one, and the block beside has the other kind. An output has one accumulator, which adds the groups of
// the row one after another: the bits are those of product_window.cu. Activations come quantised (quantize.cu) in the
// order of the format.
//
// A block has a run of tiles, one below the other, for the same columns. Its steps follow each other without a gap: while
// the last step of a tile is multiplied, the first of the next one is fetched and unpacked.
//
// Constants: TYPE a format, BM (64, 128), MT (2, 4), NT, BLOCKS of a multiprocessor, CHUNKS of raw bytes held (1, 2),
// PARTS (1, 2, 4) of what a step of DENSE copies, LIFTS (0, 1), COPIES of the table, SHARED bytes that prompt_plans.py
// asks for, READY where weights come unpacked (prompt_unpack.cu; then CHUNKS and COPIES are 0), and MODE:
//   DENSE    several matrices of one type with the same input, or with columns of it; out (n, rows) each
//   GATE_UP  experts by tile list: BM / 2 rows of gate and of up; out (pairs, rows) = silu(gate x) * (up x);
//            with NEXT_ORDER and NEXT_SUMS quantised, for a format with this order and groups of sums (0: none)
//   PAIRS    experts by tile list, one matrix; out (pairs, rows)
// A tile list (group_rows.cu) has (expert, first, count) for each tile of at most BN pairs; pairs are sorted by expert. The
// columns of such a tile are dealt evenly to the warps.
#include "device.cuh"
#include "formats.cuh"
#include "quantize.cuh"

#define DENSE 0
#define GATE_UP 1
#define PAIRS 2

#ifndef READY
#define READY 0
#endif

typedef TYPE F;
enum {
    WARPS_ACROSS = MT,
    BN = 8 * NT * WARPS_ACROSS
};

#include "prompt_unpack.cuh"

enum {
    WARPS_DOWN = SLABS / MT,
    LINE_D = BN + 8,                 // floats of a block's scales of all columns
    TABLE = F::GRID * COPIES * (F::LOOK == WORD ? 4 : 8),
    INPUTS = BN * STEP,              // bytes of a step: int8, then scales, then sums
    SUMS_AT = INPUTS + 4 * LINE_D * 4,
    FETCHED = SUMS_AT + (F::OFFSET ? GROUPS * LINE_D * 4 : 0),
    AT_UNPACKED = CHUNKS * BM * PITCH,
    AT_INPUTS = AT_UNPACKED + 2 * UNPACKED,
    AT_TABLE = AT_INPUTS + 2 * FETCHED,
    AT_PLACES = AT_TABLE + TABLE,
    AT_SOURCE = AT_PLACES + BN * 4,  // behind the places, which are read past their end
    SHARED_BYTES = AT_SOURCE + BN * 4,
    AHEAD = CHUNKS == 2,             // raw bytes arrive while those before them are unpacked
    SPREAD = (AHEAD || READY) && MODE == DENSE,  // what a step fetches is dealt to the spans that it multiplies
    ALIKE = SLABS <= 4,              // a scheduler has one warp of the block: each unpacks behind its sums
    WHOLE = F::BLOCK % STEP == 0,    // no step ends behind the row
    KINDS = READY ? 1 : 2,           // of work: sums, unpacking
    COPIES_OF_CODE = ALIKE ? 2 : 1,  // of the loop over both
    LINE_H = BM + 4                  // floats of a column of gate x and up x that is to be quantised
};

static_assert(SHARED_BYTES == SHARED, "prompt_plans.py asks for another size than this layout has");

// Asynchronous copies of part `part` of SHARES of the activations of one step: int8, scales and sums. Past the row's
// end nothing is copied. `source`: where each column's row begins, in blocks of 32 inputs. The 32 bytes of span s of
// column c lie at place s ^ (c & 3), so that neighbouring columns meet different banks. All sources are read before the
// first copy: a copy behind a read waits for it. The second half is left out where there are no columns for it; behind
// the last column of a tile of experts lie others that are valid.
DEVICE void fetch_inputs(u8* shared, const Arguments& a, int step, int buffer, int columns, int part) {
    enum {
        AT_ONCE = THREADS / 8, Q_PART = (BN + AT_ONCE * SHARES - 1) / (AT_ONCE * SHARES),
        AT_ONCE_D = THREADS / 4, D_PART = (BN + AT_ONCE_D * SHARES - 1) / (AT_ONCE_D * SHARES),
        EVEN = BN % (AT_ONCE * SHARES) == 0, EVEN_D = BN % (AT_ONCE_D * SHARES) == 0,
        AT_ONCE_S = THREADS / GROUPS, SUMS = (BN + AT_ONCE_S - 1) / AT_ONCE_S, EVEN_S = BN % AT_ONCE_S == 0,
        HALF = (BN / 2 + AT_ONCE_D - 1) / AT_ONCE_D * AT_ONCE_D  // columns
    };
    const bool whole = MODE == DENSE || columns > HALF;
    const u32* source = (const u32*)(shared + AT_SOURCE);
    u8* inputs = shared + AT_INPUTS + buffer * FETCHED;
    const int piece = 16 * (threadIdx.x & 7), s = threadIdx.x & 3;
    const int first = (threadIdx.x >> 3) + part * (Q_PART * AT_ONCE);
    const int own = (threadIdx.x >> 2) + part * (D_PART * AT_ONCE_D);
    u32 begin[Q_PART], begin_d[D_PART];
#pragma unroll
    for (int i = 0; i < Q_PART; i++)
        if (EVEN || first + i * AT_ONCE < BN) begin[i] = source[first + i * AT_ONCE];
#pragma unroll
    for (int i = 0; i < D_PART; i++)
        if (EVEN_D || own + i * AT_ONCE_D < BN) begin_d[i] = source[own + i * AT_ONCE_D];
    u64 from = (u64)a.q + STEP * step + piece, from_d = (u64)a.d + 4 * (4 * step + s);
    KEEP_ADDRESS(from);
    KEEP_ADDRESS(from_d);
    if (WHOLE || STEP * step + piece < a.cols) {
        u8* to = inputs + first * STEP + (piece ^ (first & 3) << 5);
#pragma unroll
        for (int i = 0; i < Q_PART; i++)
            if ((EVEN || first + i * AT_ONCE < BN) && (i * AT_ONCE < HALF || whole))
                copy16(to + i * AT_ONCE * STEP, (const u8*)(from + 32ull * begin[i]));
    }
    if (WHOLE || STEP * step + 32 * s < a.cols) {
        float* to = (float*)(inputs + INPUTS) + s * LINE_D + own;
#pragma unroll
        for (int i = 0; i < D_PART; i++)
            if ((EVEN_D || own + i * AT_ONCE_D < BN) && (i * AT_ONCE_D < HALF || whole))
                copy4(to + i * AT_ONCE_D, (const float*)(from_d + 4ull * begin_d[i]));
    }
    if (F::OFFSET && part == 0) {
        const int g = threadIdx.x % GROUPS, c = threadIdx.x / GROUPS;
        u64 from_s = (u64)a.sums + 4 * (GROUPS * step + g);
        KEEP_ADDRESS(from_s);
        if (WHOLE || STEP * step + F::GROUP * g < a.cols) {
            float* to = (float*)(inputs + SUMS_AT) + g * LINE_D + c;
#pragma unroll
            for (int i = 0; i < SUMS; i++)
                if ((EVEN_S || c + i * AT_ONCE_S < BN) && (i * AT_ONCE_S < HALF || whole))
                    copy4(to + i * AT_ONCE_S, (const float*)(from_s + 4ull * PER_SPAN * source[c + i * AT_ONCE_S]));
        }
    }
}

// READY: asynchronous copies of part `part` of SHARES of an unpacked step, from its first byte on.
DEVICE void fetch_ready(u8* shared, const u8* step, int buffer, int part) {
    enum {
        PIECES = UNPACKED / 16,
        OF_A_PART = (PIECES + THREADS * SHARES - 1) / (THREADS * SHARES),
        EVEN = PIECES % (THREADS * SHARES) == 0
    };
    static_assert(UNPACKED % 16 == 0, "a step is no whole number of copies");
    const int first = threadIdx.x + part * (OF_A_PART * THREADS);
    u64 from = (u64)step + 16 * first;
    KEEP_ADDRESS(from);
    u8* to = shared + AT_UNPACKED + buffer * UNPACKED + 16 * first;
#pragma unroll
    for (int i = 0; i < OF_A_PART; i++)
        if (EVEN || first + i * THREADS < PIECES) copy16(to + 16 * THREADS * i, (const u8*)from + 16 * THREADS * i);
}

// The raw bytes of a run on their way: fetched chunk by chunk, unpacked step by step.
struct Rows {
    u8* shared;
    const Work& w;
    int row_bytes, chunks;  // bytes of a row, chunks of a tile
    Grid grid;
    Place chunk;            // to be fetched
    int fetched;            // chunks
    u32 low, high;          // address bits of the thread's rows of the tile that is unpacked

    DEVICE void fetch(int part) const {
        if (chunk.in(w.tiles, chunks))
            fetch_rows(shared + (CHUNKS == 2 && fetched & 1 ? BM * PITCH : 0), w, row_bytes, chunk, part);
    }

    DEVICE void next() { chunk = chunk.after(chunks), fetched++; }

    DEVICE void fetch_all() {
        for (int part = 0; part < SHARES; part++) fetch(part);
        next();
    }

    DEVICE void enter(int tile) {
        const int row = 16 * (threadIdx.x >> 5) + (threadIdx.x >> 2 & 7);
        low = (u32)(u64)row_of(w, tile, row, row_bytes);
        high = (u32)(u64)row_of(w, tile, row + 8, row_bytes);
    }

    DEVICE void unpack(Place step, int buffer) {
        if (MODE != GATE_UP && step.at == 0) enter(step.tile);
        const int of_run = step.tile * chunks + (step.at >> 1);
        const u8* raw = shared + (CHUNKS == 2 && of_run & 1 ? BM * PITCH : 0);
        unpack_step(raw, shared + AT_UNPACKED + buffer * UNPACKED, low, high, step.at, grid);
    }
};

// What a step fetches: the activations of the next one, a group of their own since they are needed at once, and the raw
// bytes that take the place of an unpacked chunk. For DENSE a warp starts these copies span by span: activations in the
// first PARTS spans, raw bytes in the last. Experts have another number of columns in every warp, and code of its own
// for each: theirs are started once, before. READY: unpacked weights come with the activations.
struct Coming {
    const Rows& rows;
    const Arguments& a;
    int step, buffer, columns;  // of the activations
    bool inputs, chunk;         // whether there are any
    const u8* ready;            // the step's weights

    DEVICE void fetch(int span) const {
        if (span < SHARES && inputs) {
            fetch_inputs(rows.shared, a, step, buffer, columns, span);
            if (READY) fetch_ready(rows.shared, ready, buffer, span);
        }
        if (READY) return;
        if (span == SHARES - 1) copies_commit();
        if (span >= 4 - SHARES && chunk) rows.fetch(span - (4 - SHARES));
    }

    DEVICE void fetch_from(int span) const {
        if (MODE == DENSE) {
#pragma unroll 1
            for (; span < 4; span++) fetch(span);
        } else {
            fetch(0);
            fetch(3);
        }
    }
};

// What a warp reads of the columns of one eight: 8 int8 of a column, scales and sums of two.
struct Column {
    uint2 q;
    float2 d, sum[PER_SPAN];
};

// A lane's place stays in a register: without this the compiler makes it again, from the thread's number, for every span.
// For sm_120 it has none left.
#define KEEPS (ARCH < 1000)
#define KEEP_PLACE(x) \
    if (KEEPS) asm volatile("" : "+r"(x))

// What a lane multiplies in one span, and where it reads that.
struct Span {
    const u8* shared;
    u32 at_codes, at_q, at_d;  // places of the lane's parts of the first span; at_q: span s lies at at_q ^ 32 s
    const u8* q;
    const float *d, *sums;
    Column begin;              // of the first eight
    u32 w[MT][4];
    float2 scale[PER_SPAN][MT], lift[PER_SPAN][MT], offset[PER_SPAN][MT];  // rows g and g + 8

    // What the first matrix steps of span s want.
    DEVICE void enter(int s) {
        q = shared + (at_q ^ 32 * s);
        d = (const float*)(shared + at_d) + s * LINE_D;
        sums = (const float*)(shared + at_d + (SUMS_AT - INPUTS)) + s * PER_SPAN * LINE_D;
        const u8* codes = shared + at_codes + 512 * s;
#pragma unroll
        for (int i = 0; i < MT; i++) {
            const uint4 c = *(const uint4*)(codes + i * (16 * STEP));
            w[i][0] = c.x, w[i][1] = c.y, w[i][2] = c.z, w[i][3] = c.w;
        }
        read(begin, 0);
    }

    DEVICE void read(Column& c, int j) const {
        c.q = *(const uint2*)(q + 8 * j * STEP);
        c.d = *(const float2*)(d + 8 * j);
        if (F::OFFSET)
            for (int k = 0; k < PER_SPAN; k++) c.sum[k] = *(const float2*)(sums + k * LINE_D + 8 * j);
    }

    DEVICE void multiply(int (&c)[MT][4], const Column& column, int k) const {
#pragma unroll
        for (int i = 0; i < MT; i++) {
            if (F::GROUP == 32) multiply32<16, MAGIC_BITS>(c[i], w[i], column.q.x, column.q.y);
            else multiply16<16, MAGIC_BITS>(c[i], w[i][2 * k], w[i][2 * k + 1], k ? column.q.y : column.q.x);
        }
    }

    DEVICE void add(float (&out)[4], const int (&c)[4], const Column& column, int k, int i) const {
        const float2 s = scale[k][i], l = lift[k][i], d = column.d;
        out[0] = fmaf(scaled(c[0], s.x, l.x), d.x, out[0]);
        out[1] = fmaf(scaled(c[1], s.x, l.x), d.y, out[1]);
        out[2] = fmaf(scaled(c[2], s.y, l.y), d.x, out[2]);
        out[3] = fmaf(scaled(c[3], s.y, l.y), d.y, out[3]);
        if (F::OFFSET) {
            const float2 o = offset[k][i], sum = column.sum[k];
            out[0] = fmaf(sum.x * o.x, d.x, out[0]);
            out[1] = fmaf(sum.y * o.x, d.y, out[1]);
            out[2] = fmaf(sum.x * o.y, d.x, out[2]);
            out[3] = fmaf(sum.y * o.y, d.y, out[3]);
        }
    }
};

// One step: every group of its spans, in order. EIGHTS: of columns that the warp has. The matrix steps of a unit (a group,
// eight columns) are under way while the sums of the unit before are added, and what a span begins with is read while the
// last sums of the span before are.
template <int EIGHTS>
DEVICE void multiply_step(float (&acc)[MT][NT][4], const Coming& coming, int buffer, int spans, int wm, int first) {
    const u8* shared = coming.rows.shared;
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const u32 unpacked = AT_UNPACKED + buffer * UNPACKED, inputs = AT_INPUTS + buffer * FETCHED;
    static_assert(AT_INPUTS % 128 == 0 && FETCHED % 128 == 0, "the spans of a column begin at no multiple of 128");
    static_assert(AT_UNPACKED % 128 == 0 && UNPACKED % 128 == 0, "the scales of a slab begin at no multiple of 128");
    Span span;
    span.shared = shared;
    span.at_codes = unpacked + MT * wm * (16 * STEP) + lane * 16;
    span.at_q = inputs + (first + g) * STEP + 32 * (g & 3) + 8 * t;
    span.at_d = inputs + INPUTS + 4 * (first + 2 * t);
    u32 at_scales = unpacked + CODES + (MT * wm * 8 + g) * (LIFTS ? 16 : 8);  // of span s with LIFTS at at_scales ^ 32 s
    KEEP_PLACE(span.at_codes);
    KEEP_PLACE(span.at_q);
    KEEP_PLACE(span.at_d);
    KEEP_PLACE(at_scales);
    span.enter(0);
    int s = 0;
    asm volatile("" : "+r"(s));  // not known to the compiler, which would write the first span's code a second time
#pragma unroll 1
    for (; s < (WHOLE ? 4 : spans); s++) {
        if (SPREAD) coming.fetch(s);
#pragma unroll
        for (int k = 0; k < PER_SPAN; k++)
#pragma unroll
            for (int i = 0; i < MT; i++) {
                const int group = s * PER_SPAN + k;
                if (LIFTS) {
                    const float4* kept = (const float4*)(shared + (at_scales ^ 32 * s));
                    const float4* made = (const float4*)(shared + unpacked + CODES) + MT * wm * 8;
                    const int at = group * (LINE / 4) + 8 * i;
                    const float4 v = KEEPS ? kept[at] : made[at + (g ^ 2 * s)];
                    span.scale[k][i] = make_float2(v.x, v.y);
                    span.lift[k][i] = make_float2(v.z, v.w);
                } else {
                    const float2 v = ((const float2*)(shared + at_scales))[group * (LINE / 2) + 8 * i];
                    span.scale[k][i] = v;
                    span.lift[k][i] = make_float2(v.x * -MAGIC, v.y * -MAGIC);
                }
                if (F::OFFSET) {
                    const u32 at = unpacked + OFFSETS_AT + 8 * (MT * wm * 8 + g);
                    span.offset[k][i] = ((const float2*)(shared + at))[group * (LINE_O / 2) + 8 * i];
                }
            }
        Column column[EIGHTS];
        int c[EIGHTS * PER_SPAN][MT][4];
        column[0] = span.begin;
        span.multiply(c[0], column[0], 0);
        if (EIGHTS > 1) span.read(column[1 % EIGHTS], 1);
#pragma unroll
        for (int unit = 0; unit < EIGHTS * PER_SPAN; unit++) {
            const int j = unit / PER_SPAN, next = unit + 1, next_j = next / PER_SPAN;
            if (next < EIGHTS * PER_SPAN) {
                span.multiply(c[next], column[next_j], next % PER_SPAN);
                if (next % PER_SPAN == 0 && next_j + 1 < EIGHTS) span.read(column[next_j + 1], next_j + 1);
            } else {
                span.enter(s + 1);  // behind the last span lie other bytes of this block, which nobody uses
            }
#pragma unroll
            for (int i = 0; i < MT; i++) span.add(acc[i][j], c[unit][i], column[j], unit % PER_SPAN, i);
        }
    }
}

// The columns of a warp.
struct Part {
    int eights, first;
};

// A tile of experts has its eights dealt evenly to the WARPS_ACROSS, another warp first in another block: the blocks of a
// multiprocessor share its schedulers, and a scheduler has the same warps of each.
DEVICE Part part_of(const Work& w, int wn) {
    if (MODE == DENSE) return Part{NT, 8 * NT * wn};
    const int eights = (w.count + 7) / 8, each = eights / WARPS_ACROSS, more = eights % WARPS_ACROSS;
    const int turn = (wn + (blockIdx.x * 2654435761u >> 30)) % WARPS_ACROSS;
    return Part{each + (turn < more), 8 * (each * turn + min(turn, more))};
}

// The same for any number of eights up to EIGHTS. There is code for the numbers that full tiles have, and for even
// ones: with one eight more a warp also multiplies what lies behind its columns, and nobody stores that.
template <int EIGHTS>
struct Steps {
    enum { FEWER = EIGHTS > NT - 2 ? EIGHTS - 1 : (EIGHTS - 1) / 2 * 2 };

    DEVICE static void multiply(float (&acc)[MT][NT][4], const Coming& coming, int buffer, int spans, int wm, Part own) {
        if (own.eights > FEWER) multiply_step<EIGHTS>(acc, coming, buffer, spans, wm, own.first);
        else Steps<FEWER>::multiply(acc, coming, buffer, spans, wm, own);
    }
};
template <>
struct Steps<0> {
    DEVICE static void multiply(float (&)[MT][NT][4], const Coming&, int, int, int, Part) {}
};

#include "prompt_results.cuh"

DEVICE void clear(float (&acc)[MT][NT][4]) {
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++) acc[i][j][0] = acc[i][j][1] = acc[i][j][2] = acc[i][j][3] = 0.0f;
}

// All copies of the block so far, for all of its threads.
DEVICE void copies_arrive() {
    copies_commit();
    copies_wait<0>();
    __syncthreads();
}

#include "prompt_sources.cuh"

KERNEL __launch_bounds__(THREADS, BLOCKS) void product_prompt(PARAMETER Arguments a) {
    extern __shared__ __align__(16) u8 shared[];
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);  // so the compiler knows that a warp has one
    const int wm = warp % WARPS_DOWN, wn = warp / WARPS_DOWN;
    const int steps = (a.cols + STEP - 1) / STEP;
    if (MODE != DENSE || READY) inputs_ready();
    Work w;
    if (!find_work(a, w)) return;
    find_sources<32>(shared, a, w);
    if (!w.first) return;

    Rows rows{shared, w, a.pitch / F::BLOCK * F::BYTES, (steps + 1) / 2};
#pragma unroll 1
    for (int i = 0; i < CHUNKS; i++) rows.fetch_all();
    if (!READY) rows.grid = fill_table(shared);
    if (MODE == DENSE && !READY) inputs_ready();  // the weights of the file do not wait for the kernel before
    __syncthreads();
    const Part own = part_of(w, wn);
    const int columns = MODE == DENSE ? (int)BN : (w.count + 7) / 8 * 8;
    const u8* ready = w.first + (READY ? (u64)(u32)(w.row / BM * steps) * UNPACKED : 0);  // of the step to be fetched
    Coming{rows, a, 0, 0, columns, true, false, ready}.fetch_from(0);
    copies_arrive();
    if (!READY) {
        rows.enter(0);
        rows.unpack(Place{0, 0}, 0);
        __syncthreads();
    }

    const bool busy = own.eights && own.first < w.count;  // a warp without columns only unpacks
    const bool unpacks_first = !ALIKE && !READY && warp & 4;  // warps w and w + 4 share a scheduler
    float acc[MT][NT][4] = {};
    int buffer = 0;
    for (Place here{0, 0}; here.in(w.tiles, steps); buffer ^= 1) {
        const Place next = here.after(steps);
        const bool more = next.in(w.tiles, steps);
        const bool unpacked = here.at & 1 || (MODE != GATE_UP && next.at == 0);  // a chunk, to its end
        ready += READY ? UNPACKED : 0;
        const Coming coming{rows, a, next.at, buffer ^ 1, columns, more, unpacked, ready};
        if (!SPREAD || !busy) coming.fetch_from(0);
        if (CHUNKS == 1 && unpacked && more) copies_arrive();
#pragma unroll COPIES_OF_CODE
        for (int part = 0; part < KINDS; part++) {  // a loop, so that the code is there once
            if ((part == 0) == unpacks_first) {
                if (more) rows.unpack(next, buffer ^ 1);
            } else if (busy) {
                const int spans = min(4, a.cols / 32 - 4 * here.at);
                if (MODE == DENSE) multiply_step<NT>(acc, coming, buffer, spans, wm, own.first);
                else Steps<NT>::multiply(acc, coming, buffer, spans, wm, own);
                if (SPREAD && !WHOLE) coming.fetch_from(spans);
            }
        }
        copies_commit();
        if (unpacked) rows.next();
        if (MODE != GATE_UP && next.at == 0 && busy) {
            store_tile(shared, a, acc, w, here.tile, wm, own);
            clear(acc);
        }
        const bool ends = MODE != GATE_UP && next.after(steps).at == 0;  // the next step is a tile's last
        if (AHEAD && unpacked && (next.at & 1) == 0 && !ends) copies_wait<1>();  // the next step has its chunk
        else copies_wait<0>();
        __syncthreads();
        here = next;
    }
#ifdef NEXT_ORDER  // GATE_UP has runs of one tile
    store_quantized(shared, a, acc, w, wm, own);
#else
    if (MODE == GATE_UP && busy) store_tile(shared, a, acc, w, 0, wm, own);
#endif
}
