// The end of a hyper-connection's mix in a window: gates = up(silu(a * scale)), the mean of the gated streams, and beta.
//
// A block makes ELEMENTS elements of u for all rows: the weight rows of all its streams come to shared memory before the
// activations are there. A warp takes eight weight rows and keeps their codes in registers as matrix steps want them; its
// lanes add the terms of two activation rows each, in the order of the weight row. The blocks after those make BETAS beta
// each, lanes(inject * normed): all of it before the kernel that made `a` ends.
// What the products of u want is left beside it (forms.cuh).
// FRESH = 1, one row: the kernel before has made beta and the streams' factors r; normed = ((x + strength * y) * r) * w is
// made here, and x written, unless strength is null: nothing is added.
// early: `a` and the factors are words that the kernel before puts while this one looks (words.cuh).
// Constants   TYPE a format of groups of 32 without a table, SPANS = R / 32, STREAMS = C, FRESH, EIGHTS of activation rows,
//             AT_ONCE blocks of 32 inputs that a warp quantises
// Shapes      a (n, R), factors (C,), normed (n, C, H), w (C, H), up (C * H, R), inject (C, C * H) or null -> u (n, H),
//             beta (n, C); H a multiple of ELEMENTS. Dynamic shared memory: `Parts`
// Source      `product`, `lanes` and `ops.Kernels.hyper_mix`
#define TRACES_ITSELF
#define TRACES_ENTRY
#include "rows.cuh"
#include "formats.cuh"
#include "quantize_lane.cuh"
#include "forms.cuh"
#include "words.cuh"

typedef TYPE F;
constexpr int ELEMENTS = 32;
constexpr int WEIGHT_ROWS = STREAMS * ELEMENTS;
constexpr int THREADS = 4 * WEIGHT_ROWS;
constexpr int WARPS = THREADS / 32;
constexpr int ROWS_OF_WARP = 8;
constexpr int CHUNK_BYTES = 256 / F::BLOCK * F::BYTES;
constexpr int COLUMNS = 8 * EIGHTS;
constexpr int INPUT_PITCH = 32 * SPANS + (32 - 32 * SPANS % 128 + 128) % 128;  // four rows of inputs lie in different banks
constexpr int GATE_PITCH = WEIGHT_ROWS + 4;
constexpr int BETAS = THREADS / LANES;  // of a block
constexpr int BATCH = 20;               // loads of a chain of beta under way
constexpr int BESIDE = SPANS <= 10 && EIGHTS == 1 ? 2 : 1;  // registers that leave room for a block of the next kernel
static_assert(WARPS * ROWS_OF_WARP == WEIGHT_ROWS, "a warp has eight weight rows");
static_assert(BETAS * LANES == THREADS, "a beta is the work of 128 threads");

// Shared memory, in bytes from its beginning. hyper_window.py computes the same.
struct Parts {
    int stream, inputs, scales, sums, normed, gates;  // `stream`: bytes of the weight rows of one stream

    DEVICE static Parts of(int row_bytes, int n) {
        Parts p;
        p.stream = (ELEMENTS * row_bytes + 31) / 16 * 16;
        p.inputs = STREAMS * p.stream;
        p.scales = p.inputs + COLUMNS * INPUT_PITCH;
        p.sums = p.scales + COLUMNS * SPANS * 4;
        p.normed = p.sums + (F::OFFSET ? COLUMNS * SPANS * 4 : 0);
        p.gates = p.normed + n * WEIGHT_ROWS * 4;
        return p;
    }
};

// Of a weight row, which lies at `row`: the words of one of its four lanes. Two spans are a fragment of a matrix step, one in
// the place of a row and the other in that of the row eight below; a step uses one half of its results.
struct Codes {
    static constexpr int PAIRS = (SPANS + 1) / 2;
    u32 word[PAIRS][4];
    const u8* row;

    DEVICE explicit Codes(const u8* row, int t) : row(row) {
#pragma unroll
        for (int s = 0; s < 2 * PAIRS; s++) {
            const int span = s < SPANS ? s : SPANS - 1;
            F::span(row + span / 8 * CHUNK_BYTES, span & 7, t, Grid{0}, word[s / 2][s & 1], word[s / 2][2 + (s & 1)]);
        }
    }
    DEVICE float scale(int s) const { return F::scale(row + s / 8 * CHUNK_BYTES, s & 7); }
    DEVICE float offset(int s) const { return F::offset(row + s / 8 * CHUNK_BYTES, s & 7); }
};

