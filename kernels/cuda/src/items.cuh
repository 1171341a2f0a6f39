// Weights for a lane that multiplies alone: an *item* is SPANS spans of 32 weights of one row, and a lane holds it whole.
//
// A block of 256 weights is two items of 4 spans; smaller blocks make items of 1 to 5 spans (row_plans.py). A lane needs no
// other lane for its sums: four products an instruction, and a term a group of weights.
//
//     Item<F>::run(terms, p, first, grid, q, sums)
//
// p: the item's block in shared memory (the first, of small blocks), first: the item's first span in it; q: its activations,
// 32 bytes a span in the order of Item<F>::ORDER; sums: the sums of its activations by groups, float for a format with
// offsets, int where FOLD says so. terms: for each group the product, scaled, and then the offset's, if there are offsets.
//
// Formats without an own Item go through F::span (Plain), and so do items that are multiplied with several rows of
// activations (Codes). An own one leaves fields where they are: a masked field is a factor 2^k of
// its number, two fields are multiplied apart and joined in the sum, and a constant that every code lacks is a multiple of
// the sum of the activations (FOLD). All of that is exact in integers.
#pragma once

enum { PAIRED = 3 };  // an order of activations: 0, 16, 1, 17; 2, 18, 3, 19; ... of a span

// sum + four products of bytes, those of a without a sign.
DEVICE int dot_unsigned(u32 a, u32 q, int sum) {
    int r;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(q), "r"(sum));
    return r;
}

