// Words that a kernel hands to the one behind it while both run. Needs intrinsics.cuh.
//
// The maker empties its words before the kernel behind it can come, and puts a number into each when it has it; the taker,
// launched right behind it, looks until a word is not empty, which costs less than the end of a kernel. It cannot wait
// for a block that has no place: it comes to the card when all blocks of the maker are there. The place is nobody
// else's: kernels before the maker may still run when it is emptied. Where launches do not overlap all numbers are there.
#pragma once

constexpr u32 EMPTY = 0xFFFFFFFFu;  // a NaN that no arithmetic of a card makes
constexpr u32 MOST_LOOKS = 1u << 24;  // some ten seconds; then the launch fails

// By threads of the maker, before they copy anything: a fence waits for copies. Then a barrier of the block, before any of
// its threads lets the next kernel come.
DEVICE void empty_word(float* word) {
#if ARCH >= 900
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(EMPTY) : "memory");
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
#else
    *word = __uint_as_float(EMPTY);
#endif
}

DEVICE void put_word(float* word, float value) {
#if ARCH >= 900
    const u32 bits = __float_as_uint(value), kept = bits == EMPTY ? 0x7FFFFFFFu : bits;
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(kept) : "memory");
#else
    *word = value;
#endif
}

// The numbers of N words of each lane of a whole warp; at(i): where they lie.
template <int N, class At>
DEVICE void take_words(float (&v)[N], At at) {
#if ARCH >= 900
    bool missing = true;
    for (u32 looks = 0; missing; looks++) {
        if (looks == MOST_LOOKS) __trap();
        missing = false;
#pragma unroll
        for (int i = 0; i < N; i++) {
            u32 bits;
            asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(bits) : "l"(at(i)) : "memory");
            v[i] = __uint_as_float(bits);
        }
#pragma unroll
        for (int i = 0; i < N; i++) missing |= __float_as_uint(v[i]) == EMPTY;
        missing = __any_sync(~0u, missing);
    }
#else
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = *at(i);
#endif
}
