// Something in shared memory that one warp makes once and others wait for. A barrier where the card has them (sm_80), since
// a fence waits for the copies under way. Needs intrinsics.cuh.
#pragma once

struct Ready {
    u64 made;
};

// By one thread, a __syncthreads() before anybody looks.
DEVICE void ready_init(Ready* ready) {
#if ARCH >= 800
    const u32 at = (u32)__cvta_generic_to_shared(&ready->made);
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(1) : "memory");
#else
    ready->made = 0;
#endif
}

// By the whole warp that made it.
DEVICE void ready_set(Ready* ready) {
    __syncwarp();
    if (threadIdx.x & 31) return;
    const u32 at = (u32)__cvta_generic_to_shared(&ready->made);
#if ARCH >= 800
    u64 state;
    asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(state) : "r"(at) : "memory");
#else
    asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(at), "r"(1u) : "memory");
#endif
}

// Whether it is made: what it holds can then be read. To ask early costs less than to wait.
DEVICE bool ready_seen(const Ready* ready) {
    const u32 at = (u32)__cvta_generic_to_shared(&ready->made);
    u32 seen;
#if ARCH >= 800
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(seen)
                 : "r"(at), "r"(0)
                 : "memory");
#else
    asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(seen) : "r"(at) : "memory");
#endif
    return seen;
}

DEVICE void ready_wait(const Ready* ready) {
    while (!ready_seen(ready)) {
    }
}
