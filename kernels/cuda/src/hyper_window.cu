// The end of a hyper-connection's mix in a window: gates = up(silu(a * scale)), the mean of the gated streams, and beta.
//
// A block makes ELEMENTS elements of u for all rows: the weight rows of all its streams come to shared memory before the
// activations are there. Four lanes share a weight row, each takes every fourth span of 32 columns and keeps its codes in
// registers for all rows; the terms of a row are added in the order of the row. The blocks after those make BETAS beta
// each, lanes(inject * normed): all of it before the kernel that made `a` ends.
// What the products of u want is left beside it (forms.cuh).
// x null: the streams have been added to before. Else x = fma(strength, y, x) here, and `fresh`: the kernel before has made
// `normed` of it, and beta.
// Constants   TYPE a format of groups of 32 without a table, SPANS of a lane: R <= 128 * SPANS, STREAMS = C
// Shapes      a (n, R), normed (n, C, H), up (C * H, R), inject (C, C * H) or null -> u (n, H), beta (n, C); H a multiple
//             of ELEMENTS. Dynamic shared memory: `Parts`
// Source      `product`, `lanes` and `ops.Kernels.hyper_mix`
#include "rows.cuh"
#include "formats.cuh"
#include "quantize.cuh"
#include "quantize_lane.cuh"
#include "forms.cuh"

typedef TYPE F;
constexpr int ELEMENTS = 32;
constexpr int WEIGHT_ROWS = STREAMS * ELEMENTS;
constexpr int THREADS = 4 * WEIGHT_ROWS;
constexpr int CHUNK_BYTES = 256 / F::BLOCK * F::BYTES;
constexpr int BETAS = THREADS / LANES;  // of a block
constexpr int BATCH = 20;               // loads of a chain of beta under way
static_assert(BETAS * LANES == THREADS, "a beta is the work of 128 threads");

// Shared memory, in bytes from its beginning. hyper.py computes the same.
struct Parts {
    int stream, inputs, scales, sums, gates;  // `stream`: bytes of the weight rows of one stream

    DEVICE static Parts of(int row_bytes, int cols, int n) {
        Parts p;
        p.stream = (ELEMENTS * row_bytes + 31) / 16 * 16;
        p.inputs = STREAMS * p.stream;
        p.scales = p.inputs + n * cols;
        p.sums = p.scales + n * cols / 8;
        p.gates = p.sums + (F::OFFSET ? n * cols / 8 : 0);
        return p;
    }
};

struct Codes {  // of a lane's spans
    u32 word[SPANS][8];
    float scale[SPANS], offset[SPANS];

    DEVICE void load(const u8* row, int spans, int t) {
#pragma unroll
        for (int i = 0; i < SPANS; i++) {
            const int span = min(4 * i + t, spans - 1);
            const u8* p = row + span / 8 * CHUNK_BYTES;
#pragma unroll
            for (int u = 0; u < 4; u++) F::span(p, span & 7, u, Grid{0}, word[i][2 * u], word[i][2 * u + 1]);
            scale[i] = F::scale(p, span & 7);
            offset[i] = F::offset(p, span & 7);
        }
    }
};

