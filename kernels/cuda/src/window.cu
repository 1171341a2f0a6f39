// Between two windows of one row a sequence: what the second needs of the first, without the host.
//
// window_recent   before a window: its tokens join the ids that the penalties look at; recent (n, last), and row i keeps
//                 its token of a position at place position mod moduli[i], so that the oldest id makes room
// window_next     after it: the sampled ids are its tokens, one position on, and the rows of state that it wrote are the
//                 ones that it reads. An id below 0 (there was none) becomes token 0: the host sees the id and stops
// Shapes          tokens, positions, ids, moduli (n,), segments (n, 3) as rows.cuh reads them
#include "rows.cuh"

KERNEL void __launch_bounds__(32) window_recent(const int* tokens, const int* positions, const int* moduli, int* recent,
                                                int n, int last) {
    inputs_ready();
    const int i = threadIdx.x;
    if (i < n && moduli[i] > 0) recent[i * last + positions[i] % moduli[i]] = tokens[i];
}

KERNEL void __launch_bounds__(32) window_next(const int* ids, int* tokens, int* positions, int* segments, int n) {
    inputs_ready();
    const int i = threadIdx.x;
    if (i >= n) return;
    tokens[i] = max(ids[i], 0);
    positions[i] += 1;
    segments[3 * i] ^= segments[3 * i] >> 16;
}
