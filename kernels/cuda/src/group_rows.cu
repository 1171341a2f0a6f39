// Pairs (row, rank) of a prompt sorted by expert, and the tiles that the grouped products work through.
//
// One block: a histogram in shared memory, a scan, then the pairs to their places. The order inside an expert depends on
// the run; no result does, since a row is computed alike wherever it lies. Pairs of the experts of a tile list are split
// evenly: 160 pairs are two tiles of 80, not 128 and 32.
#include "device.cuh"

#define MAX_EXPERTS 2048

// ids (pairs,) -> order (pairs,), tile_list (expert, first, count, 0), n_tiles. Pairs with ids outside 0 .. experts - 1
// are left out. tile: pairs of a tile at most.
KERNEL __launch_bounds__(1024) void group_rows(const int* ids, int pairs, int experts, int tile, int* order,
                                                              int4* tile_list, int* n_tiles) {
    inputs_ready();
    __shared__ int count[MAX_EXPERTS], next[MAX_EXPERTS];
    for (int e = threadIdx.x; e < experts; e += 1024) count[e] = 0;
    __syncthreads();
    for (int p = threadIdx.x; p < pairs; p += 1024)
        if (ids[p] >= 0 && ids[p] < experts) atomicAdd(&count[ids[p]], 1);
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
    for (int p = threadIdx.x; p < pairs; p += 1024)
        if (ids[p] >= 0 && ids[p] < experts) order[atomicAdd(&next[ids[p]], 1)] = p;
}
