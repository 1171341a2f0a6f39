// Blocks of every quantised tensor type to int8 codes and scales: formats.py in the shape that matrix steps want.
//
// A *chunk* is 256 weights of a row: one block of 256, two of 128, four of 64, or eight of 32 (the last chunk of a row of small
// blocks may be short). Eight *spans* of 32 weights make a chunk. Four threads t = 0..3 share a row: thread t gets two
// words, eight codes, of every span:
//
//     NATIVE     4 t .. 4 t + 3, then 16 + 4 t .. 16 + 4 t + 3: for groups of 16, one word of either group
//     EIGHT      8 t .. 8 t + 7
//     EVEN_ODD   8 t + 0, 2, 4, 6, then 8 t + 1, 3, 5, 7
//
// The activations are stored in the same order (quantize.cuh), so the sums are the same. A format F has
//
//     BLOCK, BYTES       weights and bytes of a block          GROUP, OFFSET   16 or 32; 1 with an additive offset
//     ORDER              of the three above                    ALIGN           of a block's address: 4, 2 or 1
//     GRID, LOOK         entries of its table (0: none) and how they are read: WORD, PAIR, HALF
//     F::span(p, s, t, grid, c0, c1)    words of thread t of span s; p is the chunk's first byte
//     F::scale(p, g), F::offset(p, g)   of group g of the chunk
//
// FACTOR: the codes are FACTOR times those of formats.py and the scales as many times smaller (a power of two; it
// saves the subtraction of a bias: a field in the top bits with its highest bit flipped is the biased number).
// Tables hold positive codes; `negate` applies the signs of four.
#pragma once

enum { NATIVE, EIGHT, EVEN_ODD };
enum { WORD, PAIR, HALF };

struct Pair {
    u32 x, y;
};

// A table in shared memory with COPIES of every entry side by side, so that the lanes of a warp do not meet in a bank.
#ifndef COPIES
#define COPIES 1
#endif
struct Grid {
    const u8* base;  // the lane's copy of entry 0

    DEVICE u32 word(int i) const { return *(const u32*)(base + i * (4 * COPIES)); }
    DEVICE Pair pair(int i) const { return *(const Pair*)(base + i * (8 * COPIES)); }
    DEVICE u32 half(int i, int h) const { return *(const u32*)(base + i * (8 * COPIES) + 4 * h); }
};

template <int ALIGN>
DEVICE u32 load4(const u8* p) {
    if (ALIGN == 4) return *(const u32*)p;
    if (ALIGN == 2) return *(const u16*)p | (u32) * (const u16*)(p + 2) << 16;
    const u32* w = (const u32*)((u64)p & ~3ull);
    return funnel(w[0], w[1], 8 * ((u64)p & 3));
}

template <int ALIGN>
DEVICE u32 load2(const u8* p) {
    if (ALIGN >= 2) return *(const u16*)p;
    return p[0] | (u32)p[1] << 8;
}

// The compiler must take this value as it is: it would undo what several codes share.
DEVICE u32 made(u32 x) {
    asm("" : "+r"(x));
    return x;
}

DEVICE float half_at(const u8* p) { return half_value(*(const u16*)p); }

// d * i for a half-precision d and a small integer, exact, without a conversion (those run at a quarter of the rate).
DEVICE float times(float d, int i) { return fmaf(float_bits(0x4B400000u + i), d, d * -12582912.0f); }

// Four bits to bit `at` of four bytes.
DEVICE u32 spread4(u32 nibble, int at) { return (nibble * (0x00204081u << at)) & (0x01010101u << at); }

// Four positive codes with the signs of a nibble. ~(c) + 1 = -c per byte; no byte carries, since no code is 0.
DEVICE u32 negate(u32 codes, u32 nibble) {
    u32 mask = permute(nibble * 0x10204080u, 0, 0xBA98);
    return (codes ^ mask) + (mask & 0x01010101u);
}

// The same for odd codes: -c differs from c in every bit but the lowest.
DEVICE u32 negate_odd(u32 codes, u32 nibble) {
    return codes ^ (permute(nibble * 0x10204080u, 0, 0xBA98) & 0xFEFEFEFEu);
}

// Seven sign bits and an eighth that makes their number even.
DEVICE u32 even_signs(u32 seven) { return seven | parity(seven) << 7; }

