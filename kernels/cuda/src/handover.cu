// Experts of a window that the processor computes while the card goes on: what it is asked, and its answers.
//
// The desk lies in page-locked RAM: words that ring (one to a cache line), then what stands in the wrapper's arrays. The
// card writes the request and rings with its number; the processor answers with the same number; the card waits for that,
// but not for ever. One request is under way at a time, since a layer waits for the one before it.
//
// `own` lies on the card: the number of the last request, that of the request under way (0: none), the share of missing
// experts that the card reads itself, in 256ths, a count of blocks, whether an answer has ever failed to come, the last
// request whose answer was looked for, how many these were, and how many of them were not there at the first look, and
// what is added to the share's experts before they are rounded down.
#include "device.cuh"

enum { MOST = 256, AT_ONCE = 8 };                                          // pairs of a window; words of an answer
enum { ASKED = 0, ANSWERED = 32, FAILED = 64, LAYER = 96, PAIRS = 97, USED = 98 };  // words of the desk (desk.py)
enum { NUMBER, UNDER_WAY, SHARE, ENDED, LOST, LOOKED, REQUESTS, WAITS, AHEAD };  // words of `own`

DEVICE void ring(int* desk, u32 number) {
    __threadfence_system();
    *(volatile u32*)(desk + ASKED) = number;
}

// x (n, width), ids (n, used), addresses (experts,): those outside of [begin, end) and not 0 are missing. Of a layer's
// distinct missing experts the first (m * share + ahead) / 256 stay with the card, those that most rows pick before
// others; of the rest, and of all whose address has its highest bit, which the card cannot read and which are no part of m, kept[pair]
// is -1, at[pair] the address, and the rows go to the desk. A block a row; 256 threads.
KERNEL __launch_bounds__(MOST) void ask_host(const float* x, const int* ids, const u64* addresses, u64 begin, u64 end,
                                             int used, int width, int layer, u32* own, int* kept, int* desk, u64* at,
                                             float* desk_x) {
    inputs_ready();
    __shared__ u64 where[MOST];  // of missing experts, else 0
    __shared__ int firsts[MOST], counts[MOST];
    __shared__ int wanted;
    const int p = threadIdx.x, pairs = gridDim.x * used;
    const int id = p < pairs ? ids[p] : -1;
    const u64 address = id >= 0 ? addresses[id] : 0;
    where[p] = address >= begin && address < end ? 0 : address;
    if (p == 0) wanted = 0;
    __syncthreads();
    int first = p, count = 0;
    for (int q = pairs - 1; q >= 0 && where[p]; q--)
        if (where[q] == where[p]) first = q, count++;
    firsts[p] = where[p] ? first : -1;
    counts[p] = count;
    __syncthreads();
    int missing = 0, before = 0;
    for (int q = 0; q < pairs; q++) {
        if (firsts[q] != q || (long long)where[q] < 0) continue;
        missing++;
        before += counts[q] > count || (counts[q] == count && q < first);
    }
    const bool asked = (long long)where[p] < 0 || (where[p] && before >= (missing * (int)own[SHARE] + (int)own[AHEAD]) / 256);
    if (asked) wanted = 1;
    if (blockIdx.x == 0 && p < pairs) {
        kept[p] = asked ? -1 : id;
        at[p] = asked ? where[p] : 0;
    }
    __syncthreads();
    if (!wanted) {
        if (blockIdx.x == 0 && p == 0) own[UNDER_WAY] = 0;
        return;
    }
    const float4* from = (const float4*)(x + (long long)blockIdx.x * width);
    float4* to = (float4*)(desk_x + (long long)blockIdx.x * width);
    for (int i = p; i < width / 4; i += MOST) to[i] = from[i];
    __threadfence_system();
    if (!last_block(own + ENDED, gridDim.x) || p) return;
    const u32 number = own[NUMBER] == 0xffffffffu ? 1 : own[NUMBER] + 1;  // 0 is none
    own[NUMBER] = own[UNDER_WAY] = number;
    desk[LAYER] = layer, desk[PAIRS] = pairs, desk[USED] = used;
    ring(desk, number);
}

// Outputs of the pairs that were asked for: given[pair] = out[places[pair]] once the answer is there, zeros for the
// other pairs without an expert. A block a pair.
KERNEL __launch_bounds__(256) void take_answers(const int* ids, const int* kept, int width, int layer, u64 limit_ns,
                                                u32* own, int* desk, const int* places, const float* out, float* given) {
    inputs_ready();
    const int p = blockIdx.x;
    if (kept[p] >= 0) return;
    __shared__ int lost;
    if (threadIdx.x == 0) {
        const u32 number = own[UNDER_WAY];
        const u64 since = nanoseconds();
        lost = *(volatile u32*)(own + LOST) != 0 || ids[p] < 0;
        if (!lost && atomicExch(own + LOOKED, number) != number) {
            atomicAdd(own + REQUESTS, 1u);
            if (*(volatile u32*)(desk + ANSWERED) != number) atomicAdd(own + WAITS, 1u);
        }
        while (!lost && *(volatile u32*)(desk + ANSWERED) != number) {
            if (nanoseconds() - since < limit_ns) continue;
            lost = 1;
            own[LOST] = 1;
            *(volatile int*)(desk + FAILED) = layer + 1;
        }
        __threadfence_system();
    }
    __syncthreads();
    const long long place = lost ? 0 : *(volatile const int*)(places + p);
    const volatile u64* from = (const volatile u64*)(out + place * width);
    u64* to = (u64*)(given + (long long)p * width);
    for (int i = threadIdx.x; i < width / 2; i += 256 * AT_ONCE) {  // each is a way over the link and back
        u64 held[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) held[k] = !lost && i + 256 * k < width / 2 ? from[i + 256 * k] : 0;
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (i + 256 * k < width / 2) to[i + 256 * k] = held[k];
    }
}
