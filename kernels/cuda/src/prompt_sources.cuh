// What a block of a prompt's product looks up before its first step. Needs prompt_work.cuh and, of its source, what
// prompt_table.cuh needs, and where in shared memory the parts lie (AT_SOURCE, AT_PLACES).
#pragma once
#include "prompt_table.cuh"

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
