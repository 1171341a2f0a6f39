// The beginning of a hyper-connection's mix in a window of one row: a = down * normed, the norm's factors and beta.
//
// A block takes ROWS rows of `down` over their whole length, which come to shared memory before the activations are there;
// a thread makes the terms of 32 columns of a row, and a lane adds those of a row in their order.
// Every block adds and norms the streams for itself, as hyper_norm does, thread (c, j) the elements j + 128 i of stream c.
// That costs less than a launch that waits for one. The blocks after those with rows make beta, one row of `inject` each.
// x is not written: hyper_window does that, and norms its elements with the factors of the streams. `a` and the factors are
// words (words.cuh), which are emptied first when hyper_window looks for them.
// Blocks that unpacked their rows and held the norm's factors before the activations were there, in 104 KB, took 9.5 us of a
// window each, these 5.0 (H200, 2026-11-29).
// Constants   TYPE a format without a table, ROWS, STREAMS = C, PER_THREAD elements of a thread: H = LANES * PER_THREAD
// Shapes      x (C, H), y (H,), beta (C,), inject (C, C * H) or null, down (rows, C * H) -> a (rows,), r (C,). Dynamic
//             shared memory: `Parts`
// Source      `product`, `lanes` and `ops.Kernels.hyper_mix`
#include "rows.cuh"
#include "formats.cuh"
#include "quantize_lane.cuh"
#include "words.cuh"

typedef TYPE F;
constexpr int THREADS = 512;
constexpr int COLS = STREAMS * PER_THREAD * LANES, SPANS = COLS / 32;
constexpr int ROW_BYTES = COLS / F::BLOCK * F::BYTES;
constexpr int CHUNK_BYTES = 256 / F::BLOCK * F::BYTES;
constexpr int PER_SPAN = 32 / F::GROUP;
constexpr int SPAN_TERMS = PER_SPAN * (1 + F::OFFSET);
static_assert(STREAMS * LANES == THREADS, "a thread is a chain of a stream");
static_assert(PER_THREAD <= 32, "a lane has the scale of one block");

// Shared memory, in bytes from its beginning. hyper_window.py computes the same.
struct Parts {
    static constexpr int ROW = (ROW_BYTES + 31) / 16 * 16;  // bytes of a weight row
    static constexpr int PITCH = SPANS * SPAN_TERMS + 4;    // of the terms of a row; pairs of terms are aligned
    static constexpr int INPUTS = ROWS * ROW, SCALES = INPUTS + COLS, SUMS = SCALES + COLS / 8;
    static constexpr int TERMS = SUMS + (F::OFFSET ? COLS / F::GROUP * 4 : 0);
};

DEVICE void copy_bytes(u8* to, const u8* from, int bytes) {  // 16 at a time, from any address; the shift stays
    const int shift = (int)((u64)from & 15);
#pragma unroll 1
    for (int i = 16 * threadIdx.x; i < shift + bytes; i += 16 * THREADS) copy16(to + i, from - shift + i);
}

// Terms of 32 columns of a weight row.
DEVICE void span_terms(const u8* p, int s, const u8* q, const float* sums, float* terms, int span) {
    u32 word[8];
    float scale[PER_SPAN], offset[PER_SPAN];
#pragma unroll
    for (int u = 0; u < 4; u++) F::span(p, s, u, Grid{0}, word[2 * u], word[2 * u + 1]);
#pragma unroll
    for (int k = 0; k < PER_SPAN; k++) scale[k] = F::scale(p, s * PER_SPAN + k), offset[k] = F::offset(p, s * PER_SPAN + k);
    const bool flip = span & 4;  // eight neighbours read halves that lie in different banks
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const u32 low = word[k], high = word[k + 4];
        word[k] = flip ? high : low, word[k + 4] = flip ? low : high;
    }
    q += 32 * span + (flip ? 16 : 0);
    const int other = flip ? -16 : 16;
    const uint4 x = *(const uint4*)q, y = *(const uint4*)(q + other);
    const u32 input[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
    int sum[2] = {0, 0};  // of even and odd words, which are the halves where groups have 16
#pragma unroll
    for (int k = 0; k < 8; k++) sum[k & 1] = __dp4a((int)word[k], (int)input[k], sum[k & 1]);
    if (PER_SPAN == 1) sum[0] += sum[1];
#pragma unroll
    for (int k = 0; k < PER_SPAN; k++) {
        float* to = terms + span * SPAN_TERMS + k * (1 + F::OFFSET);
        to[0] = (float)sum[k] * scale[k];
        if (F::OFFSET) to[1] = sums[span * PER_SPAN + k] * offset[k];
    }
}

