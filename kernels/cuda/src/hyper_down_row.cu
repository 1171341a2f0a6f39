// The beginning of a hyper-connection's mix in a window of one row: a = down * normed, the norm's factors and beta.
//
// A block takes ROWS rows of `down` over their whole length, which come to shared memory before the activations are there
// and are unpacked in their place. Every block adds and norms the streams for itself, as hyper_norm does, thread (c, j) the
// elements j + 128 i of stream c. That costs less than a launch that waits for one. The threads of a stream quantise it and
// make its terms; a lane of the first warp adds those of a part of a row in their order, from the first stream of each part
// on, and the parts are joined at the end.
// The blocks after those with rows make beta, one row of `inject` each. x is not written: hyper_window does that, and norms
// its elements with the factors of the streams. `a` and the factors are words (words.cuh), which are emptied first when
// hyper_window looks for them.
// A block has 64 registers a thread, so that it finds a place beside blocks of the kernels before it and behind it; w comes
// to shared memory as well, since the first cache is small then.
// Constants   TYPE a format without a table, ROWS, STREAMS = C, ROW_PARTS of a row's sum, PER_THREAD elements of a thread:
//             H = LANES * PER_THREAD
// Shapes      x (C, H), y (H,), beta (C,), inject (C, C * H) or null, down (rows, C * H) -> a (rows,), r (C,). Dynamic
//             shared memory: `Parts`
// Source      `product`, `lanes` and `ops.Kernels.hyper_mix`
#define TRACES_ENTRY
#include "rows.cuh"
#include "formats.cuh"
#include "quantize_lane.cuh"
#include "ready.cuh"
#include "words.cuh"

typedef TYPE F;
constexpr int THREADS = 512;
constexpr int WIDTH = PER_THREAD * LANES, COLS = STREAMS * WIDTH;
#include "hyper_down.cuh"

constexpr int STREAM_SPANS = WIDTH / 32;
constexpr int WARPS_OF_STREAM = LANES / 32;
constexpr int TOGETHER = STREAMS / ROW_PARTS;  // streams of a part
static_assert(STREAMS * LANES == THREADS, "a thread is a chain of a stream");
static_assert(PER_THREAD <= 32, "a lane has the scale of one block");
static_assert(STREAMS == 4, "a stream's floats have room where all streams' int8 come");
static_assert(TOGETHER * ROW_PARTS == STREAMS && ROWS * ROW_PARTS <= 32, "a warp adds parts of whole streams");

// Shared memory, in bytes from its beginning. hyper_window.py computes the same.
struct Parts {
    static constexpr int ROW = (ROW_BYTES + 31) / 16 * 16;  // bytes of a packed row
    static constexpr int PITCH = ROW_PARTS * PART_TERMS;    // of the terms of a row, where its scales are before
    static constexpr int TERMS = ROWS * (ROW > COLS ? ROW : COLS);
    static constexpr int INPUTS = TERMS + ROWS * PITCH * 4;  // int8 by halves of spans, and y before
    static constexpr int SCALES = INPUTS + COLS, SUMS = SCALES + ROW_PARTS * PART_SCALES * 4;
    static constexpr int FACTORS = SUMS + (F::OFFSET ? SPANS * PER_SPAN * 4 : 0);  // w

    DEVICE static float* terms(u8* memory, int r, int span) { return (float*)(memory + TERMS) + r * PITCH + terms_at(span); }
};

// The block's rows, which lie packed, to codes and scales in their place. All threads.
DEVICE void unpack_rows(u8* memory, const u8* down, int first, int rows) {
    constexpr int ITEMS = (ROWS * SPANS + THREADS - 1) / THREADS;
    Codes held[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int item = min((int)threadIdx.x + i * THREADS, rows * SPANS - 1), r = item / SPANS;
        const u8* row = memory + r * Parts::ROW + ((u64)(down + (long long)(first + r) * ROW_BYTES) & 15);
        held[i].unpack(row, item - r * SPANS);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int item = threadIdx.x + i * THREADS, r = item / SPANS, span = item - r * SPANS;
        if (item >= rows * SPANS) break;
        *half_span(memory + r * COLS, span, 0) = held[i].low;
        *half_span(memory + r * COLS, span, 1) = held[i].high;
        float* to = Parts::terms(memory, r, span);
#pragma unroll
        for (int k = 0; k < PER_SPAN; k++) {
            to[k * (1 + F::OFFSET)] = held[i].scale[k];
            if (F::OFFSET) to[2 * k + 1] = held[i].offset[k];
        }
    }
}

