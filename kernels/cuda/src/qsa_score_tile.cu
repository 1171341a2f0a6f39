// Scores of the index blocks for many rows: score_j = sum over heads, ascending, of max(0, dot(index_q, block_j)).
//
// dot: four chains (index mod 4) of fma in ascending order from 0, (c0 + c1) + (c2 + c3).
//
// qsa_score_tile   64 index queries (whole rows of them, at most 32) against TILE_KEYS keys, 16 dims at a time; a lane has one
//                  chain of 8 x TILE_KEYS / 4 dots: of 12 it reads 20 words for 96 fma. grid (tiles of keys, tiles of rows).
//                  Rows of one tile may belong to several slots: each run of rows of a slot is computed with that slot's keys.
// Rows whose blocks do not compete are left out, and their scores undefined.
// Why      with two chains of 4 x 8 dots a lane reads 24 words for 64 fma, so that reads take longer than sums. Several
//          blocks of four warps: while one waits for its rows, its pages and its first keys, the others add. Their shared
//          memory (17.5 KB each with 48 keys) has room on every card: 64 KB of a multiprocessor are the least.
// Constants   TILE_KEYS, a multiple of 16 up to 64; BLOCKS of a multiprocessor
// Shapes   as in qsa_score.cu
// Source   `ops.Kernels.qsa_attend`
#include "qsa_score.cuh"

constexpr int THREADS = 128;
constexpr int QUERIES = 64;
constexpr int MOST_ROWS = 32;
constexpr int SLICE = 16;
constexpr int PITCH = SLICE + 4;           // floats: eight rows begin in different banks
constexpr int DOTS_PITCH = TILE_KEYS + 8;  // four rows likewise, eight words of each
constexpr int Q = 8, K = TILE_KEYS / 4;    // dots of a lane
static_assert(TILE_KEYS % 16 == 0, "four lanes exchange the chains of four keys");

struct Slices {
    float queries[QUERIES][PITCH], keys[TILE_KEYS][PITCH];
};

constexpr int DOTS = QUERIES * DOTS_PITCH, TWO_SLICES = 2 * sizeof(Slices) / sizeof(float);
constexpr int TILE_FLOATS = DOTS > TWO_SLICES ? DOTS : TWO_SLICES;

// The pieces of 16 bytes of a tile's slices that a thread copies: of two queries and two keys.
struct Copies {
    static constexpr int PIECES = SLICE / 4, EACH = THREADS / PIECES, N = QUERIES / EACH;
    static_assert(N * EACH == QUERIES && TILE_KEYS <= QUERIES, "a thread has as many keys as queries, or fewer");
    const float *query[N], *key[N];
    int row, x;

    // Queries and keys that are not there are the last ones again.
    DEVICE Copies(const float* iq, int queries, const Pages& pages, int slot, int first, int n)
        : row(threadIdx.x / PIECES), x(threadIdx.x % PIECES * 4) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            key[i] = pages.key(slot, first + min(row + i * EACH, n - 1)) + x;
            query[i] = iq + static_cast<long long>(min(row + i * EACH, queries - 1)) * pages.d + x;
        }
    }
    DEVICE void start(Slices& to, int at) const {
#pragma unroll
        for (int i = 0; i < N; i++) {
            copy16(&to.queries[row + i * EACH][x], query[i] + at);
            if (row + i * EACH < TILE_KEYS) copy16(&to.keys[row + i * EACH][x], key[i] + at);
        }
        copies_commit();
    }
};

// Which dots a lane has: a warp has half of the queries and of the keys, four lanes a chain each of the same ones.
struct Place {
    int chain, query, key;

    DEVICE Place() {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        chain = lane & 3, query = warp / 2 * 32 + (lane >> 2 & 3), key = warp % 2 * (2 * K) + (lane >> 4) * 4;
    }
    DEVICE int of_query(int i) const { return query + 4 * i; }
    // Dot j of a lane: what it keeps of an exchange of chains is in the same registers in every lane.
    DEVICE int of_key(int j) const { return key + j / 4 * 8 + (j % 4 ^ chain); }
};

