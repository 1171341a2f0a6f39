// A prompt's rows on their way into a hyper-connection, in one pass over their streams.
//
// hyper_rows   [x = fma(beta, y, x) when beta is given,] normed = rms(x) per stream, which is not written: q, d and sums are
//              its int8, scales and sums of groups as quantize.cu leaves them, `factors` the r of each stream; with `inject`
//              also strength = 2 * sigmoid(lanes(inject * normed) * scale)
// A team of 128 threads has ROWS rows; thread j is chain j of every sum. A block is a team, or TEAMS of them with w and inject
// in its shared memory, which take rows in turn: a multiprocessor then reads these once, not again for every team's rows.
// Of 2.0 GB that passed from the second cache to 8,192 rows, 0.84 were w and inject: they and the rows do not fit the first.
//
// Constants   STREAMS, PER_THREAD = H / 128, ROWS, INPUT_ORDER, SUMS (0, 16, 32), INJECTS (0, 1), TEAMS (0: a block is one,
//             else with INJECTS)
// Shapes      x (n, C, H), y (n, H), beta and strength (n, C), w (C, H), inject (C, C * H), factors (n, C)
// Cost        x is read and written once, y read once from memory; a byte and an eighth written an element
#include "rows.cuh"
#include "formats.cuh"
#include "quantize_lane.cuh"

enum { H = LANES * PER_THREAD, KEPT = INJECTS ? STREAMS : 1, AT_ONCE = TEAMS ? TEAMS : 1 };

#if TEAMS
// Shared memory of a block; hyper.py knows how much it is.
struct Resident {
    float w[STREAMS * H], inject[STREAMS * STREAMS * H];
};
#endif

DEVICE void team_meets() {
    if (TEAMS) threads_meet(1 + threadIdx.x / LANES, LANES);
    else __syncthreads();
}

// Sums over the chains of all threads, as `lanes` folds them; every thread gets them.
template <int N>
DEVICE void fold_all(float (&sums)[N], const float (&chains)[N], float (&buffer)[N][LANES]) {
    const int j = TEAMS ? threadIdx.x % LANES : threadIdx.x, lane = j & 31;
    team_meets();  // what was there before is read
#pragma unroll
    for (int i = 0; i < N; i++) buffer[i][j] = chains[i];
    team_meets();
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float* p = buffer[i];
        sums[i] = fold_warp((p[lane] + p[lane + 64]) + (p[lane + 32] + p[lane + 96]));
    }
}

// One stream of a row, quantised: block `first` and every fourth one.
DEVICE void store_quantized(const float (&v)[PER_THREAD], long long first, u8* q, float* d, float* sums) {
    const int lane = threadIdx.x & 31;
    const LaneScales<PER_THREAD> scales(v);
#pragma unroll
    for (int h = 0; h < scales.HELD; h++)
        if (lane + 32 * h < PER_THREAD)
            d[first + (lane + 32 * h) * (LANES / 32)] = scales.d[h];
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const long long block = first + i * (LANES / 32);
        const int each = scales.quantized(v[i], i);
        q[32 * block + place_in_block<INPUT_ORDER>(lane)] = (u8)each;
#if SUMS
        const int sum = sum_of_group<SUMS>(each);
        if (lane % SUMS == 0) sums[block * (32 / SUMS) + lane / SUMS] = (float)sum;
#endif
    }
}

