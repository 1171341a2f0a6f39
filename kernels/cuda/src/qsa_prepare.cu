// What rows do before attention: store keys, values and indexer keys; complete index blocks; turn queries.
//
// A row has kv_heads + 1 + heads + index_heads tasks of a warp each: a key head with its value head, the indexer key
// with the block that may end at it, a query head, an indexer query head. A launch does the tasks [first, last), so
// that storing and attending can be one launch or two.
// A block that ends at a row may begin in rows of this launch: their raw keys are taken from the input, where the
// row's neighbours are, and from the pages otherwise, so no row waits for another.
#include "qsa_store.cuh"

KERNEL void __launch_bounds__(128)
    qsa_prepare(const int* tables, const int* slots, const int* positions, const float* k, const float* v,
                const float* index_k, const float* q_gate, const float* index_q, const float* norm_k,
                const float* norm_index_k, const float* norm_q, const float* norm_index_q, const float* cos,
                const float* sin, u8* cached_k, u8* cached_v, float* raw, u8* far_k, u8* far_v, float* far_raw,
                const int* numbers, float* block, float* q, float* iq, int pages_of_a_slot, int kv_heads, int heads, int index_heads, int d, int index_dim, int r,
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
        const long long from = (static_cast<long long>(row) * kv_heads + task) * d;
        const long long to = token_row(tables, pages_of_a_slot, slots[row], position);
        store_key_and_value(k + from, v + from, d, norm_k, eps, rope, position,
                            cell(cached_k, far_k, to, kv_heads, task, Keys::row(d)),
                            cell(cached_v, far_v, to, kv_heads, task, Values::row(d)), buffer);
        return;
    }
    task -= kv_heads;
    if (task == 0) {
        store_index_key(index_k, row, tables, numbers, pages_of_a_slot, slots, positions, raw, far_raw, block,
                        norm_index_k, eps, rope, index_dim, r, buffer);
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