// A word of shared memory that is not written any more: the compiler may move the read, and an address of 32 bits takes
// one addition where a pointer takes two.
DEVICE u32 shared_word(u32 at) {
    u32 r;
    asm("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(at));
    return r;
}

// Bytes of a lane at a multiple of 2, read by whole words. word(at): the four at `at`, a constant multiple of 2; so that bytes
// some multiple of 4 further need no picks of their own, `further` gives them.
struct Halves {
    const u32* words;
    u32 whole, half;  // picks of a word at a multiple of 4, and 2 past one

    DEVICE explicit Halves(const u8* p) {
        const u32 odd = (u32)(u64)p & 2;
        words = (const u32*)(p - odd);
        whole = odd ? 0x5432 : 0x3210;
        half = odd ? 0x7654 : 0x5432;
    }
    DEVICE Halves(const u32* words, u32 whole, u32 half) : words(words), whole(whole), half(half) {}

    DEVICE u32 word(int at) const { return permute(words[at >> 2], words[(at >> 2) + 1], at & 2 ? half : whole); }
    DEVICE Halves further(int bytes) const { return Halves((const u32*)((const u8*)words + bytes), whole, half); }
};

// 4 N words of a block that begins at a multiple of 4, or of 16 where ALIGNED.
template <int N>
DEVICE void load_words(u32 (&to)[4 * N], const u8* p) {
#pragma unroll
    for (int i = 0; i < N; i++) {
#if ALIGNED
        const uint4 v = *(const uint4*)(p + 16 * i);
        to[4 * i] = v.x, to[4 * i + 1] = v.y, to[4 * i + 2] = v.z, to[4 * i + 3] = v.w;
#else
        for (int k = 0; k < 4; k++) to[4 * i + k] = *(const u32*)(p + 16 * i + 4 * k);
#endif
    }
}

// 0 that the compiler does not know: an address of shared memory has no 32nd bit. A number with it added stays in a register,
// where the compiler would make a constant again and again.
DEVICE u32 unknown_zero(const void* shared) { return (u32)__cvta_generic_to_shared(shared) >> 31; }

// d * (byte k of word - less) for a half-precision d: `shift` is d * -(32768 + less). No conversion, exact. `magic`: BYTE_MAGIC.
#define BYTE_MAGIC 0x47000000u
DEVICE float byte_times(u32 word, int k, float d, float shift, u32 magic = BYTE_MAGIC) {
    return fmaf(float_bits(permute(word, magic, 0x7404 | k << 4)), d, shift);
}

DEVICE float term(int sum, float scale) { return scaled(sum, scale, scale * -MAGIC); }

// Activations of half h (16) of span s: words of threads 2 h and 2 h + 1 in the order of the format.
DEVICE uint4 inputs_of(const u8* q, int s, int h) { return *(const uint4*)(q + 32 * s + 16 * h); }

// What Codes reads of an item's blocks; `first`: the item's first span in the first one. Words instead of half words where
// blocks begin at a multiple of 2.
template <class T>
struct Reader {
    const u8* p;
    int first;
    Grid grid;

    DEVICE Reader(const u8* p, int first, Grid grid) : p(p), first(first), grid(grid) {}
    DEVICE void span(int s, int t, u32& c0, u32& c1) const { T::span(p, first + s, t, grid, c0, c1); }
    DEVICE float scale(int g) const { return T::scale(p, first * (32 / T::GROUP) + g); }
};

template <>
struct Reader<Q8_0> {
    Halves bytes;

    DEVICE Reader(const u8* p, int, Grid) : bytes(p) {}
    DEVICE void span(int s, int t, u32& c0, u32& c1) const {
        c0 = bytes.word(34 * s + 2 + 4 * t), c1 = bytes.word(34 * s + 18 + 4 * t);
    }
    DEVICE float scale(int g) const { return half_value((u16)bytes.word(34 * g)); }
};

template <>
struct Reader<Q6_K> {
    Halves block, low, high, scales;
    float d, shift;

    DEVICE Reader(const u8* p, int first, Grid)
        : block(p), low(block.further(16 * first)), high(block.further(128 + 8 * first)), scales(block.further(192 + 2 * first)) {
        d = half_at(p + 208) * 0.25f, shift = d * -32896.0f;  // FACTOR is 4
    }
    DEVICE void span(int s, int t, u32& c0, u32& c1) const {
        const int at = 64 * (s >> 2) + 32 * (s & 1) + 4 * t, above = 32 * (s >> 2) + 4 * t;
        c0 = Q6_K::code(low.word(at), Q6_K::turned(high.word(above)), s);
        c1 = Q6_K::code(low.word(at + 16), Q6_K::turned(high.word(above + 16)), s);
    }
    DEVICE float scale(int g) const { return byte_times(scales.word(g & ~3) ^ 0x80808080u, g & 3, d, shift); }
};

// The codes of an item, for as many rows of activations as there are.
template <class F, int S>
struct Codes {
    enum { G = 32 / F::GROUP, PER = G * (1 + F::OFFSET) };

    u32 words[S][8];  // in the order of the format's activations
    float scales[S * G], offsets[F::OFFSET ? S * G : 1];

    DEVICE Codes(const u8* p, int first, Grid grid) {
        const Reader<F> blocks(p, first, grid);
#pragma unroll
        for (int s = 0; s < S; s++)
#pragma unroll
            for (int t = 0; t < 4; t++) blocks.span(s, t, words[s][2 * t], words[s][2 * t + 1]);
#pragma unroll
        for (int g = 0; g < S * G; g++) {
            scales[g] = blocks.scale(g);
            if (F::OFFSET) offsets[F::OFFSET ? g : 0] = F::offset(p, first * G + g);
        }
    }
    DEVICE void terms(float (&to)[S * PER], const u8* q, const float* sums) const {
#pragma unroll
        for (int s = 0; s < S; s++) {
            const uint4 v = inputs_of(q, s, 0), w = inputs_of(q, s, 1);
            const u32 in[8] = {v.x, v.y, v.z, v.w, w.x, w.y, w.z, w.w};
            int sum[G];
#pragma unroll
            for (int k = 0; k < G; k++) sum[k] = MAGIC_BITS;
#pragma unroll
            for (int i = 0; i < 8; i++) sum[i % G] = __dp4a((int)words[s][i], (int)in[i], sum[i % G]);
#pragma unroll
            for (int k = 0; k < G; k++) {
                const int g = s * G + k, at = g * (1 + F::OFFSET);
                to[at] = term(sum[k], scales[g]);
                if (F::OFFSET) to[at + 1] = sums[g] * offsets[F::OFFSET ? g : 0];
            }
        }
    }
};

template <class F>
struct Plain {
    typedef float Sum;
    enum { ORDER = F::ORDER, FOLD = 0, ODD_CODES = 0, PER = 32 / F::GROUP * (1 + F::OFFSET) };

    template <int S>
    DEVICE static void run(float (&terms)[S * PER], const u8* p, int first, Grid grid, const u8* q, const float* sums) {
        Codes<F, S>(p, first, grid).terms(terms, q, sums);
    }
};

template <class F>
struct Item : Plain<F> {};

template <>
struct Item<Q8_0> {
    typedef float Sum;
    enum { ORDER = NATIVE, FOLD = 0, ODD_CODES = 0, PER = 1 };

    template <int S>
    DEVICE static void run(float (&terms)[S], const u8* p, int, Grid, const u8* q, const float*) {
        const Halves bytes(p);
#pragma unroll
        for (int s = 0; s < S; s++) {
            int sum = MAGIC_BITS;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint4 v = inputs_of(q, s, h);
                const int at = 34 * s + 2 + 8 * h;
                sum = __dp4a((int)bytes.word(at), (int)v.x, sum);
                sum = __dp4a((int)bytes.word(at + 16), (int)v.y, sum);
                sum = __dp4a((int)bytes.word(at + 4), (int)v.z, sum);
                sum = __dp4a((int)bytes.word(at + 20), (int)v.w, sum);
            }
            terms[s] = term(sum, half_value((u16)bytes.word(34 * s)));
        }
    }
};

