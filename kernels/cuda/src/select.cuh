// The k best of n words and where they are, by one block of threads; equal words: the lower index.
//
// The block finds the last kept word by counting: the range between the smallest and the largest word is cut into BINS,
// the bin that holds the last kept one is cut again, until all of a bin is kept or a bin is one word. Cutting the range
// that is there, instead of the bits from the top, spreads words of like size over all bins. Words equal to the lower
// end of a range (often zeros, in great number) are counted by ballots. Then every warp lists its own run of indices.
//
// `words(i)` gives word i; blockDim.x is a power of two from 64 to 1024. Cost: about six passes over the words.
#pragma once
#include "rows.cuh"

constexpr int BINS = 2048;

struct Search {
    u32 low, high;  // the last kept word is in [low, high]
    int left;       // how many words of this range are kept
    bool all;       // all of them
};

struct SelectMemory {
    int bins[BINS];
    int totals[32];
    u32 low[32], high[32];
    Search found;
};

// The sum of a value over the warps before this one, and over all. Two barriers. Each lane of a warp has the same value.
DEVICE int sum_before(int value, int* totals, int& all) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    if (lane == 0) totals[warp] = value;
    __syncthreads();
    const int mine = lane < warps ? totals[lane] : 0;
    __syncthreads();
    int before = lane < warp ? mine : 0;
    all = mine;
#pragma unroll
    for (int s = 16; s; s >>= 1) {
        before += __shfl_xor_sync(ALL, before, s);
        all += __shfl_xor_sync(ALL, all, s);
    }
    return before;
}

template <class Words>
DEVICE Search whole_range(const Words& words, int n, int k, SelectMemory& m) {
    u32 low = ALL, high = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const u32 v = words(i);
        low = min(low, v), high = max(high, v);
    }
    low = warp_min(low), high = warp_max(high);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    if (lane == 0) m.low[warp] = low, m.high[warp] = high;
    __syncthreads();
    low = warp_min(lane < warps ? m.low[lane] : ALL);
    high = warp_max(lane < warps ? m.high[lane] : 0);
    return {low, high, k, false};
}

// Count the words of the range by bins of 2^shift words.
template <class Words>
DEVICE void count_words(const Words& words, int n, const Search& s, int shift, int* bins) {
    for (int i = threadIdx.x; i < BINS; i += blockDim.x) bins[i] = 0;
    __syncthreads();
    int lowest = 0;
    for (int first = 0; first < n; first += blockDim.x) {
        const int i = first + threadIdx.x;
        const u32 v = i < n ? words(i) : 0;
        lowest += __popc(__ballot_sync(ALL, i < n && v == s.low));
        if (i < n && v > s.low && v <= s.high) atomicAdd(&bins[(v - s.low) >> shift], 1);
    }
    if ((threadIdx.x & 31) == 0 && lowest) atomicAdd(&bins[0], lowest);
    __syncthreads();
}

// Narrow the range to the bin with the last kept word.
DEVICE void narrow(Search& s, int shift, SelectMemory& m) {
    const int each = BINS / blockDim.x, first = BINS - (threadIdx.x + 1) * each;  // thread 0 has the highest bins
    const int lane = threadIdx.x & 31;
    int own = 0, whole;
    for (int i = 0; i < each; i++) own += m.bins[first + i];
    int up_to = own;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        const int other = __shfl_up_sync(ALL, up_to, d);
        if (lane >= d) up_to += other;
    }
    int above = sum_before(__shfl_sync(ALL, up_to, 31), m.totals, whole) + up_to - own;
    if (above < s.left && s.left <= above + own) {
        int bin = first + each - 1;
        while (above + m.bins[bin] < s.left) above += m.bins[bin--];
        const u32 low = s.low + (static_cast<u32>(bin) << shift), width = (1u << shift) - 1;
        m.found = {low, s.high - low > width ? low + width : s.high, s.left - above, m.bins[bin] == s.left - above};
    }
    __syncthreads();
    s = m.found;
    __syncthreads();
}

// The range of the last kept word: one word, or one whose words are all kept. 0 < k <= n.
template <class Words>
DEVICE Search find_last(const Words& words, int n, int k, SelectMemory& m) {
    Search s = whole_range(words, n, k, m);
    while (!s.all && s.low < s.high) {
        const int shift = max(0, 32 - __clz(static_cast<int>(s.high - s.low)) - 11);
        count_words(words, n, s, shift, m.bins);
        narrow(s, shift, m);
    }
    return s;
}

// list(place, index) for the k best in ascending order of the index, place = 0 .. k - 1.
template <class Words, class List>
DEVICE void list_best(const Words& words, int n, int k, SelectMemory& m, const List& list) {
    const Search s = find_last(words, n, k, m);
    const int equals = s.all ? n : s.left;  // how many of those equal to s.low are kept
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const int run = (n + 32 * warps - 1) / (32 * warps) * 32, begin = warp * run, end = min(n, begin + run);
    int above = 0, at = 0, all;
    for (int i = begin; i < end; i += 32) {
        const u32 v = i + lane < end ? words(i + lane) : 0;
        above += __popc(__ballot_sync(ALL, i + lane < end && v > s.low));
        at += __popc(__ballot_sync(ALL, i + lane < end && v == s.low));
    }
    above = sum_before(above, m.totals, all);
    at = sum_before(at, m.totals, all);
    const u32 lower = (1u << lane) - 1;
    for (int i = begin; i < end; i += 32) {
        const bool inside = i + lane < end;
        const u32 v = inside ? words(i + lane) : 0;
        const u32 over = __ballot_sync(ALL, inside && v > s.low), same = __ballot_sync(ALL, inside && v == s.low);
        const int rank = at + __popc(same & lower);
        const bool keep = inside && (v > s.low || (v == s.low && rank < equals));
        if (keep) list(above + __popc(over & lower) + min(rank, equals), i + lane);
        above += __popc(over);
        at += __popc(same);
    }
}
