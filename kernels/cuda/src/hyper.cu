// Hyper-connections around their products: streams normed, gates activated, streams mixed, a block's output added.
//
// hyper_norm   [x = fma(beta, y, x) when beta is given,] normed = rms(x) per stream; a block of 128 threads a stream. With
//              INPUT_ORDER of a format also int8 and scales of normed, and SUMS of groups of so many, as quantize.cu leaves
//              them, but the first halves of all blocks of 32 before the second halves, as hyper_down.cu reads them
// hyper_join   a = a + part: of a sum whose parts are products of their own
// hyper_gate   a = silu(a * scale) in place; beta = 2 * sigmoid(inject * scale)
// hyper_mean   u = (sum_c sigmoid(gates[c]) * normed[c]) * scale, c ascending, first a product, then fma. With FACTORS = 1
//              `normed` is x, and normed[c] = (x[c] * factors[c]) * w[c]; what products want of u is left beside it where
//              H is a multiple of 128
// hyper_add    x = fma(beta, y, x)
// Constants   PER_THREAD elements of a thread of hyper_norm: H <= LANES * PER_THREAD. All are read at once, since a window
//             has few blocks and waits for memory.
//             STREAMS = C of hyper_mean
// Shapes   x, normed, gates (n, C, H), y and u (n, H), beta and inject (n, C), H a multiple of 4
// Cost     each reads and writes its arrays once
#include "rows.cuh"
#include "formats.cuh"
#include "quantize_lane.cuh"
#include "forms.cuh"

#ifndef PER_THREAD
#define PER_THREAD 20
#endif
#ifndef STREAMS
#define STREAMS 4
#endif
#ifndef FACTORS
#define FACTORS 0
#endif

KERNEL void __launch_bounds__(LANES)
    hyper_norm(float* x, const float* beta, const float* y, const float* w, float* normed, u8* q, float* d, float* sums,
               int width, int streams, float eps) {
    __shared__ float buffer[LANES];
    const long long row = blockIdx.x;
    x += row * width + threadIdx.x;
    normed += row * width + threadIdx.x;
    w += row % streams * width + threadIdx.x;
    float v[PER_THREAD], factors[PER_THREAD];
    const int n = (width - static_cast<int>(threadIdx.x) + LANES - 1) / LANES;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) factors[i] = i < n ? w[i * LANES] : 0.0f;
    if (!beta) inputs_ready();  // else the kernel before made y, and x and beta are older
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) v[i] = i < n ? read_early(x + i * LANES) : 0.0f;
    if (beta) {
        const float strength = read_early(beta + row);
        inputs_ready();
        y += row / streams * width + threadIdx.x;
        float added[PER_THREAD];
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) added[i] = i < n ? y[i * LANES] : 0.0f;
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) v[i] = fmaf(strength, added[i], v[i]);
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++)
            if (i < n) x[i * LANES] = v[i];
    }
    float chain = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++)
        if (i < n) chain = fmaf(v[i], v[i], chain);
    const float r = rms_factor(fold_block(chain, buffer), width, eps);
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        if (i >= n) break;
        v[i] = (v[i] * r) * factors[i];
        normed[i * LANES] = v[i];
    }
#ifdef INPUT_ORDER
    const int lane = threadIdx.x & 31, place = place_in_block<INPUT_ORDER>(lane);
    const long long first = (row * width + threadIdx.x) / 32;  // n = PER_THREAD here
    const long long all = streams * width, half = (row / streams + (place >> 4)) * (all / 2);
    const LaneScales<PER_THREAD> scales(v);
#pragma unroll
    for (int h = 0; h < scales.HELD; h++)
        if (lane + 32 * h < PER_THREAD) d[first + (lane + 32 * h) * (LANES / 32)] = scales.d[h];
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const long long block = first + i * (LANES / 32);
        const int each = scales.quantized(v[i], i);
        q[16 * block + half + (place & 15)] = (u8)each;
#if SUMS
        const int sum = sum_of_group<SUMS>(each);
        if (lane % SUMS == 0) sums[block * (32 / SUMS) + lane / SUMS] = (float)sum;
#endif
    }
#endif
}

KERNEL void __launch_bounds__(256) hyper_join(float* a, const float* part, long long n) {
    inputs_ready();
    const long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i < n) a[i] = a[i] + part[i];
}

