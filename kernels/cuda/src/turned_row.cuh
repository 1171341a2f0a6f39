// Rows whose blocks lie across words, for four lanes that share a row (formats.cuh): which of a group's inputs a lane has is free,
// as long as all rows agree, so a lane takes whole words where they lie. Needs formats.cuh.
#pragma once

// Whether a type is read so.
template <class T>
struct Turnable {
    enum { YES = 0 };
};

template <>
struct Turnable<Q6_K> {
    enum { YES = 1 };
};

// Blocks of Q6_K that begin 2 past a multiple of 4: a lane takes whole words, which lie 2 further in their group of 16, and
// the last of a group its ends; `take_pair` puts the inputs in that order. So 13 words are read for 12, not 24.
struct TurnedRow {
    u32 word[13];
    u32 pick;

    DEVICE TurnedRow(const u8* p, int t, Grid) {
        const u32 odd = (u32)(u64)p & 2, first = t + (odd >> 1);  // the fourth of a group is the first of the next
        const u32* words = (const u32*)(p - odd) + (first & 3);
        pick = first == 4 ? 0x5432 : 0x3210;
#pragma unroll
        for (int i = 0; i < 13; i++) word[i] = words[4 * i];
    }
    DEVICE u32 group(int i) const { return permute(word[i], word[i + 1], pick); }  // of 16 bytes
    DEVICE void span(int s, u32& c0, u32& c1) const {
        const int low = 4 * (s >> 2) + 2 * (s & 1), high = 8 + 2 * (s >> 2);
        c0 = Q6_K::code(group(low), Q6_K::turned(group(high)), s);
        c1 = Q6_K::code(group(low + 1), Q6_K::turned(group(high + 1)), s);
    }
};

// Pieces i and i + 1 of two inputs each, of eight in a group of 16, to where a lane wants them for weights that lie 2 past a
// multiple of 4 (TurnedRow): 1 to 6 come first, and the ends are together.
DEVICE void take_pair(u8* block, int group, int i, u32 word) {
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int piece = i + k, at = piece == 0 ? 6 : piece == 7 ? 7 : piece - 1;
        *(u16*)(block + 8 * (at >> 1) + 4 * group + 2 * (at & 1)) = (u16)(word >> 16 * k);
    }
}