// The 16 values of a table by the nibbles of a word: of the first four to `first`, of the others to `last`.
DEVICE void look8(u32 w, u32 t0, u32 t1, u32 t2, u32 t3, u32& first, u32& last) {
    u32 pick = w & 0x77777777u, upper = ((w >> 1) & 0x44444444u) | 0x32103210u;
    first = permute(permute(t0, t1, pick), permute(t2, t3, pick), upper);
    last = permute(permute(t0, t1, pick >> 16), permute(t2, t3, pick >> 16), upper >> 16);
}

// The same: of the low nibbles of its bytes to `low`, of the high ones to `high`.
DEVICE void look16(u32 w, u32 t0, u32 t1, u32 t2, u32 t3, u32& low, u32& high) {
    u32 r0, r1;
    look8(w, t0, t1, t2, t3, r0, r1);
    low = permute(r0, r1, 0x6420);
    high = permute(r0, r1, 0x7531);
}

#define IQ4_TABLE 0xBFAD9881u, 0xF6EADDCFu, 0x26190D01u, 0x71594535u
#define MXFP4_TABLE 0x03020100u, 0x0C080604u, 0xFDFEFF00u, 0xF4F8FAFCu

#define FORMAT(block, bytes, group, offset_, order, align, grid, look, factor)                                    \
    enum {                                                                                                        \
        BLOCK = block, BYTES = bytes, GROUP = group, OFFSET = offset_, ORDER = order, ALIGN = align, GRID = grid, \
        LOOK = look, FACTOR = factor                                                                              \
    };
#define NO_OFFSET \
    DEVICE static float offset(const u8*, int) { return 0.0f; }

// ----------------------------------------------------------------------------------------------- blocks of 32 and 64

struct Q8_0 {
    FORMAT(32, 34, 32, 0, NATIVE, 2, 0, WORD, 1)
    DEVICE static void span(const u8* p, int s, int t, Grid, u32& c0, u32& c1) {
        const u8* q = p + 34 * s + 2 + 4 * t;
        c0 = load4<2>(q), c1 = load4<2>(q + 16);
    }
    DEVICE static float scale(const u8* p, int g) { return half_at(p + 34 * g); }
    NO_OFFSET
};

struct Q4_0 {
    FORMAT(32, 18, 32, 0, NATIVE, 2, 0, WORD, 16)
    DEVICE static void span(const u8* p, int s, int t, Grid, u32& c0, u32& c1) {
        u32 w = load4<2>(p + 18 * s + 2 + 4 * t);
        c0 = (w << 4 & 0xF0F0F0F0u) ^ 0x80808080u, c1 = (w & 0xF0F0F0F0u) ^ 0x80808080u;
    }
    DEVICE static float scale(const u8* p, int g) { return half_at(p + 18 * g) * 0.0625f; }
    NO_OFFSET
};

struct Q4_1 {
    FORMAT(32, 20, 32, 1, NATIVE, 4, 0, WORD, 1)
    DEVICE static void span(const u8* p, int s, int t, Grid, u32& c0, u32& c1) {
        u32 w = load4<4>(p + 20 * s + 4 + 4 * t);
        c0 = w & 0x0F0F0F0Fu, c1 = w >> 4 & 0x0F0F0F0Fu;
    }
    DEVICE static float scale(const u8* p, int g) { return half_at(p + 20 * g); }
    DEVICE static float offset(const u8* p, int g) { return half_at(p + 20 * g + 2); }
};

struct Q5_0 {
    FORMAT(32, 22, 32, 0, NATIVE, 2, 0, WORD, 8)
    DEVICE static void span(const u8* p, int s, int t, Grid, u32& c0, u32& c1) {
        u32 w = load4<2>(p + 22 * s + 6 + 4 * t), h = load4<2>(p + 22 * s + 2) >> 4 * t;
        c0 = ((w << 3 & 0x78787878u) | spread4(h & 15, 7)) ^ 0x80808080u;
        c1 = ((w >> 1 & 0x78787878u) | spread4(h >> 16 & 15, 7)) ^ 0x80808080u;
    }
    DEVICE static float scale(const u8* p, int g) { return half_at(p + 22 * g) * 0.125f; }
    NO_OFFSET
};

