// What CUDA has no portable word for: names of the integers, bytes of words, launches, copies to shared memory, flags,
// matrix steps.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__
#define ARCH __CUDA_ARCH__
#define PARAMETER const __grid_constant__

#include "trace.cuh"

// The compiler must have the value here: it may not move the computation down past a wait.
#ifndef KEEP
#define KEEP(x) asm volatile("" : "+f"(x))
#endif

// ------------------------------------------------------------------------------------------------------------- bits

// Bytes of a (0-3) and b (4-7) by the nibbles of `pick`; a nibble's high bit spreads the byte's sign.
DEVICE u32 permute(u32 a, u32 b, u32 pick) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(pick));
    return r;
}

DEVICE u32 funnel(u32 low, u32 high, int bits) { return __funnelshift_r(low, high, bits); }

DEVICE float half_value(u16 bits) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits));
    return r;
}

DEVICE float float_bits(u32 bits) { return __uint_as_float(bits); }

DEVICE u32 parity(u32 x) { return __popc(x) & 1; }

// The line of this address comes to the second cache.
DEVICE void expect(const void* p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
}

// About so many nanoseconds, which other warps have.
DEVICE void rest(u32 ns) {
    asm volatile("nanosleep.u32 %0;" ::"r"(ns) : "memory");
}

// Since some time that all blocks share; it moves in steps of a microsecond or so.
DEVICE u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}

// ---------------------------------------------------------------------------------------------------------- launches

// A kernel that is launched before the end of its predecessor (kernel.py) calls inputs_ready() in every thread, also in
// those that have nothing to do: it returns when the predecessor has ended and what it wrote can be read, and lets the next
// kernel come to the card. So the end of a kernel means that all before it have ended, and a kernel that has come knows
// that all before its predecessor have.
//
// Before it a thread may read constants, and with `read_early` what kernels before the predecessor wrote. It writes nothing,
// unless the wrapper has made sure that the predecessor does not know the place: such a kernel is *early*. It calls
// next_may_come() first, works beside its predecessor, and waits at its end; the kernel after it may then read early
// only what was written before that predecessor.
DEVICE void next_may_come() {
#if ARCH >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

DEVICE void inputs_ready() {
#ifndef TRACES_ITSELF
    trace_begin();
#endif
#if ARCH >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
#ifndef TRACES_ITSELF
    trace_mark(1);
#endif
    next_may_come();
}

// Past the first level of the cache, which may hold what was there before.
DEVICE float read_early(const float* p) {
#if ARCH >= 900
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
#else
    return *p;
#endif
}

// The line of 128 bytes to the second cache: it will be read soon.
DEVICE void fetch_line(const void* p) {
#if ARCH >= 900
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}

// Whether this is the last of `blocks` to come here, after all its threads; what the others wrote before can then be read
// past the first cache. `ended`: a word that is 0, and is again afterwards. One thread's fences do for what its block's
// barriers order before and behind them.
DEVICE bool last_block(u32* ended, u32 blocks) {
    __shared__ u32 before;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        before = atomicInc(ended, blocks - 1);
        __threadfence();
    }
    __syncthreads();
    return before == blocks - 1;
}

// A barrier for some warps of a block; barrier: 1 to 15.
DEVICE void threads_meet(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ----------------------------------------------------------------------------------------------------------- copies

// 16 bytes from global to shared memory, both aligned. Asynchronous where the card can (sm_80 and newer).
DEVICE void copy16(void* to, const void* from) {
#if ARCH >= 800
    u32 a = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(a), "l"(from) : "memory");
#else
    *(uint4*)to = *(const uint4*)from;
#endif
}

// 4 bytes likewise.
DEVICE void copy4(void* to, const void* from) {
#if ARCH >= 800
    u32 a = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(a), "l"(from) : "memory");
#else
    *(u32*)to = *(const u32*)from;
#endif
}

DEVICE void copies_commit() {
#if ARCH >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until at most N of the thread's last groups are under way.
template <int N>
DEVICE void copies_wait() {
#if ARCH >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// -------------------------------------------------------------------------------------------------------------- box
//
// A mailbox in shared memory that one warp fills and another empties, again and again; whole warps call. Barriers and not
// flags with fences where the card has them (sm_80): a fence waits for the warp's copies under way, which are not its
// business. `turn` counts the fillings of this box, from 0.

#if ARCH >= 800 && !defined(ON_HOST)

struct Box {
    u64 full, empty;
};

DEVICE void box_init(Box* box) {
    const u32 at = (u32)__cvta_generic_to_shared(box);
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(at) : "memory");
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(at + 8) : "memory");
}

