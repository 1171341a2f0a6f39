// Matrix steps of four warps together (sm_90a), whose operands lie in shared memory (wide.cuh) and whose sums come to their
// registers while they do something else; bulk copies and the barriers that tell their end. Needs intrinsics.cuh.
#pragma once

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// What lies at an address of shared memory. Not before what stands before it, as little as what else is asked for here.
DEVICE float4 four_at(u32 at) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
    return v;
}

DEVICE float2 two_at(u32 at) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
    return v;
}

// ---------------------------------------------------------------------------------------------------------- barriers

DEVICE void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// By the thread that has made barriers, before the block's first meeting.
DEVICE void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Whole warps call these, and one lane does it: not a branch, behind which the compiler would no longer know what the lanes
// of a warp share.

DEVICE void barrier_arrive(u32 barrier, bool lane) {
    asm volatile(
        "{.reg .pred p; .reg .b64 state; setp.ne.b32 p, %1, 0; @p mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(barrier),
        "r"((int)lane)
        : "memory");
}

// So many bytes will come.
DEVICE void barrier_expect(u32 barrier, u32 bytes, bool lane) {
    asm volatile(
        "{.reg .pred p; .reg .b64 state; setp.ne.b32 p, %2, 0; "
        "@p mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;}" ::"r"(barrier),
        "r"(bytes), "r"((int)lane)
        : "memory");
}

// They come to shared memory: a multiple of 16, as both addresses are.
DEVICE void copy_bulk(u32 to, const u8* from, u32 bytes, u32 barrier, bool lane) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %4, 0; "
        "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];}" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "r"((int)lane)
        : "memory");
}

// Until the phase with this parity has ended.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    u32 done;
    do asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                    : "=r"(done)
                    : "r"(barrier), "r"(parity)
                    : "memory");
    while (!__any_sync(~0u, done));
}

// A turn that teams of `threads` pass on: the next one's barrier (1 to 15) ends when that has come and this one has passed it.
DEVICE void pass_turn(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ------------------------------------------------------------------------------------------------------ matrix steps

// An operand of 16 columns at this address of shared memory, the low half of its descriptor: eight columns on are 128 bytes
// further. STRIDE, the other half: eight rows on are 1,024.
DEVICE u32 operand(u32 at) { return at >> 4 | 128 >> 4 << 16; }
#define STRIDE "64"

// Before steps that write registers which have been read.
DEVICE void steps_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void steps_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most N of the last groups are under way.
template <int N>
DEVICE void steps_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

#define FOUR(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define SIXTEEN_OF(c, i) FOUR(c, i), FOUR(c, i + 4), FOUR(c, i + 8), FOUR(c, i + 12)

// c (64 x 64) = a (64 x 16) b (16 x 64), or with ADDS c + a b; halves, float sums. Warp w has rows 16 w on, lane 4 g + t of
// eight columns j: c[4 j], c[4 j + 1] of row g and columns 2 t, 2 t + 1, c[4 j + 2], c[4 j + 3] of row g + 8.
template <bool ADDS>
DEVICE void multiply64x64(float (&c)[32], u32 a, u32 b) {
    asm volatile(
        "{.reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %34, 0; "
        "mov.b64 a, {%32, " STRIDE "}; mov.b64 b, {%33, " STRIDE "}; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31}, a, b, p, 1, 1, 0, 0;}"
        : SIXTEEN_OF(c, 0), SIXTEEN_OF(c, 16)
        : "r"(a), "r"(b), "n"(ADDS));
}

// The compiler may not read these before what was waited for, nor later than where this stands.
DEVICE void sums_there(float (&c)[32]) { asm volatile("" : SIXTEEN_OF(c, 0), SIXTEEN_OF(c, 16)::"memory"); }
