// The experts of a window: which are used, and by which pairs (row, rank) each. In shared memory, built by every block.
//
// lists: number of unique experts; expert[pairs] in the order of their first pair; count[pairs]; members[pairs][COLUMNS],
// the pairs of each; then ids[pairs] (-1: skipped) and rank[pairs] (pairs of the same expert before it).
#pragma once

template <int COLUMNS>
struct Lists {
    int* base;
    int pairs;

    DEVICE int unique() const { return base[0]; }
    DEVICE int& expert(int u) const { return base[1 + u]; }
    DEVICE int& count(int u) const { return base[1 + pairs + u]; }
    DEVICE int& member(int u, int column) const { return base[1 + 2 * pairs + u * COLUMNS + column]; }
    DEVICE bool has(int p) const { return id(p) >= 0; }
    DEVICE int& id(int p) const { return base[1 + pairs * (2 + COLUMNS) + p]; }
    DEVICE int& rank(int p) const { return base[1 + pairs * (3 + COLUMNS) + p]; }

    // By all threads of the block. An id outside 0 .. and an expert without an address are skipped.
    DEVICE void build(const int* ids, const u64* addresses) const {
        for (int p = threadIdx.x; p < pairs; p += blockDim.x) {
            const int e = ids[p];
            id(p) = e >= 0 && addresses[e] ? e : -1;
            count(p) = 0;
        }
        if (threadIdx.x == 0) base[0] = 0;
        __syncthreads();
        for (int p = threadIdx.x; p < pairs; p += blockDim.x) {
            int before = 0;
            for (int i = 0; i < p; i++) before += id(i) == id(p);
            rank(p) = before;
        }
        __syncthreads();
        for (int p = threadIdx.x; p < pairs; p += blockDim.x) {
            const int e = id(p);
            if (e < 0) continue;
            int u = 0;  // experts that come before this one
            for (int i = 0; i < pairs && id(i) != e; i++) u += id(i) >= 0 && rank(i) == 0;
            member(u, rank(p)) = p;
            atomicAdd(&count(u), 1);
            if (rank(p) == 0) {
                expert(u) = e;
                atomicAdd(base, 1);
            }
        }
        __syncthreads();
    }
};

// The weighted sum of a row's pairs in rank order. y[p] by the functor; skipped pairs from `given` (pairs, rows).
template <class Lists, class Output>
DEVICE float join_pairs(const Lists& lists, const float* weights, const float* given, int token, int used, int row, int rows,
                        Output y) {
    float acc = 0.0f;
    for (int k = 0; k < used; k++) {
        const int p = token * used + k;
        acc = fmaf(weights[p], lists.has(p) ? y(p) : given[(long long)p * rows + row], acc);
    }
    return acc;
}
