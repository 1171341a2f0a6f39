// Attention of many rows: a row is enough work for a block. HEADS query heads that share keys are computed together.
//
// qsa_keys_row    a block is one part of a row, 2 tokens x HEADS query heads a thread
// qsa_values_row  a block is a row and HEADS query heads, all parts in order
// Why 2 x HEADS: of 12 heads a thread has 96 sums and loads 14 vectors from shared memory for 96 fma.
#include "attend.cuh"

#ifndef HEADS
#define HEADS 12
#endif

constexpr int SLICE = 16;

struct Slices {
    static constexpr int GAP = 16 / sizeof(Cache::Value);
    Cache::Value k[PART][SLICE + GAP];
    float q[HEADS][SLICE];
};

// Start the copies of dims [at, at + SLICE) of the keys of a part and of their queries.
DEVICE void load_slice(Slices& to, const int* tokens, int count, const Cache::Value* cached,
                       const float* q, const Args& g, int kv, int at) {
    constexpr int PIECE = 16 / sizeof(Cache::Value), PIECES = SLICE / PIECE;
#pragma unroll 2
    for (int e = threadIdx.x; e < count * PIECES; e += THREADS) {
        const int t = e / PIECES, x = e % PIECES * PIECE;
        copy16(&to.k[t][x], cached + (static_cast<long long>(tokens[t]) * g.kv_heads + kv) * g.d + at + x);
    }
    if (threadIdx.x < HEADS * SLICE / 4) {
        const int h = threadIdx.x / (SLICE / 4), x = threadIdx.x % (SLICE / 4) * 4;
        copy16(&to.q[h][x], q + h * g.d + at + x);
    }
    copies_commit();
}

KERNEL void __launch_bounds__(THREADS, 3)
    qsa_keys_row(ROW_ARGUMENTS, const float* q, const Cache::Value* cached, float* s, int stride) {
    inputs_ready();
    const Args g = ROW;
    constexpr int EACH = PART / THREADS;
    __shared__ __align__(16) Slices slices[2];
    __shared__ int tokens[PART];
    const int row = blockIdx.z, tid = threadIdx.x, chunks = g.heads / g.kv_heads / HEADS, kv = blockIdx.y / chunks;
    const Kept kept = g.kept(row);
    const int first = blockIdx.x * PART, count = min(PART, kept.count - first);
    if (count <= 0) return;
    const long long first_head = static_cast<long long>(row) * g.heads + blockIdx.y * HEADS;
    q += first_head * g.d;
    for (int t = tid; t < count; t += THREADS) tokens[t] = g.token(row, kept, first + t);
    __syncthreads();
    float c[EACH][HEADS][4];
#pragma unroll
    for (int a = 0; a < EACH; a++)
#pragma unroll
        for (int h = 0; h < HEADS; h++) c[a][h][0] = c[a][h][1] = c[a][h][2] = c[a][h][3] = 0.0f;
    load_slice(slices[0], tokens, count, cached, q, g, kv, 0);
    for (int at = 0, u = 0; at < g.d; at += SLICE, u ^= 1) {
        if (at + SLICE < g.d)
            load_slice(slices[u ^ 1], tokens, count, cached, q, g, kv, at + SLICE);
        else
            copies_commit();
        copies_wait<1>();
        __syncthreads();
#pragma unroll 1
        for (int x = 0; x < SLICE; x += 8) {
            float k[EACH][8];
#pragma unroll
            for (int a = 0; a < EACH; a++) Cache::load8(&slices[u].k[tid + a * THREADS][x], k[a]);
#pragma unroll
            for (int h = 0; h < HEADS; h++)
#pragma unroll
                for (int a = 0; a < EACH; a++) add_products(c[a][h], &slices[u].q[h][x], k[a]);
        }
        __syncthreads();
    }
    const float scale = 1.0f / sqrtf(static_cast<float>(g.d));
#pragma unroll
    for (int a = 0; a < EACH; a++)
        if (tid + a * THREADS < count)
#pragma unroll
            for (int h = 0; h < HEADS; h++)
                s[(first_head + h) * stride + first + tid + a * THREADS] = join_chains(c[a][h]) * scale;
}

