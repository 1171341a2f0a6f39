// The `picked` best blocks of every row, ascending; equal scores: the lower index.
//
// A score is zero or more, so it is ordered as its bits are. A block of threads a row finds the bits of the last kept
// score by counting: the range between the smallest and the largest score is cut into BINS, the bin that holds the last
// kept one is cut again, until all of a bin is kept or a bin is one value. Cutting the range that is there, instead of
// the bits from the top, spreads scores of like size over all bins. Equal scores at the lower end of a range (often
// zeros, in great number) are counted by ballots.
// Then every warp lists its own run of blocks.
// Shapes   scores (rows, stride); list (rows, picked). Rows whose blocks do not compete are left alone.
// Cost     about six passes over the scores, from the cache
#include "cache.cuh"

constexpr int BINS = 2048;

struct Search {
    int low, high;  // the bits of the last kept score are in [low, high]
    int left;       // how many scores of this range are kept
};

// The sum over a block of threads, warp by warp; `totals` is shared, one int a warp. Two barriers.
DEVICE int before_warps(int value, int* totals, int& all) {
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

DEVICE void smallest_and_largest(const int* bits, int n, int* shared, int& low, int& high) {
    int a = 0x7fffffff, b = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) a = min(a, bits[i]), b = max(b, bits[i]);
#pragma unroll
    for (int s = 16; s; s >>= 1) {
        a = min(a, __shfl_xor_sync(ALL, a, s));
        b = max(b, __shfl_xor_sync(ALL, b, s));
    }
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    if (lane == 0) shared[warp] = a, shared[32 + warp] = b;
    __syncthreads();
    a = lane < warps ? shared[lane] : 0x7fffffff;
    b = lane < warps ? shared[32 + lane] : 0;
#pragma unroll
    for (int s = 16; s; s >>= 1) {
        a = min(a, __shfl_xor_sync(ALL, a, s));
        b = max(b, __shfl_xor_sync(ALL, b, s));
    }
    low = a, high = b;
    __syncthreads();
}

// Count the scores of the range by bins of 2^shift values.
DEVICE void count(const int* bits, int n, const Search& s, int shift, int* bins) {
    for (int i = threadIdx.x; i < BINS; i += blockDim.x) bins[i] = 0;
    __syncthreads();
    int lowest = 0;
    const int rounds = (n + blockDim.x - 1) / blockDim.x;
    for (int k = 0; k < rounds; k++) {
        const int i = k * blockDim.x + threadIdx.x;
        const int v = i < n ? bits[i] : -1;
        lowest += __popc(__ballot_sync(ALL, v == s.low));
        if (v > s.low && v <= s.high) atomicAdd(&bins[(v - s.low) >> shift], 1);
    }
    if ((threadIdx.x & 31) == 0 && lowest) atomicAdd(&bins[0], lowest);
    __syncthreads();
}

// Narrow the range to the bin with the last kept score. True when all scores of that bin are kept.
DEVICE bool narrow(Search& s, int shift, const int* bins, int* totals, Search* found) {
    const int each = BINS / blockDim.x, first = BINS - (threadIdx.x + 1) * each;  // thread 0 has the highest bins
    const int lane = threadIdx.x & 31;
    int own = 0, whole;
    for (int i = 0; i < each; i++) own += bins[first + i];
    int up_to = own;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        const int other = __shfl_up_sync(ALL, up_to, d);
        if (lane >= d) up_to += other;
    }
    int above = before_warps(__shfl_sync(ALL, up_to, 31), totals, whole) + up_to - own;
    if (above < s.left && s.left <= above + own) {
        int bin = first + each - 1;
        while (above + bins[bin] < s.left) above += bins[bin--];
        const int low = s.low + (bin << shift), most = low + ((1 << shift) - 1);
        found->low = low;
        found->high = min(s.high, most);
        found->left = s.left - above;
        totals[32] = bins[bin] == s.left - above;
    }
    __syncthreads();
    s = *found;
    const bool all = totals[32];
    __syncthreads();
    return all;
}

// List the blocks above `cut`, and the first `equals` of those at it.
DEVICE void list_blocks(const int* bits, int n, int cut, int equals, int* totals, int* list) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const int run = (n + 32 * warps - 1) / (32 * warps) * 32, begin = warp * run, end = min(n, begin + run);
    int above = 0, at = 0, all;
    for (int i = begin; i < end; i += 32) {
        const int v = i + lane < end ? bits[i + lane] : -1;
        above += __popc(__ballot_sync(ALL, v > cut));
        at += __popc(__ballot_sync(ALL, i + lane < end && v == cut));
    }
    above = before_warps(above, totals, all);
    at = before_warps(at, totals, all);
    const unsigned lower = (1u << lane) - 1;
    for (int i = begin; i < end; i += 32) {
        const bool inside = i + lane < end;
        const int v = inside ? bits[i + lane] : -1;
        const unsigned over = __ballot_sync(ALL, inside && v > cut), same = __ballot_sync(ALL, inside && v == cut);
        const int rank = at + __popc(same & lower);
        const bool keep = inside && (v > cut || (v == cut && rank < equals));
        if (keep) list[above + __popc(over & lower) + min(rank, equals)] = i + lane;
        above += __popc(over);
        at += __popc(same);
    }
}

KERNEL void __launch_bounds__(1024)
    qsa_select(const float* scores, const int* positions, int* list, int stride, int r, int picked) {
    __shared__ int bins[BINS];
    __shared__ int totals[64];
    __shared__ Search found;
    const int row = blockIdx.x, n = competing(positions[row], r, picked);
    if (!n) return;
    const int* bits = reinterpret_cast<const int*>(scores) + static_cast<long long>(row) * stride;
    Search s = {0, 0, picked};
    smallest_and_largest(bits, n, totals, s.low, s.high);
    bool all = false;
    while (!all && s.low < s.high) {
        const int span = s.high - s.low;
        const int shift = max(0, 32 - __clz(span) - 11);
        count(bits, n, s, shift, bins);
        all = narrow(s, shift, bins, totals, &found);
    }
    list_blocks(bits, n, all ? s.low - 1 : s.low, all ? 0 : s.left, totals, list + static_cast<long long>(row) * picked);
}
