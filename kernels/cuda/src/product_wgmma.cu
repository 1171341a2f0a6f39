// The product of quantised weights with many rows (a prompt) on a card whose matrix steps take four warps together (compute
// capability 9.0). Order of summation: ops.py, `product`. The bits are those of product_prompt.cu.
//
// A warp computes 16 weight rows (GATE_UP: eight of gate and the same eight of up) times all BN activation rows of the block. Its weights go from raw bytes, a chunk of 256
// columns ahead, to int8 in its own part of shared memory and on to registers: no other warp has them. Activations of STEP
// columns lie in two places in turn for all warps. A unit is a group of the row times PART columns: its matrix steps are under
// way while the sums of the unit before are added.
//
// A sum of int8 products comes without a bias that makes it a float (device.cuh), so matrix steps add one: constants of
// -128 times constants of -128 are BIAS, more than any sum. For groups of 16 they are the other half of the step's 32
// inputs, for groups of 32 a step of their own. The bits of the positive sum are those of the float sum * 2^-149, and
//     fma(sum * 2^-149, scale * 2^106, -BIAS * scale * 2^-43) = float(sum - BIAS) * scale * 2^-43,
// rounded as the written order has it, since no scale is outside of 2^-29 .. 2^21; the activations' scales are 2^43
// times as large (quantize.cuh), so inputs must be below 2^91.
//
// Constants: TYPE a format with the order NATIVE or EIGHT, FOURS of warps, EIGHTS of columns of a part, PARTS of a tile,
// BLOCKS of a multiprocessor, COPIES of the table, SHARED bytes that prompt_plans.py asks for; MODE, NEXT_ORDER and
// NEXT_SUMS as in product_prompt.cu. A tile of a list with fewer columns has smaller parts.
#include "device.cuh"
#include "formats.cuh"
#include "quantize.cuh"
#include "prompt.cuh"
#include "wgmma.cuh"

typedef TYPE F;
enum {
    WARPS = 4 * FOURS,
    THREADS = 32 * WARPS,
    BM = 16 * WARPS,
    ROWS = MODE == GATE_UP ? BM / 2 : BM,  // of a tile, of each matrix
    PART = 8 * EIGHTS,
    BN = PART * PARTS,
    CHUNK_BYTES = 256 / F::BLOCK * F::BYTES,
    PITCH = ((CHUNK_BYTES + 15 + 4 + 15) / 16 | 1) * 16,  // of a row of raw bytes
    STEP = 128,
    PER_SPAN = 32 / F::GROUP,
    GROUPS = 4 * PER_SPAN,  // of a step
    UNITS = PER_SPAN * PARTS,        // of a span
    AT_ONCE = UNITS <= 2 ? 4 : 2,    // spans without a jump between them
    RAW = 16 * PITCH,       // bytes of a chunk of a warp
    SCALES = GROUPS * 8,    // float4 of a step of a warp: scale and lift of rows g and g + 8
    UNPACKED = 16 * STEP + SCALES * 16 + (F::OFFSET ? SCALES * 8 : 0),
    PIECE = BN * 16 + 16,   // bytes of 16 inputs of all columns; eight pieces meet different banks
    LINE = BN + 8,          // floats of a span's scales of all columns
    SUMS_AT = 8 * PIECE + 4 * LINE * 4,
    FETCHED = SUMS_AT + (F::OFFSET ? GROUPS * LINE * 4 : 0),
    AT_UNPACKED = WARPS * 2 * RAW,
    AT_INPUTS = AT_UNPACKED + WARPS * 2 * UNPACKED,
    AT_BIAS = AT_INPUTS + 2 * FETCHED,
    AT_SOURCE = AT_BIAS + 2 * PART * 16,
    AT_TABLE = AT_SOURCE + BN * 4,
    SHARED_BYTES = AT_TABLE + F::GRID * COPIES * (F::LOOK == WORD ? 4 : 8),
    LINE_H = BM / 2 + 4     // floats of a column of silu(gate x) * (up x) that is to be quantised
};

static_assert(SHARED_BYTES == SHARED, "prompt_plans.py asks for another size than this layout has");
static_assert(F::ORDER != EVEN_ODD, "no order of activations is made for this format");
static_assert(BN * LINE_H * 4 <= AT_SOURCE, "a tile of results does not fit where the operands were");

