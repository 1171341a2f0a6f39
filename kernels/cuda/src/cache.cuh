// Keys and values in pages, in the formats KEYS and VALUES, and which tokens a row attends to.
//
// A row of pages is the vector of one token and key head: `row(d)` bytes, a multiple of 16. Float32 and Float16 are the
// elements. Int8 and Int4 are blocks of 32 with a float16 scale each: all codes, then all scales (ops.py, `cache`). Their
// values are code * scale in float32, which is exact, and from there on all formats are alike.
//
//   put_row(to, d, value)     a warp writes a row; value(i) is element i, i = lane, lane + 32, ...
//   load8(row, d, x, v)       elements x to x + 7 of a row in shared or device memory, x a multiple of 8
//   Raw<N>, fetch, unpack     N elements a lane of a row, fetched now and unpacked later; `dim` says which they are
#pragma once
#include "rows.cuh"

DEVICE u16 half_bits(float v) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    return bits;
}

template <int BYTES>
struct Word;
template <>
struct Word<1> { typedef u8 T; };
template <>
struct Word<2> { typedef u16 T; };
template <>
struct Word<4> { typedef u32 T; };
template <>
struct Word<8> { typedef uint2 T; };
template <>
struct Word<16> { typedef uint4 T; };

// The elements of a lane when a warp shares a row of 32 * N: runs of UNIT, 32 * UNIT apart.
template <int N, int MOST>
struct Lane {
    static constexpr int UNIT = N % 8 == 0 && MOST >= 8 ? 8 : N % 4 == 0 && MOST >= 4 ? 4 : 2, UNITS = N / UNIT;
    DEVICE static int dim(int lane, int i) { return (i / UNIT * 32 + lane) * UNIT + i % UNIT; }
};

struct Float32 {
    static constexpr bool PACKED = false;
    typedef float Value;
    __host__ __device__ static constexpr int row(int d) { return 4 * d; }
    DEVICE static float get(Value v) { return v; }
    template <class F>
    DEVICE static void put_row(u8* to, int d, const F& value) {
        for (int i = threadIdx.x & 31; i < d; i += 32) reinterpret_cast<float*>(to)[i] = value(i);
    }
    DEVICE static void load8(const u8* row, int, int x, float (&v)[8]) {
        const float4* p = reinterpret_cast<const float4*>(row + 4 * x);
        const float4 a = p[0], b = p[1];
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    }
    template <int N>
    struct Raw : Lane<N, 4> {
        typedef Lane<N, 4> L;
        typename Word<4 * L::UNIT>::T word[L::UNITS];
        DEVICE void fetch(const u8* row, int, int lane) {
#pragma unroll
            for (int u = 0; u < L::UNITS; u++)
                word[u] = reinterpret_cast<const typename Word<4 * L::UNIT>::T*>(row)[32 * u + lane];
        }
        DEVICE void unpack(float (&v)[N]) const {
            const u32* words = reinterpret_cast<const u32*>(word);
#pragma unroll
            for (int i = 0; i < N; i++) v[i] = __uint_as_float(words[i]);
        }
    };
};

struct Float16 {
    static constexpr bool PACKED = false;
    typedef u16 Value;
    __host__ __device__ static constexpr int row(int d) { return 2 * d; }
    DEVICE static float get(Value v) { return half_value(v); }
    template <class F>
    DEVICE static void put_row(u8* to, int d, const F& value) {
        for (int i = threadIdx.x & 31; i < d; i += 32) reinterpret_cast<u16*>(to)[i] = half_bits(value(i));
    }
    DEVICE static void two(u32 word, float& a, float& b) {
        a = half_value(static_cast<u16>(word));
        b = half_value(static_cast<u16>(word >> 16));
    }
    DEVICE static void load8(const u8* row, int, int x, float (&v)[8]) {
        const uint4 w = *reinterpret_cast<const uint4*>(row + 2 * x);
        two(w.x, v[0], v[1]);
        two(w.y, v[2], v[3]);
        two(w.z, v[4], v[5]);
        two(w.w, v[6], v[7]);
    }
    template <int N>
    struct Raw : Lane<N, 8> {
        typedef Lane<N, 8> L;
        typename Word<2 * L::UNIT>::T word[L::UNITS];
        DEVICE void fetch(const u8* row, int, int lane) {
#pragma unroll
            for (int u = 0; u < L::UNITS; u++)
                word[u] = reinterpret_cast<const typename Word<2 * L::UNIT>::T*>(row)[32 * u + lane];
        }
        DEVICE void unpack(float (&v)[N]) const {
            const u32* words = reinterpret_cast<const u32*>(word);
#pragma unroll
            for (int i = 0; i < N; i += 2) two(words[i / 2], v[i], v[i + 1]);
        }
    };
};

