// A matrix of the next kernel on its way to the second level of the cache. ahead.py says what it is good for.
#pragma once
#include "intrinsics.cuh"

constexpr int AHEAD_PIECE = 4096;

struct Ahead {
    const u8* first;
    int pieces;

    // Block `block` of `blocks` asks for its share; a thread for one piece of it. Behind inputs_ready(): the kernel before
    // needs the memory for itself.
    DEVICE void ask(int block, int blocks) const {
#if ARCH >= 900
        const int piece = (int)threadIdx.x * blocks + block;
        if (piece < pieces)
            asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(first + (long long)piece * AHEAD_PIECE),
                         "r"(AHEAD_PIECE)
                         : "memory");
#endif
    }
};
