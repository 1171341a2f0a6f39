// A table in shared memory that many fill, `parts` times a turn, and a warp reads when it is full, again and again.
//
// `turn` counts the fillings of this table, from 0. A reader waits for the readings of the turns before, so the parity of a
// barrier tells it that its turn is full (where the card has barriers, sm_80; those who fill have copies under way, and a fence would wait for
// them). Those who fill may leave turns out: they look at the number of readings. Needs intrinsics.cuh.
#pragma once

struct Gate {
    u64 full;
    u32 read, unused;
};

DEVICE u32 gate_seen(const u32* word) {
    u32 seen;
    asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(seen) : "r"((u32)__cvta_generic_to_shared(word)) : "memory");
    return seen;
}

DEVICE void gate_init(Gate* gate, int parts) {
    gate->read = 0;
#if ARCH >= 800
    const u32 at = (u32)__cvta_generic_to_shared(&gate->full);
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(parts) : "memory");
#else
    gate->full = 0;
#endif
}

// Of every thread that comes.
DEVICE void gate_wait_full(const Gate* gate, u32 turn, int parts) {
#if ARCH >= 800
    const u32 at = (u32)__cvta_generic_to_shared(&gate->full);
    u32 done;
    do asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                    : "=r"(done)
                    : "r"(at), "r"(turn & 1)
                    : "memory");
    while (!done);
#else
    while (gate_seen((const u32*)&gate->full) < parts * (turn + 1));
#endif
}

DEVICE void gate_wait_read(const Gate* gate, u32 turn) {
    while (gate_seen(&gate->read) < turn);
}

// By one thread, for lanes that a __syncwarp() was before.
DEVICE void gate_filled(Gate* gate) {
#if ARCH >= 800
    u64 state;
    asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(state) : "r"((u32)__cvta_generic_to_shared(&gate->full)) : "memory");
#else
    __threadfence();
    atomicAdd((u32*)&gate->full, 1u);
#endif
}

DEVICE void gate_read(Gate* gate) {
    __threadfence_block();
    atomicAdd(&gate->read, 1u);
}
