// The scales and offsets of a row's chunk of 256 weights, by the four lanes t = 0..3 that share the row: lane t makes those of
// its quarter of the groups, 16 or 32 weights each, from the first at t * OWN. p: the chunk's first byte, in shared memory.
// The same numbers as F::scale and F::offset give; types whose scales are read often make them by words. Needs formats.cuh, items.cuh.
#pragma once

template <class T>
struct OwnScales {
    enum { OWN = 64 / T::GROUP };
    float scale[OWN], offset[OWN];

    DEVICE OwnScales(const u8* p, int t) {
#pragma unroll
        for (int i = 0; i < OWN; i++) scale[i] = T::scale(p, OWN * t + i), offset[i] = T::offset(p, OWN * t + i);
    }
};

template <>
struct OwnScales<Q6_K> {
    float scale[4], offset[4];

    DEVICE OwnScales(const u8* p, int t) {
        const u32 biased = Halves(p + 192 + 4 * t).word(0) ^ 0x80808080u;
        const float d = half_at(p + 208) * 0.25f, shift = d * -32896.0f;  // FACTOR is 4
#pragma unroll
        for (int i = 0; i < 4; i++) scale[i] = byte_times(biased, i, d, shift);
    }
};

template <>
struct OwnScales<Q6_K_CARD> {
    float scale[4], offset[4];

    DEVICE OwnScales(const u8* p, int t) {
        const u32 biased = *(const u32*)(p + 192 + 4 * t) ^ 0x80808080u;
        const float d = half_at(p + 208) * 0.25f, shift = d * -32896.0f;  // FACTOR is 4
#pragma unroll
        for (int i = 0; i < 4; i++) scale[i] = byte_times(biased, i, d, shift);
    }
};

// Six bits a scale and a minimum; those of the upper half have their top bits with the lower ones.
struct OwnMinima {
    float scale[2], offset[2];

    DEVICE OwnMinima(const u8* p, int t) {
        const u32 both = ((const u32*)p)[0], a = ((const u32*)p)[1], b = ((const u32*)p)[2], c = ((const u32*)p)[3];
        u32 scales = a & 0x3F3F3F3Fu, minima = b & 0x3F3F3F3Fu;
        if (t & 2) {
            scales = (c & 0x0F0F0F0Fu) | (a >> 2 & 0x30303030u);
            minima = (c >> 4 & 0x0F0F0F0Fu) | (b >> 2 & 0x30303030u);
        }
        const float d = half_value((u16)both), least = -half_value((u16)(both >> 16));
        const int from = 16 * (t & 1);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            scale[i] = byte_times(scales >> from, i, d, d * -32768.0f);
            offset[i] = byte_times(minima >> from, i, least, least * -32768.0f);
        }
    }
};

template <>
struct OwnScales<Q4_K> : OwnMinima {
    using OwnMinima::OwnMinima;
};

template <>
struct OwnScales<Q5_K> : OwnMinima {
    using OwnMinima::OwnMinima;
};

template <>
struct OwnScales<IQ3_S_CARD> {
    float scale[2], offset[2];

    DEVICE OwnScales(const u8* p, int t) {
        const uint2 head = *(const uint2*)p;
        const u32 own = head.y >> (16 * (t & 1) + 4 * (t >> 1)) & 0x0F0Fu;
        const float d = half_value((u16)head.x), quarter = d * 0.25f, less = d * -31.875f;
#pragma unroll
        for (int i = 0; i < 2; i++)  // (2 n + 1) d / 8 as (128 + n) d / 4 - 255 d / 8, exact; FACTOR is 8
            scale[i] = fmaf(float_bits(permute(own, 0x43000000u, 0x7044 + (i << 8))), quarter, less);
    }
};

template <>
struct OwnScales<IQ4_NL_CARD> {
    float scale[2], offset[2];

    DEVICE OwnScales(const u8* p, int t) {
        const u32 both = *(const u32*)(p + 72 * (t >> 1) + 4 * (t & 1));
        scale[0] = half_value((u16)both), scale[1] = half_value((u16)(both >> 16));
    }
};
