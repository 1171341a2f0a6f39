// A prompt's rows on their way into a hyper-connection, in one pass over their streams.
//
// hyper_rows   [x = fma(beta, y, x) when beta is given,] normed = rms(x) per stream, which is not written: q, d and sums are
//              its int8, scales and sums of groups as quantize.cu leaves them, `factors` the r of each stream; with `inject`
//              also strength = 2 * sigmoid(lanes(inject * normed) * scale)
// A team of 128 threads has ROWS rows; thread j is chain j of every sum. A block is a team, or TEAMS of them with w and inject
// in its shared memory, which take rows in turn: a multiprocessor then reads these once, not again for every team's rows.
// Of 2.0 GB that passed from the second cache to 8,192 rows, 0.84 were w and inject: they and the rows do not fit the first.
// There are few warps beside so much of that memory, so such a team asks for the next stream before it works on this one.
//
// Constants   STREAMS, PER_THREAD = H / 128, ROWS, INPUT_ORDER, SUMS (0, 16, 32), INJECTS (0, 1), TEAMS (0: a block is one,
//             else with INJECTS and ROWS = 1)
// Shapes      x (n, C, H), y (n, H), beta and strength (n, C), w (C, H), inject (C, C * H), factors (n, C)
// Cost        x is read and written once, y read once from memory; a byte and an eighth written an element
#include "rows.cuh"
#include "formats.cuh"
#include "quantize_lane.cuh"

enum { H = LANES * PER_THREAD, KEPT = INJECTS ? STREAMS : 1, AT_ONCE = TEAMS ? TEAMS : 1 };

#if TEAMS
// Of inject what belongs to one element of a row: a weight of each of its rows, which lie far from each other in memory.
struct alignas(STREAMS % 4 == 0 ? 16 : STREAMS % 2 == 0 ? 8 : 4) Injected {
    float of[STREAMS];
};

// Shared memory of a block; hyper.py knows how much it is.
struct Resident {
    Injected inject[STREAMS * H];
    float w[STREAMS * H];
};
#else
typedef float Injected;
#endif

// What the threads of a team leave for each other. Two places for the squares: what stands in one is read before the team
// meets over the other, and before it meets over the logits.
struct Mail {
    float squares[2][ROWS][LANES], logits[ROWS * KEPT][LANES];
};

struct Job {
    float* x;
    const float *beta, *y;
    float* factors;
    u8* q;
    float *d, *sums, *strength;
    int n;
    float eps, scale;
};

// One stream of ROWS rows as memory has it, and what is added to them. A row that is not there is the last one again.
struct Coming {
    float x[ROWS][PER_THREAD], y[ROWS][PER_THREAD], beta[ROWS];

    DEVICE void load(const Job& job, int first, int c, int j) {
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            const int stream = min(first + k, job.n - 1) * STREAMS + c;
            const float* own = job.x + (long long)stream * H + j;
#pragma unroll
            for (int i = 0; i < PER_THREAD; i++) x[k][i] = own[i * LANES];
            if (job.beta) beta[k] = job.beta[stream];
        }
    }
    DEVICE void load_added(const Job& job, int first, int j) {
        if (!job.beta) return;
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            const float* own = job.y + (long long)min(first + k, job.n - 1) * H + j;
#pragma unroll
            for (int i = 0; i < PER_THREAD; i++) y[k][i] = own[i * LANES];
        }
    }
};

DEVICE void team_meets() {
    if (TEAMS) threads_meet(1 + threadIdx.x / LANES, LANES);
    else __syncthreads();
}

// Sums over the chains of all threads, as `lanes` folds them; every thread gets them. Nobody reads `buffer` any more.
template <int N>
DEVICE void fold_all(float (&sums)[N], const float (&chains)[N], float (&buffer)[N][LANES]) {
    const int j = TEAMS ? threadIdx.x % LANES : threadIdx.x, lane = j & 31;
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

// A stream out of what came of it.
DEVICE void take(float (&v)[ROWS][PER_THREAD], const Job& job, const Coming& came) {
#pragma unroll
    for (int k = 0; k < ROWS; k++)
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++)
            v[k][i] = job.beta ? fmaf(came.beta[k], came.y[k][i], came.x[k][i]) : came.x[k][i];
}

DEVICE void write(const float (&v)[ROWS][PER_THREAD], const Job& job, int first, int c, int j) {
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        if (k && first + k >= job.n) break;
        float* own = job.x + (long long)((first + k) * STREAMS + c) * H + j;
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) own[i * LANES] = v[k][i];
    }
}

// The thread's elements of a stream, of which the first is element `begin` of a row, normed and added to the logits' chains.
DEVICE void norm(float (&v)[ROWS][PER_THREAD], float (&chains)[ROWS * KEPT], const float (&r)[ROWS], const float* w,
                 const Injected* inject, int begin) {
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const float factor = w[begin + i * LANES];
#pragma unroll
        for (int k = 0; k < ROWS; k++) v[k][i] = (v[k][i] * r[k]) * factor;
    }