#define BIAS_BITS (F::GROUP == 16 ? 18 : 19)
#define SCALE_UP 0x74800000u                                 // 2^106
#define LIFT_OF_SCALE (F::GROUP == 16 ? 0x00040000u : 0x00080000u)  // 2^-131, 2^-130: BIAS * 2^-149

// Where each column's row begins, in int8.
DEVICE void find_sources(u8* shared, const Arguments& a, const Work& w) {
    for (int c = threadIdx.x; c < BN; c += THREADS) {
        const int column = w.begin + min(c, w.count - 1);
        ((u32*)(shared + AT_SOURCE))[c] = (u32)(MODE == DENSE ? column : a.order[column] / a.divide) * a.cols;
    }
}

// Where the scale of a column lies in a line: a lane reads those of two eights at once.
DEVICE int place_of(int column) {
    return (column & ~15) | (column >> 1 & 3) << 2 | (column >> 3 & 1) << 1 | (column & 1);
}

// Asynchronous copies of the activations of one step, of `columns`: int8, scales and sums. Past the row's end nothing is
// copied. Sources are read some at a time before their copies: a copy behind a read waits for it.
DEVICE void fetch_inputs(u8* shared, const Arguments& a, int step, int parity, int columns) {
    enum {
        AT_ONCE_Q = THREADS / 8,
        AT_ONCE_D = THREADS / 4,
        QS = (BN + AT_ONCE_Q - 1) / AT_ONCE_Q,
        DS = (BN + AT_ONCE_D - 1) / AT_ONCE_D,
        WHOLE = MODE == DENSE && BN % AT_ONCE_D == 0,  // no column has to be asked for
        SOME = 4
    };
    const u32* source = (const u32*)(shared + AT_SOURCE);
    u8* inputs = shared + AT_INPUTS + parity * FETCHED;
    const int piece = threadIdx.x & 7, first = threadIdx.x >> 3, s = threadIdx.x & 3, own = threadIdx.x >> 2;
    if (STEP * step + 16 * piece < a.cols) {
        const u8* from = a.q + STEP * step + 16 * piece;
        u8* to = inputs + piece * PIECE + first * 16;
#pragma unroll
        for (int begin = 0; begin < QS; begin += SOME) {
            u32 at[SOME];
#pragma unroll
            for (int i = 0; i < SOME; i++) {
                const int column = first + (begin + i) * AT_ONCE_Q;
                at[i] = source[BN % (SOME * AT_ONCE_Q) ? min(column, BN - 1) : column];
            }
#pragma unroll
            for (int i = 0; i < SOME; i++)
                if (begin + i < QS && (WHOLE || first + (begin + i) * AT_ONCE_Q < columns))
                    copy16(to + (begin + i) * AT_ONCE_Q * 16, from + at[i]);
        }
    }
    if (STEP * step + 32 * s < a.cols) {
        const float* from = a.d + 4 * step + s;
        float* to = (float*)(inputs + 8 * PIECE) + s * LINE + place_of(own);
#pragma unroll
        for (int i = 0; i < DS; i++) {
            const int column = own + i * AT_ONCE_D;  // whole lines of 16 further
            if (WHOLE || column < columns) copy4(to + i * AT_ONCE_D, from + source[column] / 32);
        }
    }
    if (F::OFFSET) {
        const int g = threadIdx.x % GROUPS, c = threadIdx.x / GROUPS;
        if (STEP * step + F::GROUP * g < a.cols) {
            const float* from = a.sums + GROUPS * step + g;
            float* to = (float*)(inputs + SUMS_AT) + g * LINE;
#pragma unroll
            for (int i = 0; i < (BN * GROUPS + THREADS - 1) / THREADS; i++) {
                const int column = c + i * (THREADS / GROUPS);
                if (column < columns) copy4(to + place_of(column), from + source[column] / F::GROUP);
            }
        }
    }
}

// The warp's rows on their way: fetched chunk by chunk, unpacked step by step.
struct Rows {
    u8 *raw, *unpacked;     // of the warp
    const Work& w;
    int row_bytes, chunks;  // bytes of a row, chunks of a tile
    Grid grid;
    Place chunk;            // to be fetched
    int fetched;            // chunks
    u32 low, high;          // address bits of the thread's rows of the tile that is unpacked

