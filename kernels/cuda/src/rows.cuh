// What the kernels on rows share: segments, sums over lanes inside a warp or a block of 128 threads, pages, rotation.
//
// A row's arithmetic never depends on which block or warp it falls into: the chain of an element is given by its index.
#pragma once
#include "device.cuh"

constexpr int LANES = 128;
constexpr int PAGE = 64;
constexpr unsigned ALL = 0xffffffffu;

#define INFINITE __int_as_float(0x7f800000)  // NVRTC has no INFINITY

// A run of rows of one sequence. Its state is read from row `slot` of the state arrays and written to row `to`.
struct Segment {
    int slot, to, begin, end;
};

// The first of a segment's numbers: the row in the lower half; in the upper half the bits in which the written row
// differs, 0 = the state advances in place.
DEVICE Segment segment_at(const int* segments, int s) {
    const int first = segments[3 * s], slot = first & 0xffff;
    return {slot, slot ^ (first >> 16), segments[3 * s + 1], segments[3 * s + 2]};
}

// The segment that holds a row. Segments cover all rows in order; there are few.
DEVICE Segment segment_of(const int* segments, int row) {
    int s = 0;
    while (row >= segments[3 * s + 2]) s++;
    return segment_at(segments, s);
}

DEVICE float warp_max(float v) {
#pragma unroll
    for (int s = 16; s; s >>= 1) v = fmaxf(v, __shfl_xor_sync(ALL, v, s));
    return v;
}

DEVICE u32 warp_max(u32 v) {
#if ARCH >= 800
    return __reduce_max_sync(ALL, v);
#else
#pragma unroll
    for (int s = 16; s; s >>= 1) v = max(v, __shfl_xor_sync(ALL, v, s));
    return v;
#endif
}

DEVICE u32 warp_min(u32 v) {
#if ARCH >= 800
    return __reduce_min_sync(ALL, v);
#else
#pragma unroll
    for (int s = 16; s; s >>= 1) v = min(v, __shfl_xor_sync(ALL, v, s));
    return v;
#endif
}

// A word that is ordered as the float is: 0 below everything, -0 like 0, NaN above everything.
DEVICE u32 ordered(float x) {
    const u32 bits = __float_as_uint(x + 0.0f), flip = static_cast<u32>(static_cast<int>(bits) >> 31) | 0x80000000u;
    return x != x ? ALL : bits ^ flip;
}

DEVICE float from_ordered(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// The last five folds of `lanes`; every lane gets the total. Exchanging both ways adds the same pairs.
DEVICE float fold_warp(float p) {
#pragma unroll
    for (int s = 16; s; s >>= 1) p = p + __shfl_xor_sync(ALL, p, s);
    return p;
}

// `lanes` of a row spread over one warp: lane i holds the elements i + 32 m. chains[m mod 4] are its chains.
DEVICE float fold_chains(const float (&chains)[4]) {
    return fold_warp((chains[0] + chains[2]) + (chains[1] + chains[3]));
}

// The fold of `lanes` over the chains of 128 threads, thread j holding chain j; every thread gets the total.
// `buffer`: LANES floats of shared memory that nobody reads or writes between the last barrier and this call.
DEVICE float fold_block(float chain, float* buffer) {
    const int j = threadIdx.x, lane = j & 31;
    buffer[j] = chain;
    __syncthreads();
    return fold_warp((buffer[lane] + buffer[lane + 64]) + (buffer[lane + 32] + buffer[lane + 96]));
}

DEVICE float rms_factor(float sum_of_squares, int n, float eps) {
    return 1.0f / sqrtf(sum_of_squares / static_cast<float>(n) + eps);
}

constexpr int VECTOR_MOST = 256;
constexpr int VECTOR_PARTS = VECTOR_MOST / 32;

// A vector of up to 256 elements held by one warp: lane i holds x[i + 32 m].
struct WarpVector {
    float x[VECTOR_PARTS];
};

DEVICE WarpVector load_vector(const float* from, int n) {
    const int lane = threadIdx.x & 31;
    WarpVector v;
#pragma unroll
    for (int m = 0; m < VECTOR_PARTS; m++) v.x[m] = 32 * m < n ? from[lane + 32 * m] : 0.0f;
    return v;
}

DEVICE float sum_of_squares(const WarpVector& v, int n) {
    float chains[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int m = 0; m < VECTOR_PARTS; m++)
        if (32 * m < n) chains[m & 3] = fmaf(v.x[m], v.x[m], chains[m & 3]);
    return fold_chains(chains);
}

// rope(rms(v)): norm factors w, angles of one position (half each), half-split. `buffer`: n floats of this warp's own.
// The result is in `buffer`, visible to the warp.
DEVICE void norm_and_rotate(const WarpVector& v, int n, const float* w, float eps, const float* cos, const float* sin,
                            int half, float* buffer) {
    const int lane = threadIdx.x & 31;
    const float r = rms_factor(sum_of_squares(v, n), n, eps);
#pragma unroll
    for (int m = 0; m < VECTOR_PARTS; m++)
        if (32 * m < n) buffer[lane + 32 * m] = (v.x[m] * r) * w[lane + 32 * m];
    __syncwarp();
    for (int j = lane; j < half; j += 32) {
        const float a = buffer[j], b = buffer[j + half], c = cos[j], s = sin[j];
        buffer[j] = fmaf(a, c, -(b * s));
        buffer[j + half] = fmaf(b, c, a * s);
    }
    __syncwarp();
}

// Where a token of a slot lies, counted in tokens through all pages.
DEVICE long long token_row(const int* tables, int pages_of_a_slot, int slot, int position) {
    const int page = tables[static_cast<long long>(slot) * pages_of_a_slot + position / PAGE];
    return static_cast<long long>(page) * PAGE + position % PAGE;
}

// With FAR some pages lie in RAM: a table has ~p for the p-th of those, whose token rows are below 0.
#ifndef FAR
#define FAR 0
#endif

// Where a head of a token row begins, of `heads` of `size` elements each.
template <class T>
DEVICE T* cell(T* near, T* far, long long token, int heads, int head, int size) {
    if (FAR && token < 0) return far + (((~(token >> 6) << 6) + (token & 63)) * heads + head) * size;
    return near + (token * heads + head) * size;
}
