// How many of a window's picked experts lie in the expert cache: ids whose address is in a range; and how often each is
// picked. A warp a row.
#include "device.cuh"

// ids (n, used), addresses (experts,) -> hits[row] = (first ? 0 : hits[row]) + those from `begin` up to `end`, use[id] + 1.
// ids below 0 name nothing.
KERNEL __launch_bounds__(512) void count_hits(const int* ids, const u64* addresses, u64 begin, u64 end, int used,
                                              int first, int* hits, int* use) {
    inputs_ready();
    const int row = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int count = 0;
    for (int k = 0; k < used; k += 32) {
        const int e = k + lane < used ? ids[row * used + k + lane] : -1;
        const u64 at = e >= 0 ? addresses[e] : 0;
        if (e >= 0) atomicAdd(use + e, 1);
        count += __popc(__ballot_sync(~0u, at >= begin && at < end));
    }
    if (lane == 0) hits[row] = (first ? 0 : hits[row]) + count;
}