// Words of a block of Q6_K, two of them 4 apart: by picks, or, where blocks begin at a multiple of 8, in one read.
struct PickedPairs {
    Halves bytes;

    DEVICE explicit PickedPairs(const u8* p) : bytes(p) {}
    DEVICE PickedPairs(const Halves& bytes) : bytes(bytes) {}
    DEVICE PickedPairs further(int n) const { return PickedPairs(bytes.further(n)); }
    DEVICE uint2 pair(int at) const { return make_uint2(bytes.word(at), bytes.word(at + 4)); }
};

struct AlignedPairs {
    const u8* p;

    DEVICE explicit AlignedPairs(const u8* p) : p(p) {}
    DEVICE AlignedPairs further(int n) const { return AlignedPairs(p + n); }
    DEVICE uint2 pair(int at) const { return *(const uint2*)(p + at); }
};

// Half a block: two words of low fields and one of high fields make four spans.
template <class Pairs>
struct SixBits {
    typedef int Sum;
    enum { ORDER = NATIVE, FOLD = 1, ODD_CODES = 0, PER = 2 };

    template <int S>
    DEVICE static void run(float (&terms)[2 * S], const u8* p, int first, Grid, const u8* q, const int* sums) {
        static_assert(S == 4, "an item of Q6_K is half a block");
        const Pairs block(p), low = block.further(16 * first), high = block.further(128 + 8 * first);
        int fours[4][2], twos[4][2];  // span, group
        const int4 of[2] = {((const int4*)sums)[0], ((const int4*)sums)[1]};
#pragma unroll
        for (int s = 0; s < 4; s++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const int4& own = of[s >> 1];
                fours[s][k] = MAGIC_BITS - (s < 2 ? 32 : 512) * (s & 1 ? (k ? own.w : own.z) : k ? own.y : own.x);
                twos[s][k] = 0;
            }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint4 v[4];
#pragma unroll
            for (int s = 0; s < 4; s++) v[s] = inputs_of(q, s, h);
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const uint2 x = low.pair(8 * h + 16 * k), y = low.pair(32 + 8 * h + 16 * k), z = high.pair(8 * h + 16 * k);
#pragma unroll
                for (int t = 0; t < 2; t++) {  // words t = 2 h, 2 h + 1 of the group
                    const u32 a = t ? x.y : x.x, b = t ? y.y : y.x, c = t ? z.y : z.x;
                    const auto in = [&](int s) { return t ? (k ? v[s].w : v[s].z) : k ? v[s].y : v[s].x; };
                    fours[0][k] = dot_unsigned(a & 0x0F0F0F0Fu, in(0), fours[0][k]);
                    fours[1][k] = dot_unsigned(b & 0x0F0F0F0Fu, in(1), fours[1][k]);
                    fours[2][k] = dot_unsigned(a & 0xF0F0F0F0u, in(2), fours[2][k]);
                    fours[3][k] = dot_unsigned(b & 0xF0F0F0F0u, in(3), fours[3][k]);
                    twos[0][k] = dot_unsigned(c & 0x03030303u, in(0), twos[0][k]);
                    twos[1][k] = dot_unsigned(c & 0x0C0C0C0Cu, in(1), twos[1][k]);
                    twos[2][k] = dot_unsigned(c & 0x30303030u, in(2), twos[2][k]);
                    twos[3][k] = dot_unsigned(c & 0xC0C0C0C0u, in(3), twos[3][k]);
                }
            }
        }
        const uint2 scales = block.further(192 + 2 * first).pair(0);
        const u32 biased[2] = {scales.x ^ 0x80808080u, scales.y ^ 0x80808080u};
        const float d = half_at(p + 208), d16 = d * 0.0625f;
        const u32 magic = BYTE_MAGIC + unknown_zero(p);
