// The n-gram embedding of a layer: hashes to table rows, the gate, the dilated convolution added to the residual.
//
// ple_rows       table rows of all heads of every token, 64-bit integers. A grid of one block a segment also advances the
//                history; with more blocks ple_history does it afterwards.
// ple_gate       a block of 128 threads a (row, stream): gamma, and f = rms(p), p = gamma * value
// ple_convolve   x = x + (p + silu(sum_j w[:, j] * f[t - (kernel - 1 - j) * gap])); a block takes 512 channels of RUN rows one
//                after the other: what a row reads of the rows before it is in the first cache
// ple_window     the same, a block 128 channels of a segment: row by row, then the kept inputs
// ple_keep       the kept inputs alone, after ple_convolve, or again over the first rows of a window. As in ple_history, a
//                segment without rows leaves everything as it is
// Constants   WIDTH = H of ple_gate, TAPS = kernel of ple_convolve
// Shapes   channels = C * H; x, keys, f (n, C, H); values (n, H); gamma (n, C); conv (slots, (kernel - 1) * gap, C*H)
// Source   `ops.Kernels.ple_rows`, `ops.Kernels.ple`
#include "rows.cuh"

#ifndef WIDTH
#define WIDTH 2560
#endif
#ifndef TAPS
#define TAPS 4
#endif

enum { RUN = 16, PER_THREAD = (WIDTH + LANES - 1) / LANES };

// ---------------------------------------------------------------------------------------------------------------- rows

DEVICE int token_before(const int* tokens, const int* history, int before, const Segment& s, int at) {
    return at >= s.begin ? tokens[at] : history[s.slot * before + before + at - s.begin];
}

// Going back from a token, once an eos is met that position and all before it read as eos.
DEVICE u64 hashed(const int* tokens, const int* history, int before, const Segment& s, int t, int backs, int eos,
                  const u64* multipliers) {
    u64 mixed = static_cast<u32>(tokens[t]) * multipliers[0];
    bool cut = false;
    for (int back = 1; back <= backs; back++) {
        const int token = token_before(tokens, history, before, s, t - back);
        cut = cut || token == eos;
        mixed ^= static_cast<u32>(cut ? eos : token) * multipliers[back];
    }
    return mixed;
}

// By one thread: the ids before the next token, oldest first. A later one never moves to a place that is still read.
DEVICE void advance(const int* tokens, int* history, int before, const Segment& s) {
    for (int i = 0; i < before; i++)
        history[s.to * before + i] = token_before(tokens, history, before, s, s.end - before + i);
}

KERNEL void __launch_bounds__(256)
    ple_rows(const int* tokens, const int* segments, int* history, const u64* multipliers, const u64* sizes,
             const u64* offsets, long long* rows, int before, int heads, int eos) {
    inputs_ready();
    const Segment s = segment_at(segments, blockIdx.y);
    const int items = (s.end - s.begin) * heads, per_order = heads / before;
    for (int i = blockIdx.x * 256 + threadIdx.x; i < items; i += gridDim.x * 256) {
        const int t = s.begin + i / heads, head = i % heads;
        const u64 mixed = hashed(tokens, history, before, s, t, head / per_order + 1, eos, multipliers);
        const u64 size = sizes[head];  // 0 while weights are still coming: passes that only measure must stay in the table
        rows[static_cast<long long>(t) * heads + head] = static_cast<long long>((size ? mixed % size : 0) + offsets[head]);
    }
    if (gridDim.x > 1) return;
    __syncthreads();
    if (threadIdx.x == 0) advance(tokens, history, before, s);
}

KERNEL void __launch_bounds__(32) ple_history(const int* tokens, const int* segments, int* history, int before) {
    inputs_ready();
    const Segment s = segment_at(segments, blockIdx.x);
    if (threadIdx.x == 0 && s.begin < s.end) advance(tokens, history, before, s);
}

// ---------------------------------------------------------------------------------------------------------------- gate