// A code's byte becomes the float 32768 + code by one permutation; fma(32768 + code, scale, -(32768 + zero) * scale) is
// (code - zero) * scale: both products have at most 24 bits, so nothing is rounded.
struct Scale {
    float scale, lift;
    DEVICE Scale(u16 bits, float zero) : scale(half_value(bits)) { lift = -(32768.0f + zero) * scale; }
    DEVICE float value(u32 codes, int byte) const {
        return fmaf(__uint_as_float(permute(codes, 0x47000000u, 0x7404 | byte << 4)), scale, lift);
    }
};

// The scale of a block: a positive one never overflows float16.
DEVICE u16 scale_bits(float scale) { return half_bits(fminf(fmaxf(scale, -65504.0f), 65504.0f)); }

DEVICE float code_of(float x, float scale, float least, float most) {
    return scale == 0.0f ? 0.0f : fminf(fmaxf(rintf(x / scale), least), most);
}

// Codes -127 .. 127 as bytes 1 .. 255; scale = the largest magnitude / 127.
struct Int8 {
    static constexpr bool PACKED = true;
    static constexpr float ZERO = 128.0f;
    __host__ __device__ static constexpr int codes(int d) { return d; }
    __host__ __device__ static constexpr int row(int d) { return (d + d / 16 + 15) / 16 * 16; }
    template <class F>
    DEVICE static void put_row(u8* to, int d, const F& value) {
        const int lane = threadIdx.x & 31;
        for (int b = 0; b < d / 32; b++) {
            const float x = value(32 * b + lane);
            const u16 bits = scale_bits(warp_max(fabsf(x)) / 127.0f);
            to[32 * b + lane] = static_cast<u8>(static_cast<int>(code_of(x, half_value(bits), -127.0f, 127.0f)) + 128);
            if (lane == 0) reinterpret_cast<u16*>(to + d)[b] = bits;
        }
    }
    DEVICE static u32 code(const u8* block, int i) { return block[i]; }
    template <int UNIT>
    DEVICE static void spread(typename Word<UNIT>::T word, const Scale& s, float* v) {
        const u32* words = reinterpret_cast<const u32*>(&word);
        if (UNIT == 2) {
            const u32 narrow = *reinterpret_cast<const u16*>(&word);
            v[0] = s.value(narrow, 0), v[1] = s.value(narrow, 1);
        } else {
#pragma unroll
            for (int i = 0; i < UNIT; i++) v[i] = s.value(words[i / 4], i % 4);
        }
    }
    __host__ __device__ static constexpr int UNIT_BYTES(int unit) { return unit; }
};