// The terms of a stream's spans by its threads, in the place of their scales.
DEVICE void stream_terms(u8* memory, int rows, int stream) {
    const float* sums = (const float*)(memory + Parts::SUMS);
    for (int item = threadIdx.x % LANES; item < rows * STREAM_SPANS; item += LANES) {
        const int r = item / STREAM_SPANS, span = stream * STREAM_SPANS + item - r * STREAM_SPANS;
        float *to = Parts::terms(memory, r, span), of_groups[PER_SPAN];
        Codes codes;
        codes.low = *half_span(memory + r * COLS, span, 0), codes.high = *half_span(memory + r * COLS, span, 1);
#pragma unroll
        for (int k = 0; k < PER_SPAN; k++) {
            codes.scale[k] = to[k * (1 + F::OFFSET)], codes.offset[k] = F::OFFSET ? to[2 * k + 1] : 0.0f;
            of_groups[k] = F::OFFSET ? sums[span * PER_SPAN + k] : 0.0f;
        }
        u8* input = memory + Parts::INPUTS;
        codes.multiply(*half_span(input, span, 0), *half_span(input, span, 1), of_groups, to);
    }
}

// What a thread holds of its stream: after `norm`, normed values.
struct Values {
    float v[PER_THREAD];

    DEVICE void read(const float* x) {
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) v[i] = read_early(x + i * LANES);
    }
    DEVICE void add(float strength, const float* y) {
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) v[i] = fmaf(strength, y[i * LANES], v[i]);
    }
    // w in shared memory, the thread's first -> the factor of the stream. All threads of the block.
    DEVICE float norm(const float* w, float* buffer, float eps) {
        const int lane = threadIdx.x & 31;
        float chain = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) chain = fmaf(v[i], v[i], chain);
        buffer[threadIdx.x] = chain;
        __syncthreads();
        const float* p = buffer + (threadIdx.x & ~(LANES - 1)) + lane;
        const float r = rms_factor(fold_warp((p[0] + p[64]) + (p[32] + p[96])), WIDTH, eps);
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) v[i] = (v[i] * r) * w[i * LANES];
        return r;
    }
    // A warp's 32 values of one i are a block. `inverse`: room for PER_THREAD floats of the warp's own, at a multiple of 16.
    DEVICE void quantize(u8* memory, float* inverse) const {
        const int lane = threadIdx.x & 31, stream = threadIdx.x / LANES, warp = threadIdx.x % LANES / 32;
        const OwnScale own(v);
        const auto block_of = [&](int i) { return stream * STREAM_SPANS + i * WARPS_OF_STREAM + warp; };
        inverse[own.block] = own.inv;
        ((float*)(memory + Parts::SCALES))[stream / TOGETHER * BETWEEN + block_of(own.block)] = own.d;
        __syncwarp();
        const int place = place_in_block<F::ORDER>(lane);
        u8* to = memory + Parts::INPUTS + (place >> 4) * (COLS / 2) + (place & 15);
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            const int q = __float_as_int(v[i] * inverse[i] + MAGIC) - MAGIC_BITS;
            to[16 * block_of(i)] = (u8)q;
            if (!F::OFFSET) continue;
            const int sum = sum_of_group<F::GROUP>(q);
            if (lane % F::GROUP == 0)
                ((float*)(memory + Parts::SUMS))[block_of(i) * PER_SPAN + lane / F::GROUP] = (float)sum;
        }
    }

    // The scale of one block of the warp, and which. A lane has the largest of one block after as many exchanges as there
    // are blocks: halves of them change places, then quarters.
    struct OwnScale {
        int block;
        float d, inv;

        DEVICE explicit OwnScale(const float (&v)[PER_THREAD]) {
            u32 most[PER_THREAD];  // ordered as the floats are
#pragma unroll
            for (int i = 0; i < PER_THREAD; i++) most[i] = __float_as_uint(fabsf(v[i]));
            block = reduce<PER_THREAD, 16>(most);
            const float amax = __uint_as_float(most[0]);
            const BlockScale scale(amax);
            inv = scale.inv, d = scale.d;
        }
        // The first of N numbers becomes the largest of its lanes; which of N it was.
        template <int N, int STEP>
        DEVICE static int reduce(u32 (&most)[PER_THREAD]) {
            constexpr int HALF = (N + 1) / 2;
            const bool upper = threadIdx.x & STEP;
#pragma unroll
            for (int i = 0; i < HALF; i++) {
                const bool pair = i + HALF < N;
                const u32 mine = pair && upper ? most[pair ? i + HALF : i] : most[i];
                const u32 other = pair && !upper ? most[pair ? i + HALF : i] : most[i];
                most[i] = max(mine, __shfl_xor_sync(ALL, other, STEP));
            }
            int at = 0;
            if constexpr (STEP > 1) at = reduce<HALF, STEP / 2>(most);
            return upper && at + HALF < N ? at + HALF : at;
        }
    };
};

