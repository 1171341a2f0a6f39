// What the rows of a launch store in the pages: keys and values, raw indexer keys, the index blocks that end at them.
#pragma once
#include "cache.cuh"

struct Angles {
    const float *cos, *sin;
    int half;
};

DEVICE void norm_to_buffer(const float* x, int d, const float* w, float eps, const Angles& rope, int position,
                           float* buffer) {
    const long long at = static_cast<long long>(position) * rope.half;
    norm_and_rotate(load_vector(x, d), d, w, eps, rope.cos + at, rope.sin + at, rope.half, buffer);
}

// Store the raw indexer key of a row; when a block ends here, its key is rope(rms(mean of r raw keys)). `numbers`: tables of
// the pages of `block`.
DEVICE void store_index_key(const float* index_k, int row, const int* tables, const int* numbers, int pages_of_a_slot,
                            const int* slots, const int* positions, float* raw, float* far_raw, float* block, const float* w,
                            float eps, const Angles& rope, int d, int r, float* buffer) {
    const int lane = threadIdx.x & 31, slot = slots[row], position = positions[row], first = position + 1 - r;
    const long long token = token_row(tables, pages_of_a_slot, slot, position);
    const float* own = index_k + static_cast<long long>(row) * d;
    float* kept = cell(raw, far_raw, token, 1, 0, d);
    for (int i = lane; i < d; i += 32) kept[i] = own[i];
    if (!r || first % r) return;
    WarpVector mean;
#pragma unroll
    for (int m = 0; m < VECTOR_PARTS; m++) mean.x[m] = 0.0f;
    for (int t = 0; t < r; t++) {
        const int back = r - 1 - t;
        const bool here = row >= back && slots[row - back] == slot && positions[row - back] == first + t;
        const float* from = here ? own - static_cast<long long>(back) * d
                                 : cell(raw, far_raw, token_row(tables, pages_of_a_slot, slot, first + t), 1, 0, d);
#pragma unroll
        for (int m = 0; m < VECTOR_PARTS; m++)
            if (32 * m < d) {
                const float v = from[lane + 32 * m];
                mean.x[m] = t ? mean.x[m] + v : v;
            }
    }
    const float share = 1.0f / static_cast<float>(r);
#pragma unroll
    for (int m = 0; m < VECTOR_PARTS; m++) mean.x[m] = mean.x[m] * share;
    const long long at = static_cast<long long>(first) * rope.half;
    norm_and_rotate(mean, d, w, eps, rope.cos + at, rope.sin + at, rope.half, buffer);
    float* to = block + token_row(FAR ? numbers : tables, pages_of_a_slot, slot, first) / r * d;
    for (int i = lane; i < d; i += 32) to[i] = buffer[i];
}

// By a warp: key (normed, turned) and value of a row's key head to the pages.
DEVICE void store_key_and_value(const float* k, const float* v, int d, const float* norm_k, float eps, const Angles& rope,
                                int position, u8* to_k, u8* to_v, float* buffer) {
    norm_to_buffer(k, d, norm_k, eps, rope, position, buffer);
    Keys::put_row(to_k, d, [&](int i) { return buffer[i]; });
    Values::put_row(to_v, d, [&](int i) { return v[i]; });
}
