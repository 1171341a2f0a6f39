// Scores of the index blocks: score_j = sum over heads, ascending, of max(0, dot(index_q, block_j)).
//
// dot: four chains (index mod 4) of fma in ascending order from 0, (c0 + c1) + (c2 + c3). A float4 holds one element of
// each chain, so a thread that owns a dot has four sums and reads 16 bytes at a time.
//
// qsa_score        few rows: a block takes tiles of 64 keys of one row; grid (tiles at once, rows)
// qsa_score_tile   many rows: 64 index queries (whole rows of them) against 64 keys, 16 dims at a time; a lane has two
//                  chains of 4 x 8 dots, 12 reads of two words for 64 fma (qsa_prompt_keys.cu says why). grid (tiles of keys,
//                  tiles of rows). Rows of one tile may belong to several slots: each run of rows of a slot is computed
//                  with that slot's keys.
// Rows whose blocks do not compete are left out, and their scores undefined.
// Shapes   iq (rows, heads, d) turned; block (pages, PAGE / r, d); scores (rows, stride); d a multiple of 32
// Source   `ops.Kernels.qsa_attend`
#include "cache.cuh"

constexpr int KEYS = 64;
constexpr int SCORE_THREADS = 128;
constexpr int TILE_THREADS = 256;
constexpr int QUERIES = 64;
constexpr int TILE_KEYS = 64;
constexpr int SLICE = 16;
constexpr int PITCH = SLICE + 4;          // floats: eight rows begin in different banks
constexpr int DOTS_PITCH = TILE_KEYS + 16;  // two rows likewise

struct Pages {
    const float* block;
    const int* tables;
    int pages_of_a_slot, r, d;

    DEVICE const float* key(int slot, int j) const {
        return block + token_row(tables, pages_of_a_slot, slot, j * r) / r * d;
    }
};

DEVICE float positive(float x) { return x > 0.0f ? x : 0.0f; }

DEVICE void add_products(float (&c)[4], float4 a, float4 b) {
    c[0] = fmaf(a.x, b.x, c[0]);
    c[1] = fmaf(a.y, b.y, c[1]);
    c[2] = fmaf(a.z, b.z, c[2]);
    c[3] = fmaf(a.w, b.w, c[3]);
}

DEVICE float join(const float (&c)[4]) { return (c[0] + c[1]) + (c[2] + c[3]); }

KERNEL void __launch_bounds__(SCORE_THREADS)
    qsa_score(const float* block, const int* tables, const int* slots, const int* positions, const float* iq,
              float* scores, int stride, int pages_of_a_slot, int heads, int d, int r, int picked) {
    extern __shared__ __align__(16) float memory[];
    const int row = blockIdx.y, tid = threadIdx.x, gap = d + 4, slot = slots[row];
    const int blocks = competing(positions[row], r, picked), begin = blockIdx.x * KEYS;
    const Pages pages = {block, tables, pages_of_a_slot, r, d};
    float *keys = memory, *query = keys + KEYS * gap, *dots = query + heads * d;
    const auto copy_keys = [&](int first, int from, int to) {
        const int pieces = d / 4;
        for (int e = from * pieces + tid; e < to * pieces; e += SCORE_THREADS)
            copy16(keys + e / pieces * gap + e % pieces * 4, pages.key(slot, first + e / pieces) + e % pieces * 4);
    };
    // Before the kernel that stores this launch's rows ends: keys of blocks that end before them.
    int stored = positions[row];
    for (int i = 0; i < static_cast<int>(gridDim.y); i++)
        if (slots[i] == slot) stored = min(stored, positions[i]);
    int old = blocks ? max(0, min(min(KEYS, blocks - begin), stored / r - begin)) : 0;
    copy_keys(begin, 0, old);
    inputs_ready();
    if (begin >= blocks) return;
    for (int e = tid; e < heads * d / 4; e += SCORE_THREADS)
        copy16(query + 4 * e, iq + static_cast<long long>(row) * heads * d + 4 * e);
    for (int first = begin; first < blocks; first += gridDim.x * KEYS) {
        const int n = min(KEYS, blocks - first);
        copy_keys(first, old, n);
        old = 0;
        copies_commit();
        copies_wait<0>();
        __syncthreads();
        const int key = tid % KEYS;
        for (int h = tid / KEYS; h < heads; h += SCORE_THREADS / KEYS) {
            float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
            for (int i = 0; i < d; i += 4)
                add_products(c, *reinterpret_cast<const float4*>(query + h * d + i),
                             *reinterpret_cast<const float4*>(keys + key * gap + i));
            dots[h * KEYS + key] = join(c);
        }
        __syncthreads();
        if (tid < n) {
            float sum = 0.0f;
            for (int h = 0; h < heads; h++) sum = sum + positive(dots[h * KEYS + tid]);
            scores[static_cast<long long>(row) * stride + first + tid] = sum;
        }
    }
}

struct Slices {
    float queries[QUERIES][PITCH], keys[TILE_KEYS][PITCH];
};

constexpr int DOTS = QUERIES * DOTS_PITCH, TWO_SLICES = 2 * sizeof(Slices) / sizeof(float);
constexpr int TILE_FLOATS = DOTS > TWO_SLICES ? DOTS : TWO_SLICES;