#pragma unroll
        for (int s = 0; s < 4; s++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const float own = s < 2 ? d : d16;
                const float scale = byte_times(biased[s >> 1], 2 * (s & 1) + k, own, own * -32896.0f, magic);
                terms[2 * s + k] = term(fours[s][k] + (s & 1 ? 4 : 16) * twos[s][k], scale);
            }
    }
};

template <>
struct Item<Q6_K> : SixBits<PickedPairs> {};

template <>
struct Item<Q6_K_CARD> : SixBits<AlignedPairs> {};

// The 4-bit fields of 32 weights, low ones in the even span of a pair, with a fifth bit each.
template <int FIFTH>
struct NibbleItem {
    typedef float Sum;
    enum { ORDER = NATIVE, FOLD = 0, ODD_CODES = 0, PER = 2 };

    // blocks: d, dmin, twelve bytes of scales and minima, 32 bytes of fifth bits if any, the fields
    template <int S>
    DEVICE static void run(float (&terms)[2 * S], const u8* p, int first, Grid, const u8* q, const float* sums) {
        static_assert(S == 4, "an item is half a block");
        u32 head[4], fifth[8];
        load_words<1>(head, p);
        if (FIFTH) {
            load_words<2>(fifth, p + 16);
#pragma unroll
            for (int i = 0; i < 8; i++) fifth[i] >>= first;
        }
        int fields[4], bits[4];
#pragma unroll
        for (int s = 0; s < 4; s++) fields[s] = MAGIC_BITS, bits[s] = 0;
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            u32 w[8];
            load_words<2>(w, p + (FIFTH ? 48 : 16) + 16 * first + 32 * pair);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint4 even = inputs_of(q, 2 * pair, h), odd = inputs_of(q, 2 * pair + 1, h);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int j = 2 * h + (i >> 1) + 4 * (i & 1), s = 2 * pair;
                    const u32 e = i == 0 ? even.x : i == 1 ? even.y : i == 2 ? even.z : even.w;
                    const u32 o = i == 0 ? odd.x : i == 1 ? odd.y : i == 2 ? odd.z : odd.w;
                    fields[s] = dot_unsigned(w[j] & 0x0F0F0F0Fu, e, fields[s]);
                    fields[s + 1] = dot_unsigned(w[j] & 0xF0F0F0F0u, o, fields[s + 1]);
                    if (FIFTH) {
                        bits[s] = dot_unsigned(fifth[j] & 0x01010101u << s, e, bits[s]);
                        bits[s + 1] = dot_unsigned(fifth[j] & 0x01010101u << (s + 1), o, bits[s + 1]);
                    }
                }
            }
        }
        // six bits a scale and a minimum; those of the upper half have their top bits with the lower ones
        u32 scales = head[1] & 0x3F3F3F3Fu, minima = head[2] & 0x3F3F3F3Fu;
        if (first) {
            scales = (head[3] & 0x0F0F0F0Fu) | (head[1] >> 2 & 0x30303030u);
            minima = (head[3] >> 4 & 0x0F0F0F0Fu) | (head[2] >> 2 & 0x30303030u);
        }
        const float4 of = *(const float4*)sums;
        const float d = half_value((u16)head[0]), d16 = d * 0.0625f, least = -half_value((u16)(head[0] >> 16));