struct Q5_1 {
    FORMAT(32, 24, 32, 1, NATIVE, 4, 0, WORD, 1)
    DEVICE static void span(const u8* p, int s, int t, Grid, u32& c0, u32& c1) {
        u32 w = load4<4>(p + 24 * s + 8 + 4 * t), h = load4<4>(p + 24 * s + 4) >> 4 * t;
        c0 = (w & 0x0F0F0F0Fu) | spread4(h & 15, 4), c1 = (w >> 4 & 0x0F0F0F0Fu) | spread4(h >> 16 & 15, 4);
    }
    DEVICE static float scale(const u8* p, int g) { return half_at(p + 24 * g); }
    DEVICE static float offset(const u8* p, int g) { return half_at(p + 24 * g + 2); }
};

struct IQ4_NL {
    FORMAT(32, 18, 32, 0, NATIVE, 2, 0, WORD, 1)
    DEVICE static void span(const u8* p, int s, int t, Grid, u32& c0, u32& c1) {
        look16(load4<2>(p + 18 * s + 2 + 4 * t), IQ4_TABLE, c0, c1);
    }
    DEVICE static float scale(const u8* p, int g) { return half_at(p + 18 * g); }
    NO_OFFSET
};

struct MXFP4 {
    FORMAT(32, 17, 32, 0, NATIVE, 1, 0, WORD, 1)
    DEVICE static void span(const u8* p, int s, int t, Grid, u32& c0, u32& c1) {
        look16(load4<1>(p + 17 * s + 1 + 4 * t), MXFP4_TABLE, c0, c1);
    }
    DEVICE static float scale(const u8* p, int g) {
        u32 e = p[17 * g];  // 2^(e - 128); below 2^-126 a subnormal
        return float_bits(e >= 2 ? (e - 1) << 23 : 0x00200000u << e);
    }
    NO_OFFSET
};

struct Q2_0 {
    FORMAT(64, 18, 32, 0, EVEN_ODD, 2, 0, WORD, 1)
    DEVICE static void span(const u8* p, int s, int t, Grid, u32& c0, u32& c1) {
        u32 w = load2<2>(p + 18 * (s >> 1) + 2 + 8 * (s & 1) + 2 * t);
        c0 = permute(0x020100FFu, 0, w & 0x3333), c1 = permute(0x020100FFu, 0, w >> 2 & 0x3333);
    }
    DEVICE static float scale(const u8* p, int g) { return half_at(p + 18 * (g >> 1)); }
    NO_OFFSET
};

// ----------------------------------------------------------------------------------------------------- K super-blocks

struct Q2_K {
    FORMAT(256, 84, 16, 1, NATIVE, 4, 0, WORD, 1)
    DEVICE static void span(const u8* p, int s, int t, Grid, u32& c0, u32& c1) {
        const u8* q = p + 16 + 32 * (s >> 2) + 4 * t;
        int k = 2 * (s & 3);
        c0 = load4<4>(q) >> k & 0x03030303u, c1 = load4<4>(q + 16) >> k & 0x03030303u;
    }
    DEVICE static float scale(const u8* p, int g) { return times(half_at(p + 80), p[g] & 15); }
    DEVICE static float offset(const u8* p, int g) { return times(-half_at(p + 82), p[g] >> 4); }
};

struct Q3_K {
    FORMAT(256, 110, 16, 0, NATIVE, 2, 0, WORD, 32)
    DEVICE static u32 code(u32 low, u32 high, int s) {
        return ((low >> 2 * (s & 3)) << 5 & 0x60606060u) | ((high >> s) << 7 & 0x80808080u);
    }
    DEVICE static void span(const u8* p, int s, int t, Grid, u32& c0, u32& c1) {
        const u8 *q = p + 32 + 32 * (s >> 2) + 4 * t, *h = p + 4 * t;
        c0 = code(load4<2>(q), load4<2>(h), s) ^ 0x80808080u;
        c1 = code(load4<2>(q + 16), load4<2>(h + 16), s) ^ 0x80808080u;
    }
    DEVICE static float scale(const u8* p, int g) {
        int low = p[96 + (g & 7)] >> 4 * (g >> 3) & 15, high = p[104 + (g & 3)] >> 2 * (g >> 2) & 3;
        return times(half_at(p + 108) * 0.03125f, (low | high << 4) - 32);
    }
    NO_OFFSET
};