#if TEAMS
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const Injected weights = inject[begin + i * LANES];
#pragma unroll
        for (int o = 0; o < STREAMS; o++) chains[o] = fmaf(weights.of[o], v[0][i], chains[o]);
    }
#elif INJECTS
#pragma unroll
    for (int o = 0; o < STREAMS; o++)
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            const float weight = inject[o * STREAMS * H + begin + i * LANES];
#pragma unroll
            for (int k = 0; k < ROWS; k++) chains[k * STREAMS + o] = fmaf(weight, v[k][i], chains[k * STREAMS + o]);
        }
#endif
}

// ROWS rows from `first`, by a team. TEAMS: their first stream is under way, and those from `next` on come after them.
DEVICE void mix_rows(const Job& job, Coming& coming, Mail& mail, const float* w, const Injected* inject, int first,
                     int next) {
    const int j = TEAMS ? threadIdx.x % LANES : threadIdx.x;
    float chains[ROWS * KEPT] = {};
#pragma unroll 1
    for (int c = 0; c < STREAMS; c++) {
        float v[ROWS][PER_THREAD], squares[ROWS] = {}, r[ROWS];
        Coming now;
        if (!TEAMS) now.load(job, first, c, j), now.load_added(job, first, j);
        take(v, job, TEAMS ? coming : now);
        if (TEAMS) {
            const bool last = c + 1 == STREAMS;
            if (last && next < job.n) coming.load_added(job, next, j);
            if (!last || next < job.n) coming.load(job, last ? next : first, last ? 0 : c + 1, j);
        }
        if (job.beta) write(v, job, first, c, j);
#pragma unroll
        for (int k = 0; k < ROWS; k++)
#pragma unroll
            for (int i = 0; i < PER_THREAD; i++) squares[k] = fmaf(v[k][i], v[k][i], squares[k]);
        fold_all<ROWS>(r, squares, mail.squares[c & 1]);
#pragma unroll
        for (int k = 0; k < ROWS; k++) r[k] = rms_factor(r[k], H, job.eps);
        norm(v, chains, r, w, inject, c * H + j);
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            if (k && first + k >= job.n) break;
            const int stream = (first + k) * STREAMS + c;
            if (j == 0) job.factors[stream] = r[k];
            store_quantized(v[k], ((long long)stream * H + j) / 32, job.q, job.d, job.sums);
        }
    }
#if INJECTS
    float logits[ROWS * STREAMS];
    fold_all<ROWS * STREAMS>(logits, chains, mail.logits);
#pragma unroll
    for (int i = 0; i < ROWS * STREAMS; i++)
        if (j == i && first * STREAMS + i < job.n * STREAMS)
            job.strength[first * STREAMS + i] = 2.0f * sigmoid_f32(logits[i] * job.scale);
#endif
}

KERNEL void __launch_bounds__(LANES * AT_ONCE)
    hyper_rows(float* x, const float* beta, const float* y, const float* w, const float* inject, float* factors, u8* q,
               float* d, float* sums, float* strength, int n, float eps, float scale) {
    __shared__ Mail mail[AT_ONCE];
    const int team = TEAMS ? threadIdx.x / LANES : 0;
    const Job job = {x, beta, y, factors, q, d, sums, strength, n, eps, scale};
    Coming coming;
#if TEAMS
    extern __shared__ __align__(16) u8 memory[];
    Resident& own = *reinterpret_cast<Resident*>(memory);
    constexpr int ALL_THREADS = LANES * TEAMS;
    for (int i = 4 * threadIdx.x; i < STREAMS * H; i += 4 * ALL_THREADS) copy16(own.w + i, w + i);
    copies_commit();
#pragma unroll 5
    for (int e = threadIdx.x; e < STREAMS * H; e += ALL_THREADS) {
        Injected all;
#pragma unroll
        for (int o = 0; o < STREAMS; o++) all.of[o] = inject[o * STREAMS * H + e];
        own.inject[e] = all;
    }
    inputs_ready();  // w and inject do not wait for the kernel before
    const int step = gridDim.x * TEAMS, j = threadIdx.x % LANES;
    int first = blockIdx.x * TEAMS + team;
    if (first < n) coming.load_added(job, first, j), coming.load(job, first, 0, j);
    copies_wait<0>();
    __syncthreads();
#pragma unroll 1
    for (; first < n; first += step) mix_rows(job, coming, mail[team], own.w, own.inject, first, first + step);
#else
    inputs_ready();
    mix_rows(job, coming, mail[0], w, inject, blockIdx.x * ROWS, n);
#endif
}