// The products of a weight row with the activation rows 2 t and 2 t + 1 of every eight.
DEVICE void row_products(const Codes& codes, const u8* memory, const Parts& at, float (&acc)[EIGHTS][2]) {
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    const u8* q = memory + at.inputs + g * INPUT_PITCH + 8 * t;
    const float *d = (const float*)(memory + at.scales) + 2 * t, *sums = (const float*)(memory + at.sums) + 2 * t;
#pragma unroll
    for (int e = 0; e < EIGHTS; e++) acc[e][0] = acc[e][1] = 0.0f;
#pragma unroll
    for (int s = 0; s < SPANS; s++) {
        const float scale = codes.scale(s), lift = -MAGIC * scale, offset = codes.offset(s);
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
            const uint2 input = *(const uint2*)(q + 8 * e * INPUT_PITCH + 32 * s);
            const float2 by = *(const float2*)(d + s * COLUMNS + 8 * e);
            int c[4];
            multiply32<16>(c, codes.word[s / 2], input.x, input.y);
            acc[e][0] = fmaf(scaled(c[2 * (s & 1)], scale, lift), by.x, acc[e][0]);
            acc[e][1] = fmaf(scaled(c[2 * (s & 1) + 1], scale, lift), by.y, acc[e][1]);
            if (!F::OFFSET) continue;
            const float2 sum = *(const float2*)(sums + s * COLUMNS + 8 * e);
            acc[e][0] = fmaf(sum.x * offset, by.x, acc[e][0]);
            acc[e][1] = fmaf(sum.y * offset, by.y, acc[e][1]);
        }
    }
}

// Rows of `inject` with an activation row, each by 128 threads: thread j is chain j.
DEVICE void make_beta(const float* normed, const float* inject, float* beta, int unit, int n_beta, int cols, float scale) {
    __shared__ float buffer[THREADS];
    const int part = threadIdx.x / LANES, j = threadIdx.x % LANES, lane = threadIdx.x & 31, mine = BETAS * unit + part;
    const bool works = mine < n_beta;
    float chain = 0.0f;
    if (works) {
        const float* x = normed + static_cast<long long>(mine / STREAMS) * cols + j;
        const float* w = inject + static_cast<long long>(mine % STREAMS) * cols + j;
#pragma unroll 1
        for (int first = 0; first < cols; first += BATCH * LANES) {
            float a[BATCH], b[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++)
                if (first + i * LANES + j < cols) a[i] = w[first + i * LANES], b[i] = read_early(x + first + i * LANES);
#pragma unroll
            for (int i = 0; i < BATCH; i++)
                if (first + i * LANES + j < cols) chain = fmaf(a[i], b[i], chain);
        }
    }
    buffer[threadIdx.x] = chain;
    __syncthreads();
    const float* p = buffer + part * LANES + lane;
    const float sum = fold_warp((p[0] + p[64]) + (p[32] + p[96]));
    inputs_ready();
    if (works && j == 0) beta[mine] = 2.0f * sigmoid_f32(sum * scale);
}

// silu(a * scale) of all rows to int8 in shared memory: AT_ONCE blocks of a warp at once.
DEVICE void inputs_to_shared(const float* a, u8* memory, const Parts& at, int n, float scale) {
    const int blocks = n * SPANS, lane = threadIdx.x & 31;
    for (int first = threadIdx.x >> 5; first < blocks; first += AT_ONCE * WARPS) {
        float v[AT_ONCE];
        take_words(v, [&](int i) { return a + 32ll * min(first + i * WARPS, blocks - 1) + lane; });
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) v[i] = silu_f32(v[i] * scale);
        const LaneScales<AT_ONCE> scales(v);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int block = first + i * WARPS, r = block / SPANS, s = block - r * SPANS, q = scales.quantized(v[i], i);
            if (block >= blocks) break;
            memory[at.inputs + r * INPUT_PITCH + 32 * s + place_in_block<F::ORDER>(lane)] = (u8)q;
            if (lane == i) ((float*)(memory + at.scales))[s * COLUMNS + r] = scales.d[0];
            if (!F::OFFSET) continue;
            const int sum = sum_of_group<32>(q);
            if (lane == 0) ((float*)(memory + at.sums))[s * COLUMNS + r] = (float)sum;
        }
    }
}

// The block's elements of `normed`, past the first level of the cache.
DEVICE void copy_normed(const float* normed, u8* memory, const Parts& at, int n, int width, int first) {
    constexpr int QUADS = ELEMENTS / 4;
    for (int i = threadIdx.x; i < n * STREAMS * QUADS; i += THREADS)
        copy16(memory + at.normed + 16 * i, normed + static_cast<long long>(i / QUADS) * width + first + 4 * (i % QUADS));
}

