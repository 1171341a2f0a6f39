// The experts of a window that lie in RAM, copied to the card before its products read them: a product reads a few words of
// many rows at a time, which the link serves at half its rate; here a warp reads 512 bytes in a row, EACH times at once.
#include "device.cuh"

enum { MOST = 256, CHUNK = MOST * EACH };  // pairs of a window; words of 16 bytes that a block copies at once

// ids (pairs,), below 0: none; gate, up, down: addresses (experts,), 0: not there. Those outside of [begin, end) lie in RAM,
// `words` words of 16 bytes from gate's address on; the first `most` different ones come to `staging`, one behind the other.
// named[pair]: the first pair of the same expert, or -1; table (3, pairs): the addresses by such pairs, those of staged
// experts `up_at` and `down_at` bytes behind gate's. All blocks find the same.
KERNEL __launch_bounds__(MOST) void fetch_experts(const int* ids, const u64* gate, const u64* up, const u64* down, u64 begin,
                                                  u64 end, int pairs, int most, int words, u64 up_at, u64 down_at,
                                                  u8* staging, int* named, u64* table) {
    inputs_ready();
    __shared__ int all[MOST], missing[MOST];
    __shared__ u64 from[MOST];
    __shared__ int staged;
    const int p = threadIdx.x, id = p < pairs ? ids[p] : -1;
    const u64 at = id >= 0 ? gate[id] : 0;
    all[p] = id;
    if (p == 0) staged = 0;
    __syncthreads();
    int first = p;
    for (int q = p - 1; q >= 0; q--)
        if (all[q] == id) first = q;
    const bool leads = id >= 0 && first == p;
    missing[p] = leads && at && !(at >= begin && at < end);
    __syncthreads();
    int place = 0;
    for (int q = 0; q < p; q++) place += missing[q];
    const bool comes = missing[p] && place < most;
    if (comes) {
        from[place] = at;
        atomicMax(&staged, place + 1);
    }
    const u64 here = (u64)staging + (u64)place * words * 16;
    if (blockIdx.x == 0 && p < pairs) {
        named[p] = id >= 0 ? first : -1;
        table[p] = comes ? here : leads ? at : 0;
        table[pairs + p] = comes ? here + up_at : leads ? up[id] : 0;
        table[2 * pairs + p] = comes ? here + down_at : leads ? down[id] : 0;
    }
    __syncthreads();
    const int chunks = (words + CHUNK - 1) / CHUNK;
    for (int c = blockIdx.x; c < staged * chunks; c += gridDim.x) {
        const int expert = c / chunks, word = (c - expert * chunks) * CHUNK + p;
        const uint4* source = (const uint4*)from[expert] + word;
        uint4* to = (uint4*)staging + (long long)expert * words + word;
        uint4 held[EACH];
#pragma unroll
        for (int k = 0; k < EACH; k++)
            if (word + k * MOST < words) held[k] = source[k * MOST];
#pragma unroll
        for (int k = 0; k < EACH; k++)
            if (word + k * MOST < words) to[k * MOST] = held[k];
    }
}
