// When a block was where, for bench/window_trace_cuda.py. Without TRACED, a number of the kernel, nothing of it is compiled.
//
// A record is RECORD_WORDS words: the kernel, multiprocessor and block; the multiprocessor's clock when the block's first thread
// began to wait for the kernel before (mark 0), when it need not wait any more (mark 1), at the marks behind that, and at the
// block's first line (the last mark) where the source says TRACES_ENTRY and calls trace_entry there. A kernel that begins its
// records itself says TRACES_ITSELF.
#pragma once

#ifdef TRACED
enum { RECORD_WORDS = 12, MOST_RECORDS = 1 << 18, ENTRY = RECORD_WORDS - 2 };
__device__ u64* trace_to;  // the number of records, and behind RECORD_WORDS words the records

DEVICE u64*& trace_record() {
    __shared__ u64* record;
    return record;
}

DEVICE u64& trace_came() {
    __shared__ u64 came;
    return came;
}

DEVICE u64 trace_clock() {
    u64 now;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
    return now;
}
#endif

DEVICE void trace_entry() {
#ifdef TRACED
    if (threadIdx.x == 0) trace_came() = trace_clock();
#endif
}

DEVICE void trace_begin() {
#ifdef TRACED
    if (threadIdx.x) return;
    const u64 now = trace_clock();
    u32 sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    const u32 number = min(atomicAdd((u32*)trace_to, 1u), (u32)MOST_RECORDS - 1);
    u64* record = trace_to + (number + 1ull) * RECORD_WORDS;
    record[0] = (u64)TRACED << 48 | (u64)sm << 32 | blockIdx.x;
    record[1] = now;
#ifdef TRACES_ENTRY
    record[1 + ENTRY] = trace_came();
#endif
    trace_record() = record;
#endif
}

// Marks 1 to ENTRY - 1, after trace_begin.
DEVICE void trace_mark(int mark) {
#ifdef TRACED
    if (threadIdx.x == 0) trace_record()[1 + mark] = trace_clock();
#endif
}
