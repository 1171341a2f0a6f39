// Numbers that a kernel hands to the next one while both run: words in device memory of a number and the turn in which it was
// posted. The reader comes when all blocks of the poster have come (kernel.py), so that it waits for blocks that run.
// Needs intrinsics.cuh.
//
// A turn is a launch of the poster and one of the reader. Both take its number from `Mail` before they let the next kernel
// come: the poster's blocks before there is a reader, and the last of the reader's blocks to have taken it moves it on. A
// word is posted anew at least once in 2^32 turns.
#pragma once

struct Mail {
    u32 turn, taken;  // `taken`: blocks of the reader that have the turn
};

constexpr u32 MOST_LOOKS = 1u << 22;  // a second or two, then the kernel ends with an error

DEVICE u32 mail_turn(const Mail* mail) { return __float_as_uint(read_early((const float*)&mail->turn)) + 1; }

// By one thread of each of the reader's blocks. The next kernel may come when all have called it.
DEVICE u32 mail_take(Mail* mail, u32 blocks) {
    const u32 turn = mail_turn(mail);
    if (atomicInc(&mail->taken, blocks - 1) == blocks - 1) {
        mail->turn = turn;
        __threadfence();
    }
    next_may_come();
    return turn;
}

DEVICE void mail_post(u64* word, u32 turn, float value) {
    const u64 both = (u64)turn << 32 | __float_as_uint(value);
#if ARCH >= 900
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(both) : "memory");
#else
    *word = both;
#endif
}

// The numbers of N words, all looked for together.
template <int N>
DEVICE void mail_read(float (&value)[N], const u64* const (&word)[N], u32 turn) {
#if ARCH >= 900
    bool all;
    u32 looks = 0;
    do {
        u64 both[N];
#pragma unroll
        for (int i = 0; i < N; i++)
            asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(both[i]) : "l"(word[i]) : "memory");
        all = true;
#pragma unroll
        for (int i = 0; i < N; i++) {
            all &= (u32)(both[i] >> 32) == turn;
            value[i] = __uint_as_float((u32)both[i]);
        }
        if (!all && ++looks == MOST_LOOKS) asm volatile("trap;");
    } while (!all);
#else  // one kernel after the other
#pragma unroll
    for (int i = 0; i < N; i++) value[i] = __uint_as_float((u32)*word[i]);
#endif
}
