// Scores of the index blocks for few rows: score_j = sum over heads, ascending, of max(0, dot(index_q, block_j)).
//
// dot: four chains (index mod 4) of fma in ascending order from 0, (c0 + c1) + (c2 + c3). A float4 holds one element of
// each chain, so a thread that owns a dot has four sums and reads 16 bytes at a time.
//
// qsa_score   a block takes tiles of 64 keys of one row; grid (tiles at once, rows)
// Rows whose blocks do not compete are left out, and their scores undefined.
// Shapes   iq (rows, heads, d) turned; block (pages, PAGE / r, d); scores (rows, stride); d a multiple of 32
// Source   `ops.Kernels.qsa_attend`
#include "qsa_score.cuh"

constexpr int KEYS = 64;
constexpr int SCORE_THREADS = 128;

DEVICE void add_products(float (&c)[4], float4 a, float4 b) {
    c[0] = fmaf(a.x, b.x, c[0]);
    c[1] = fmaf(a.y, b.y, c[1]);
    c[2] = fmaf(a.z, b.z, c[2]);
    c[3] = fmaf(a.w, b.w, c[3]);
}

DEVICE float join(const float (&c)[4]) { return (c[0] + c[1]) + (c[2] + c[3]); }

KERNEL void __launch_bounds__(SCORE_THREADS)
    qsa_score(const float* block, const int* tables, const int* slots, const int* positions, const float* iq,
              float* scores, int stride, int pages_of_a_slot, int heads, int d, int r, int picked) {
    extern __shared__ __align__(16) float memory[];
    const int row = blockIdx.y, tid = threadIdx.x, gap = d + 4, slot = slots[row];
    const int blocks = competing(positions[row], r, picked), begin = blockIdx.x * KEYS;
    const Pages pages = {block, tables, pages_of_a_slot, r, d};
    float *keys = memory, *query = keys + KEYS * gap, *dots = query + heads * d;
    const auto copy_keys = [&](int first, int from, int to) {
        const int pieces = d / 4;
        for (int e = from * pieces + tid; e < to * pieces; e += SCORE_THREADS)
            copy16(keys + e / pieces * gap + e % pieces * 4, pages.key(slot, first + e / pieces) + e % pieces * 4);
    };
    // Before the kernel that stores this launch's rows ends: keys of blocks that end before them.
    int stored = positions[row];
    for (int i = 0; i < static_cast<int>(gridDim.y); i++)
        if (slots[i] == slot) stored = min(stored, positions[i]);
    int old = blocks ? max(0, min(min(KEYS, blocks - begin), stored / r - begin)) : 0;
    copy_keys(begin, 0, old);
    inputs_ready();
    if (begin >= blocks) return;
    for (int e = tid; e < heads * d / 4; e += SCORE_THREADS)
        copy16(query + 4 * e, iq + static_cast<long long>(row) * heads * d + 4 * e);
    for (int first = begin; first < blocks; first += gridDim.x * KEYS) {
        const int n = min(KEYS, blocks - first);
        copy_keys(first, old, n);
        old = 0;
        copies_commit();
        copies_wait<0>();
        __syncthreads();
        const int key = tid % KEYS;
        for (int h = tid / KEYS; h < heads; h += SCORE_THREADS / KEYS) {
            float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
            for (int i = 0; i < d; i += 4)
                add_products(c, *reinterpret_cast<const float4*>(query + h * d + i),
                             *reinterpret_cast<const float4*>(keys + key * gap + i));
            dots[h * KEYS + key] = join(c);
        }
        __syncthreads();
        if (tid < n) {
            float sum = 0.0f;
            for (int h = 0; h < heads; h++) sum = sum + positive(dots[h * KEYS + tid]);
            scores[static_cast<long long>(row) * stride + first + tid] = sum;
        }
    }
}