// The 6-bit scale (at = 0) or minimum (at = 4) of group g from the twelve bytes at q.
DEVICE int k_scale(const u8* q, int g, int at) {
    if (g < 4) return q[at + g] & 63;
    return (q[4 + g] >> at & 15) | (q[at + g - 4] >> 2 & 48);
}

struct Q4_K {
    FORMAT(256, 144, 32, 1, NATIVE, 4, 0, WORD, 1)
    DEVICE static void span(const u8* p, int s, int t, Grid, u32& c0, u32& c1) {
        const u8* q = p + 16 + 32 * (s >> 1) + 4 * t;
        int k = 4 * (s & 1);
        c0 = load4<4>(q) >> k & 0x0F0F0F0Fu, c1 = load4<4>(q + 16) >> k & 0x0F0F0F0Fu;
    }
    DEVICE static float scale(const u8* p, int g) { return times(half_at(p), k_scale(p + 4, g, 0)); }
    DEVICE static float offset(const u8* p, int g) { return times(-half_at(p + 2), k_scale(p + 4, g, 4)); }
};

struct Q5_K {
    FORMAT(256, 176, 32, 1, NATIVE, 4, 0, WORD, 1)
    DEVICE static u32 high(u32 h, int s) { return (h >> s) << 4 & 0x10101010u; }
    DEVICE static void span(const u8* p, int s, int t, Grid, u32& c0, u32& c1) {
        const u8 *q = p + 48 + 32 * (s >> 1) + 4 * t, *h = p + 16 + 4 * t;
        int k = 4 * (s & 1);
        c0 = (load4<4>(q) >> k & 0x0F0F0F0Fu) | high(load4<4>(h), s);
        c1 = (load4<4>(q + 16) >> k & 0x0F0F0F0Fu) | high(load4<4>(h + 16), s);
    }
    DEVICE static float scale(const u8* p, int g) { return Q4_K::scale(p, g); }
    DEVICE static float offset(const u8* p, int g) { return Q4_K::offset(p, g); }
};

struct Q6_K {
    FORMAT(256, 210, 16, 0, NATIVE, 2, 0, WORD, 4)
    DEVICE static u32 turned(u32 high) { return made(high ^ 0xAAAAAAAAu); }  // the upper bit of each field
    DEVICE static u32 code(u32 low, u32 high, int s) {
        u32 four = s & 2 ? low >> 2 : low << 2, two = (high >> 2 * (s & 3)) << 6;
        return (four & 0x3C3C3C3Cu) | (two & 0xC0C0C0C0u);
    }
    DEVICE static void span(const u8* p, int s, int t, Grid, u32& c0, u32& c1) {
        const u8 *q = p + 64 * (s >> 2) + 32 * (s & 1) + 4 * t, *h = p + 128 + 32 * (s >> 2) + 4 * t;
        c0 = code(load4<2>(q), turned(load4<2>(h)), s), c1 = code(load4<2>(q + 16), turned(load4<2>(h + 16)), s);
    }
    DEVICE static float scale(const u8* p, int g) { return times(half_at(p + 208) * 0.25f, (i8)p[192 + g]); }
    NO_OFFSET
};

// Q6_K as a card keeps it: a block begins at a multiple of 8.
struct Q6_K_CARD {
    FORMAT(256, 216, 16, 0, NATIVE, 4, 0, WORD, 4)
    DEVICE static void span(const u8* p, int s, int t, Grid, u32& c0, u32& c1) {
        const u8 *q = p + 64 * (s >> 2) + 32 * (s & 1) + 4 * t, *h = p + 128 + 32 * (s >> 2) + 4 * t;
        c0 = Q6_K::code(load4<4>(q), Q6_K::turned(load4<4>(h)), s);
        c1 = Q6_K::code(load4<4>(q + 16), Q6_K::turned(load4<4>(h + 16)), s);
    }
    DEVICE static float scale(const u8* p, int g) { return Q6_K::scale(p, g); }
    NO_OFFSET
};

// ---------------------------------------------------------------------------------------------------- IQ super-blocks

