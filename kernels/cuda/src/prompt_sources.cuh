// What a block of a prompt's product looks up before its first step. Needs prompt_work.cuh and, of its source: the type F,
// THREADS of a block, COPIES of the type's table, and where in shared memory the parts lie (AT_SOURCE, AT_PLACES, AT_TABLE).
#pragma once

// Where the row of each column begins, in units of UNIT int8, and the place of its results.
template <int UNIT = 1>
DEVICE void find_sources(u8* shared, const Arguments& a, const Work& w) {
    for (int c = threadIdx.x; c < BN; c += THREADS) {
        const int column = w.begin + min(c, w.count - 1), place = MODE == DENSE ? column : a.order[column];
        const u32 first = MODE == DENSE ? w.matrix * (a.apart / UNIT) : 0;
        ((u32*)(shared + AT_SOURCE))[c] = (u32)(MODE == DENSE ? place : place / a.divide) * (u32)(a.pitch / UNIT) + first;
        ((int*)(shared + AT_PLACES))[c] = place;
    }
}

// The type's table, and the lane's copy of it.
DEVICE Grid fill_table(u8* shared) {
#if HAS_TABLE
    enum { WORDS = F::LOOK == WORD ? 1 : 2 };
    u32* table = (u32*)(shared + AT_TABLE);
    for (int i = threadIdx.x; i < F::GRID * COPIES; i += THREADS)
        for (int k = 0; k < WORDS; k++) table[i * WORDS + k] = table_words[i / COPIES * WORDS + k];
#endif
    const int lane = threadIdx.x & 31, copy = COPIES == 1 ? 0 : (F::LOOK == HALF ? lane >> 1 : lane) % COPIES;
    return Grid{shared + AT_TABLE + copy * (F::LOOK == WORD ? 4 : 8)};
}
