// A prompt's rows on their way into a hyper-connection, in one pass over their streams.
//
// hyper_rows   [x = fma(beta, y, x) when beta is given,] normed = rms(x) per stream, which is not written: q, d and sums are
//              its int8, scales and sums of groups as quantize.cu leaves them, `factors` the r of each stream; with `inject`
//              also strength = 2 * sigmoid(lanes(inject * normed) * scale)
// A warp has a row, a stream of it at a time: lane l holds the elements 4 l to 4 l + 3 of every 128, so the chains 4 l to
// 4 l + 3 of every sum, and eight lanes a block of 32 inputs. What all rows read, w and inject, stays in the first cache;
// the streams pass by it.
//
// Constants   STREAMS, PER_THREAD = H / 128, INPUT_ORDER, SUMS (0, 16, 32), INJECTS (0, 1); blocks of up to 8 warps
// Shapes      x (n, C, H), y (n, H), beta and strength (n, C), w (C, H), inject (C, C * H), factors (n, C)
// Cost        x is read and written once, y read once from memory; a byte and an eighth written an element
#include "rows.cuh"
#include "formats.cuh"
#include "quantize_lane.cuh"

enum { H = LANES * PER_THREAD, HELD = (PER_THREAD + 7) / 8 };

typedef float Stream[PER_THREAD][4];

// Four floats that the first cache need not keep.
DEVICE void read_past(float (&v)[4], const float* p) {
#if ARCH >= 900
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                 : "l"(p)
                 : "memory");
#else
    const float4 four = *reinterpret_cast<const float4*>(p);
    v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
#endif
}

// The fold of `lanes`; every lane gets the total.
DEVICE float fold_quads(float (&p)[4]) {
#pragma unroll
    for (int s = 16; s; s >>= 1)
#pragma unroll
        for (int i = 0; i < 4; i++) p[i] = p[i] + __shfl_xor_sync(ALL, p[i], s);
    return (p[0] + p[2]) + (p[1] + p[3]);
}

// Scales of the blocks that a stream's eight lanes share: lane l of them has those of the quads l, l + 8, ...
struct QuadScales {
    float d[HELD], inv[HELD];

    DEVICE explicit QuadScales(const Stream& v) {
        float amax[HELD] = {};
#pragma unroll
        for (int m = 0; m < PER_THREAD; m++) {
            float most = fmaxf(fmaxf(fabsf(v[m][0]), fabsf(v[m][1])), fmaxf(fabsf(v[m][2]), fabsf(v[m][3])));
#pragma unroll
            for (int s = 1; s < 8; s *= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, s));
            if ((threadIdx.x & 7) == (m & 7)) amax[m / 8] = most;
        }
#pragma unroll
        for (int h = 0; h < HELD; h++) {
            const bool tiny = amax[h] < 1e-30f;
            inv[h] = tiny ? 0.0f : 127.0f / amax[h];
            d[h] = tiny ? 0.0f : amax[h] / 127.0f;
        }
    }
    DEVICE float inverse(int m) const { return __shfl_sync(ALL, inv[m / 8], (threadIdx.x & 24) | (m & 7)); }
};

// Quad g (0..7) of a block to its place among the block's bytes; code: four int8, in their order.
DEVICE void store_quad(u8* block, int g, u32 code) {
    if (INPUT_ORDER == EVEN_ODD) {
        u8* p = block + g / 2 * 8 + g % 2 * 2;
        *reinterpret_cast<u16*>(p) = static_cast<u16>(permute(code, 0, 0x20));
        *reinterpret_cast<u16*>(p + 4) = static_cast<u16>(permute(code, 0, 0x31));
    } else {
        *reinterpret_cast<u32*>(block + place_in_block<INPUT_ORDER>(4 * g)) = code;
    }
}

