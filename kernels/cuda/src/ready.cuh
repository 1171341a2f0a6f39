// Something in shared memory that some warps make once and others wait for. A barrier where the card has them (sm_80), since
// a fence waits for the copies under way. Needs intrinsics.cuh.
#pragma once

struct __align__(8) Ready {
    u32 left, unused;
};

// By one thread, a __syncthreads() before anybody looks.
DEVICE void ready_init(Ready* ready, int warps) {
#if ARCH >= 800
    const u32 at = (u32)__cvta_generic_to_shared(ready);
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(warps) : "memory");
#else
    ready->left = warps;
#endif
}

// By each whole warp that makes it.
DEVICE void ready_set(Ready* ready) {
    __syncwarp();
    if (threadIdx.x & 31) return;
#if ARCH >= 800
    const u32 at = (u32)__cvta_generic_to_shared(ready);
    u64 state;
    asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(state) : "r"(at) : "memory");
#else
    __threadfence_block();
    atomicSub(&ready->left, 1u);
#endif
}

// Whether it is made: what it holds can then be read. To ask early costs less than to wait.
DEVICE bool ready_seen(const Ready* ready) {
    const u32 at = (u32)__cvta_generic_to_shared(ready);
    u32 seen;
#if ARCH >= 800
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(seen)
                 : "r"(at), "r"(0)
                 : "memory");
    return seen;
#else
    asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(seen) : "r"(at) : "memory");
    return seen == 0;
#endif
}

DEVICE void ready_wait(const Ready* ready) {
    while (!ready_seen(ready)) {
    }
}