#pragma unroll
        for (int s = 0; s < 4; s++) {
            const float own = s & 1 ? d16 : d;
            const float scale = byte_times(scales, s, own, own * -32768.0f);
            terms[2 * s] = term(fields[s] + ((s & 1 ? 256 : 16) >> s) * bits[s], scale);
            terms[2 * s + 1] = (s == 0 ? of.x : s == 1 ? of.y : s == 2 ? of.z : of.w) * byte_times(minima, s, least, least * -32768.0f);
        }
    }
};

template <>
struct Item<Q4_K> : NibbleItem<0> {};

template <>
struct Item<Q5_K> : NibbleItem<1> {};

// Codes of four fields: of the lower and of the upper half of the table, added in the sum. A pick with its high bit spreads
// the byte's sign: -1 for a negative code, 0 for a positive one, so the upper half holds 1 more.
struct Nibbles {
    u32 table[4];

    DEVICE explicit Nibbles(const void* shared) {
        const u32 zero = unknown_zero(shared);
        table[0] = zero + 0xBFAD9881u, table[1] = zero + 0xF6EADDCFu, table[2] = zero + 0x271A0E02u, table[3] = zero + 0x725A4636u;
    }
    // Four fields in the low bits; `turned`: with their highest bits turned.
    DEVICE int dot(u32 fields, u32 turned, u32 q, int sum) const {
        sum = __dp4a((int)permute(table[0], table[1], fields), (int)q, sum);
        return __dp4a((int)permute(table[2], table[3], turned), (int)q, sum);
    }
    DEVICE int dot(u32 fields, u32 q, int sum) const { return dot(fields, fields ^ 0x8888u, q, sum); }
};

template <>
struct Item<IQ4_NL> {
    typedef float Sum;
    enum { ORDER = PAIRED, FOLD = 0, ODD_CODES = 0, PER = 1 };

    template <int S>
    DEVICE static void run(float (&terms)[S], const u8* p, int, Grid, const u8* q, const float*) {
        const Halves bytes(p);
        const Nibbles codes(p);
#pragma unroll
        for (int s = 0; s < S; s++) {
            const uint4 v = inputs_of(q, s, 0), u = inputs_of(q, s, 1);
            const u32 in[8] = {v.x, v.y, v.z, v.w, u.x, u.y, u.z, u.w};
            int sum = MAGIC_BITS;
#pragma unroll
            for (int i = 0; i < 8; i++) sum = codes.dot(bytes.word(18 * s + 2 + 2 * i), in[i], sum);
            terms[s] = term(sum, half_value((u16)bytes.word(18 * s)));
        }
    }
};

// The codes are odd: the table holds c = (code - 1) / 2, a sign is an exclusive or, and a code is 2 (c ^ sign) + 1.
template <>
struct Item<IQ3_S> {
    typedef int Sum;
    enum { ORDER = EIGHT, FOLD = 1, ODD_CODES = 1, PER = 1 };

    // Four bits of eight to the top bits of four bytes, the highest first: copies 9 bits apart do not meet.
    DEVICE static u32 spread(u32 eight, int i) { return eight * (i & 1 ? 0x08040201u : 0x80402010u); }

    template <int S>
    DEVICE static void run(float (&terms)[S], const u8* p, int first, Grid grid, const u8* q, const int* sums) {
        static_assert(S == 4, "an item of IQ3_S is half a block");
        const Halves block(p + 2), indices = block.further(8 * first), signs = block.further(72 + 4 * first);
        const u32 high = block.further(64 + first).word(0), scales = *(const u16*)(p + 106 + (first >> 1));
        const u32 table = (u32)__cvta_generic_to_shared(grid.base);
        u32 sign[4];
        int sum[4];
#pragma unroll
        for (int s = 0; s < 4; s++) sum[s] = MAGIC_BITS / 2, sign[s] = signs.word(4 * s);
#pragma unroll
        for (int s = 0; s < 4; s++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 w = indices.word(8 * s + 4 * h);
                const uint4 v = inputs_of(q, s, h);
#pragma unroll
                for (int i = 0; i < 4; i++) {  // codes 16 h + 4 i of the span
                    const int bit = 4 * h + i;
                    const u32 index = permute(w, high >> bit & 0x01010101u, 0xCC40 + 16 * s + i);
                    const u32 entry = shared_word(table + index * (4 * COPIES));
                    const u32 eight = permute(sign[s], 0, 0x4440 + 2 * h + (i >> 1));
                    const u32 mask = permute(spread(eight, i), 0, 0x89AB);
                    sum[s] = __dp4a((int)(entry ^ mask), (int)(i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w), sum[s]);
                }
            }
        const int4 of = *(const int4*)sums;
        const u32 even = scales & 0x0F0Fu, odd = scales >> 4 & 0x0F0Fu;
        const float d = half_at(p), twice = d + d, less = d * -255.0f;
#pragma unroll
        for (int s = 0; s < 4; s++) {
            // (2 n + 1) d as (128 + n) 2 d - 255 d, exact
            const float scale = fmaf(float_bits(permute(s & 1 ? odd : even, 0x43000000u, 0x7044 + ((s >> 1) << 8))), twice, less);
            terms[s] = term(2 * sum[s] + (s == 0 ? of.x : s == 1 ? of.y : s == 2 ? of.z : of.w), scale);
        }
    }
};