    // Asynchronous copies of the raw bytes of the next chunk; LANES neighbours copy a row, 16 bytes each. Rows past the
    // matrix are not copied: nobody stores their results.
    DEVICE void fetch() {
        enum { MOST = (CHUNK_BYTES + 30) / 16, LANES = MOST <= 8 ? 8 : MOST <= 16 ? 16 : 32, AT_ONCE = 32 / LANES };
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        const int first = lane / LANES, piece = 16 * (lane % LANES), at = chunk.at * CHUNK_BYTES;
        const int bytes = F::BLOCK == 256 ? (int)CHUNK_BYTES : min((int)CHUNK_BYTES, row_bytes - at);
        const int row = w.row + chunk.tile * ROWS + (MODE == GATE_UP ? 8 : 16) * warp + first;
        u8* to = raw + (fetched & 1) * RAW + first * PITCH + piece;
        const u32 begin = (u32)row * row_bytes + at;
        if (chunk.tile < w.tiles)
#pragma unroll
            for (int i = 0; i < 16; i += AT_ONCE) {
                const int r = MODE == GATE_UP ? i & 7 : i;  // of a warp's 16 rows, eight are of gate, then eight of up
                const u64 from = (u64)(MODE == GATE_UP && i >= 8 ? w.second : w.first) + (begin + (u32)(r * row_bytes));
                if (row + r < w.rows && piece < (int)(from & 15) + bytes)
                    copy16(to + i * PITCH, (const u8*)(from & ~15ull) + piece);
            }
        chunk = chunk.after(chunks), fetched++;
    }

    // A step to int8, scales and offsets, to the place of its parity in the run. The int8 of a span are 16 bytes a lane,
    // the registers of a matrix step. Spans past the row's end have codes without meaning, which nobody reads.
    DEVICE void unpack(Place step, int parity) {
        const int g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3, upper = 4 * (step.at & 1);
        if (step.at == 0) {
            const int row = w.row + step.tile * ROWS + (MODE == GATE_UP ? 8 : 16) * (threadIdx.x >> 5) + g;
            low = (u32)(u64)w.first + row * row_bytes;
            high = MODE == GATE_UP ? (u32)(u64)w.second + row * row_bytes : low + 8 * row_bytes;
        }
        const u32 at = (step.at >> 1) * CHUNK_BYTES;
        const u8* from = raw + ((step.tile * chunks + (step.at >> 1)) & 1) * RAW + g * PITCH;
        const u8* p0 = from + ((low + at) & 15);
        const u8* p1 = from + 8 * PITCH + ((high + at) & 15);
        u8* to = unpacked + parity * UNPACKED;
        uint4 c[4];  // stored at the end: a store between loads would make them again
#pragma unroll
        for (int s = 0; s < 4; s++) {
            F::span(p0, upper + s, t, grid, c[s].x, c[s].z);
            F::span(p1, upper + s, t, grid, c[s].y, c[s].w);
        }
#pragma unroll
        for (int s = 0; s < 4; s++) *(uint4*)(to + 512 * s + (threadIdx.x & 31) * 16) = c[s];
        float4* scales = (float4*)(to + 16 * STEP) + g;
        float2* offsets = (float2*)(to + 16 * STEP + SCALES * 16) + g;
        const float up = float_bits(SCALE_UP), lift = -float_bits(LIFT_OF_SCALE);
#pragma unroll
        for (int k = 0; k < PER_SPAN; k++) {
            const int group = t * PER_SPAN + k, of = upper * PER_SPAN + group;
            const float x = F::scale(p0, of) * up, y = F::scale(p1, of) * up;
            scales[group * 8] = make_float4(x, y, x * lift, y * lift);
            if (F::OFFSET) {
                const float down = float_bits(0x2A000000u);  // 2^-43
                offsets[group * 8] = make_float2(F::offset(p0, of) * down, F::offset(p1, of) * down);
            }
        }
        __syncwarp();
    }
};

// Where a span lies: its codes and scales, the first of its two pieces of inputs (an address), its columns' scales and sums.
struct Span {
    const u8* codes;
    const float4* scales;
    const float2* offsets;
    u32 inputs;
    const float *d, *sums;