// An element of u of a row, from the gates and normed streams of the block's elements.
DEVICE void make_mean(const float* gates, const float* normed, float* u, const Forms& forms, int row, int element, int first,
                      int n, int width, float scale) {
    const float* streams = normed + row * WEIGHT_ROWS + element;
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < STREAMS; c++) {
        const float by = gates[row * GATE_PITCH + c * ELEMENTS + element];
        sum = c ? fmaf(by, streams[c * ELEMENTS], sum) : by * streams[c * ELEMENTS];
    }
    const long long block = (static_cast<long long>(row) * width + first) / 32;
    u[32 * block + element] = sum * scale;
    const float made[1] = {sum * scale};
    forms.leave(made, block, static_cast<long long>(n) * width);
}

// An element of every stream of the only row, before the kernel before has ended.
struct Element {
    float v[STREAMS], w[STREAMS];

    DEVICE void read(const float* x, const float* strength, const float* y, const float* factors, int width, int at) {
        const float more = strength ? read_early(y + at) : 0.0f;
#pragma unroll
        for (int c = 0; c < STREAMS; c++) {
            v[c] = read_early(x + c * width + at), w[c] = factors[c * width + at];
            if (strength) v[c] = fmaf(read_early(strength + c), more, v[c]);
        }
    }
    DEVICE void norm(const float* r, float* normed) const {
        float by[STREAMS];
        take_words(by, [&](int c) { return r + c; });
#pragma unroll
        for (int c = 0; c < STREAMS; c++) normed[c * ELEMENTS] = (v[c] * by[c]) * w[c];
    }
};

KERNEL void __launch_bounds__(THREADS, BESIDE)
    hyper_window(const float* a, const float* factors, const float* normed, const float* w, const u8* up,
                 const float* inject, float* u, float* beta, float* x, const float* strength, const float* y,
                 PARAMETER Forms forms, int n, int width, int n_beta, float scale, int early) {
    extern __shared__ __align__(16) u8 memory[];
    trace_entry();
    const int blocks = width / ELEMENTS, tid = threadIdx.x, t = tid & 3;
    if (!FRESH && blockIdx.x >= blocks) {
        if (early) next_may_come();
        trace_begin();
        make_beta(normed, inject, beta, blockIdx.x - blocks, n_beta, STREAMS * width, scale);
        trace_mark(1);
        return;
    }
    const int row_bytes = 32 * SPANS / F::BLOCK * F::BYTES, first = blockIdx.x * ELEMENTS;
    const Parts at = Parts::of(row_bytes, n);
    for (int c = 0; c < STREAMS; c++) {
        const u8* from = up + (static_cast<long long>(c) * width + first) * row_bytes;
        const int shift = (int)((u64)from & 15);
#pragma unroll 1
        for (int i = 16 * tid; i < shift + ELEMENTS * row_bytes; i += 16 * THREADS)
            copy16(memory + c * at.stream + i, from - shift + i);
    }
    if (!FRESH) copy_normed(normed, memory, at, n, width, first);
    copies_commit();
    const int output = tid / ELEMENTS, element = tid % ELEMENTS;  // the activation row and element that a thread ends
    const bool reads = FRESH && output == 0;
    Element own;
    if (reads) own.read(x, strength, y, w, width, first + element);
    copies_wait<0>();
    __syncthreads();
    const int row = tid / 4, stream = row / ELEMENTS;  // of the weights
    const u8* begin = up + (static_cast<long long>(stream) * width + first) * row_bytes;
    const Codes codes(memory + stream * at.stream + ((u64)begin & 15) + row % ELEMENTS * row_bytes, t);

    trace_begin();
    if (!early) inputs_ready();
    if (reads) own.norm(factors, (float*)(memory + at.normed) + element);
    trace_mark(2);
    inputs_to_shared(a, memory, at, n, scale);
    __syncthreads();
    trace_mark(3);
    if (early) next_may_come();  // who empties the words again comes now at the earliest
    float* gates = (float*)(memory + at.gates);
    float gate[EIGHTS][2];
    row_products(codes, memory, at, gate);
#pragma unroll
    for (int e = 0; e < EIGHTS; e++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int input = 8 * e + 2 * t + k;
            if (input < n) gates[input * GATE_PITCH + row] = sigmoid_f32(gate[e][k]);
        }
    __syncthreads();
    trace_mark(4);
    if (output < n)
        make_mean(gates, (const float*)(memory + at.normed), u, forms, output, element, first, n, width, scale);
    trace_mark(5);
    if (early) inputs_ready();  // others of the kernel before may still read x
    trace_mark(1);
    if (!reads || !strength) return;
#pragma unroll
    for (int c = 0; c < STREAMS; c++) x[c * width + first + element] = own.v[c];
}