// The product of a weight row with one activation row; every lane of the four gets it.
DEVICE float row_product(const Codes& codes, const u8* q, const float* d, const float* sums, int spans, int t) {
    float term[SPANS], shift[SPANS];
#pragma unroll
    for (int i = 0; i < SPANS; i++) {
        const int span = min(4 * i + t, spans - 1);
        const uint4 low = *(const uint4*)(q + 32 * span), high = *(const uint4*)(q + 32 * span + 16);
        const u32 input[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        int sum = 0;
#pragma unroll
        for (int k = 0; k < 8; k++) sum = __dp4a((int)codes.word[i][k], (int)input[k], sum);
        term[i] = (float)sum * codes.scale[i];
        shift[i] = F::OFFSET ? sums[span] * codes.offset[i] : 0.0f;
    }
    float acc = 0.0f;
#pragma unroll
    for (int g = 0; g < 4 * SPANS; g++) {  // no branch: the exchanges are under way together
        const float next = __shfl_sync(ALL, term[g / 4], g & 3, 4), after = F::OFFSET ? __shfl_sync(ALL, shift[g / 4], g & 3, 4) : 0.0f;
        const float scale = d[min(g, spans - 1)], sum = fmaf(next, scale, acc);
        acc = g < spans ? F::OFFSET ? fmaf(after, scale, sum) : sum : acc;
    }
    return acc;
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

// silu(a * scale) of all rows to int8 in shared memory. Whole warps.
DEVICE void inputs_to_shared(const float* a, u8* memory, const Parts& at, int n, int cols, float scale) {
    const int octets = n * cols / 8;
    for (int first = threadIdx.x & ~31; first < octets; first += THREADS) {
        const int o = first + (threadIdx.x & 31);
        float v[8];
        load_octet(v, a + 8ll * min(o, octets - 1));
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = silu_f32(v[i] * scale);
        const Octet octet = quantize_octet(v);
        if (o >= octets) continue;
        store_octet<F::ORDER>(memory + at.inputs + 32 * (o / 4), o & 3, octet);
        if ((o & 3) == 0) *(float*)(memory + at.scales + o) = octet.d;
        if (F::OFFSET) store_sums<32>((float*)(memory + at.sums) + o / 4, o & 3, octet);
    }
}

KERNEL void __launch_bounds__(THREADS)
    hyper_window(const float* a, const float* normed, const u8* up, const float* inject, float* u, float* beta, float* x,
                 const float* strength, const float* y, PARAMETER Forms forms, int fresh, int n, int width, int cols,
                 int n_beta, float scale) {
    extern __shared__ __align__(16) u8 memory[];
    const int blocks = width / ELEMENTS, tid = threadIdx.x, t = tid & 3;
    if (blockIdx.x >= blocks) {
        make_beta(normed, inject, beta, blockIdx.x - blocks, n_beta, STREAMS * width, scale);
        return;
    }
    const int row_bytes = cols / F::BLOCK * F::BYTES, spans = cols / 32, first = blockIdx.x * ELEMENTS;
    const Parts at = Parts::of(row_bytes, cols, n);
    for (int c = 0; c < STREAMS; c++) {
        const u8* from = up + (static_cast<long long>(c) * width + first) * row_bytes;
        const int shift = (int)((u64)from & 15);
#pragma unroll 1
        for (int i = 16 * tid; i < shift + ELEMENTS * row_bytes; i += 16 * THREADS)
            copy16(memory + c * at.stream + i, from - shift + i);
    }
    copies_commit();
    const int output = tid / ELEMENTS, element = tid % ELEMENTS;  // the activation row and element that a thread ends
    const long long own = static_cast<long long>(output) * STREAMS * width + first + element;
    float streams[STREAMS], added[STREAMS];
    if (output < n) {
#pragma unroll
        for (int c = 0; c < STREAMS; c++) {
            if (!fresh) streams[c] = read_early(normed + own + c * width);
            if (!x) continue;
            const float v = read_early(y + static_cast<long long>(output) * width + first + element);
            added[c] = fmaf(read_early(strength + output * STREAMS + c), v, read_early(x + own + c * width));
        }
    }
    copies_wait<0>();
    __syncthreads();
    const int stream = tid / 4 / ELEMENTS, row = tid / 4 % ELEMENTS;
    const u8* begin = up + (static_cast<long long>(stream) * width + first) * row_bytes;
    Codes codes;
    codes.load(memory + stream * at.stream + ((u64)begin & 15) + row * row_bytes, spans, t);

    inputs_ready();
    if (output < n) {
#pragma unroll
        for (int c = 0; c < STREAMS; c++) {
            if (fresh) streams[c] = normed[own + c * width];
            if (x) x[own + c * width] = added[c];
        }
    }
    inputs_to_shared(a, memory, at, n, cols, scale);
    __syncthreads();
    float* gates = (float*)(memory + at.gates);
    for (int r = 0; r < n; r++) {
        const float gate = row_product(codes, memory + at.inputs + r * cols, (const float*)(memory + at.scales) + r * spans,
                                       (const float*)(memory + at.sums) + r * spans, spans, t);
        if (t == (r & 3)) gates[r * WEIGHT_ROWS + tid / 4] = sigmoid_f32(gate);
    }
    __syncthreads();
    if (output >= n) return;
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < STREAMS; c++) {
        const float gate = gates[output * WEIGHT_ROWS + c * ELEMENTS + element];
        sum = c ? fmaf(gate, streams[c], sum) : gate * streams[c];
    }
    const long long block = (static_cast<long long>(output) * width + first) / 32;
    u[32 * block + element] = sum * scale;
    const float made[1] = {sum * scale};
    forms.leave(made, block, static_cast<long long>(n) * width);
}