// 2 * sigmoid(lanes(inject * normed) * scale); inject: the thread's first. A chain goes through all streams, from thread to
// thread.
DEVICE void make_beta(const Values& values, const float* inject, float* buffer, float* beta, float scale) {
    const int stream = threadIdx.x / LANES, j = threadIdx.x % LANES, lane = threadIdx.x & 31;
    float w[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) w[i] = inject[i * LANES];
    __syncthreads();
    for (int s = 0; s < STREAMS; s++) {
        if (stream == s) {
            float chain = s ? buffer[j] : 0.0f;
#pragma unroll
            for (int i = 0; i < PER_THREAD; i++) chain = fmaf(w[i], values.v[i], chain);
            buffer[j] = chain;
        }
        __syncthreads();
    }
    if (threadIdx.x >= 32) return;
    const float sum = fold_warp((buffer[lane] + buffer[lane + 64]) + (buffer[lane + 32] + buffer[lane + 96]));
    if (lane == 0) *beta = 2.0f * sigmoid_f32(sum * scale);
}

struct Rows {  // of `down`, that a block takes; none: it makes a beta
    const u8* down;
    int first, count;

    DEVICE void copy(u8* memory) const {
        for (int i = 0; i < count; i++)
            copy_bytes(memory + i * Parts::ROW, down + (long long)(first + i) * ROW_BYTES, ROW_BYTES);
    }
    DEVICE void unpack(u8* memory) const {
        __syncthreads();
        if (count > 0) unpack_rows(memory, down, first, count);
    }
};

KERNEL void __launch_bounds__(THREADS, 2)
    hyper_down(const float* x, const float* strength, const float* y, const float* w, const float* inject, const u8* down,
               float* a, float* r, float* beta, int n_rows, int early, float eps, float scale) {
    extern __shared__ __align__(16) u8 memory[];
    trace_entry();
    __shared__ float buffer[THREADS];
    __shared__ __align__(16) float inverse[THREADS / 32][(PER_THREAD + 3) / 4 * 4];
    __shared__ Ready terms[TOGETHER];  // of the streams that are each part's first, second ..
    const int blocks = (n_rows + ROWS - 1) / ROWS, unit = (int)blockIdx.x - blocks;
    const int stream = threadIdx.x / LANES, own = stream * WIDTH + threadIdx.x % LANES;
    const Rows rows{down, (int)blockIdx.x * ROWS, unit < 0 ? min(ROWS, n_rows - (int)blockIdx.x * ROWS) : 0};
    if (threadIdx.x < TOGETHER) ready_init(terms + threadIdx.x, ROW_PARTS * WARPS_OF_STREAM);
    if (early) {
        if (threadIdx.x < rows.count) empty_word(a + rows.first + threadIdx.x);
        if (blockIdx.x == 0 && threadIdx.x < STREAMS) empty_word(r + threadIdx.x);
    }
    rows.copy(memory);
    for (int i = threadIdx.x; i < COLS / 4; i += THREADS) copy16(memory + Parts::FACTORS + 16 * i, w + 4 * i);
    copies_commit();
    __syncthreads();
    if (unit >= 0 && 32 * threadIdx.x < COLS) fetch_line(inject + (long long)unit * COLS + 32 * threadIdx.x);
    if (!strength) inputs_ready();  // else the kernel before made y, and x and strength are older
    Values values;
    values.read(x + own);
    const float by = strength ? read_early(strength + stream) : 0.0f;
    copies_wait<0>();
    rows.unpack(memory);
    u8* added = memory + (unit < 0 ? Parts::INPUTS : 0);
    if (strength) {
        inputs_ready();
        for (int i = threadIdx.x; i < WIDTH / 4; i += THREADS) copy16(added + 16 * i, y + 4 * i);
    }
    copies_commit();
    copies_wait<0>();
    __syncthreads();
    trace_mark(2);
    if (strength) values.add(by, (const float*)added + threadIdx.x % LANES);
    const float factor = values.norm((const float*)(memory + Parts::FACTORS) + own, buffer, eps);
    trace_mark(3);
    if (blockIdx.x == 0 && threadIdx.x % LANES == 0) put_word(r + stream, factor);
    if (unit >= 0) {
        make_beta(values, inject + (long long)unit * COLS + own, buffer, beta + unit, scale);
        return;
    }
    values.quantize(memory, inverse[threadIdx.x >> 5]);
    threads_meet(1 + stream, LANES);
    trace_mark(4);
    stream_terms(memory, rows.count, stream);
    ready_set(terms + stream % TOGETHER);
    trace_mark(5);
    if (threadIdx.x >= 32) return;
    const int row = threadIdx.x / ROW_PARTS, part = threadIdx.x % ROW_PARTS;
    constexpr int LENGTH = STREAM_SPANS % 8 ? 4 : 8;
    const float sum = add_parts(sum_of_part<LENGTH, STREAM_SPANS / LENGTH>(
        Parts::terms(memory, min(row, rows.count - 1), part * PART_SPANS),
        (const float*)(memory + Parts::SCALES) + part * PART_SCALES, terms));
    if (row < rows.count && part == 0) put_word(a + rows.first + row, sum);
    trace_mark(6);
}
