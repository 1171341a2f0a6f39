// What hyper_down.cu and hyper_down_row.cu share: rows of `down` in shared memory, and the terms of 32 columns. Needs F, COLS,
// THREADS, formats.cuh.
#pragma once

constexpr int CHUNK_BYTES = 256 / F::BLOCK * F::BYTES;
constexpr int PER_SPAN = 32 / F::GROUP;
constexpr int SPAN_TERMS = PER_SPAN * (1 + F::OFFSET);
constexpr int SPANS = COLS / 32;
constexpr int ROW_BYTES = COLS / F::BLOCK * F::BYTES;

DEVICE void copy_bytes(u8* to, const u8* from, int bytes) {  // 16 at a time, from any address; the shift stays
    const int shift = (int)((u64)from & 15);
#pragma unroll 1
    for (int i = 16 * threadIdx.x; i < shift + bytes; i += 16 * THREADS) copy16(to + i, from - shift + i);
}

// Where 16 bytes of a row's codes or of inputs lie: the halves of 32 columns apart, so that lanes meet in no bank.
DEVICE uint4* half_span(u8* row, int span, int half) { return (uint4*)(row + half * (COLS / 2)) + span; }

struct Codes {  // of 32 columns of a row
    uint4 low, high;
    float scale[PER_SPAN], offset[PER_SPAN];

    DEVICE void unpack(const u8* row, int span) {
        const u8* p = row + span / 8 * CHUNK_BYTES;
        const int s = span & 7;
        F::span(p, s, 0, Grid{0}, low.x, low.y);
        F::span(p, s, 1, Grid{0}, low.z, low.w);
        F::span(p, s, 2, Grid{0}, high.x, high.y);
        F::span(p, s, 3, Grid{0}, high.z, high.w);
#pragma unroll
        for (int k = 0; k < PER_SPAN; k++)
            scale[k] = F::scale(p, s * PER_SPAN + k), offset[k] = F::offset(p, s * PER_SPAN + k);
    }
    // The terms with 32 inputs. `sums`: of their groups.
    DEVICE void multiply(const uint4& x, const uint4& y, const float* sums, float* to) const {
        const u32 word[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        const u32 input[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
        int sum[2] = {MAGIC_BITS, PER_SPAN == 1 ? 0 : MAGIC_BITS};  // of even and odd words: halves where groups have 16
#pragma unroll
        for (int k = 0; k < 8; k++) sum[k & 1] = __dp4a((int)word[k], (int)input[k], sum[k & 1]);
        if (PER_SPAN == 1) sum[0] += sum[1];
        float t[SPAN_TERMS];
#pragma unroll
        for (int k = 0; k < PER_SPAN; k++) {
            t[k * (1 + F::OFFSET)] = scaled(sum[k], scale[k], -MAGIC * scale[k]);
            if (F::OFFSET) t[k * (1 + F::OFFSET) + 1] = sums[k] * offset[k];
        }
        if (SPAN_TERMS == 1) to[0] = t[0];
#pragma unroll
        for (int k = 0; k + 1 < SPAN_TERMS; k += 2) *(float2*)(to + k) = make_float2(t[k], t[k + 1]);
    }
};
