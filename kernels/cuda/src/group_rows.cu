// Pairs (row, rank) of a prompt sorted by expert, and the tiles that the grouped products work through.
//
// One block: a histogram in shared memory, a scan, then the pairs to their places. The order inside an expert depends on
// the run; no result does, since a row is computed alike wherever it lies. Pairs of an expert are split evenly: 300 pairs
// are two tiles of 152 and 148, not 256 and 44. Ids are read AT_ONCE at a time: the block is alone on the card, and waits
// for memory are all that it does.
#include "device.cuh"

#define MAX_EXPERTS 2048
#define AT_ONCE 8

// f(pair, id) for every pair whose id is in 0 .. experts - 1.
template <class Use>
DEVICE void each_pair(const int* ids, int pairs, int experts, Use f) {
    for (int first = threadIdx.x; first < pairs; first += AT_ONCE * 1024) {
        int id[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) id[i] = first + i * 1024 < pairs ? ids[first + i * 1024] : -1;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (id[i] >= 0 && id[i] < experts) f(first + i * 1024, id[i]);
    }
}

// ids (pairs,) -> order (pairs,), tile_list (expert, first, count, 0), n_tiles. Pairs with ids outside 0 .. experts - 1
// are left out. tile: pairs of a tile at most.
KERNEL __launch_bounds__(1024) void group_rows(const int* ids, int pairs, int experts, int tile, int* order,
                                               int4* tile_list, int* n_tiles) {
    __shared__ int count[MAX_EXPERTS], next[MAX_EXPERTS];
    for (int e = threadIdx.x; e < experts; e += 1024) count[e] = 0;
    inputs_ready();
    __syncthreads();
    each_pair(ids, pairs, experts, [&](int, int e) { atomicAdd(&count[e], 1); });
    __syncthreads();
    if (threadIdx.x < 32) {  // a warp scans pairs and tiles, 32 experts a turn
        int at = 0, tile_at = 0;
        const int lane = threadIdx.x;
        for (int e0 = 0; e0 < experts; e0 += 32) {
            const int e = e0 + lane, c = e < experts ? count[e] : 0, t = (c + tile - 1) / tile;
            int pairs_to = c, tiles_to = t;
#pragma unroll
            for (int s = 1; s < 32; s <<= 1) {
                const int a = __shfl_up_sync(~0u, pairs_to, s), b = __shfl_up_sync(~0u, tiles_to, s);
                if (lane >= s) pairs_to += a, tiles_to += b;
            }
            const int first = at + pairs_to - c;
            if (e < experts) next[e] = first;
            int size = t ? ((c + t - 1) / t + 7) & ~7 : 0;  // whole eights of columns
            for (int i = 0; i < t; i++)
                tile_list[tile_at + tiles_to - t + i] = make_int4(e, first + i * size, min(size, c - i * size), 0);
            at += __shfl_sync(~0u, pairs_to, 31);
            tile_at += __shfl_sync(~0u, tiles_to, 31);
        }
        if (lane == 0) *n_tiles = tile_at;
    }
    __syncthreads();
    each_pair(ids, pairs, experts, [&](int p, int e) { order[atomicAdd(&next[e], 1)] = p; });
}
