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

// exp_f32 of -87.3 to 88.3. Rounded to the power of two by the last bits of MAGIC + n: no conversion, of which a card does
// few at a time.
DEVICE float exp_between(float y) {
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
    return (fmaf(p, r * r, r) + 1.0f) * power;
}

DEVICE float exp_f32(float x) {
    float e = exp_between(x > 88.3f ? 88.3f : x);
    asm("" : "+f"(e));  // no branch around it: work of other elements lies in between
    return x < -87.3f ? 0.0f : e;
}

// a / b, rounded once, where b, 1 / b and a / b are ordinary numbers: what the compiler's division does when it has found that
// they are, without the look and without the other way, which takes a call for the lanes that need it.
DEVICE float quotient(float a, float b) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
    r = fmaf(r, fmaf(-b, r, 1.0f), r);
    const float q = a * r;
    return fmaf(r, fmaf(-b, q, a), q);
}

#define LARGEST 0x1.fffffep+127f
#define MOST_DIVISOR 0x1.4f748cp+127f  // 1 + exp_f32(88.3), of all gates that are further out
#define LEAST_SIGMOID 0x1.86ba9p-128f  // 1 / MOST_DIVISOR

// 1 + exp_f32(-x), without a branch: what is added where x > 87.3 is too little to be seen beside 1.
DEVICE float sigmoid_divisor(float x) {
    const float y = x > 87.3f ? -87.3f : -x;
    return 1.0f + exp_between(y > 88.3f ? 88.3f : y);
}

// 1 / d of such divisors but the few with which the result is less than an ordinary number and no constant.
DEVICE bool usual_divisor(float d) { return d <= 0x1p+126f || d == MOST_DIVISOR; }
DEVICE float usual_sigmoid(float d) {
    const float y = quotient(1.0f, fminf(d, 0x1p+126f));
    return d == MOST_DIVISOR ? LEAST_SIGMOID : y;
}

DEVICE float sigmoid_f32(float x) {
    const float d = sigmoid_divisor(x);
    return usual_divisor(d) ? usual_sigmoid(d) : 1.0f / d;
}

// Divided by powers of two less where that is much; x / 2 where x is next to nothing, x / 1 and what is infinite.
DEVICE float silu_f32(float x) {
    const float d = sigmoid_divisor(x), by = d > 0x1p+64f ? 0x1p-64f : 1.0f;
    const float y = quotient(x, d * by) * by;
    return fabsf(x) < 0x1p-60f ? x * 0.5f : x > 88.0f || x < -LARGEST ? x : y;
}

DEVICE float softplus_f32(float x) {
    float y = exp_f32(-fabsf(x));
    float z = y < 0x1p-60f ? y * 0.5f : quotient(y, 2.0f + y), s = z * z;
    float p = (float)(1.0 / 13);
    p = fmaf(p, s, (float)(1.0 / 11));
    p = fmaf(p, s, (float)(1.0 / 9));
    p = fmaf(p, s, (float)(1.0 / 7));
    p = fmaf(p, s, (float)(1.0 / 5));
    p = fmaf(p, s, (float)(1.0 / 3));
    p = fmaf(p, s, 1.0f);
    return fmaxf(x, 0.0f) + (2.0f * z) * p;
}

// Of a block of inputs whose largest magnitude is `amax`: its scale, and what its inputs are multiplied with (`quantize`).
struct BlockScale {
    float d, inv;

    DEVICE explicit BlockScale(float amax) {
        const bool usual = amax >= 1e-30f && amax <= LARGEST;
        const float by = amax > 0x1p+64f ? 0x1p-64f : 1.0f;
        inv = usual ? quotient(127.0f, amax * by) * by : 0.0f;
        d = usual ? quotient(amax, 127.0f) : amax < 1e-30f ? 0.0f : amax;
    }
};

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
