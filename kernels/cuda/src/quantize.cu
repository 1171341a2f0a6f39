// `quantize` of ops.py for all rows of an input: int8 in the order of a format, scales, and sums where they are wanted.
//
// Constants: INPUT_ORDER of formats.cuh, SUMS group of the sums (0 none, 16, 32); PARTS of the input, which are added in their
// order; SILU = 1: of silu(x * scale); TIMES = 1: of what that is times `up`. A thread takes eight inputs.
#include "device.cuh"
#include "formats.cuh"
#include "quantize.cuh"

#ifndef SILU
#define SILU 0
#endif
#ifndef TIMES
#define TIMES 0
#endif
#ifndef PARTS
#define PARTS 1
#endif

// x (PARTS, n, cols), up (n, cols) float32 -> q (n, cols) int8, d (n, cols / 32), sums (n, cols / SUMS). total = n * cols / 8.
KERNEL __launch_bounds__(256) void quantize(const float* x, const float* up, u8* q, float* d, float* sums, long long total,
                                            float scale) {
    inputs_ready();
    const long long i = blockIdx.x * 256ll + threadIdx.x;  // octet; the four of a block are in one warp
    float v[8];
    load_octet(v, x + 8 * min(i, total - 1));
    float more[PARTS][8];
#pragma unroll
    for (int p = 1; p < PARTS; p++) load_octet(more[p], x + 8 * (p * total + min(i, total - 1)));
#pragma unroll
    for (int p = 1; p < PARTS; p++)
#pragma unroll
        for (int e = 0; e < 8; e++) v[e] = v[e] + more[p][e];
#if TIMES
    float by[8];
    load_octet(by, up + 8 * min(i, total - 1));
#endif
#if SILU
#pragma unroll
    for (int e = 0; e < 8; e++) v[e] = silu_f32(v[e] * scale);
#endif
#if TIMES
#pragma unroll
    for (int e = 0; e < 8; e++) v[e] = v[e] * by[e];
#endif
    const Octet octet = quantize_octet(v);
    if (i >= total) return;
    const int u = (int)(i & 3);
    store_octet<INPUT_ORDER>(q + 8 * (i - u), u, octet);
    if (u == 0) d[i >> 2] = octet.d;
    if (SUMS) store_sums<SUMS ? SUMS : 32>(sums + (i >> 2) * (32 / (SUMS ? SUMS : 32)), u, octet);
}