// The pieces of 16 bytes of a tile's slices that a thread copies: one of a query, one of a key.
struct Copies {
    static constexpr int PIECES = SLICE / 4, EACH = TILE_THREADS / PIECES;
    static_assert(EACH == QUERIES && EACH == TILE_KEYS, "a query and a key a thread");
    const float *query, *key;
    int row, x;

    // Queries and keys that are not there are the last ones again.
    DEVICE Copies(const float* iq, int queries, const Pages& pages, int slot, int first, int n)
        : row(threadIdx.x / PIECES), x(threadIdx.x % PIECES * 4) {
        query = iq + static_cast<long long>(min(row, queries - 1)) * pages.d + x;
        key = pages.key(slot, first + min(row, n - 1)) + x;
    }
    DEVICE void start(Slices& to, int at) const {
        copy16(&to.queries[row][x], query + at);
        copy16(&to.keys[row][x], key + at);
        copies_commit();
    }
};

// Dots of all queries of the tile with n keys of a slot, to dots[query][key]. A warp has 8 queries and all keys. Lanes 1
// apart differ in the query mod 2, lanes 4 apart in the two chains, the others in the key mod 8. Dot (i, j) of a lane is
// key j ^ chains of its eight: what it keeps of an exchange of chains is in the same registers in every lane.
DEVICE void tile_dots(Slices* slices, const float* iq, int queries, const Pages& pages, int slot, int first, int n,
                      float (*dots)[DOTS_PITCH]) {
    constexpr int Q = 4, K = 8;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, chains = lane >> 2 & 1;
    const int query = warp * 2 * Q + (lane & 1), key = (lane >> 1 & 1) + (lane >> 3 << 1);
    float c[Q][K][2];
#pragma unroll
    for (int i = 0; i < Q; i++)
#pragma unroll
        for (int j = 0; j < K; j++) c[i][j][0] = c[i][j][1] = 0.0f;
    const Copies copies(iq, queries, pages, slot, first, n);
    copies.start(slices[0], 0);
#pragma unroll 1
    for (int at = 0, u = 0; at < pages.d; at += SLICE, u ^= 1) {
        copies_wait<0>();
        __syncthreads();
        if (at + SLICE < pages.d) copies.start(slices[u ^ 1], at + SLICE);
        const float *q = &slices[u].queries[query][2 * chains], *even = &slices[u].keys[key + 8 * chains][2 * chains],
                    *odd = &slices[u].keys[key + 8 * (1 ^ chains)][2 * chains];
#pragma unroll
        for (int x = 0; x < SLICE; x += 4) {
            float2 a[Q], b[K];
#pragma unroll
            for (int i = 0; i < Q; i++) a[i] = *reinterpret_cast<const float2*>(q + 2 * i * PITCH + x);
#pragma unroll
            for (int j = 0; j < K; j++)
                b[j] = *reinterpret_cast<const float2*>((j % 2 ? odd : even) + j / 2 * 16 * PITCH + x);
#pragma unroll
            for (int i = 0; i < Q; i++)
#pragma unroll
                for (int j = 0; j < K; j++) {
                    c[i][j][0] = fmaf(a[i].x, b[j].x, c[i][j][0]);
                    c[i][j][1] = fmaf(a[i].y, b[j].y, c[i][j][1]);
                }
        }
    }
    __syncthreads();  // the dots lie where the slices were
#pragma unroll
    for (int i = 0; i < Q; i++)
#pragma unroll
        for (int j = 0; j < K; j += 2) {
            const float mine = c[i][j][0] + c[i][j][1], theirs = c[i][j + 1][0] + c[i][j + 1][1];
            dots[query + 2 * i][key + 8 * (j ^ chains)] = mine + __shfl_xor_sync(ALL, theirs, 4);
        }
    __syncthreads();
}

KERNEL void __launch_bounds__(TILE_THREADS, 2)
    qsa_score_tile(const float* block, const int* tables, const int* slots, const int* positions, const float* iq,
                   float* scores, int stride, int pages_of_a_slot, int heads, int d, int r, int picked, int rows) {
    inputs_ready();
    __shared__ __align__(16) float memory[TILE_FLOATS];  // first slices, then dots
    Slices* slices = reinterpret_cast<Slices*>(memory);
    float(*dots)[DOTS_PITCH] = reinterpret_cast<float(*)[DOTS_PITCH]>(memory);
    const Pages pages = {block, tables, pages_of_a_slot, r, d};
    const int at_once = QUERIES / heads, begin = blockIdx.y * at_once, end = min(begin + at_once, rows);
    const int first = blockIdx.x * TILE_KEYS;
    iq += static_cast<long long>(begin) * heads * d;
    for (int run = begin; run < end;) {
        const int slot = slots[run];
        int blocks = 0, after = run;
        for (; after < end && slots[after] == slot; after++) blocks = max(blocks, competing(positions[after], r, picked));
        if (first < blocks) {
            tile_dots(slices, iq, (end - begin) * heads, pages, slot, first, min(TILE_KEYS, blocks - first), dots);
            for (int e = threadIdx.x; e < (after - run) * TILE_KEYS; e += TILE_THREADS) {
                const int row = run + e / TILE_KEYS, key = e % TILE_KEYS;
                if (first + key >= competing(positions[row], r, picked)) continue;
                float sum = 0.0f;
                for (int h = 0; h < heads; h++) sum = sum + positive(dots[(row - begin) * heads + h][key]);
                scores[static_cast<long long>(row) * stride + first + key] = sum;
            }
            __syncthreads();
        }
        run = after;
    }
}