// A stream of a row, whose first block is `first`.
DEVICE void store_quantized(const Stream& v, long long first, u8* q, float* d, float* sums) {
    const int lane = threadIdx.x & 31, g = lane & 7;
    const QuadScales scales(v);
    first += lane >> 3;
#pragma unroll
    for (int h = 0; h < HELD; h++)
        if (g + 8 * h < PER_THREAD) d[first + (g + 8 * h) * (LANES / 32)] = scales.d[h];
#pragma unroll
    for (int m = 0; m < PER_THREAD; m++) {
        const long long block = first + m * (LANES / 32);
        const float inv = scales.inverse(m);
        const u32 code = low_bytes(v[m][0] * inv + MAGIC, v[m][1] * inv + MAGIC, v[m][2] * inv + MAGIC, v[m][3] * inv + MAGIC);
        store_quad(q + 32 * block, g, code);
#if SUMS
        const int sum = sum_of_group<SUMS / 4>(__dp4a(static_cast<int>(code), 0x01010101, 0));
        if (g % (SUMS / 4) == 0) sums[block * (32 / SUMS) + g / (SUMS / 4)] = static_cast<float>(sum);
#endif
    }
}

KERNEL void __launch_bounds__(256, 2)
    hyper_rows(float* x, const float* beta, const float* y, const float* w, const float* inject, float* factors, u8* q,
               float* d, float* sums, float* strength, int n, float eps, float scale) {
    const int row = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), lane = threadIdx.x & 31, j = 4 * lane;
    inputs_ready();
    if (row >= n) return;
    x += static_cast<long long>(row) * STREAMS * H + j;
    y += static_cast<long long>(row) * H + j;
    float chains[INJECTS ? STREAMS : 1][4] = {};
#pragma unroll 1
    for (int c = 0; c < STREAMS; c++) {
        Stream v;
        float squares[4] = {};
#pragma unroll
        for (int m = 0; m < PER_THREAD; m++) read_past(v[m], x + c * H + m * LANES);
        if (beta) {
            const float b = beta[row * STREAMS + c];
#pragma unroll
            for (int m = 0; m < PER_THREAD; m++) {
                const float4 a = *reinterpret_cast<const float4*>(y + m * LANES);
                v[m][0] = fmaf(b, a.x, v[m][0]);
                v[m][1] = fmaf(b, a.y, v[m][1]);
                v[m][2] = fmaf(b, a.z, v[m][2]);
                v[m][3] = fmaf(b, a.w, v[m][3]);
                *reinterpret_cast<float4*>(x + c * H + m * LANES) = make_float4(v[m][0], v[m][1], v[m][2], v[m][3]);
            }
        }
#pragma unroll
        for (int m = 0; m < PER_THREAD; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) squares[i] = fmaf(v[m][i], v[m][i], squares[i]);
        const float r = rms_factor(fold_quads(squares), H, eps);
#pragma unroll
        for (int m = 0; m < PER_THREAD; m++) {
            const float4 factor = *reinterpret_cast<const float4*>(w + c * H + j + m * LANES);
            v[m][0] = (v[m][0] * r) * factor.x;
            v[m][1] = (v[m][1] * r) * factor.y;
            v[m][2] = (v[m][2] * r) * factor.z;
            v[m][3] = (v[m][3] * r) * factor.w;
        }
#if INJECTS
#pragma unroll
        for (int o = 0; o < STREAMS; o++)
#pragma unroll
            for (int m = 0; m < PER_THREAD; m++) {
                const float4 weight = *reinterpret_cast<const float4*>(inject + (o * STREAMS + c) * H + j + m * LANES);
                chains[o][0] = fmaf(weight.x, v[m][0], chains[o][0]);
                chains[o][1] = fmaf(weight.y, v[m][1], chains[o][1]);
                chains[o][2] = fmaf(weight.z, v[m][2], chains[o][2]);
                chains[o][3] = fmaf(weight.w, v[m][3], chains[o][3]);
            }
#endif
        const long long stream = static_cast<long long>(row) * STREAMS + c;
        if (lane == 0) factors[stream] = r;
        store_quantized(v, stream * (H / 32), q, d, sums);
    }
#if INJECTS
#pragma unroll
    for (int o = 0; o < STREAMS; o++) {
        const float logit = fold_quads(chains[o]);
        if (lane == o) strength[static_cast<long long>(row) * STREAMS + o] = 2.0f * sigmoid_f32(logit * scale);
    }
#endif
}
