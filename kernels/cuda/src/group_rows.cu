// Pairs (row, rank) of a prompt sorted by expert, and the tiles that the grouped products work through.
//
// count_rows   how many of a block's pairs each expert has
// group_rows   every block finds from all counts where its own pairs begin, and puts them there; block 0 writes the tiles
// The order of a block's pairs inside an expert depends on the run; no result does, since a row is computed alike wherever
// it lies. Pairs of an expert are split evenly: 300 pairs are two tiles of 152 and 148, not 256 and 44.
//
// Shapes   ids (pairs,), a block has the next PAIRS of them; counts (blocks, experts) int
#include "device.cuh"

#define MAX_EXPERTS 2048
#define PAIRS 4096
#define THREADS 1024

// f(pair, id) for every pair of the block whose id is in 0 .. experts - 1; all ids are read at once.
template <class Use>
DEVICE void each_pair(const int* ids, int pairs, int experts, Use f) {
    enum { EACH = PAIRS / THREADS };
    const int first = blockIdx.x * PAIRS + threadIdx.x;
    int id[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) id[i] = first + i * THREADS < pairs ? ids[first + i * THREADS] : -1;
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (id[i] >= 0 && id[i] < experts) f(first + i * THREADS, id[i]);
}

KERNEL __launch_bounds__(THREADS) void count_rows(const int* ids, int pairs, int experts, int* counts) {
    __shared__ int count[MAX_EXPERTS];
    for (int e = threadIdx.x; e < experts; e += THREADS) count[e] = 0;
    inputs_ready();
    __syncthreads();
    each_pair(ids, pairs, experts, [&](int, int e) { atomicAdd(&count[e], 1); });
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += THREADS) counts[blockIdx.x * experts + e] = count[e];
}

// A warp's running sums over 32 experts: those up to and with its own.
DEVICE void add_before(int& a, int& b) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int s = 1; s < 32; s <<= 1) {
        const int x = __shfl_up_sync(~0u, a, s), y = __shfl_up_sync(~0u, b, s);
        if (lane >= s) a += x, b += y;
    }
}

// ids -> order (pairs,), tile_list (expert, first, count, 0), n_tiles. Pairs with ids outside 0 .. experts - 1 are left
// out. tile: pairs of a tile at most.
KERNEL __launch_bounds__(THREADS) void group_rows(const int* ids, const int* counts, int pairs, int experts, int tile,
                                                  int* order, int4* tile_list, int* n_tiles) {
    __shared__ int total[MAX_EXPERTS], next[MAX_EXPERTS];
    inputs_ready();
    for (int e = threadIdx.x; e < experts; e += THREADS) {
        int all = 0, before = 0;
#pragma unroll 8
        for (int b = 0; b < gridDim.x; b++) {
            const int c = counts[b * experts + e];
            all += c;
            before += b < blockIdx.x ? c : 0;
        }
        total[e] = all, next[e] = before;
    }
    __syncthreads();
    if (threadIdx.x < 32) {  // a warp scans pairs and tiles, 32 experts a turn
        int at = 0, tile_at = 0;
        const int lane = threadIdx.x;
        for (int e0 = 0; e0 < experts; e0 += 32) {
            const int e = e0 + lane, c = e < experts ? total[e] : 0, t = (c + tile - 1) / tile;
            int pairs_to = c, tiles_to = t;
            add_before(pairs_to, tiles_to);
            const int first = at + pairs_to - c;
            if (e < experts) next[e] += first;
            int size = t ? ((c + t - 1) / t + 7) & ~7 : 0;  // whole eights of columns
            for (int i = 0; i < t && blockIdx.x == 0; i++)
                tile_list[tile_at + tiles_to - t + i] = make_int4(e, first + i * size, min(size, c - i * size), 0);
            at += __shfl_sync(~0u, pairs_to, 31);
            tile_at += __shfl_sync(~0u, tiles_to, 31);
        }
        if (lane == 0 && blockIdx.x == 0) *n_tiles = tile_at;
    }
    __syncthreads();
    each_pair(ids, pairs, experts, [&](int p, int e) { order[atomicAdd(&next[e], 1)] = p; });
}