struct Span2 {  // terms of two spans, and their scales
    float t[2 * SPAN_TERMS], d[2];

    DEVICE void load(const float* terms, const float* scales) {
#pragma unroll
        for (int i = 0; i < 2 * SPAN_TERMS; i += 2) {
            const float2 v = *(const float2*)(terms + i);
            t[i] = v.x, t[i + 1] = v.y;
        }
        const float2 v = *(const float2*)scales;
        d[0] = v.x, d[1] = v.y;
    }
    DEVICE float add(float sum) const {
#pragma unroll
        for (int i = 0; i < 2 * SPAN_TERMS; i++) sum = fmaf(t[i], d[i / SPAN_TERMS], sum);
        return sum;
    }
};

// The terms of a row in their order; those of the next spans are read while these are added.
DEVICE float sum_of_row(const float* terms, const float* scales) {
    constexpr int DEPTH = 4;
    Span2 next[DEPTH];
    constexpr int PAIRS = SPANS / 2;
#pragma unroll
    for (int i = 0; i < DEPTH; i++)
        if (i < PAIRS) next[i].load(terms + 2 * i * SPAN_TERMS, scales + 2 * i);
    float sum = 0.0f;
    for (int first = 0; first < PAIRS; first += DEPTH) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            if (first + i >= PAIRS) break;
            const Span2 now = next[i];
            const int ahead = first + i + DEPTH;
            if (ahead < PAIRS) next[i].load(terms + 2 * ahead * SPAN_TERMS, scales + 2 * ahead);
            sum = now.add(sum);
        }
    }
    return sum;
}

// The block's rows with inputs that lie in shared memory.
DEVICE void multiply_rows(u8* memory, const u8* down, float* a, int first, int rows) {
    float* terms = (float*)(memory + Parts::TERMS);
    for (int item = threadIdx.x; item < rows * SPANS; item += THREADS) {
        const int r = item / SPANS, span = item - r * SPANS;
        const u8* row = memory + r * Parts::ROW + ((u64)(down + (long long)(first + r) * ROW_BYTES) & 15);
        span_terms(row + span / 8 * CHUNK_BYTES, span & 7, memory + Parts::INPUTS, (const float*)(memory + Parts::SUMS),
                   terms + r * Parts::PITCH, span);
    }
    __syncthreads();
    const int r = threadIdx.x >> 5;
    if (r >= rows || (threadIdx.x & 31)) return;
    const float sum = sum_of_row(terms + r * Parts::PITCH, (const float*)(memory + Parts::SCALES));
    put_word(a + first + r, sum);
}

// What a thread holds of its stream: after `norm`, normed values.
struct Values {
    float v[PER_THREAD];