    // Span s of a step.
    DEVICE Span(u8* shared, const Rows& rows, int parity, int s) {
        const int lane = threadIdx.x & 31;
        const u8* unpacked = rows.unpacked + parity * UNPACKED;
        const u8* fetched = shared + AT_INPUTS + parity * FETCHED;
        codes = unpacked + 512 * s + 16 * lane;
        scales = (const float4*)(unpacked + 16 * STEP) + s * (PER_SPAN * 8) + (lane >> 2);
        offsets = (const float2*)(unpacked + 16 * STEP + SCALES * 16) + s * (PER_SPAN * 8) + (lane >> 2);
        inputs = (u32)__cvta_generic_to_shared(fetched) + 2 * s * PIECE;
        d = (const float*)(fetched + 8 * PIECE) + s * LINE + 4 * (lane & 3);
        sums = (const float*)(fetched + SUMS_AT) + s * (PER_SPAN * LINE) + 4 * (lane & 3);
    }

    // Of the span s behind this one.
    DEVICE void codes_of(int s, u32 (&w)[4]) const {
        const uint4 c = *(const uint4*)(codes + 512 * s);
        w[0] = c.x, w[1] = c.y, w[2] = c.z, w[3] = c.w;
    }
};

// The matrix steps of a unit: group k of the span with these codes, part h of WIDTH eights.
template <int WIDTH>
DEVICE void multiply(int (&d)[4 * EIGHTS], const u32 (&w)[4], u32 inputs, u32 bias, u32 constant, int k, int h) {
    enum { N = 8 * WIDTH };
    const u32 first = inputs + h * (N * 16);
    steps_begin();
    if (F::GROUP == 16) {
        const u32 a[4] = {w[2 * k], w[2 * k + 1], constant, constant};
        step<N, false>(d, a, pieces(first + k * PIECE, bias));
    } else {
        const u32 ones[4] = {constant, constant, constant, constant};
        step<N, false>(d, ones, pieces(bias, bias + PART * 16));
        step<N, true>(d, w, pieces(first, first + PIECE));
    }
    steps_commit();
}

// What the sums of a unit are multiplied with, read before they arrive: group k and span b, from the first one on, part h.
template <int WIDTH>
struct Factors {
    float4 scale, d[WIDTH / 2];
    float2 offset;
    float4 sum[F::OFFSET ? WIDTH / 2 : 1];

    DEVICE void read(const Span& span, int k, int b, int h) {
        scale = span.scales[k * 8];
#pragma unroll
        for (int j = 0; j < WIDTH / 2; j++) d[j] = *(const float4*)(span.d + b * LINE + 8 * (WIDTH * h + 2 * j));
        if (F::OFFSET) {
            offset = span.offsets[k * 8];
#pragma unroll
            for (int j = 0; j < WIDTH / 2; j++) sum[j] = *(const float4*)(span.sums + k * LINE + 8 * (WIDTH * h + 2 * j));
        }
    }
};

// The sums of a unit to the results of its part.
template <int WIDTH>
DEVICE void add(float (&acc)[EIGHTS][4], const int (&c)[4 * EIGHTS], const Factors<WIDTH>& f) {
    const float4 s = f.scale;
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
        const float4 d = f.d[j / 2];
        const float x = j & 1 ? d.z : d.x, y = j & 1 ? d.w : d.y;
        float* out = acc[j];
        const int* in = c + 4 * j;
        out[0] = fmaf(fmaf(__int_as_float(in[0]), s.x, s.z), x, out[0]);
        out[1] = fmaf(fmaf(__int_as_float(in[1]), s.x, s.z), y, out[1]);
        out[2] = fmaf(fmaf(__int_as_float(in[2]), s.y, s.w), x, out[2]);
        out[3] = fmaf(fmaf(__int_as_float(in[3]), s.y, s.w), y, out[3]);
        if (F::OFFSET) {
            const float4 sum = f.sum[j / 2];
            const float u = j & 1 ? sum.z : sum.x, v = j & 1 ? sum.w : sum.y;
            out[0] = fmaf(u * f.offset.x, x, out[0]);
            out[1] = fmaf(v * f.offset.x, y, out[1]);
            out[2] = fmaf(u * f.offset.y, x, out[2]);
            out[3] = fmaf(v * f.offset.y, y, out[3]);
        }
    }
}

