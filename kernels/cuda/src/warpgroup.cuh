// Matrix steps of four warps together (sm_90a), whose operands lie in shared memory (wide.cuh) and whose sums come to their
// registers while they do something else; bulk copies and the barriers that tell their end. Needs intrinsics.cuh.
#pragma once

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---------------------------------------------------------------------------------------------------------- barriers

DEVICE void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// By the thread that has made barriers, before the block's first meeting.
DEVICE void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void barrier_arrive(u32 barrier) {
    u64 state;
    asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(state) : "r"(barrier) : "memory");
}

DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    u64 state;
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 %0, [%1], %2;" : "=l"(state) : "r"(barrier), "r"(bytes) : "memory");
}

// Until the phase with this parity has ended.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    u32 done;
    do asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                    : "=r"(done)
                    : "r"(barrier), "r"(parity)
                    : "memory");
    while (!done);
}

// So many bytes, a multiple of 16 as both addresses are, to shared memory; counted by the barrier.
DEVICE void copy_bulk(u32 to, const u8* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// ------------------------------------------------------------------------------------------------------ matrix steps

// Of an operand of 16 columns at this address of shared memory: eight columns on are 128 bytes further, eight rows 1,024.
DEVICE u64 operand(u32 at) { return (u64)(at >> 4 & 0x3FFF) | (u64)(128 >> 4) << 16 | (u64)(1024 >> 4) << 32; }

// Before steps that write registers which have been read.
DEVICE void steps_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void steps_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most N of the last groups are under way.
template <int N>
DEVICE void steps_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

#define F4(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define F32(c) F4(c, 0), F4(c, 4), F4(c, 8), F4(c, 12), F4(c, 16), F4(c, 20), F4(c, 24), F4(c, 28)

// c (64 x 64) = a (64 x 16) b (16 x 64), or with `adds` c + a b; halves, float sums. Warp w has rows 16 w on, lane 4 g + t of
// eight columns j: c[4 j], c[4 j + 1] of row g and columns 2 t, 2 t + 1, c[4 j + 2], c[4 j + 3] of row g + 8.
template <bool ADDS>
DEVICE void multiply64(float (&c)[32], u64 a, u64 b) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, 0;}"
        : F32(c)
        : "l"(a), "l"(b), "n"(ADDS));
}

// The compiler may not read these before what was waited for.
DEVICE void sums_there(float (&c)[32]) { asm volatile("" : F32(c)::"memory"); }
