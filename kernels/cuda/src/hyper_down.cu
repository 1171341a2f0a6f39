// A product of a hyper-connection's mix in a window of several rows: a = down * normed; of one row: hyper_down_row.cu.
//
// A block takes ROWS rows of `down` over their whole length, which come to shared memory before the activations are there.
// A lane of WORKERS warps keeps the codes of 32 columns of the rows, copies the inputs of these columns for itself and makes
// their terms; a lane of SUMMERS warps adds those of a part of a row and an input in their order, which takes long, so that it
// begins as soon as it can: a warp of workers has neighbouring columns of every part, and the first warp the first.
// Constants   TYPE a format without a table, ROWS, COLS = C * H, ROW_PARTS of a row's sum, COLUMNS rows of activations whose
//             copies are under way together, WORKERS, SUMMERS
// Shapes      down (rows, C * H); int8, scales and sums of n rows as hyper_norm leaves them: q (n, 2, C * H / 2) by halves
//             of blocks, d (n, C * H / 32), sums (n, C * H / GROUP) -> a (n, rows), as words (words.cuh), which are emptied
//             first when hyper_window looks for them. C * H a multiple of 256. Dynamic shared memory: `Parts`
// Source      `product` of ops.py
#include "rows.cuh"
#include "formats.cuh"
#include "ready.cuh"
#include "words.cuh"

typedef TYPE F;
constexpr int THREADS = 32 * (WORKERS + SUMMERS);
#include "hyper_down.cuh"

constexpr int AT_ONCE = 8;                                // spans whose terms are read at once
constexpr int OF_PART = 32 / ROW_PARTS;                   // spans of a part that a warp has, which become ready together
constexpr int BESIDE = ROWS <= 3 && ARCH >= 800 ? 2 : 1;  // registers that leave room for a block of another kernel
static_assert(WORKERS <= 16, "a barrier between any two of them that follow each other");
static_assert(PART_SPANS % AT_ONCE == 0 && OF_PART % AT_ONCE == 0, "terms are read eight spans at once");

// Shared memory, in bytes from its beginning. hyper_window.py computes the same.
struct Parts {
    static constexpr int PITCH = ROW_PARTS * PART_TERMS, SCALE_PITCH = ROW_PARTS * PART_SCALES;  // of a row and input, an input
    static constexpr int ROW = (ROW_BYTES + 31) / 16 * 16;                                       // bytes of a packed row
    static constexpr int INPUTS = 0, PACKED = COLUMNS * COLS;
    static constexpr int SCALES = PACKED + (SPANS > 32 * WORKERS ? ROWS * ROW : 0);  // else in the place of the packed rows

    DEVICE static int terms(int n) { return SCALES + n * SCALE_PITCH * 4; }
};

struct Rows {  // of `down`, that a block takes
    const u8* first;
    int count;

    DEVICE Rows(const u8* down, int rows)
        : first(down + (long long)blockIdx.x * ROWS * ROW_BYTES), count(min(ROWS, rows - (int)blockIdx.x * ROWS)) {}
    DEVICE void copy(u8* memory) const {
        for (int r = 0; r < count; r++) copy_bytes(memory + Parts::PACKED + r * Parts::ROW, first + r * ROW_BYTES, ROW_BYTES);
    }
    // Where the sum of row id / n with the input id % n goes.
    DEVICE float* sum(float* a, int n_rows, int n, int id) const {
        const int r = id / n;
        return a + (long long)(id - r * n) * n_rows + blockIdx.x * ROWS + r;
    }
    DEVICE const u8* at(const u8* memory, int r) const {
        return memory + Parts::PACKED + r * Parts::ROW + ((u64)(first + r * ROW_BYTES) & 15);
    }
};

// A span of a warp that has OF_PART spans of every part, from span `first` of the part on.
struct Own {
    int span;
    bool works;  // whether the part has it; else `span` is its last

    DEVICE Own(int first, int i) : span(first + i % OF_PART), works(span < PART_SPANS) {
        span = min(span, PART_SPANS - 1) + i / OF_PART * PART_SPANS;
    }
};