struct IQ4_XS {
    FORMAT(256, 136, 32, 0, NATIVE, 4, 0, WORD, 1)
    DEVICE static void span(const u8* p, int s, int t, Grid, u32& c0, u32& c1) {
        look16(load4<4>(p + 8 + 16 * s + 4 * t), IQ4_TABLE, c0, c1);
    }
    DEVICE static float scale(const u8* p, int g) {
        int low = p[4 + (g >> 1)] >> 4 * (g & 1) & 15, high = load2<2>(p + 2) >> 2 * g & 3;
        return times(half_at(p), (low | high << 4) - 32);
    }
    NO_OFFSET
};

// d * part * (2 s + 1) for s of four bits: with v = 1 + s / 16 that is 32 v - 31, exact.
DEVICE float odd_scale(float d, float part, u32 s) {
    return fmaf(float_bits(0x3F800000u | s << 19), d * (32 * part), d * (-31 * part));
}

DEVICE int nibble(const u8* p, int i) { return p[i >> 1] >> 4 * (i & 1) & 15; }

struct IQ2_XXS {
    FORMAT(256, 66, 32, 0, EIGHT, 2, 256, PAIR, 1)
    DEVICE static void span(const u8* p, int s, int t, Grid grid, u32& c0, u32& c1) {
        Pair v = grid.pair(p[2 + 8 * s + t]);
        u32 signs = even_signs(load4<2>(p + 6 + 8 * s) >> 7 * t & 127);
        c0 = negate(v.x, signs & 15), c1 = negate(v.y, signs >> 4);
    }
    DEVICE static float scale(const u8* p, int g) { return odd_scale(half_at(p), 0.125f, p[9 + 8 * g] >> 4); }
    NO_OFFSET
};

struct IQ2_XS {
    FORMAT(256, 74, 16, 0, NATIVE, 2, 512, HALF, 1)
    DEVICE static u32 code(u32 w, int t, Grid grid) {
        return negate(grid.half(w & 511, t & 1), even_signs(w >> 9) >> 4 * (t & 1) & 15);
    }
    DEVICE static void span(const u8* p, int s, int t, Grid grid, u32& c0, u32& c1) {
        const u8* q = p + 2 + 8 * s + 2 * (t >> 1);
        c0 = code(load2<2>(q), t, grid), c1 = code(load2<2>(q + 4), t, grid);
    }
    DEVICE static float scale(const u8* p, int g) { return odd_scale(half_at(p), 0.125f, nibble(p + 66, g)); }
    NO_OFFSET
};

struct IQ2_S {
    FORMAT(256, 82, 16, 0, NATIVE, 2, 1024, HALF, 1)
    DEVICE static u32 code(const u8* p, int i, int h, u32 high, Grid grid) {
        return negate(grid.half(p[2 + i] | (high & 3) << 8, h), p[34 + i] >> 4 * h & 15);
    }
    DEVICE static void span(const u8* p, int s, int t, Grid grid, u32& c0, u32& c1) {
        int i = 4 * s + (t >> 1), h = t & 1;
        u32 high = p[66 + s] >> 2 * (t >> 1);
        c0 = code(p, i, h, high, grid), c1 = code(p, i + 2, h, high >> 4, grid);
    }
    DEVICE static float scale(const u8* p, int g) { return odd_scale(half_at(p), 0.125f, nibble(p + 74, g)); }
    NO_OFFSET
};

struct IQ3_XXS {
    FORMAT(256, 98, 32, 0, EIGHT, 2, 256, WORD, 1)
    DEVICE static void span(const u8* p, int s, int t, Grid grid, u32& c0, u32& c1) {
        u32 w = load2<2>(p + 2 + 8 * s + 2 * t), signs = even_signs(load4<2>(p + 66 + 4 * s) >> 7 * t & 127);
        c0 = negate(grid.word(w & 255), signs & 15), c1 = negate(grid.word(w >> 8), signs >> 4);
    }
    DEVICE static float scale(const u8* p, int g) { return odd_scale(half_at(p), 0.25f, p[69 + 4 * g] >> 4); }
    NO_OFFSET
};

