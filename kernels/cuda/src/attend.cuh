// What both kinds of attention share (qsa_window.cu, qsa_prompt_keys.cu, qsa_prompt_values.cu): the arithmetic of an element.
//
//   s = dot(q, k) / sqrt(d), dot in four chains (index mod 4), (c0 + c1) + (c2 + c3)
//   m_p = max s, e = exp(s - m_p), l_p = lanes(e), o_p = fma chain of e * v in token order, per part of PART tokens
//   c_p = exp(m_p - max m); l = fma(c_p, l_p, l), o = fma(c_p, o_p, o) in order of the parts
//   out = (o / l) * sigmoid(gate)
// A row's length is read from its position on the device. Blocks past it end at once.
//
// Shapes   q (rows, heads, d) turned; s (rows, heads, stride); list (rows, picked); q_gate (rows, heads, 2, d)
//          out (rows, heads * d); d a multiple of 64 up to 256
// Source   `ops.Kernels.qsa_attend`
#pragma once
#include "cache.cuh"

constexpr int PART = 256;
constexpr int THREADS = 128;

struct Args {
    const int *tables, *slots, *positions, *list;
    int pages_of_a_slot, kv_heads, heads, d, r, picked;

    // The value head of the i-th chunk of N query heads: mostly each has one.
    template <int N>
    DEVICE int kv_of(int i) const {
        return heads == N * kv_heads ? i : i / (heads / kv_heads / N);
    }
    DEVICE Kept kept(int row) const { return kept_tokens(positions[row], r, picked); }
    // The first position of this launch's rows in the slot of a row: tokens before it are in the pages already.
    DEVICE int first_new(int row, int rows) const {
        int first = positions[row];
        for (int i = 0; i < rows; i++)
            if (slots[i] == slots[row]) first = min(first, positions[i]);
        return first;
    }
    // Which row of all pages holds the t-th kept token of a row.
    DEVICE int token(int row, const Kept& k, int t) const {
        const int position = k.position(list + static_cast<long long>(row) * picked, r, t);
        return static_cast<int>(token_row(tables, pages_of_a_slot, slots[row], position));
    }
};

#define ROW_ARGUMENTS                                                                                                  \
    const int *tables, const int *slots, const int *positions, const int *list, int pages_of_a_slot, int kv_heads,     \
        int heads, int d, int r, int picked
#define ROW \
    Args { tables, slots, positions, list, pages_of_a_slot, kv_heads, heads, d, r, picked }

// 16 bytes from global memory to an address of shared memory, as copy16.
DEVICE void copy16_to(u32 to, const void* from) {
#if ARCH >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#else
    const float4 v = *static_cast<const float4*>(from);
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
#endif
}

DEVICE void add_products(float (&c)[4], const float* q, const float (&k)[8]) {
    const float4 a = reinterpret_cast<const float4*>(q)[0], b = reinterpret_cast<const float4*>(q)[1];
    c[0] = fmaf(b.x, k[4], fmaf(a.x, k[0], c[0]));
    c[1] = fmaf(b.y, k[5], fmaf(a.y, k[1], c[1]));
    c[2] = fmaf(b.z, k[6], fmaf(a.z, k[2], c[2]));
    c[3] = fmaf(b.w, k[7], fmaf(a.w, k[3], c[3]));
}

DEVICE float join_chains(const float (&c)[4]) { return (c[0] + c[1]) + (c[2] + c[3]); }

// sum / weights: of exponentials, of which the largest is 1, so that `weights` is an ordinary number: from 1 to their
// number, or NaN. A quotient that is zero keeps its sign only when it is divided.
DEVICE float mean(float sum, float weights) {
    const float size = fabsf(sum);
    return size > 0x1p-80f && size < 0x1p+100f ? quotient(sum, weights) : sum / weights;
}

// Scores of one head and part, lane i those of the tokens i + 32 m; there are `count`.
typedef float PartScores[PART / 32];
DEVICE void load_scores(PartScores& v, const float* s, int count) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int m = 0; m < PART / 32; m++) v[m] = lane + 32 * m < count ? s[lane + 32 * m] : -INFINITE;
}

// Scores to exponentials in shared memory, by one warp. Returns m_p and l_p.
DEVICE float2 exponentials(const PartScores& v, int count, float* e) {
    const int lane = threadIdx.x & 31;
    float most = -INFINITE;
#pragma unroll
    for (int m = 0; m < PART / 32; m++) most = fmaxf(most, v[m]);
    most = warp_max(most);
    float chains[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int m = 0; m < PART / 32; m++)
        if (lane + 32 * m < count) {
            const float x = exp_f32(v[m] - most);
            e[lane + 32 * m] = x;
            chains[m & 3] = chains[m & 3] + x;
        }
    return make_float2(most, fold_chains(chains));
}

DEVICE float2 exponentials(const float* s, int count, float* e) {
    PartScores v;
    load_scores(v, s, count);
    return exponentials(v, count, e);
}
