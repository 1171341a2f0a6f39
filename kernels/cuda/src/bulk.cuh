// Copies of a warp from global to shared memory, a run of bytes each. Needs intrinsics.cuh and constants:
//
// BULK   1: one instruction a run (sm_90 and newer), whose end a barrier tells: it takes no time of the lanes and few turns
//        of shared memory. 0: 16 bytes a lane (copy16).
// DEPTH  runs under way at most; they end in their order
//
// Addresses and sizes are multiples of 16.

// Before runs to memory that this block has written itself, behind a barrier.
DEVICE void runs_may_write() {
#if BULK
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

struct Runs {
    u32 barriers;  // of this warp's runs, in shared memory; not used without BULK

    // `own`: DEPTH words of this warp. Ends with all lanes.
    DEVICE explicit Runs(u64* own) : barriers((u32)__cvta_generic_to_shared(own)) {
#if BULK
        if ((threadIdx.x & 31) == 0) {
            for (int i = 0; i < DEPTH; i++)
                asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barriers + 8 * i), "r"(1) : "memory");
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
#endif
    }
    // Run `turn` of at most MOST bytes begins; all lanes come, and `stage` is free.
    template <int MOST>
    DEVICE void begin(u32 turn, void* stage, const u8* from, int bytes) const {
        expect(turn, bytes);
        piece<MOST>(turn, stage, from, bytes);
    }
    // The same in pieces: first how many bytes they have together.
    DEVICE void expect(u32 turn, int bytes) const {
#if BULK
        if ((threadIdx.x & 31) == 0) {
            u64 state;
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 %0, [%1], %2;"
                         : "=l"(state)
                         : "r"(barriers + 8 * (turn % DEPTH)), "r"(bytes)
                         : "memory");
        }
#endif
    }
    template <int MOST>
    DEVICE void piece(u32 turn, void* stage, const u8* from, int bytes) const {
        const int lane = threadIdx.x & 31;
#if BULK
        if (lane == 0)
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                             (u32)__cvta_generic_to_shared(stage)),
                         "l"(from), "r"(bytes), "r"(barriers + 8 * (turn % DEPTH))
                         : "memory");
#else
        from += 16 * lane;
#pragma unroll
        for (int i = 0; i < MOST; i += 512)
            if (i + 16 * lane < bytes) copy16((u8*)stage + i + 16 * lane, from + i);
#endif
    }
    // As many of these as runs and places without one: what was begun in between is a group.
    DEVICE void commit() const {
#if !BULK
        copies_commit();
#endif
    }
    // Until run `turn` has ended, for all lanes.
    DEVICE void wait(u32 turn) const {
#if BULK
        const u32 barrier = barriers + 8 * (turn % DEPTH), parity = turn / DEPTH & 1;
        u32 done;
        do asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                        : "=r"(done)
                        : "r"(barrier), "r"(parity)
                        : "memory");
        while (!done);
#else
        copies_wait<DEPTH - 1>();
        __syncwarp();
#endif
    }
};