struct IQ3_S {
    FORMAT(256, 110, 32, 0, EIGHT, 2, 512, WORD, 1)
    DEVICE static void span(const u8* p, int s, int t, Grid grid, u32& c0, u32& c1) {
        u32 w = load2<2>(p + 2 + 8 * s + 2 * t), signs = p[74 + 4 * s + t];
        u32 high = load4<2>(p + 66 + (s & 4)) >> 2 * t;  // ninth bits of both indices, of four spans
        u32 pick = 0x2240 + ((s & 3) << 4);  // a byte of w, then one of the ninth bits; bytes 2 and 3 of w are 0
        c0 = negate_odd(grid.word(permute(w, high & 0x01010101u, pick)), signs & 15);
        c1 = negate_odd(grid.word(permute(w, high >> 1 & 0x01010101u, pick + 1)), signs >> 4);
    }
    DEVICE static float scale(const u8* p, int g) { return odd_scale(half_at(p), 1.0f, nibble(p + 106, g)); }
    NO_OFFSET
};

// IQ3_S as a card keeps it: a code is 2 n - 15 for four bits n, so 8 * code is n in the upper bits with the highest flipped, and 8.
struct IQ3_S_CARD {
    FORMAT(256, 136, 32, 0, NATIVE, 4, 0, WORD, 8)
    DEVICE static void span(const u8* p, int s, int t, Grid, u32& c0, u32& c1) {
        u32 w = load4<4>(p + 8 + 16 * s + 4 * t);
        c0 = (w << 4 & 0xF0F0F0F0u) ^ 0x88888888u, c1 = (w & 0xF0F0F0F0u) ^ 0x88888888u;
    }
    DEVICE static float scale(const u8* p, int g) {
        return odd_scale(half_at(p), 0.125f, p[4 + (g & 3)] >> (g & 4) & 15);
    }
    NO_OFFSET
};

// IQ4_NL as a card keeps it: four blocks together.
struct IQ4_NL_CARD {
    FORMAT(128, 72, 32, 0, NATIVE, 4, 0, WORD, 1)
    DEVICE static void span(const u8* p, int s, int t, Grid, u32& c0, u32& c1) {
        look8(load4<4>(p + 72 * (s >> 2) + 8 + 16 * (s & 3) + 4 * t), IQ4_TABLE, c0, c1);
    }
    DEVICE static float scale(const u8* p, int g) { return half_at(p + 72 * (g >> 2) + 2 * (g & 3)); }
    NO_OFFSET
};

// The table of the IQ1 types holds 8 * grid + 1 + 128 in every byte: a delta of -1 subtracts 2 without a borrow.
DEVICE u32 with_delta(u32 biased, bool negative) { return (biased - (negative ? 0x02020202u : 0)) ^ 0x80808080u; }

struct IQ1_S {
    FORMAT(256, 50, 32, 0, EIGHT, 2, 2048, PAIR, 1)
    DEVICE static void span(const u8* p, int s, int t, Grid grid, u32& c0, u32& c1) {
        u32 high = load2<2>(p + 34 + 2 * s);
        Pair v = grid.pair(p[2 + 4 * s + t] | (high >> 3 * t & 7) << 8);
        c0 = with_delta(v.x, high >> 15), c1 = with_delta(v.y, high >> 15);
    }
    DEVICE static float scale(const u8* p, int g) {
        return odd_scale(half_at(p), 0.125f, load2<2>(p + 34 + 2 * g) >> 12 & 7);
    }
    NO_OFFSET
};

struct IQ1_M {
    FORMAT(256, 56, 16, 0, NATIVE, 4, 2048, HALF, 1)
    DEVICE static u32 code(const u8* p, int i, int h, Grid grid) {
        u32 high = nibble(p + 32, i);
        return with_delta(grid.half(p[i] | (high & 7) << 8, h), high >> 3);
    }
    DEVICE static void span(const u8* p, int s, int t, Grid grid, u32& c0, u32& c1) {
        int i = 4 * s + (t >> 1), h = t & 1;
        c0 = code(p, i, h, grid), c1 = code(p, i + 2, h, grid);
    }
    DEVICE static float scale(const u8* p, int g) {
        u32 a = load4<4>(p + 48), b = load4<4>(p + 52);  // the top nibbles of four words are the block's scale
        float d = half_value((u16)((a >> 12 & 15) | (a >> 24 & 0xF0) | (b >> 4 & 0xF00) | (b >> 16 & 0xF000)));
        u32 pair = g & 8 ? b : a;
        return odd_scale(d, 0.125f, pair >> (16 * (g >> 2 & 1) + 3 * (g & 3)) & 7);
    }
    NO_OFFSET
};
