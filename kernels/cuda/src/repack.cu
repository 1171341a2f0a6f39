// Blocks of a file's type in their card form: formats.py, CARD_FORMS. Codes and scales stay what they are.
//
// Constants: TYPE, of the file. A warp makes a block of the card form, a lane the word of thread t of span s.
#include "device.cuh"
#include "formats.cuh"

enum { WARPS = 8 };

template <class F>
struct Packed;

template <>
struct Packed<IQ3_S> {
    typedef IQ3_S_CARD Form;

    // Odd codes, signed, as n = (code + 15) / 2.
    DEVICE static u32 halved(u32 codes) { return ((codes ^ 0x80808080u) - 0x71717171u) >> 1 & 0x0F0F0F0Fu; }

    DEVICE static void block(const u8* p, u32* to, int s, int t, Grid grid) {
        u32 x, y;
        IQ3_S::span(p, s, t, grid, x, y);
        x = halved(x), y = halved(y);
        const int from = 4 * s + (t >> 1);  // eight codes a thread become four and the four 16 further
        const u32 x0 = __shfl_sync(~0u, x, from), y0 = __shfl_sync(~0u, y, from);
        const u32 x1 = __shfl_sync(~0u, x, from + 2), y1 = __shfl_sync(~0u, y, from + 2);
        to[2 + 4 * s + t] = t & 1 ? y0 | y1 << 4 : x0 | x1 << 4;
        if (s == 0 && t == 0) to[0] = *(const u16*)p;
        if (s == 0 && t == 1) to[1] = bytes_of(load4<2>(p + 106)) | bytes_of(load4<2>(p + 106) >> 16) << 4;
    }
    // The four low nibbles as bytes.
    DEVICE static u32 bytes_of(u32 w) {
        w = (w & 0xFFu) | (w & 0xFF00u) << 8;
        return (w | w << 4) & 0x0F0F0F0Fu;
    }
};

template <>
struct Packed<IQ4_NL> {
    typedef IQ4_NL_CARD Form;

    DEVICE static void block(const u8* p, u32* to, int s, int t, Grid) {
        if (s >= 4) return;  // a block of the form has four spans
        const u8* own = p + 18 * s;
        const u32 w = load4<2>(own + 2 + 4 * t);
        to[2 + 4 * s + t] = low_halves(w) | low_halves(w >> 4) << 16;
        if (t == 0) ((u16*)to)[s] = *(const u16*)own;
    }
    // The low nibbles of four bytes side by side.
    DEVICE static u32 low_halves(u32 w) {
        w = w & 0x0F0F0F0Fu;
        w = (w | w >> 4) & 0x00FF00FFu;
        return (w | w >> 8) & 0xFFFFu;
    }
};

template <>
struct Packed<Q6_K> {
    typedef Q6_K_CARD Form;

    DEVICE static void block(const u8* p, u32* to, int s, int t, Grid) {
        const int lane = 4 * s + t;
        for (int i = lane; i < Form::BYTES / 4; i += 32) to[i] = i < 52 ? load4<2>(p + 4 * i) : i == 52 ? *(const u16*)(p + 208) : 0;
    }
};

// n blocks of the form to `to`, from the file's blocks at `from`, which begins at a multiple of 4.
KERNEL __launch_bounds__(32 * WARPS) void repack(const u8* from, u8* to, long long n) {
    inputs_ready();
    typedef TYPE F;
    typedef Packed<F>::Form G;
    const int lane = threadIdx.x & 31;
    const long long block = blockIdx.x * (long long)WARPS + (threadIdx.x >> 5);
    if (block >= n) return;
#if HAS_TABLE
    const Grid grid{(const u8*)table_words};
#else
    const Grid grid{from};
#endif
    Packed<F>::block(from + block * (G::BLOCK / F::BLOCK * F::BYTES), (u32*)(to + block * G::BYTES), lane >> 2, lane & 3, grid);
}