// Copies of a lane's columns of COLUMNS inputs from `begin` on, each a group, and with the first the scales of its warp's.
DEVICE void copy_inputs(u8* memory, const u8* q, const float* d, int n, int begin, int first) {
    const int lane = threadIdx.x & 31;
    const Own own(first, lane), four(first, 4 * (lane & 7));
    for (int i = lane / 8; i < COLUMNS; i += 4)
        if (begin + i < n && four.works)
            copy16((float*)(memory + Parts::SCALES) + (begin + i) * Parts::SCALE_PITCH + scale_at(four.span),
                   d + (long long)(begin + i) * SPANS + four.span);
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
        if (own.works && begin + i < n)
#pragma unroll
            for (int half = 0; half < 2; half++)
                copy16(half_span(memory + Parts::INPUTS + i * COLS, own.span, half),
                       q + (long long)(begin + i) * COLS + half * (COLS / 2) + 16 * own.span);
        copies_commit();
    }
}

// Until the lane's copies of input i have come, those of the inputs behind it still under way.
DEVICE void wait_for_input(int i) {
    switch (COLUMNS - 1 - i) {
        case 7: return copies_wait<7>();
        case 6: return copies_wait<6>();
        case 5: return copies_wait<5>();
        case 4: return copies_wait<4>();
        case 3: return copies_wait<3>();
        case 2: return copies_wait<2>();
        case 1: return copies_wait<1>();
        default: return copies_wait<0>();
    }
}

struct Worker {  // a lane with 32 columns of all rows
    Codes codes[ROWS];

    DEVICE void unpack(const u8* memory, const Rows& rows, int span) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) codes[r].unpack(rows.at(memory, min(r, rows.count - 1)), span);
    }
    DEVICE void multiply(u8* memory, const float* sums, int n, int begin, const Own& own) const {
        const int span = own.span;
        float* terms = (float*)(memory + Parts::terms(n)) + terms_at(span);
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            wait_for_input(i);
            if (!own.works || begin + i >= n) continue;
            u8* input = memory + Parts::INPUTS + i * COLS;
            const uint4 low = *half_span(input, span, 0), high = *half_span(input, span, 1);
            float of_groups[PER_SPAN];
#pragma unroll
            for (int k = 0; k < PER_SPAN; k++)
                of_groups[k] = F::OFFSET ? sums[((long long)(begin + i) * SPANS + span) * PER_SPAN + k] : 0.0f;
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                codes[r].multiply(low, high, of_groups, terms + (r * n + begin + i) * Parts::PITCH);
        }
    }
};

KERNEL void __launch_bounds__(THREADS, BESIDE)
    hyper_down(const u8* q, const float* d, const float* sums, const u8* down, float* a, int n_rows, int n, int early) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ Ready ready[(PART_SPANS + OF_PART - 1) / OF_PART];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const Rows rows(down, n_rows);
    if (early && threadIdx.x < rows.count * n) empty_word(rows.sum(a, n_rows, n, threadIdx.x));
    for (int i = threadIdx.x; OF_PART * i < PART_SPANS; i += THREADS) ready_init(ready + i, 1);
    rows.copy(memory);
    copies_commit();
    copies_wait<0>();
    __syncthreads();
    const int own = warp - SUMMERS;
    int first = OF_PART * own;  // of the warp's columns of each part, in spans
    Worker worker;
    if (warp >= SUMMERS) worker.unpack(memory, rows, Own(first, lane).span);
    __syncthreads();
    inputs_ready();
    if (warp < SUMMERS) {
        const bool works = threadIdx.x < rows.count * n * ROW_PARTS;
        const int id = works ? threadIdx.x : 0;  // of a part
        const float sum = add_parts(sum_of_part<AT_ONCE, OF_PART / AT_ONCE>(
            (const float*)(memory + Parts::terms(n)) + id * PART_TERMS,
            (const float*)(memory + Parts::SCALES) + id % (n * ROW_PARTS) * PART_SCALES, ready));
        if (works && id % ROW_PARTS == 0) put_word(rows.sum(a, n_rows, n, id / ROW_PARTS), sum);
        return;
    }
    for (;;) {
        for (int begin = 0; begin < n; begin += COLUMNS) {
            const bool ordered = begin == 0 && first < OF_PART * WORKERS;  // in their order: sums begin with the first
            if (ordered && own > 0) threads_meet(own, 64);
            copy_inputs(memory, q, d, n, begin, first);
            if (ordered && own + 1 < WORKERS) threads_meet(own + 1, 64);
            worker.multiply(memory, sums, n, begin, Own(first, lane));
        }
        ready_set(ready + first / OF_PART);
        first += OF_PART * WORKERS;
        if (first >= PART_SPANS) return;
        worker.unpack(memory, rows, Own(first, lane).span);
    }
}