// Until the phase with this parity has ended.
DEVICE void box_wait(u32 at, u32 parity) {
    u32 done;
    do asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                    : "=r"(done)
                    : "r"(at), "r"(parity)
                    : "memory");
    while (!done);
}

DEVICE void box_arrive(u32 at, int lane) {
    __syncwarp();
    if (lane == 0) {
        u64 state;
        asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(state) : "r"(at) : "memory");
    }
}

DEVICE void box_wait_full(Box* box, u32 turn) { box_wait((u32)__cvta_generic_to_shared(box), turn & 1); }
DEVICE void box_wait_empty(Box* box, u32 turn) { box_wait((u32)__cvta_generic_to_shared(box) + 8, (turn & 1) ^ 1); }
DEVICE void box_fill(Box* box, int lane) { box_arrive((u32)__cvta_generic_to_shared(box), lane); }
DEVICE void box_empty(Box* box, int lane) { box_arrive((u32)__cvta_generic_to_shared(box) + 8, lane); }

#else

struct Box {
    u32 flag;
};

DEVICE void box_init(Box* box) { box->flag = 0; }

DEVICE void wait_for(u32* word, u32 value) {
    const u32 at = (u32)__cvta_generic_to_shared(word);
    u32 seen;
    do asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(seen) : "r"(at) : "memory");
    while (seen != value);
}

DEVICE void box_wait(Box* box, u32 value) { wait_for(&box->flag, value); }

DEVICE void box_set(Box* box, u32 value, int lane) {
    __syncwarp();
    const u32 at = (u32)__cvta_generic_to_shared(&box->flag);
    if (lane == 0) asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(at), "r"(value) : "memory");
}

DEVICE void box_wait_full(Box* box, u32) { box_wait(box, 1); }
DEVICE void box_wait_empty(Box* box, u32) { box_wait(box, 0); }
DEVICE void box_fill(Box* box, int lane) { box_set(box, 1, lane); }
DEVICE void box_empty(Box* box, int lane) { box_set(box, 0, lane); }

#endif

// ----------------------------------------------------------------------------------------------------- matrix steps

#define MAGIC_BITS 0x4B400000  // device.cuh

#if ARCH < 800
DEVICE void step8x8x16(int& c0, int& c1, u32 a, u32 b) {
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1},{%2},{%3},{%0,%1};"
                 : "+r"(c0), "+r"(c1)
                 : "r"(a), "r"(b));
}
#endif

// c (16 x 8) = START + a (16 x 32) * b (32 x 8), int8. Lane 4 g + t: a[0], a[2] are the two words of row g,
// a[1], a[3] those of row g + 8, b those of column g; c[0], c[1] are row g and columns 2 t, 2 t + 1, c[2], c[3] row
// g + 8. Which 8 of the 32 inputs a lane holds is free as long as a and b agree. HEIGHT = 8: rows 8-15 are not used.
template <int HEIGHT, int START = MAGIC_BITS>
DEVICE void multiply32(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if ARCH >= 800
    const u32 a1 = HEIGHT == 16 ? a[1] : 0, a3 = HEIGHT == 16 ? a[3] : 0;
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
                 : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
                 : "r"(a[0]), "r"(a1), "r"(a[2]), "r"(a3), "r"(b0), "r"(b1), "r"(START));
#else
    c[0] = c[1] = c[2] = c[3] = START;
    step8x8x16(c[0], c[1], a[0], b0);
    step8x8x16(c[0], c[1], a[2], b1);
    if (HEIGHT == 16) {
        step8x8x16(c[2], c[3], a[1], b0);
        step8x8x16(c[2], c[3], a[3], b1);
    }
#endif
}

// The same over 16 inputs: a_low is the word of row g, a_high that of row g + 8.
template <int HEIGHT, int START = MAGIC_BITS>
DEVICE void multiply16(int (&c)[4], u32 a_low, u32 a_high, u32 b) {
#if ARCH >= 800
    if (HEIGHT == 8) a_high = 0;
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5},{%6},{%7,%7,%7,%7};"
                 : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
                 : "r"(a_low), "r"(a_high), "r"(b), "r"(START));
#else
    c[0] = c[1] = c[2] = c[3] = START;
    step8x8x16(c[0], c[1], a_low, b);
    if (HEIGHT == 16) step8x8x16(c[2], c[3], a_high, b);
#endif
}

// c (16 x 8) += a (16 x 32) * b (32 x 8), as multiply32 has them.
DEVICE void add_multiply32(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if ARCH >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    step8x8x16(c[0], c[1], a[0], b0);
    step8x8x16(c[0], c[1], a[2], b1);
    step8x8x16(c[2], c[3], a[1], b0);
    step8x8x16(c[2], c[3], a[3], b1);
#endif
}