// Whether a thread has an i-th element.
DEVICE bool has(int i) { return (i + 1) * LANES <= WIDTH || threadIdx.x + i * LANES < WIDTH; }

// A thread holds its elements of x, keys and values: each is read once.
KERNEL void __launch_bounds__(LANES)
    ple_gate(const float* x, const float* keys, const float* values, const float* norm_key, const float* norm_query,
             const float* norm_conv, float* f, float* gamma, int width, int streams, float eps) {
    inputs_ready();
    __shared__ float even[LANES], odd[LANES];
    const long long unit = blockIdx.x;
    const int norm = static_cast<int>(unit % streams) * width + threadIdx.x;
    x += unit * width + threadIdx.x;
    keys += unit * width + threadIdx.x;
    f += unit * width + threadIdx.x;
    values += unit / streams * width + threadIdx.x;
    float query[PER_THREAD], key[PER_THREAD], value[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++)
        if (has(i)) query[i] = x[i * LANES], key[i] = keys[i * LANES], value[i] = values[i * LANES];
    float query_chain = 0.0f, key_chain = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++)
        if (has(i)) query_chain = fmaf(query[i], query[i], query_chain), key_chain = fmaf(key[i], key[i], key_chain);
    const float of_query = rms_factor(fold_block(query_chain, even), width, eps);
    const float of_key = rms_factor(fold_block(key_chain, odd), width, eps);
    float chain = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++)
        if (has(i))
            chain = fmaf((key[i] * of_key) * norm_key[norm + i * LANES], (query[i] * of_query) * norm_query[norm + i * LANES],
                         chain);
    const float s = fold_block(chain, even) * (1.0f / sqrtf(static_cast<float>(width)));
    const float sign = s > 0.0f ? 1.0f : s < 0.0f ? -1.0f : s, size = fabsf(s);
    const float gate = sigmoid_f32(sign * sqrtf(size > 1e-6f ? size : 1e-6f));
    chain = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++)
        if (has(i)) value[i] = gate * value[i], chain = fmaf(value[i], value[i], chain);
    const float r = rms_factor(fold_block(chain, odd), width, eps);
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++)
        if (has(i)) f[i * LANES] = (value[i] * r) * norm_conv[norm + i * LANES];
    if (threadIdx.x == 0) gamma[unit] = gate;
}

// --------------------------------------------------------------------------------------------------------- convolution

struct Channel {
    const float *f, *w, *values, *gamma;  // f and w of this channel
    const float* kept;                    // inputs of this channel before this call
    float *keep_to, *x;                   // of this channel
    int channels, kernel, gap, width, streams, at;

    DEVICE int n_kept() const { return (kernel - 1) * gap; }
    // The convolution's input at row `source` of a segment: of this call or kept.
    DEVICE float input(const Segment& s, int source) const {
        return source >= s.begin ? f[static_cast<long long>(source) * channels]
                                 : kept[static_cast<long long>(n_kept() + source - s.begin) * channels];
    }
    DEVICE void add(const Segment& s, int row) const {
        float d = 0.0f;
        for (int j = 0; j < kernel; j++) {
            const float in = input(s, row - (kernel - 1 - j) * gap);
            d = j ? fmaf(w[j], in, d) : w[j] * in;
        }
        const float p = gamma[static_cast<long long>(row) * streams + at / width] *
                        values[static_cast<long long>(row) * width + at % width];
        float& to = x[static_cast<long long>(row) * channels];
        to = to + (p + silu_f32(d));
    }
    DEVICE void keep(const Segment& s) const {
        for (int i = 0; i < n_kept(); i++) keep_to[static_cast<long long>(i) * channels] = input(s, s.end - n_kept() + i);
    }
};

