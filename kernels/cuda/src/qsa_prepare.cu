// What rows do before attention: store keys, values and indexer keys; complete index blocks; turn queries.
//
// A row has kv_heads + 1 + heads + index_heads tasks of a warp each: a key head with its value head, the indexer key
// with the block that may end at it, a query head, an indexer query head. A launch does the tasks [first, last), so
// that storing and attending can be one launch or two.
// A block that ends at a row may begin in rows of this launch: their raw keys are taken from the input, where the
// row's neighbours are, and from the pages otherwise, so no row waits for another.
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

// Store the raw indexer key of a row; when a block ends here, its key is rope(rms(mean of r raw keys)).
DEVICE void store_index_key(const float* index_k, int row, const int* tables, int pages_of_a_slot, const int* slots,
                            const int* positions, float* raw, float* block, const float* w, float eps,
                            const Angles& rope, int d, int r, float* buffer) {
    const int lane = threadIdx.x & 31, slot = slots[row], position = positions[row], first = position + 1 - r;
    const long long token = token_row(tables, pages_of_a_slot, slot, position);
    const float* own = index_k + static_cast<long long>(row) * d;
    for (int i = lane; i < d; i += 32) raw[token * d + i] = own[i];
    if (!r || first % r) return;
    WarpVector mean;
#pragma unroll
    for (int m = 0; m < VECTOR_PARTS; m++) mean.x[m] = 0.0f;
    for (int t = 0; t < r; t++) {
        const int back = r - 1 - t;
        const bool here = row >= back && slots[row - back] == slot && positions[row - back] == first + t;
        const float* from = here ? own - static_cast<long long>(back) * d
                                 : raw + token_row(tables, pages_of_a_slot, slot, first + t) * d;
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
    float* to = block + token_row(tables, pages_of_a_slot, slot, first) / r * d;
    for (int i = lane; i < d; i += 32) to[i] = buffer[i];
}

KERNEL void __launch_bounds__(128)
    qsa_prepare(const int* tables, const int* slots, const int* positions, const float* k, const float* v,
                const float* index_k, const float* q_gate, const float* index_q, const float* norm_k,
                const float* norm_index_k, const float* norm_q, const float* norm_index_q, const float* cos,
                const float* sin, u8* cached_k, u8* cached_v, float* raw, float* block, float* q,
                float* iq, int pages_of_a_slot, int kv_heads, int heads, int index_heads, int d, int index_dim, int r,
                int half, int first, int last, float eps) {
    inputs_ready();
    __shared__ float buffers[4][VECTOR_MOST];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = blockIdx.y;
    const int position = positions[row];
    const Angles rope = {cos, sin, half};
    float* buffer = buffers[warp];
    int task = first + blockIdx.x * 4 + warp;
    if (task >= last) return;
    if (task < kv_heads) {
        const float* from = v + (static_cast<long long>(row) * kv_heads + task) * d;
        const long long to = token_row(tables, pages_of_a_slot, slots[row], position) * kv_heads + task;
        norm_to_buffer(k + (static_cast<long long>(row) * kv_heads + task) * d, d, norm_k, eps, rope, position, buffer);
        Keys::put_row(cached_k + to * Keys::row(d), d, [&](int i) { return buffer[i]; });
        Values::put_row(cached_v + to * Values::row(d), d, [&](int i) { return from[i]; });
        return;
    }
    task -= kv_heads;
    if (task == 0) {
        store_index_key(index_k, row, tables, pages_of_a_slot, slots, positions, raw, block, norm_index_k, eps, rope,
                        index_dim, r, buffer);
        return;
    }
    task -= 1;
    if (task < heads) {
        const long long head = static_cast<long long>(row) * heads + task;
        norm_to_buffer(q_gate + head * 2 * d, d, norm_q, eps, rope, position, buffer);
        for (int i = lane; i < d; i += 32) q[head * d + i] = buffer[i];
        return;
    }
    const long long head = static_cast<long long>(row) * index_heads + (task - heads);
    norm_to_buffer(index_q + head * index_dim, index_dim, norm_index_q, eps, rope, position, buffer);
    for (int i = lane; i < index_dim; i += 32) iq[head * index_dim + i] = buffer[i];
}