// Largest score of each head over all kept tokens, to shared memory; a warp a head.
DEVICE void tops_of_heads(const float* s, long long stride, int count, float* tops) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    for (int h = warp; h < HEADS; h += warps) {
        float top = -INFINITE;
        for (int t = lane; t < count; t += 32) top = fmaxf(top, s[h * stride + t]);
        top = warp_max(top);
        if (lane == 0) tops[h] = top;
    }
}

// A thread has the dims 2 i and 2 i + 1 of all heads.
KERNEL void __launch_bounds__(THREADS)
    qsa_values_row(ROW_ARGUMENTS, const float* s, int stride, const Cache::Value* cached, const float* q_gate,
                   float* out) {
    inputs_ready();
    const Args g = ROW;
    __shared__ __align__(16) float e[HEADS][PART];
    __shared__ float tops[HEADS], shares[HEADS], totals[HEADS];
    __shared__ int tokens[PART];
    const int row = blockIdx.y, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, warps = blockDim.x >> 5;
    const int chunks = g.heads / g.kv_heads / HEADS, kv = blockIdx.x / chunks;
    const Kept kept = g.kept(row);
    const long long first_head = static_cast<long long>(row) * g.heads + blockIdx.x * HEADS;
    s += first_head * stride;
    cached += kv * g.d + 2 * tid;
    tops_of_heads(s, stride, kept.count, tops);
    if (tid < HEADS) totals[tid] = 0.0f;
    float2 o[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; h++) o[h] = make_float2(0.0f, 0.0f);
    for (int first = 0; first < kept.count; first += PART) {
        const int count = min(PART, kept.count - first);
        __syncthreads();
        for (int h = warp; h < HEADS; h += warps) {
            const float2 peak_and_sum = exponentials(s + static_cast<long long>(h) * stride + first, count, e[h]);
            const float share = exp_f32(peak_and_sum.x - tops[h]);
            if (lane == 0) shares[h] = share, totals[h] = fmaf(share, peak_and_sum.y, totals[h]);
        }
        for (int t = tid; t < count; t += blockDim.x) tokens[t] = g.token(row, kept, first + t);
        __syncthreads();
        float2 own[HEADS];
#pragma unroll
        for (int h = 0; h < HEADS; h++) own[h] = make_float2(0.0f, 0.0f);
        const long long token_values = g.kv_heads * g.d;
        int t = 0;
        for (; t + 4 <= count; t += 4) {
            float2 v[4];
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = Cache::load2(cached + tokens[t + i] * token_values);
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                const float4 w = *reinterpret_cast<const float4*>(&e[h][t]);
                own[h].x = fmaf(w.w, v[3].x, fmaf(w.z, v[2].x, fmaf(w.y, v[1].x, fmaf(w.x, v[0].x, own[h].x))));
                own[h].y = fmaf(w.w, v[3].y, fmaf(w.z, v[2].y, fmaf(w.y, v[1].y, fmaf(w.x, v[0].y, own[h].y))));
            }
        }
        for (; t < count; t++) {
            const float2 v = Cache::load2(cached + tokens[t] * token_values);
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                own[h].x = fmaf(e[h][t], v.x, own[h].x);
                own[h].y = fmaf(e[h][t], v.y, own[h].y);
            }
        }
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            o[h].x = fmaf(shares[h], own[h].x, o[h].x);
            o[h].y = fmaf(shares[h], own[h].y, o[h].y);
        }
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        const long long head = first_head + h;
        const float2 gate = *reinterpret_cast<const float2*>(q_gate + (2 * head + 1) * g.d + 2 * tid);
        *reinterpret_cast<float2*>(out + head * g.d + 2 * tid) =
            make_float2((o[h].x / totals[h]) * sigmoid_f32(gate.x), (o[h].y / totals[h]) * sigmoid_f32(gate.y));
    }
}
