// The beginning of a hyper-connection's mix in a window: a = down * normed.
//
// A block takes ROWS rows of `down` over their whole length, which come to shared memory before the activations are there;
// a thread makes the terms of 32 columns of a row, and a lane adds those of a row in their order.
// FUSED = 1, a window of one row: every block adds and norms the streams for itself, as hyper_norm does, thread (c, j) the
// elements j + 128 i of stream c. That costs less than a launch that waits for one. The blocks after those with rows
// write `normed` and make beta, one row of `inject` each. x is not written: hyper_window does that.
// FUSED = 0: int8 and scales of n rows are there, as hyper_norm leaves them.
// Constants   TYPE a format without a table, ROWS, STREAMS = C, PER_THREAD elements of a thread: H = LANES * PER_THREAD when
//             FUSED
// Shapes      x, normed (C, H), y (H,), beta (C,), inject (C, C * H) or null, down (rows, C * H), q (n, C * H), d (n,
//             C * H / 32), sums (n, C * H / GROUP) -> a (n, rows). Dynamic shared memory: `Parts`
// Source      `product`, `lanes` and `ops.Kernels.hyper_mix`
#include "rows.cuh"
#include "formats.cuh"
#include "quantize_lane.cuh"

typedef TYPE F;
constexpr int THREADS = 512;
constexpr int CHUNK_BYTES = 256 / F::BLOCK * F::BYTES;
constexpr int PER_SPAN = 32 / F::GROUP;
constexpr int SPAN_TERMS = PER_SPAN * (1 + F::OFFSET);

#if FUSED
static_assert(STREAMS * LANES == THREADS, "a thread is a chain of a stream");
static_assert(PER_THREAD <= 32, "a lane has the scale of one block");
#endif

// Shared memory, in bytes from its beginning. hyper.py computes the same.
struct Parts {
    int row, inputs, scales, sums, terms, pitch;  // bytes of a weight row; `pitch`: terms of a row and input

    DEVICE static Parts of(int cols, int n) {
        Parts p;
        p.row = (cols / F::BLOCK * F::BYTES + 31) / 16 * 16;
        p.inputs = ROWS * p.row;
        p.scales = p.inputs + n * cols;
        p.sums = p.scales + n * cols / 8;
        p.terms = p.sums + (F::OFFSET ? n * (cols / F::GROUP) * 4 : 0);
        p.pitch = cols / 32 * SPAN_TERMS + 4;  // cols is a multiple of 64: pairs of terms are aligned
        return p;
    }
};

DEVICE void copy_bytes(u8* to, const u8* from, int bytes) {  // 16 at a time, from any address; the shift stays
    const int shift = (int)((u64)from & 15);
#pragma unroll 1
    for (int i = 16 * threadIdx.x; i < shift + bytes; i += 16 * THREADS) copy16(to + i, from - shift + i);
}

// Terms of 32 columns of a weight row with all inputs.
DEVICE void span_terms(const u8* p, int s, const u8* q, const float* sums, float* terms, const Parts& at, int n, int cols,
                       int span) {
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
    for (int i = 0; i < n; i++) {
        const uint4 x = *(const uint4*)(q + i * cols), y = *(const uint4*)(q + i * cols + other);
        const u32 input[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
        int sum[2] = {0, 0};  // of even and odd words, which are the halves where groups have 16
#pragma unroll
        for (int k = 0; k < 8; k++) sum[k & 1] = __dp4a((int)word[k], (int)input[k], sum[k & 1]);
        if (PER_SPAN == 1) sum[0] += sum[1];
#pragma unroll
        for (int k = 0; k < PER_SPAN; k++) {
            float* to = terms + i * at.pitch + span * SPAN_TERMS + k * (1 + F::OFFSET);
            to[0] = (float)sum[k] * scale[k];
            if (F::OFFSET) to[1] = sums[i * (cols / F::GROUP) + span * PER_SPAN + k] * offset[k];
        }
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
DEVICE float sum_of_row(const float* terms, const float* scales, int spans) {
    constexpr int DEPTH = 4;
    Span2 next[DEPTH];
    const int pairs = spans / 2;
#pragma unroll
    for (int i = 0; i < DEPTH; i++)
        if (i < pairs) next[i].load(terms + 2 * i * SPAN_TERMS, scales + 2 * i);
    float sum = 0.0f;
    for (int first = 0; first < pairs; first += DEPTH) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            if (first + i >= pairs) break;
            const Span2 now = next[i];
            const int ahead = first + i + DEPTH;
            if (ahead < pairs) next[i].load(terms + 2 * ahead * SPAN_TERMS, scales + 2 * ahead);
            sum = now.add(sum);
        }
    }
    if (spans & 1)
#pragma unroll
        for (int i = 0; i < SPAN_TERMS; i++) sum = fmaf(terms[(spans - 1) * SPAN_TERMS + i], scales[spans - 1], sum);
    return sum;
}

// The block's rows with inputs that lie in shared memory.
DEVICE void multiply_rows(u8* memory, const Parts& at, const u8* down, float* a, int first, int rows, int all, int n,
                          int cols) {
    const int spans = cols / 32, row_bytes = cols / F::BLOCK * F::BYTES;
    float* terms = (float*)(memory + at.terms);
    for (int item = threadIdx.x; item < rows * spans; item += THREADS) {
        const int r = item / spans, span = item - r * spans;
        const u8* row = memory + r * at.row + ((u64)(down + (long long)(first + r) * row_bytes) & 15);
        span_terms(row + span / 8 * CHUNK_BYTES, span & 7, memory + at.inputs, (const float*)(memory + at.sums),
                   terms + r * n * at.pitch, at, n, cols, span);
    }
    __syncthreads();
    const int r = threadIdx.x >> 5, i = threadIdx.x & 31;
    if (r >= rows || i >= n) return;
    a[(long long)i * all + first + r] =
        sum_of_row(terms + (r * n + i) * at.pitch, (const float*)(memory + at.scales) + i * spans, spans);
}

#if FUSED

// What a thread holds of its stream: after `norm`, normed values.
struct Values {
    float v[PER_THREAD];

    DEVICE void norm(const float (&factors)[PER_THREAD], float* buffer, float eps) {
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
    }
    // A warp's 32 values of one i are a block.
    DEVICE void quantize(u8* memory, const Parts& at) const {
        const int lane = threadIdx.x & 31, first = (threadIdx.x / LANES * PER_THREAD * LANES + threadIdx.x % LANES) & ~31;
        const LaneScales<PER_THREAD> scales(v);
        if (lane < PER_THREAD) ((float*)(memory + at.scales))[(first + lane * LANES) / 32] = scales.d[0];
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            const int block = (first + i * LANES) / 32, q = scales.quantized(v[i], i);
            memory[at.inputs + 32 * block + place_in_block<F::ORDER>(lane)] = (u8)q;
            if (!F::OFFSET) continue;
            const int sum = sum_of_group<F::GROUP>(q);
            if (lane % F::GROUP == 0) ((float*)(memory + at.sums))[block * PER_SPAN + lane / F::GROUP] = (float)sum;
        }
    }
};

