// What the kernels share: single-rounding arithmetic and the functions of ops.py.
//
// Compiled without fast-math and with --fmad=false: only fmaf() fuses. Division and sqrtf() are correctly rounded,
// subnormals stay.
#pragma once
#include "intrinsics.cuh"

// An int32 accumulator that starts at MAGIC_BITS reads, as a float, MAGIC + sum while |sum| < 2^22: no conversion.
// fmaf(MAGIC + sum, scale, -MAGIC * scale) is then sum * scale rounded once, since MAGIC * scale is exact.
#define MAGIC 12582912.0f

// sum * scale, rounded once; `lift` is -MAGIC * scale.
DEVICE float scaled(int c, float scale, float lift) { return fmaf(__int_as_float(c), scale, lift); }

// Rounded to the power of two by the last bits of MAGIC + n: no conversion, of which a card does few at a time.
DEVICE float exp_f32(float x) {
    float y = x > 88.3f ? 88.3f : x;
    float shifted = y * 1.44269504f + MAGIC, n = shifted - MAGIC;
    float r = fmaf(-n, 0.693145751953125f, y);
    r = fmaf(-n, 1.42860677e-6f, r);
    float p = 1.9875691500e-4f;
    p = fmaf(p, r, 1.3981999507e-3f);
    p = fmaf(p, r, 8.3334519073e-3f);
    p = fmaf(p, r, 4.1665795894e-2f);
    p = fmaf(p, r, 1.6666665459e-1f);
    p = fmaf(p, r, 5.0000001201e-1f);
    float power = __uint_as_float((__float_as_uint(shifted) << 23) + 0x3F800000u);
    return x < -87.3f ? 0.0f : (fmaf(p, r * r, r) + 1.0f) * power;
}

// A card divides by more than 2^126 in a way of its own that takes some hundred instructions, and saturated gates come
// together: they are divided by powers of two less, which changes no bit, or are known.
#define LARGE_DIVISOR 0x1p+126f
#define MOST_DIVISOR 0x1.4f748cp+127f   // 1 + exp_f32(88.3), of all that are further out
#define LEAST_SIGMOID 0x1.86ba9p-128f     // 1 / MOST_DIVISOR

DEVICE float sigmoid_f32(float x) {
    const float d = 1.0f + exp_f32(-x);
    if (d > LARGE_DIVISOR) return d == MOST_DIVISOR ? LEAST_SIGMOID : 1.0f / d;
    return 1.0f / d;
}

DEVICE float silu_f32(float x) {
    const float d = 1.0f + exp_f32(-x), by = d > LARGE_DIVISOR ? 0x1p-64f : 1.0f;
    return (x / (d * by)) * by;
}

DEVICE float softplus_f32(float x) {
    float y = exp_f32(-fabsf(x));
    float z = y / (2.0f + y), s = z * z;
    float p = (float)(1.0 / 13);
    p = fmaf(p, s, (float)(1.0 / 11));
    p = fmaf(p, s, (float)(1.0 / 9));
    p = fmaf(p, s, (float)(1.0 / 7));
    p = fmaf(p, s, (float)(1.0 / 5));
    p = fmaf(p, s, (float)(1.0 / 3));
    p = fmaf(p, s, 1.0f);
    return fmaxf(x, 0.0f) + (2.0f * z) * p;
}

// The fold of `lanes`: lane l holds the chains 4 l to 4 l + 3. The result is valid in lane 0.
DEVICE float fold_lanes(float4 p) {
#pragma unroll
    for (int s = 16; s >= 1; s >>= 1) {
        p.x += __shfl_down_sync(~0u, p.x, s);
        p.y += __shfl_down_sync(~0u, p.y, s);
        p.z += __shfl_down_sync(~0u, p.z, s);
        p.w += __shfl_down_sync(~0u, p.w, s);
    }
    return (p.x + p.z) + (p.y + p.w);
}