    // The factor of the stream.
    DEVICE float norm(const float (&factors)[PER_THREAD], float* buffer, float eps) {
        const int lane = threadIdx.x & 31;
        float chain = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) chain = fmaf(v[i], v[i], chain);
        buffer[threadIdx.x] = chain;
        __syncthreads();
        const float* p = buffer + (threadIdx.x & ~(LANES - 1)) + lane;
        const float r = rms_factor(fold_warp((p[0] + p[64]) + (p[32] + p[96])), LANES * PER_THREAD, eps);
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) v[i] = (v[i] * r) * factors[i];
        return r;
    }
    // A warp's 32 values of one i are a block.
    DEVICE void quantize(u8* memory) const {
        const int lane = threadIdx.x & 31, first = (threadIdx.x / LANES * PER_THREAD * LANES + threadIdx.x % LANES) & ~31;
        const LaneScales<PER_THREAD> scales(v);
        if (lane < PER_THREAD) ((float*)(memory + Parts::SCALES))[(first + lane * LANES) / 32] = scales.d[0];
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            const int block = (first + i * LANES) / 32, q = scales.quantized(v[i], i);
            memory[Parts::INPUTS + 32 * block + place_in_block<F::ORDER>(lane)] = (u8)q;
            if (!F::OFFSET) continue;
            const int sum = sum_of_group<F::GROUP>(q);
            if (lane % F::GROUP == 0) ((float*)(memory + Parts::SUMS))[block * PER_SPAN + lane / F::GROUP] = (float)sum;
        }
    }
};

// beta of row `unit` of inject, which lies in shared memory behind room for the normed values.
DEVICE void make_beta(const Values& values, float* memory, float* buffer, float* beta, int unit, float scale) {
    const int first = threadIdx.x / LANES * PER_THREAD * LANES + threadIdx.x % LANES, lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) memory[first + i * LANES] = values.v[i];
    __syncthreads();
    if (threadIdx.x < LANES) {
        float chain = 0.0f;
#pragma unroll 8
        for (int e = threadIdx.x; e < COLS; e += LANES) chain = fmaf(memory[COLS + e], memory[e], chain);
        buffer[threadIdx.x] = chain;
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    const float sum = fold_warp((buffer[lane] + buffer[lane + 64]) + (buffer[lane + 32] + buffer[lane + 96]));
    if (lane == 0) beta[unit] = 2.0f * sigmoid_f32(sum * scale);
}

KERNEL void __launch_bounds__(THREADS, 1)
    hyper_down(const float* x, const float* strength, const float* y, const float* w, const float* inject, const u8* down,
               float* a, float* r, float* beta, int rows, int early, float eps, float scale) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ float buffer[THREADS];
    constexpr int WIDTH = PER_THREAD * LANES;
    const int blocks = (rows + ROWS - 1) / ROWS, unit = (int)blockIdx.x - blocks;
    const int first = blockIdx.x * ROWS, stream = threadIdx.x / LANES, j = threadIdx.x % LANES;
    if (unit < 0) {
        for (int i = 0; i < min(ROWS, rows - first); i++)
            copy_bytes(memory + i * Parts::ROW, down + (long long)(first + i) * ROW_BYTES, ROW_BYTES);
    } else {
        copy_bytes(memory + 4 * COLS, (const u8*)(inject + (long long)unit * COLS), 4 * COLS);
    }
    copies_commit();
    if (early) {
        if (unit < 0 && threadIdx.x < min(ROWS, rows - first)) empty_word(a + first + threadIdx.x);
        if (blockIdx.x == 0 && j == 0) empty_word(r + stream);
        __syncthreads();
    }
    float factors[PER_THREAD];
    Values values;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) factors[i] = w[stream * WIDTH + i * LANES + j];
    if (!strength) inputs_ready();  // else the kernel before made y, and x and strength are older
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) values.v[i] = read_early(x + stream * WIDTH + i * LANES + j);
    if (strength) {
        const float b = read_early(strength + stream);
        inputs_ready();
        float added[PER_THREAD];
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) added[i] = y[i * LANES + j];
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) values.v[i] = fmaf(b, added[i], values.v[i]);
    }
    const float factor = values.norm(factors, buffer, eps);
    if (blockIdx.x == 0 && j == 0) put_word(r + stream, factor);
    copies_wait<0>();
    if (unit >= 0) {
        __syncthreads();
        make_beta(values, (float*)memory, buffer, beta, unit, scale);
        return;
    }
    values.quantize(memory);
    __syncthreads();
    multiply_rows(memory, down, a, first, min(ROWS, rows - first));
}