KERNEL void __launch_bounds__(256)
    hyper_gate(float* a, long long n_a, const float* inject, float* beta, long long n_beta, float scale) {
    inputs_ready();
    const long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i < n_a)
        a[i] = silu_f32(a[i] * scale);
    else if (i - n_a < n_beta)
        beta[i - n_a] = 2.0f * sigmoid_f32(inject[i - n_a] * scale);
}

// gates = sigmoid(gates). The divisions of a thread take the ordinary way together, or none does: a branch for each would put
// them one behind the other.
DEVICE void open_gates(float4 (&gates)[STREAMS]) {
    float (&d)[4 * STREAMS] = reinterpret_cast<float (&)[4 * STREAMS]>(gates);
    bool usual = true;
#pragma unroll
    for (int i = 0; i < 4 * STREAMS; i++) d[i] = sigmoid_divisor(d[i]), usual = usual && usual_divisor(d[i]);
    if (usual) {
#pragma unroll
        for (int i = 0; i < 4 * STREAMS; i++) d[i] = usual_sigmoid(d[i]);
    } else {
#pragma unroll
        for (int i = 0; i < 4 * STREAMS; i++) d[i] = 1.0f / d[i];
    }
}

DEVICE float4 gated(float4 gate, float4 v) { return make_float4(gate.x * v.x, gate.y * v.y, gate.z * v.z, gate.w * v.w); }

DEVICE float4 add_gated(float4 gate, float4 v, float4 sum) {
    return make_float4(fmaf(gate.x, v.x, sum.x), fmaf(gate.y, v.y, sum.y), fmaf(gate.z, v.z, sum.z),
                       fmaf(gate.w, v.w, sum.w));
}

DEVICE float4 normed_by(float4 v, float r, float4 w) {
    return make_float4((v.x * r) * w.x, (v.y * r) * w.y, (v.z * r) * w.z, (v.w * r) * w.w);
}

// A thread makes four values of one row. `quarter` = H / 4. All loads come before the first logistic: before a meeting of the
// warp, or those that are used last would move down behind the logistics.
KERNEL void __launch_bounds__(128) hyper_mean(const float4* gates, const float4* normed, float4* u, const float* factors,
                                              const float4* w, int quarter, float scale, PARAMETER Forms forms) {
    inputs_ready();
    const int own = blockIdx.x * 128 + threadIdx.x, i = min(own, quarter - 1);
    const long long row = blockIdx.y;
    gates += row * STREAMS * quarter + i;
    normed += row * STREAMS * quarter + i;
    float4 gate[STREAMS], v[STREAMS];
#pragma unroll
    for (int c = 0; c < STREAMS; c++) gate[c] = gates[c * quarter], v[c] = normed[c * quarter];
#if FACTORS
    float r[STREAMS];
    float4 by[STREAMS];
#pragma unroll
    for (int c = 0; c < STREAMS; c++) r[c] = factors[row * STREAMS + c], by[c] = w[c * quarter + i];
#endif
    __syncwarp();
    if (own >= quarter) return;
#if FACTORS
#pragma unroll
    for (int c = 0; c < STREAMS; c++) v[c] = normed_by(v[c], r[c], by[c]);
#endif
    open_gates(gate);
    float4 sum = gated(gate[0], v[0]);
#pragma unroll
    for (int c = 1; c < STREAMS; c++) sum = add_gated(gate[c], v[c], sum);
    sum = make_float4(sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale);
    u[row * quarter + i] = sum;
    forms.leave_quad(sum, row * quarter + i);
}

KERNEL void __launch_bounds__(128)
    hyper_add(float4* x, const float* beta, const float4* y, int quarter, int streams) {
    inputs_ready();
    const int i = blockIdx.x * 128 + threadIdx.x;
    if (i >= quarter) return;
    const long long row = blockIdx.y;
    const float4 v = y[row * quarter + i];
    x += row * streams * quarter + i;
    beta += row * streams;
    for (int c = 0; c < streams; c++) {
        float4 old = x[c * quarter];
        const float b = beta[c];
        old.x = fmaf(b, v.x, old.x);
        old.y = fmaf(b, v.y, old.y);
        old.z = fmaf(b, v.z, old.z);
        old.w = fmaf(b, v.w, old.w);
        x[c * quarter] = old;
    }
}
