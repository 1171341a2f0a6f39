// formats.cuh as plain C++: the device functions it stands on, and one entry point a type.
#include <cmath>
#include <cstdint>
#include <cstring>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t i8;
#define DEVICE inline

static u32 permute(u32 a, u32 b, u32 pick) {
    u64 all = (u64)b << 32 | a;
    u32 r = 0;
    for (int i = 0; i < 4; i++) {
        u32 n = pick >> 4 * i & 15;
        u8 byte = (u8)(all >> 8 * (n & 7));
        if (n & 8) byte = byte & 128 ? 255 : 0;
        r |= (u32)byte << 8 * i;
    }
    return r;
}
static u32 funnel(u32 low, u32 high, int bits) { return (u32)(((u64)high << 32 | low) >> (bits & 31)); }
static float float_bits(u32 bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static float half_value(u16 h) {
    int e = h >> 10 & 31, m = h & 1023;
    float v = e == 31 ? (m ? NAN : INFINITY) : e ? ldexpf((float)(m | 1024), e - 25) : ldexpf((float)m, -24);
    return h & 0x8000 ? -v : v;
}
static u32 parity(u32 x) { return __builtin_popcount(x) & 1; }

#include "formats.cuh"

// Position of the codes of thread t in a span: the comment of formats.cuh, written out.
static int place(int order, int t, int i) {
    if (order == EIGHT) return 8 * t + i;
    if (order == EVEN_ODD) return 8 * t + (i < 4 ? 2 * i : 2 * i - 7);
    return i < 4 ? 4 * t + i : 12 + 4 * t + i;
}

template <class F>
static void unpack(const u8* data, const u32* table, int spans, i8* codes, float* scales, float* offsets, int* info) {
    Grid grid{(const u8*)table};
    for (int s = 0; s < spans; s++)
        for (int t = 0; t < 4; t++) {
            u32 c[2];
            F::span(data, s, t, grid, c[0], c[1]);
            for (int i = 0; i < 8; i++) codes[32 * s + place(F::ORDER, t, i)] = (i8)(c[i / 4] >> 8 * (i & 3));
        }
    for (int g = 0; g < spans * 32 / F::GROUP; g++) scales[g] = F::scale(data, g), offsets[g] = F::offset(data, g);
    int all[] = {F::BLOCK, F::BYTES, F::GROUP, F::OFFSET, F::GRID, F::FACTOR, F::ALIGN};
    memcpy(info, all, sizeof all);
}

#define ENTRY(T)                                                                                                 \
    extern "C" void unpack_##T(const u8* d, const u32* g, int n, i8* c, float* s, float* o, int* i) {            \
        unpack<T>(d, g, n, c, s, o, i);                                                                          \
    }
ENTRY(Q8_0) ENTRY(Q4_0) ENTRY(Q4_1) ENTRY(Q5_0) ENTRY(Q5_1) ENTRY(IQ4_NL) ENTRY(MXFP4) ENTRY(Q2_0)
ENTRY(Q2_K) ENTRY(Q3_K) ENTRY(Q4_K) ENTRY(Q5_K) ENTRY(Q6_K)
ENTRY(IQ4_XS) ENTRY(IQ2_XXS) ENTRY(IQ2_XS) ENTRY(IQ2_S) ENTRY(IQ3_XXS) ENTRY(IQ3_S) ENTRY(IQ1_S) ENTRY(IQ1_M)
ENTRY(IQ3_S_CARD) ENTRY(IQ4_NL_CARD) ENTRY(Q6_K_CARD)
