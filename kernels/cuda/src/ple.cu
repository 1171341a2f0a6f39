// The n-gram embedding of a layer: hashes to table rows, the gate, the dilated convolution added to the residual.
//
// ple_rows       table rows of all heads of every token, 64-bit integers. A grid of one block a segment also advances the
//                history; with more blocks ple_history does it afterwards.
// ple_gate       a block of 128 threads a (row, stream): gamma, and f = rms(p), p = gamma * value
// ple_convolve   x = x + (p + silu(sum_j w[:, j] * f[t - (kernel - 1 - j) * gap])), a block 128 channels of a row
// ple_window     the same, a block 128 channels of a segment: row by row, then the kept inputs
// ple_keep       the kept inputs alone, after ple_convolve, or again over the first rows of a window. As in ple_history, a
//                segment without rows leaves everything as it is
// Shapes   channels = C * H; x, keys, f (n, C, H); values (n, H); gamma (n, C); conv (slots, (kernel - 1) * gap, C*H)
// Source   `ops.Kernels.ple_rows`, `ops.Kernels.ple`
#include "rows.cuh"

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

KERNEL void __launch_bounds__(LANES)
    ple_gate(const float* x, const float* keys, const float* values, const float* norm_key, const float* norm_query,
             const float* norm_conv, float* f, float* gamma, int width, int streams, float eps) {
    inputs_ready();
    __shared__ float even[LANES], odd[LANES];
    const long long unit = blockIdx.x;
    const int norm = static_cast<int>(unit % streams) * width;
    x += unit * width;
    keys += unit * width;
    f += unit * width;
    values += unit / streams * width;
    norm_key += norm;
    norm_query += norm;
    norm_conv += norm;
    float query_chain = 0.0f, key_chain = 0.0f;
#pragma unroll 4
    for (int i = threadIdx.x; i < width; i += LANES) {
        query_chain = fmaf(x[i], x[i], query_chain);
        key_chain = fmaf(keys[i], keys[i], key_chain);
    }
    const float of_query = rms_factor(fold_block(query_chain, even), width, eps);
    const float of_key = rms_factor(fold_block(key_chain, odd), width, eps);
    float chain = 0.0f;
#pragma unroll 4
    for (int i = threadIdx.x; i < width; i += LANES)
        chain = fmaf((keys[i] * of_key) * norm_key[i], (x[i] * of_query) * norm_query[i], chain);
    const float s = fold_block(chain, even) * (1.0f / sqrtf(static_cast<float>(width)));
    const float sign = s > 0.0f ? 1.0f : s < 0.0f ? -1.0f : s, size = fabsf(s);
    const float gate = sigmoid_f32(sign * sqrtf(size > 1e-6f ? size : 1e-6f));
    chain = 0.0f;
#pragma unroll 4
    for (int i = threadIdx.x; i < width; i += LANES) {
        const float p = gate * values[i];
        chain = fmaf(p, p, chain);
    }
    const float r = rms_factor(fold_block(chain, odd), width, eps);
#pragma unroll 4
    for (int i = threadIdx.x; i < width; i += LANES) f[i] = ((gate * values[i]) * r) * norm_conv[i];
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

KERNEL void __launch_bounds__(128) ple_convolve(CONVOLUTION) {
    inputs_ready();
    const int at = blockIdx.x * 128 + threadIdx.x, row = blockIdx.y;
    if (at >= streams * width) return;
    const Segment s = segment_of(segments, row);
    CHANNEL.add(s, row);
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