DEVICE void clear(float (&acc)[PARTS][EIGHTS][4]) {
#pragma unroll
    for (int h = 0; h < PARTS; h++)
#pragma unroll
        for (int j = 0; j < EIGHTS; j++) acc[h][j][0] = acc[h][j][1] = acc[h][j][2] = acc[h][j][3] = 0.0f;
}

template <int WIDTH>
DEVICE void store_tile(const Arguments& a, const float (&acc)[PARTS][EIGHTS][4], const Work& w, int tile) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, warp = threadIdx.x >> 5;
    const int first = w.row + tile * ROWS + (MODE == GATE_UP ? 8 : 16) * warp + g;
    float* out = a.matrix[w.matrix].out;
#pragma unroll
    for (int j = 0; j < PARTS * WIDTH; j++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int column = 8 * j + 2 * t + c;
            if (column >= w.count) continue;
            const int at = MODE == DENSE ? w.begin + column : a.order[w.begin + column];
            float* line = out + (long long)at * w.rows;
            const float y = acc[j / WIDTH][j % WIDTH][c], z = acc[j / WIDTH][j % WIDTH][2 + c];
            if (MODE == GATE_UP) {
                if (first < w.rows) line[first] = silu_f32(y) * z;
                continue;
            }
            const bool joins = MODE == DENSE && a.join;
            const float weight = joins ? sigmoid_f32(a.join[at]) : 0.0f;
            if (first < w.rows) line[first] = joins ? fmaf(weight, y, line[first]) : y;
            if (first + 8 < w.rows) line[first + 8] = joins ? fmaf(weight, z, line[first + 8]) : z;
        }
}

#ifdef NEXT_ORDER
template <int WIDTH>
DEVICE void store_hidden(const Arguments& a, const float (&acc)[PARTS][EIGHTS][4], const Work& w, float* tile) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, warp = threadIdx.x >> 5;
#pragma unroll
    for (int j = 0; j < PARTS * WIDTH; j++)
#pragma unroll
        for (int c = 0; c < 2; c++)
            tile[(8 * j + 2 * t + c) * LINE_H + 8 * warp + g] =
                silu_f32(acc[j / WIDTH][j % WIDTH][c]) * acc[j / WIDTH][j % WIDTH][2 + c];
    __syncthreads();
    store_quantized<BN, BM / 16, LINE_H, THREADS>(a, w, tile);
}
#endif

// SPANS of a step, their units one after another. Nothing is under way at its beginning and its end: the compiler lets no
// matrix step cross a jump.
template <int WIDTH, int SPANS>
DEVICE void multiply_spans(float (&acc)[PARTS][EIGHTS][4], int (&c)[2][4 * EIGHTS], Span span, u32 bias, u32 constant) {
    u32 codes[2][4];
    span.codes_of(0, codes[0]);
    multiply<WIDTH>(c[0], codes[0], span.inputs, bias, constant, 0, 0);
#pragma unroll
    for (int u = 0; u < SPANS * UNITS; u++) {
        const int s = u / UNITS, k = u % UNITS / PARTS, h = u % PARTS, v = u + 1;
        Factors<WIDTH> factors;
        factors.read(span, s * PER_SPAN + k, s, h);
        if (u % UNITS == 0 && s + 1 < SPANS) span.codes_of(s + 1, codes[s + 1 & 1]);
        if (v < SPANS * UNITS) {
            const int next = v / UNITS;
            multiply<WIDTH>(c[v & 1], codes[next & 1], span.inputs + 2 * next * PIECE, bias, constant,
                            v % UNITS / PARTS, v % PARTS);
            steps_wait<1>();
        } else {
            steps_wait<0>();
        }
        steps_arrived<4 * WIDTH>(c[u & 1]);
        add<WIDTH>(acc[h], c[u & 1], factors);
    }
}