// Four bits n of a code 2 n - 15, two of them a byte: 16 n where they lie high. All as 8 * code, with the sum of the activations.
template <>
struct Item<IQ3_S_CARD> {
    typedef int Sum;
    enum { ORDER = NATIVE, FOLD = 1, ODD_CODES = 0, PER = 1 };

    template <int S>
    DEVICE static void run(float (&terms)[S], const u8* p, int first, Grid, const u8* q, const int* sums) {
        static_assert(S == 4, "an item of IQ3_S_CARD is half a block");
        const u8* fields = p + 8 + 16 * first;
        const int4 of = *(const int4*)sums;
        int low[4], high[4];
#pragma unroll
        for (int s = 0; s < 4; s++) low[s] = 0, high[s] = MAGIC_BITS - 120 * (s == 0 ? of.x : s == 1 ? of.y : s == 2 ? of.z : of.w);
#pragma unroll
        for (int s = 0; s < 4; s++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint2 w = *(const uint2*)(fields + 16 * s + 8 * h);
                const uint4 v = inputs_of(q, s, h);
                low[s] = dot_unsigned(w.x & 0x0F0F0F0Fu, v.x, low[s]);
                high[s] = dot_unsigned(w.x & 0xF0F0F0F0u, v.y, high[s]);
                low[s] = dot_unsigned(w.y & 0x0F0F0F0Fu, v.z, low[s]);
                high[s] = dot_unsigned(w.y & 0xF0F0F0F0u, v.w, high[s]);
            }
        const uint2 head = *(const uint2*)p;
        const u32 scales = head.y >> first & 0x0F0F0F0Fu;
        const float d = half_value((u16)head.x), quarter = d * 0.25f, less = d * -31.875f;
#pragma unroll
        for (int s = 0; s < 4; s++) {
            // (2 n + 1) d / 8 as (128 + n) d / 4 - 255 d / 8, exact
            const float scale = fmaf(float_bits(permute(scales, 0x43000000u, 0x7044 + (s << 8))), quarter, less);
            terms[s] = term(16 * low[s] + high[s], scale);
        }
    }
};

template <>
struct Item<IQ4_NL_CARD> {
    typedef float Sum;
    enum { ORDER = NATIVE, FOLD = 0, ODD_CODES = 0, PER = 1 };

    template <int S>
    DEVICE static void run(float (&terms)[S], const u8* p, int, Grid, const u8* q, const float*) {
        static_assert(S == 4, "an item of IQ4_NL_CARD is a block");
        const Nibbles codes(p);
        const uint2 scales = *(const uint2*)p;
#pragma unroll
        for (int s = 0; s < 4; s++) {
            int sum = MAGIC_BITS;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint2 w = *(const uint2*)(p + 8 + 16 * s + 8 * h);
                const uint4 v = inputs_of(q, s, h);
                const u32 x = w.x ^ 0x88888888u, y = w.y ^ 0x88888888u;
                sum = codes.dot(w.x, x, v.x, sum), sum = codes.dot(w.x >> 16, x >> 16, v.y, sum);
                sum = codes.dot(w.y, y, v.z, sum), sum = codes.dot(w.y >> 16, y >> 16, v.w, sum);
            }
            const u32 both = s < 2 ? scales.x : scales.y;
            terms[s] = term(sum, half_value((u16)(s & 1 ? both >> 16 : both)));
        }
    }
};