// beta of row `unit` of inject, which lies in shared memory behind room for the normed values.
DEVICE void make_beta(const Values& values, float* memory, float* buffer, float* normed, float* beta, int unit, float scale) {
    constexpr int COLS = STREAMS * PER_THREAD * LANES;
    const int first = threadIdx.x / LANES * PER_THREAD * LANES + threadIdx.x % LANES, lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        memory[first + i * LANES] = values.v[i];
        if (unit == 0) normed[first + i * LANES] = values.v[i];
    }
    if (!beta) return;
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
               float* a, float* normed, float* beta, int rows, float eps, float scale) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ float buffer[THREADS];
    constexpr int WIDTH = PER_THREAD * LANES, COLS = STREAMS * WIDTH;
    const int blocks = (rows + ROWS - 1) / ROWS, unit = (int)blockIdx.x - blocks;
    const int first = blockIdx.x * ROWS, stream = threadIdx.x / LANES, j = threadIdx.x % LANES;
    const int row_bytes = COLS / F::BLOCK * F::BYTES;
    const Parts at = Parts::of(COLS, 1);
    if (unit < 0) {
        for (int r = 0; r < min(ROWS, rows - first); r++)
            copy_bytes(memory + r * at.row, down + (long long)(first + r) * row_bytes, row_bytes);
    } else if (beta) {
        copy_bytes(memory + 4 * COLS, (const u8*)(inject + (long long)unit * COLS), 4 * COLS);
    }
    copies_commit();
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
    values.norm(factors, buffer, eps);
    copies_wait<0>();
    if (unit >= 0) {
        __syncthreads();
        make_beta(values, (float*)memory, buffer, normed, beta, unit, scale);
        return;
    }
    values.quantize(memory, at);
    __syncthreads();
    multiply_rows(memory, at, down, a, first, min(ROWS, rows - first), rows, 1, COLS);
}

#else

KERNEL void __launch_bounds__(THREADS, 1)
    hyper_down(const u8* q, const float* d, const float* sums, const u8* down, float* a, int rows, int n, int cols) {
    extern __shared__ __align__(16) u8 memory[];
    const int first = blockIdx.x * ROWS, row_bytes = cols / F::BLOCK * F::BYTES;
    const Parts at = Parts::of(cols, n);
    for (int r = 0; r < min(ROWS, rows - first); r++)
        copy_bytes(memory + r * at.row, down + (long long)(first + r) * row_bytes, row_bytes);
    inputs_ready();
    copy_bytes(memory + at.inputs, q, n * cols);
    copy_bytes(memory + at.scales, (const u8*)d, n * cols / 8);
    if (F::OFFSET) copy_bytes(memory + at.sums, (const u8*)sums, n * (cols / F::GROUP) * 4);
    copies_commit();
    copies_wait<0>();
    __syncthreads();
    multiply_rows(memory, at, down, a, first, min(ROWS, rows - first), rows, n, cols);
}

#endif