// All tiles of the run; WIDTH: eights of a part of this block.
template <int WIDTH>
DEVICE void compute(const Arguments& a, const Work& w, u8* shared, Rows& rows) {
    const int steps = (a.cols + STEP - 1) / STEP, columns = 8 * WIDTH * PARTS;
    const u32 bias = (u32)__cvta_generic_to_shared(shared + AT_BIAS);
    const u32 constant = *(const u32*)(shared + AT_BIAS);  // the compiler takes no number for a register of a step
    const int unpacks_in = (threadIdx.x >> 7) + blockIdx.x & 1;  // the half of a step in which the warp unpacks the next
    float acc[PARTS][EIGHTS][4];
    int c[2][4 * EIGHTS];
    steps_clear<4 * WIDTH>(c[0]), steps_clear<4 * WIDTH>(c[1]);
    clear(acc);
    fetch_inputs(shared, a, 0, 0, columns);
    copies_commit();
    copies_wait<0>();
    __syncwarp();
    rows.unpack(Place{0, 0}, 0);
    int parity = 0;
    for (Place here{0, 0}; here.tile < w.tiles;) {
        const Place next = here.after(steps);
        const bool more = next.tile < w.tiles;
        const int spans = min(4, a.cols / 32 - 4 * here.at);
        copies_wait<0>();
        steps_see_shared();
        __syncthreads();  // all have the copies of this step, and are done with the place that the next one takes
        if (more) fetch_inputs(shared, a, next.at, parity ^ 1, columns);
        if (here.at & 1 || next.at == 0) rows.fetch();  // its chunk is unpacked: the place takes another
        copies_commit();
#pragma unroll 1
        for (int half = 0; half < 2; half++) {
            if (more && half == unpacks_in) rows.unpack(next, parity ^ 1);
            const Span span(shared, rows, parity, 2 * half);
            if (AT_ONCE == 4) {
                if (half == 0 && (F::BLOCK == 256 || spans == 4)) multiply_spans<WIDTH, 4>(acc, c, span, bias, constant);
                else if (half == 0) multiply_spans<WIDTH, 2>(acc, c, span, bias, constant);
            } else if (F::BLOCK == 256 || 2 * half < spans) {
                multiply_spans<WIDTH, 2>(acc, c, span, bias, constant);
            }
        }
        if (MODE != GATE_UP && next.at == 0) {
            store_tile<WIDTH>(a, acc, w, here.tile);
            clear(acc);
        }
        parity ^= 1, here = next;
    }
#ifdef NEXT_ORDER  // GATE_UP has runs of one tile
    __syncthreads();
    store_hidden<WIDTH>(a, acc, w, (float*)shared);
#else
    if (MODE == GATE_UP) store_tile<WIDTH>(a, acc, w, 0);
#endif
}

// Parts of the fewest eights that hold the tile's columns.
template <int WIDTH, int LEFT>
DEVICE void compute_fitted(const Arguments& a, const Work& w, u8* shared, Rows& rows) {
    if constexpr (MODE != DENSE && LEFT > 1 && WIDTH > 2)
        if (w.count <= 8 * (WIDTH - 2) * PARTS) return compute_fitted<WIDTH - 2, LEFT - 1>(a, w, shared, rows);
    compute<WIDTH>(a, w, shared, rows);
}

KERNEL __launch_bounds__(THREADS, BLOCKS) void product_wgmma(PARAMETER Arguments a) {
    extern __shared__ __align__(128) u8 shared[];
    const int warp = threadIdx.x >> 5;
    if (MODE != DENSE) inputs_ready();
    Work w;
    if (!find_work<BN, ROWS>(a, w)) return;
    find_sources(shared, a, w);
    if (!w.first) return;
    for (int i = threadIdx.x; i < 2 * PART; i += THREADS)
        *(uint4*)(shared + AT_BIAS + 16 * i) = make_uint4(0x80808080u, 0x80808080u, 0x80808080u, 0x80808080u);
    const int steps = (a.cols + STEP - 1) / STEP;
    Rows rows{shared + warp * 2 * RAW, shared + AT_UNPACKED + warp * 2 * UNPACKED, w, a.cols / F::BLOCK * F::BYTES,
              (steps + 1) / 2};
    rows.fetch();
    rows.fetch();
    rows.grid = fill_table<F, THREADS>(shared + AT_TABLE);
    if (MODE == DENSE) inputs_ready();  // the weights do not wait for the kernel before
    __syncthreads();
    compute_fitted<EIGHTS, 4>(a, w, shared, rows);
}