// Dots of all queries of the tile with n keys of a slot, to dots[query][key].
DEVICE void tile_dots(Slices* slices, const Copies& copies, int d, float (*dots)[DOTS_PITCH]) {
    const Place place;
    float c[Q][K];
#pragma unroll
    for (int i = 0; i < Q; i++)
#pragma unroll
        for (int j = 0; j < K; j++) c[i][j] = 0.0f;
    copies.start(slices[0], 0);
#pragma unroll 1
    for (int at = 0, u = 0; at < d; at += SLICE, u ^= 1) {
        copies_wait<0>();
        __syncthreads();
        if (at + SLICE < d) copies.start(slices[u ^ 1], at + SLICE);
        const float *q = &slices[u].queries[place.query][place.chain], *k[4];
#pragma unroll
        for (int j = 0; j < 4; j++) k[j] = &slices[u].keys[place.of_key(j)][place.chain];
#pragma unroll
        for (int x = 0; x < SLICE; x += 4) {
            float a[Q], b[K];
#pragma unroll
            for (int i = 0; i < Q; i++) a[i] = q[4 * i * PITCH + x];
#pragma unroll
            for (int j = 0; j < K; j++) b[j] = k[j % 4][j / 4 * 8 * PITCH + x];
#pragma unroll
            for (int i = 0; i < Q; i++)
#pragma unroll
                for (int j = 0; j < K; j++) c[i][j] = fmaf(a[i], b[j], c[i][j]);
        }
    }
    __syncthreads();  // the dots lie where the slices were
#pragma unroll
    for (int i = 0; i < Q; i++) {
#pragma unroll
        for (int j = 0; j < K; j += 2) c[i][j] = c[i][j] + __shfl_xor_sync(ALL, c[i][j + 1], 1);
#pragma unroll
        for (int j = 0; j < K; j += 4)
            dots[place.of_query(i)][place.of_key(j)] = c[i][j] + __shfl_xor_sync(ALL, c[i][j + 2], 2);
    }
    __syncthreads();
}

KERNEL void __launch_bounds__(THREADS, BLOCKS)
    qsa_score_tile(const float* block, const int* tables, const int* slots, const int* positions, const float* iq,
                   float* scores, int stride, int pages_of_a_slot, int heads, int d, int r, int picked, int rows) {
    inputs_ready();
    __shared__ __align__(16) float memory[TILE_FLOATS];  // first slices, then dots
    Slices* slices = reinterpret_cast<Slices*>(memory);
    float(*dots)[DOTS_PITCH] = reinterpret_cast<float(*)[DOTS_PITCH]>(memory);
    const Pages pages = {block, tables, pages_of_a_slot, r, d};
    const int at_once = min(QUERIES / heads, static_cast<int>(MOST_ROWS)), begin = blockIdx.y * at_once;
    const int n = min(at_once, rows - begin), first = blockIdx.x * TILE_KEYS, lane = threadIdx.x & 31;
    iq += static_cast<long long>(begin) * heads * d;
    const int slot_of_lane = slots[begin + min(lane, n - 1)];  // a row a lane, in every warp
    const int blocks_of_lane = competing(positions[begin + min(lane, n - 1)], r, picked);
    for (int run = 0; run < n;) {
        const int slot = __shfl_sync(ALL, slot_of_lane, run);
        const u32 others = __ballot_sync(ALL, lane >= run && (lane >= n || slot_of_lane != slot));
        const int after = others ? __ffs(static_cast<int>(others)) - 1 : MOST_ROWS;
        const int blocks = static_cast<int>(warp_max(lane >= run && lane < after ? static_cast<u32>(blocks_of_lane) : 0u));
        if (first < blocks) {
            const Copies copies(iq, n * heads, pages, slot, first, min(TILE_KEYS, blocks - first));
            tile_dots(slices, copies, d, dots);
            for (int e = threadIdx.x; e < (after - run) * TILE_KEYS; e += THREADS) {
                const int row = run + e / TILE_KEYS, key = e % TILE_KEYS;
                if (first + key >= competing(positions[begin + row], r, picked)) continue;
                float sum = 0.0f;
                for (int h = 0; h < heads; h++) sum = sum + positive(dots[row * heads + h][key]);
                scores[static_cast<long long>(begin + row) * stride + first + key] = sum;
            }
            __syncthreads();
        }
        run = after;
    }
}
