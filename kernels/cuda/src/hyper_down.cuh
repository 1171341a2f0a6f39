// What hyper_down.cu and hyper_down_row.cu share: rows of `down` in shared memory, the terms of 32 columns, and sums of terms.
// A lane adds the terms of one of the ROW_PARTS parts of a row in their order, and neighbouring lanes have neighbouring parts.
// Needs F, COLS, THREADS, ROW_PARTS, formats.cuh.
#pragma once

constexpr int CHUNK_BYTES = 256 / F::BLOCK * F::BYTES;
constexpr int PER_SPAN = 32 / F::GROUP;
constexpr int SPAN_TERMS = PER_SPAN * (1 + F::OFFSET);
constexpr int SPANS = COLS / 32;
constexpr int ROW_BYTES = COLS / F::BLOCK * F::BYTES;
constexpr int PART_SPANS = SPANS / ROW_PARTS;
constexpr int BETWEEN = 4;  // floats between parts, so that lanes with neighbouring parts meet in no bank
constexpr int PART_TERMS = PART_SPANS * SPAN_TERMS + BETWEEN, PART_SCALES = PART_SPANS + BETWEEN;  // floats
static_assert(SPANS % ROW_PARTS == 0 && 32 % ROW_PARTS == 0, "parts are equal, and a warp has whole rows");

DEVICE void copy_bytes(u8* to, const u8* from, int bytes) {  // 16 at a time, from any address; the shift stays
    const int shift = (int)((u64)from & 15);
#pragma unroll 1
    for (int i = 16 * threadIdx.x; i < shift + bytes; i += 16 * THREADS) copy16(to + i, from - shift + i);
}

// Where 16 bytes of a row's codes or of inputs lie: the halves of 32 columns apart, so that lanes meet in no bank.
DEVICE uint4* half_span(u8* row, int span, int half) { return (uint4*)(row + half * (COLS / 2)) + span; }

// Where the terms and the scale of a span lie among those of its row.
DEVICE int terms_at(int span) { return span * SPAN_TERMS + span / PART_SPANS * BETWEEN; }
DEVICE int scale_at(int span) { return span + span / PART_SPANS * BETWEEN; }

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

// Terms of LENGTH spans, and their scales. A read takes as long as the additions of eight spans.
template <int LENGTH>
struct Batch {
    float t[LENGTH * SPAN_TERMS], d[LENGTH];

    DEVICE void load(const float* terms, const float* scales) {
#pragma unroll
        for (int i = 0; i < LENGTH * SPAN_TERMS; i += 4) {
            const float4 v = *(const float4*)(terms + i);
            t[i] = v.x, t[i + 1] = v.y, t[i + 2] = v.z, t[i + 3] = v.w;
        }
#pragma unroll
        for (int i = 0; i < LENGTH; i += 4) {
            const float4 v = *(const float4*)(scales + i);
            d[i] = v.x, d[i + 1] = v.y, d[i + 2] = v.z, d[i + 3] = v.w;
        }
    }
    DEVICE float add(float sum) const {
#pragma unroll
        for (int i = 0; i < LENGTH * SPAN_TERMS; i++) sum = fmaf(t[i], d[i / SPAN_TERMS], sum);
        return sum;
    }
};

// The terms of a part in their order; those of the next spans are read while these are added. `ready`: for every OF_READY
// batches, of all parts, whether their terms are there; it is asked for early, since an answer takes a while. Whole warps.
template <int LENGTH, int OF_READY>
DEVICE float sum_of_part(const float* terms, const float* scales, const Ready* ready) {
    constexpr int ALL = PART_SPANS / LENGTH;
    static_assert(PART_SPANS % LENGTH == 0, "whole batches");
    Batch<LENGTH> held[2];
    ready_wait(ready);
    held[0].load(terms, scales);
    float sum = 0.0f;
    int end = OF_READY;  // of those that are there
    bool seen = false;
#pragma unroll 1
    for (int first = 0; first < ALL; first += 2) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (ALL % 2 && first + i == ALL) break;
            const int next = min(first + i + 1, ALL - 1);
            if (OF_READY < ALL && next == end) {
                ready++, end += OF_READY;
                if (!seen) ready_wait(ready);
            }
            held[i ^ 1].load(terms + next * (LENGTH * SPAN_TERMS), scales + next * LENGTH);
            if (OF_READY < ALL && next + 1 == end && end < ALL) seen = ready_seen(ready + 1);
            sum = held[i].add(sum);
        }
    }
    return sum;
}

// The parts of a row, one of each lane, in their order: the lane with the first has the whole sum. Whole warps.
DEVICE float add_parts(float part) {
    float sum = part;
#pragma unroll
    for (int p = 1; p < ROW_PARTS; p++) sum = sum + __shfl_down_sync(~0u, part, p);
    return sum;
}
