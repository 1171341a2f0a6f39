// How many of a window's picked experts lie in the expert cache: ids whose address is in a range; how often each is picked;
// and how many of the others the window reads and the processor computes, each once for all rows. A warp a row.
#include "device.cuh"

enum { MOST_PICKS = 1024 };

// ids (n, used), addresses (experts,) -> hits[row] = (first ? 0 : hits[row]) + those from `begin` up to `end`; `pitch` words
// behind it the same for those that are below 0 in `kept`; use[id] + 1; reads[0] + those elsewhere, but not at 0, reads[1] +
// those of them below 0 in `kept`. ids below 0 name nothing.
KERNEL __launch_bounds__(512) void count_hits(const int* ids, const int* kept, const u64* addresses, u64 begin, u64 end,
                                              int used, int first, int pitch, int* hits, int* use, int* reads) {
    inputs_ready();
    __shared__ int all[MOST_PICKS];
    const int row = threadIdx.x >> 5, lane = threadIdx.x & 31;
    for (int i = threadIdx.x; i < blockDim.x / 32 * used; i += blockDim.x) all[i] = ids[i];
    __syncthreads();
    int count = 0, read = 0, helped = 0, given = 0;
    for (int k = 0; k < used; k += 32) {
        const int e = k + lane < used ? all[row * used + k + lane] : -1;
        const u64 at = e >= 0 ? addresses[e] : 0;
        const bool held = at >= begin && at < end;
        bool missing = at && !held;
        for (int i = 0; missing && i < row * used; i++) missing = all[i] != e;  // a row picks an expert once
        if (e >= 0) atomicAdd(use + e, 1);
        count += __popc(__ballot_sync(~0u, held));
        const bool asked = e >= 0 && kept[row * used + k + lane] < 0, other = missing && asked;
        given += __popc(__ballot_sync(~0u, asked));
        read += __popc(__ballot_sync(~0u, missing && !other));
        helped += __popc(__ballot_sync(~0u, other));
    }
    if (lane) return;
    hits[row] = (first ? 0 : hits[row]) + count;
    hits[pitch + row] = (first ? 0 : hits[pitch + row]) + given;
    if (read) atomicAdd(reads, read);
    if (helped) atomicAdd(reads + 1, helped);
}