DEVICE Channel channel_of(const Segment& s, int at, const float* f, const float* w, const float* values,
                          const float* gamma, float* conv, float* x, int streams, int width, int kernel, int gap) {
    const int channels = streams * width;
    const long long kept = static_cast<long long>(kernel - 1) * gap * channels;
    return {f + at,
            w + static_cast<long long>(at) * kernel,
            values,
            gamma,
            conv + s.slot * kept + at,
            conv + s.to * kept + at,
            x + at,
            channels, kernel, gap, width, streams, at};
}

#define CONVOLUTION                                                                                            \
    const float *f, const float *w, const float *values, const float *gamma, const int *segments, float *conv, \
        float *x, int streams, int width, int kernel, int gap
#define CHANNEL channel_of(s, at, f, w, values, gamma, conv, x, streams, width, kernel, gap)

DEVICE float4& quad(float* p) { return *reinterpret_cast<float4*>(p); }
DEVICE float4 quad(const float* p) { return *reinterpret_cast<const float4*>(p); }

// p + silu(d) of one channel, d summed over the rows that `in` was read from.
DEVICE float joined(float p, const float (&w)[TAPS], const float (&in)[TAPS]) {
    float d = w[0] * in[0];
#pragma unroll
    for (int j = 1; j < TAPS; j++) d = fmaf(w[j], in[j], d);
    return p + silu_f32(d);
}

// A thread has four channels of one stream. kernel = TAPS; n rows, H a multiple of 4.
KERNEL void __launch_bounds__(128) ple_convolve(CONVOLUTION, int n) {
    inputs_ready();
    const int at = 4 * (blockIdx.x * 128 + threadIdx.x), channels = streams * width;
    if (at >= channels) return;
    const int stream = at / width, place = at - stream * width, before = (TAPS - 1) * gap;
    float by[4][TAPS];
#pragma unroll
    for (int e = 0; e < 4; e++)
#pragma unroll
        for (int j = 0; j < TAPS; j++) by[e][j] = w[(at + e) * TAPS + j];
    int row = blockIdx.y * RUN;
    const int end = min(row + RUN, n);
    Segment s = segment_of(segments, row);
#pragma unroll 1
    for (; row < end; row++) {
        if (row >= s.end) s = segment_of(segments, row);
        const float* kept = conv + (static_cast<long long>(s.slot) * before + before - s.begin) * channels;
        float4 in[TAPS];
#pragma unroll
        for (int j = 0; j < TAPS; j++) {
            const int source = row - (TAPS - 1 - j) * gap;
            in[j] = quad((source >= s.begin ? f : kept) + static_cast<long long>(source) * channels + at);
        }
        const float g = gamma[row * streams + stream];
        const float4 v = quad(values + static_cast<long long>(row) * width + place);
        float4& to = quad(x + static_cast<long long>(row) * channels + at);
        float4 sum = to;
        float each[4][TAPS];
#pragma unroll
        for (int j = 0; j < TAPS; j++)
            each[0][j] = in[j].x, each[1][j] = in[j].y, each[2][j] = in[j].z, each[3][j] = in[j].w;
        sum.x = sum.x + joined(g * v.x, by[0], each[0]);
        sum.y = sum.y + joined(g * v.y, by[1], each[1]);
        sum.z = sum.z + joined(g * v.z, by[2], each[2]);
        sum.w = sum.w + joined(g * v.w, by[3], each[3]);
        to = sum;
    }
}

KERNEL void __launch_bounds__(128) ple_window(CONVOLUTION) {
    inputs_ready();
    const int at = blockIdx.x * 128 + threadIdx.x;
    if (at >= streams * width) return;
    const Segment s = segment_at(segments, blockIdx.y);
    const Channel channel = CHANNEL;
    for (int row = s.begin; row < s.end; row++) channel.add(s, row);
    channel.keep(s);
}

KERNEL void __launch_bounds__(128) ple_keep(CONVOLUTION) {
    inputs_ready();
    const int at = blockIdx.x * 128 + threadIdx.x;
    if (at >= streams * width) return;
    const Segment s = segment_at(segments, blockIdx.y);
    if (s.begin < s.end) CHANNEL.keep(s);
}