// ROWS rows from `first`, by a team.
DEVICE void mix_rows(float* x, const float* beta, const float* y, const float* w, const float* inject, float* factors, u8* q,
                     float* d, float* sums, float* strength, int n, float eps, float scale, int first,
                     float (&buffer)[ROWS * KEPT][LANES]) {
    const int j = TEAMS ? threadIdx.x % LANES : threadIdx.x;
    float chains[ROWS * KEPT] = {};
#pragma unroll 1
    for (int c = 0; c < STREAMS; c++) {
        float v[ROWS][PER_THREAD];
        float squares[ROWS] = {}, r[ROWS];
#pragma unroll
        for (int k = 0; k < ROWS; k++) {  // a row that is not there is the last one again, not written
            const float* own = x + ((long long)min(first + k, n - 1) * STREAMS + c) * H + j;
#pragma unroll
            for (int i = 0; i < PER_THREAD; i++) v[k][i] = own[i * LANES];
        }
        if (beta) {
            float added[ROWS][PER_THREAD];
#pragma unroll
            for (int k = 0; k < ROWS; k++)
#pragma unroll
                for (int i = 0; i < PER_THREAD; i++)
                    added[k][i] = y[(long long)min(first + k, n - 1) * H + j + i * LANES];
#pragma unroll
            for (int k = 0; k < ROWS; k++) {
                const float b = beta[(long long)min(first + k, n - 1) * STREAMS + c];
#pragma unroll
                for (int i = 0; i < PER_THREAD; i++) v[k][i] = fmaf(b, added[k][i], v[k][i]);
            }
#pragma unroll
            for (int k = 0; k < ROWS; k++)
#pragma unroll
                for (int i = 0; i < PER_THREAD; i++)
                    if (first + k < n) x[((long long)(first + k) * STREAMS + c) * H + j + i * LANES] = v[k][i];
        }
#pragma unroll
        for (int k = 0; k < ROWS; k++)
#pragma unroll
            for (int i = 0; i < PER_THREAD; i++) squares[k] = fmaf(v[k][i], v[k][i], squares[k]);
        fold_all<ROWS>(r, squares, reinterpret_cast<float(&)[ROWS][LANES]>(buffer));
#pragma unroll
        for (int k = 0; k < ROWS; k++) r[k] = rms_factor(r[k], H, eps);
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            const float factor = w[c * H + j + i * LANES];
#pragma unroll
            for (int k = 0; k < ROWS; k++) v[k][i] = (v[k][i] * r[k]) * factor;
        }
#if INJECTS
#pragma unroll
        for (int o = 0; o < STREAMS; o++)
#pragma unroll
            for (int i = 0; i < PER_THREAD; i++) {
                const float weight = inject[(o * STREAMS + c) * H + j + i * LANES];
#pragma unroll
                for (int k = 0; k < ROWS; k++) chains[k * STREAMS + o] = fmaf(weight, v[k][i], chains[k * STREAMS + o]);
            }
#endif
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            if (first + k >= n) break;
            const long long stream = (long long)(first + k) * STREAMS + c;
            if (j == 0) factors[stream] = r[k];
            store_quantized(v[k], (stream * H + j) / 32, q, d, sums);
        }
    }
#if INJECTS
    float logits[ROWS * STREAMS];
    fold_all<ROWS * STREAMS>(logits, chains, buffer);
#pragma unroll
    for (int i = 0; i < ROWS * STREAMS; i++)
        if (j == i && first * STREAMS + i < n * STREAMS)
            strength[first * STREAMS + i] = 2.0f * sigmoid_f32(logits[i] * scale);
#endif
}

KERNEL void __launch_bounds__(LANES * AT_ONCE)
    hyper_rows(float* x, const float* beta, const float* y, const float* w, const float* inject, float* factors, u8* q,
               float* d, float* sums, float* strength, int n, float eps, float scale) {
    __shared__ float buffer[AT_ONCE][ROWS * KEPT][LANES];
    const int team = TEAMS ? threadIdx.x / LANES : 0;
#if TEAMS
    extern __shared__ __align__(16) u8 memory[];
    Resident& own = *reinterpret_cast<Resident*>(memory);
    constexpr int ALL_THREADS = LANES * TEAMS;
    for (int i = 4 * threadIdx.x; i < STREAMS * H; i += 4 * ALL_THREADS) copy16(own.w + i, w + i);
    for (int i = 4 * threadIdx.x; i < STREAMS * STREAMS * H; i += 4 * ALL_THREADS) copy16(own.inject + i, inject + i);
    copies_commit();
    inputs_ready();  // w and inject do not wait for the kernel before
    copies_wait<0>();
    __syncthreads();
#pragma unroll 1
    for (int first = (blockIdx.x * TEAMS + team) * ROWS; first < n; first += gridDim.x * TEAMS * ROWS)
        mix_rows(x, beta, y, own.w, own.inject, factors, q, d, sums, strength, n, eps, scale, first, buffer[team]);
#else
    inputs_ready();
    mix_rows(x, beta, y, w, inject, factors, q, d, sums, strength, n, eps, scale, blockIdx.x * ROWS, buffer[team]);
#endif
}
