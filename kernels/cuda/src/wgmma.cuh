// Matrix steps of four warps together (compute capability 9.0): the activations come from shared memory, sums stay in
// registers and arrive later.
//
// A step: d (64 x N) = [d +] a (64 x 32) * b (32 x N), int8, N = 8 EIGHTS. Warp w of the four has rows 16 w .. 16 w + 15
// of a and d, in the registers of multiply32 (intrinsics.cuh): lane 4 g + t holds in d[4 j] .. d[4 j + 3] the columns
// 8 j + 2 t and 8 j + 2 t + 1 of row g, then of row g + 8.
//
// b lies as two pieces of 16 inputs; a piece has 16 bytes for each column, one column after another.
//
//     steps_begin();                      // registers are ready
//     step<N, false>(d, a, pieces(...));  // more of them
//     steps_commit();                     // these are one group
//     steps_wait<1>();                    // all groups but the last one have arrived
//     steps_arrived(d);                   // the compiler reads d after here
//
// All four warps call, and other reads may be moved across: nothing but a barrier orders them. What asynchronous copies or stores have left in shared memory is seen after steps_see_shared().
#pragma once

// Two pieces of b by their addresses in shared memory, the second one behind the first.
DEVICE u64 pieces(u32 first, u32 second) {
    return (u64)(128 >> 4) << 32 | (u32)((second - first) >> 4 << 16 | first >> 4);
}

#ifdef ON_HOST

DEVICE void steps_begin() {}
DEVICE void steps_commit() {}
DEVICE void steps_see_shared() {}
template <int LEFT>
DEVICE void steps_wait() {}
template <int N, bool ADDS, int REGISTERS>
DEVICE void step(int (&d)[REGISTERS], const u32 (&a)[4], u64 b) {
    emulated::step_of_four<N, ADDS>(d, a, b);
}
template <int USED, int REGISTERS>
DEVICE void steps_arrived(int (&)[REGISTERS]) {}
template <int USED, int REGISTERS>
DEVICE void steps_clear(int (&d)[REGISTERS]) {
    for (int i = 0; i < USED; i++) d[i] = 0;
}

#else

DEVICE void steps_begin() { asm volatile("wgmma.fence.sync.aligned;"); }
DEVICE void steps_commit() { asm volatile("wgmma.commit_group.sync.aligned;"); }
DEVICE void steps_see_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
template <int LEFT>
DEVICE void steps_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT));
}
template <int USED, int REGISTERS>
DEVICE void steps_arrived(int (&d)[REGISTERS]) {
#pragma unroll
    for (int i = 0; i < USED; i++) asm volatile("" : "+r"(d[i]));
}

// Registers of their own, before the first step: a later move into them would wait for all steps.
template <int USED, int REGISTERS>
DEVICE void steps_clear(int (&d)[REGISTERS]) {
#pragma unroll
    for (int i = 0; i < USED; i++) asm volatile("mov.u32 %0, 0;" : "=r"(d[i]));
}

#define NAMES_0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define NAMES_1 NAMES_0 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES_2 NAMES_1 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define NAMES_3 NAMES_2 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_4 NAMES_3 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define NAMES_5 NAMES_4 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define NAMES_7 NAMES_5 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define EIGHT_OF(i) \
    "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), "+r"(d[i + 6]), "+r"(d[i + 7])
#define EIGHTS_0 EIGHT_OF(0)
#define EIGHTS_1 EIGHTS_0, EIGHT_OF(8)
#define EIGHTS_2 EIGHTS_1, EIGHT_OF(16)
#define EIGHTS_3 EIGHTS_2, EIGHT_OF(24)
#define EIGHTS_4 EIGHTS_3, EIGHT_OF(32)
#define EIGHTS_5 EIGHTS_4, EIGHT_OF(40)
#define EIGHTS_7 EIGHTS_5, EIGHT_OF(48), EIGHT_OF(56)
#define STEP_OF(n, names, operands, a0, a1, a2, a3, at, adds)                                                       \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #adds ", 0;"                                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k32.s32.s8.s8 {" names "},{%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 \
                 "},%" #at ",p;}"                                                                                   \
                 : operands                                                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)ADDS))

template <int N, bool ADDS, int REGISTERS>
DEVICE void step(int (&d)[REGISTERS], const u32 (&a)[4], u64 b) {
    static_assert(N / 2 <= REGISTERS, "a step has N / 2 registers of sums");
    if constexpr (N == 16) STEP_OF(16, NAMES_0, EIGHTS_0, 8, 9, 10, 11, 12, 13);
    else if constexpr (N == 32) STEP_OF(32, NAMES_1, EIGHTS_1, 16, 17, 18, 19, 20, 21);
    else if constexpr (N == 48) STEP_OF(48, NAMES_2, EIGHTS_2, 24, 25, 26, 27, 28, 29);
    else if constexpr (N == 64) STEP_OF(64, NAMES_3, EIGHTS_3, 32, 33, 34, 35, 36, 37);
    else if constexpr (N == 80) STEP_OF(80, NAMES_4, EIGHTS_4, 40, 41, 42, 43, 44, 45);
    else if constexpr (N == 96) STEP_OF(96, NAMES_5, EIGHTS_5, 48, 49, 50, 51, 52, 53);
    else if constexpr (N == 128) STEP_OF(128, NAMES_7, EIGHTS_7, 64, 65, 66, 67, 68, 69);
    else static_assert(N == 0, "no step has this many columns");
}

#endif
