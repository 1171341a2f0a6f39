// Rows of a table in a mapped file, which the processor brings to page-locked RAM while the card waits (row_desk.py).
//
// ask_rows     one block: the numbers of the rows go to the desk, then it rings
// bring_rows   waits for the answer, but not for ever, then copies it to the card: as many bytes as the rows have, rounded
//              up to words of 8; and numbers the copies, as the next kernel wants to look them up
// `own` lies on the card: the number of the last request, and whether an answer has ever failed to come.
#include "device.cuh"

enum { ASKED = 0, ANSWERED = 32, FAILED = 64, COUNT = 96 };  // words of the desk
enum { NUMBER, LOST };                                        // words of `own`

KERNEL __launch_bounds__(1024) void ask_rows(const long long* rows, int n, u32* own, int* desk, long long* ids) {
    inputs_ready();
    for (int i = threadIdx.x; i < n; i += 1024) ids[i] = rows[i];
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x) return;
    const u32 number = own[NUMBER] == 0xffffffffu ? 1 : own[NUMBER] + 1;  // 0 is none
    own[NUMBER] = number;
    desk[COUNT] = n;
    __threadfence_system();
    *(volatile u32*)(desk + ASKED) = number;
}

// first: rows that were brought before; out begins with these.
KERNEL __launch_bounds__(256) void bring_rows(int n, int words, u64 limit_ns, u32* own, int* desk, const u64* rows,
                                              u64* out, long long* numbers, int first) {
    inputs_ready();
    __shared__ int lost;
    if (threadIdx.x == 0) {
        const u32 number = own[NUMBER];
        const u64 since = nanoseconds();
        lost = *(volatile u32*)(own + LOST) != 0;
        while (!lost && *(volatile u32*)(desk + ANSWERED) != number) {
            if (nanoseconds() - since < limit_ns) continue;
            lost = 1;
            own[LOST] = 1;
            *(volatile int*)(desk + FAILED) = 1;
        }
        __threadfence_system();
    }
    __syncthreads();
    const volatile u64* from = rows;
    for (int i = blockIdx.x * 256 + threadIdx.x; i < words; i += 256 * gridDim.x) out[i] = lost ? 0 : from[i];
    for (int i = blockIdx.x * 256 + threadIdx.x; i < n; i += 256 * gridDim.x) numbers[first + i] = first + i;
}
