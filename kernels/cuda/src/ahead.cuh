// Weights of kernels to come on their way to the second level of the cache. ahead.py says what it is good for.
#pragma once
#include "intrinsics.cuh"

constexpr int AHEAD_MOST = 4;
constexpr int AHEAD_PIECE = 4096;

struct Ahead {
    const u8* first[AHEAD_MOST];
    int pieces[AHEAD_MOST];
};

// By all threads of a block that does nothing else; `block` counts such blocks.
DEVICE void bring(const Ahead& ahead, int block) {
#if ARCH >= 900
    int piece = block * (int)blockDim.x + (int)threadIdx.x;
#pragma unroll
    for (int i = 0; i < AHEAD_MOST; i++) {
        if (piece >= 0 && piece < ahead.pieces[i])
            asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(ahead.first[i] + (long long)piece * AHEAD_PIECE),
                         "r"(AHEAD_PIECE)
                         : "memory");
        piece -= ahead.pieces[i];
    }
#endif
    inputs_ready();
}
