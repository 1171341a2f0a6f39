// The table of a type in shared memory. Needs formats.cuh and, of its source: the type F, THREADS of a block, COPIES of
// the table and where they lie (AT_TABLE).
#pragma once

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
