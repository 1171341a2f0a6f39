// What a draft needs of logits and ids.
//
// keep_rows        a copy that is a kernel among kernels: a graph waits for no other engine
// draft_tokens     ids as tokens that can be looked up: an id below 0 (there was none) becomes token 0
// likeliest_parts  a block of 256 threads a PARTS-th of a row: its best logit, the first id that has it, and the sum of
//                  exp(logit - best)
// likeliest        a warp a row: the first id of the best logit, or what `names` calls it, and its probability. With
//                  `tokens` it is the next token, one position on
// Shapes   logits (n, V); best, sums (n, PARTS), first (n, PARTS); ids, p, tokens, positions (n,); names (V,) or null
#include "rows.cuh"

constexpr int PARTS = 32;
constexpr int WARPS = 8;

KERNEL void __launch_bounds__(256) keep_rows(const float4* from, float4* to, long long quarters) {
    inputs_ready();
    const long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i < quarters) to[i] = from[i];
}

KERNEL void __launch_bounds__(32) draft_tokens(const int* ids, int* tokens, int n) {
    inputs_ready();
    const int i = threadIdx.x;
    if (i < n) tokens[i] = max(ids[i], 0);
}

DEVICE u32 warp_least(u32 v) {
#pragma unroll
    for (int s = 16; s; s >>= 1) v = min(v, __shfl_xor_sync(ALL, v, s));
    return v;
}

KERNEL void __launch_bounds__(256) likeliest_parts(const float* logits, u32* best, u32* first, float* sums, int vocab) {
    inputs_ready();
    __shared__ u32 tops[WARPS], ids[WARPS];
    __shared__ float totals[WARPS];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, part = blockIdx.x;
    const long long row = blockIdx.y;
    const int each = (vocab + PARTS - 1) / PARTS, begin = part * each, end = min(begin + each, vocab);
    logits += row * vocab;
    u32 top = 0, id = ALL;
    for (int i = begin + tid; i < end; i += 256) {
        const float x = logits[i];
        const u32 word = x == x ? ordered(x) : 0;  // what is not a number is never drafted
        if (word > top) top = word, id = static_cast<u32>(i);
    }
    const u32 of_warp = warp_max(top);
    id = warp_least(top == of_warp ? id : ALL);
    if (lane == 0) tops[warp] = of_warp, ids[warp] = id;
    __syncthreads();
    const u32 mine = lane < WARPS ? tops[lane] : 0, whole = warp_max(mine);
    id = warp_least(lane < WARPS && mine == whole ? ids[lane] : ALL);
    const float highest = from_ordered(whole);
    float sum = 0.0f;
    if (whole)
        for (int i = begin + tid; i < end; i += 256) {
            const float x = logits[i];
            if (x == x) sum = sum + exp_f32(x - highest);
        }
    sum = fold_warp(sum);
    if (lane == 0) totals[warp] = sum;
    __syncthreads();
    if (tid) return;
    for (int w = 1; w < WARPS; w++) sum = sum + totals[w];
    const long long at = row * PARTS + part;
    best[at] = whole, first[at] = id, sums[at] = sum;
}

KERNEL void __launch_bounds__(32)
    likeliest(const u32* best, const u32* first, const float* sums, const int* names, int* ids, float* p, int* tokens,
              int* positions) {
    inputs_ready();
    const int lane = threadIdx.x, row = blockIdx.x;
    const long long at = static_cast<long long>(row) * PARTS + lane;
    const u32 mine = best[at], top = warp_max(mine), id = warp_least(mine == top ? first[at] : ALL);
    const float total = fold_warp(mine ? sums[at] * exp_f32(from_ordered(mine) - from_ordered(top)) : 0.0f);
    if (lane) return;
    const int place = top ? static_cast<int>(id) : 0, token = names ? names[place] : place;
    ids[row] = token;
    p[row] = top ? 1.0f / total : 0.0f;
    if (tokens) {
        tokens[row] = token;
        positions[row] += 1;
    }
}
