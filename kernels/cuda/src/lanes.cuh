// Float weights: four neighbours of a row as float32, exactly. TYPE is F32, F16 or BF16.
#pragma once

struct F32 {
    enum { BYTES = 4 };
    DEVICE static float4 load4(const u8* p) { return *(const float4*)p; }
    DEVICE static float load1(const u8* p) { return *(const float*)p; }
};

struct F16 {
    enum { BYTES = 2 };
    DEVICE static float4 load4(const u8* p) {
        const uint2 w = *(const uint2*)p;
        return make_float4(half_value((u16)w.x), half_value((u16)(w.x >> 16)), half_value((u16)w.y),
                           half_value((u16)(w.y >> 16)));
    }
    DEVICE static float load1(const u8* p) { return half_value(*(const u16*)p); }
};

struct BF16 {
    enum { BYTES = 2 };
    DEVICE static float4 load4(const u8* p) {
        const uint2 w = *(const uint2*)p;
        return make_float4(float_bits(w.x << 16), float_bits(w.x & 0xFFFF0000u), float_bits(w.y << 16),
                           float_bits(w.y & 0xFFFF0000u));
    }
    DEVICE static float load1(const u8* p) { return float_bits((u32) * (const u16*)p << 16); }
};

// Weights at column k < cols of a row. WIDTH 4: the row is a whole number of fours; 1: what is past the end reads as 0.
template <class T, int WIDTH>
DEVICE float4 weights4(const u8* row, int k, int cols) {
    if (WIDTH == 4) return T::load4(row + (long long)k * T::BYTES);
    const u8* p = row + (long long)k * T::BYTES;
    return make_float4(T::load1(p), k + 1 < cols ? T::load1(p + T::BYTES) : 0.0f,
                       k + 2 < cols ? T::load1(p + 2 * T::BYTES) : 0.0f, k + 3 < cols ? T::load1(p + 3 * T::BYTES) : 0.0f);
}

template <int WIDTH>
DEVICE float4 inputs4(const float* row, int k, int cols) {
    return weights4<F32, WIDTH>((const u8*)row, k, cols);
}

// A chain that has no element here is left alone: adding 0 * 0 would turn a -0 into 0.
template <int WIDTH>
DEVICE void add_products(float (&p)[4], const float4& w, const float4& x, int left) {
    p[0] = fmaf(w.x, x.x, p[0]);
    if (WIDTH == 4 || left > 1) p[1] = fmaf(w.y, x.y, p[1]);
    if (WIDTH == 4 || left > 2) p[2] = fmaf(w.z, x.z, p[2]);
    if (WIDTH == 4 || left > 3) p[3] = fmaf(w.w, x.w, p[3]);
}