// Codes -8 .. 7 as nibbles 0 .. 15, even elements in the lower ones; scale = the element of largest magnitude / -8.
struct Int4 {
    static constexpr bool PACKED = true;
    static constexpr float ZERO = 8.0f;
    __host__ __device__ static constexpr int codes(int d) { return d / 2; }
    __host__ __device__ static constexpr int row(int d) { return (d / 2 + d / 16 + 15) / 16 * 16; }
    template <class F>
    DEVICE static void put_row(u8* to, int d, const F& value) {
        const int lane = threadIdx.x & 31;
        for (int b = 0; b < d / 32; b++) {
            const float x = value(32 * b + lane), most = warp_max(fabsf(x));
            const u32 where = __ballot_sync(ALL, fabsf(x) == most);
            const float top = __shfl_sync(ALL, x, where ? __ffs(static_cast<int>(where)) - 1 : 0);
            const u16 bits = scale_bits(top / -8.0f);
            const int code = static_cast<int>(code_of(x, half_value(bits), -8.0f, 7.0f)) + 8;
            const int next = __shfl_down_sync(ALL, code, 1);
            if (lane % 2 == 0) to[16 * b + lane / 2] = static_cast<u8>(code | next << 4);
            if (lane == 0) reinterpret_cast<u16*>(to + d / 2)[b] = bits;
        }
    }
    DEVICE static u32 code(const u8* block, int i) { return block[i / 2] >> i % 2 * 4 & 15; }
    template <int UNIT>
    DEVICE static void spread(typename Word<UNIT / 2>::T word, const Scale& s, float* v) {
        const u32 low = word & 0x0F0F0F0Fu, high = static_cast<u32>(word) >> 4 & 0x0F0F0F0Fu;
#pragma unroll
        for (int i = 0; i < UNIT; i++) v[i] = s.value(i % 2 ? high : low, i / 2);
    }
    __host__ __device__ static constexpr int UNIT_BYTES(int unit) { return unit / 2; }
};

// What Int8 and Int4 share.
template <class Codes>
struct Packed : Codes {
    DEVICE static u16 scale_of(const u8* row, int d, int x) {
        return *reinterpret_cast<const u16*>(row + Codes::codes(d) + x / 32 * 2);
    }
    DEVICE static void load8(const u8* row, int d, int x, float (&v)[8]) {
        typedef typename Word<Codes::UNIT_BYTES(8)>::T T;
        const Scale s(scale_of(row, d, x), Codes::ZERO);
        Codes::template spread<8>(*reinterpret_cast<const T*>(row + Codes::UNIT_BYTES(x)), s, v);
    }
    template <int N>
    struct Raw : Lane<N, 8> {
        typedef Lane<N, 8> L;
        typedef typename Word<Codes::UNIT_BYTES(L::UNIT)>::T T;
        T word[L::UNITS];
        u16 scale[L::UNITS];
        DEVICE void fetch(const u8* row, int d, int lane) {
#pragma unroll
            for (int u = 0; u < L::UNITS; u++) {
                word[u] = reinterpret_cast<const T*>(row)[32 * u + lane];
                scale[u] = scale_of(row, d, L::dim(lane, u * L::UNIT));
            }
        }
        DEVICE void unpack(float (&v)[N]) const {
#pragma unroll
            for (int u = 0; u < L::UNITS; u++)
                Codes::template spread<L::UNIT>(word[u], Scale(scale[u], Codes::ZERO), v + u * L::UNIT);
        }
    };
};

#ifndef KEYS
#define KEYS Float32
#endif
#ifndef VALUES
#define VALUES Float32
#endif
typedef Packed<Int8> Packed8;
typedef Packed<Int4> Packed4;
typedef KEYS Keys;
typedef VALUES Values;

// n / r, without a division: blocks of r tokens divide a page, so r is a power of two.
DEVICE int whole_blocks(int n, int r) { return n >> (31 - __clz(r)); }

// The tokens that a row attends to, ascending: the blocks of its list and the tail after the last complete block, or
// all tokens up to its own when no more than `picked` blocks are complete (r = 0: a dense layer).
struct Kept {
    int count;   // tokens
    int listed;  // tokens that come from the list
    int tail;    // first token after them

    // Where the t-th of them lies in the sequence.
    DEVICE int position(const int* list, int r, int t) const {
        return t < listed ? list[whole_blocks(t, r)] * r + (t & (r - 1)) : tail + (t - listed);
    }
};

// Complete blocks of a row that compete; 0 when it keeps all tokens.
DEVICE int competing(int position, int r, int picked) {
    const int complete = r ? whole_blocks(position + 1, r) : 0;
    return complete > picked ? complete : 0;
}

DEVICE Kept kept_tokens(int position, int r, int picked) {
    const int complete = competing(position, r, picked);
    if (!complete) return {position + 1, 0, 0};
    return {picked * r + position + 1 - complete * r, picked * r, complete * r};
}
