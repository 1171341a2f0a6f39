// A sequence's keys and values of one layer, page by page into memory of their own: a prompt reads each page some thousand
// times, and some of them lie in RAM.
//
// grid (pages, 2): keys, values. All rows are of one slot; the last one has the highest position.
#define FAR 1
#include "cache.cuh"

KERNEL void __launch_bounds__(256)
    qsa_stage(const int* tables, const int* slots, const int* positions, int rows, int pages_of_a_slot, const uint4* near_k,
              const uint4* far_k, const uint4* near_v, const uint4* far_v, uint4* staged_k, uint4* staged_v, int size_k,
              int size_v) {
    inputs_ready();
    const int page = blockIdx.x;
    if (page > positions[rows - 1] / PAGE) return;
    const long long token = token_row(tables, pages_of_a_slot, slots[0], page * PAGE);
    const bool keys = blockIdx.y == 0;
    const int size = keys ? size_k : size_v;  // of a token, in 16 bytes
    const uint4* from = keys ? cell(near_k, far_k, token, 1, 0, size) : cell(near_v, far_v, token, 1, 0, size);
    uint4* to = (keys ? staged_k : staged_v) + static_cast<long long>(page) * PAGE * size;
    for (int i = threadIdx.x; i < PAGE * size; i += blockDim.x) to[i] = from[i];
}
