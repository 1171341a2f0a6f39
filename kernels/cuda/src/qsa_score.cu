// Scores of the index blocks: score_j = sum over heads, ascending, of max(0, dot(index_q, block_j)).
//
// dot: four chains (index mod 4) of fma in ascending order from 0, (c0 + c1) + (c2 + c3). A float4 holds one element of
// each chain, so a thread that owns a dot has four sums and reads 16 bytes at a time.
//
// qsa_score        few rows: a block takes tiles of 64 keys of one row; grid (tiles at once, rows)
// qsa_score_tile   many rows: 64 index queries (whole rows of them) against 64 keys, 4 x 4 a thread, 32 dims at a time;
//                  grid (tiles of keys, tiles of rows). Rows of one tile may belong to several slots: each run of rows
//                  of a slot is computed with that slot's keys.
// Rows whose blocks do not compete are left out, and their scores undefined.
// Shapes   iq (rows, heads, d) turned; block (pages, PAGE / r, d); scores (rows, stride); d a multiple of 32
// Source   `ops.Kernels.qsa_attend`
#include "cache.cuh"

constexpr int KEYS = 64;
constexpr int SCORE_THREADS = 128;
constexpr int TILE_THREADS = 256;
constexpr int QUERIES = 64;
constexpr int SLICE = 32;
constexpr int SLICE_STRIDE = SLICE + 4;
constexpr int SIDE = 4;

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
    inputs_ready();
    extern __shared__ __align__(16) float memory[];
    const int row = blockIdx.y, tid = threadIdx.x, gap = d + 4;
    const int blocks = competing(positions[row], r, picked);
    if (static_cast<int>(blockIdx.x) * KEYS >= blocks) return;
    const Pages pages = {block, tables, pages_of_a_slot, r, d};
    const int slot = slots[row];
    float *keys = memory, *query = keys + KEYS * gap, *dots = query + heads * d;
    for (int e = tid; e < heads * d / 4; e += SCORE_THREADS)
        copy16(query + 4 * e, iq + static_cast<long long>(row) * heads * d + 4 * e);
    for (int first = blockIdx.x * KEYS; first < blocks; first += gridDim.x * KEYS) {
        const int n = min(KEYS, blocks - first), pieces = d / 4;
        for (int e = tid; e < n * pieces; e += SCORE_THREADS)
            copy16(keys + e / pieces * gap + e % pieces * 4, pages.key(slot, first + e / pieces) + e % pieces * 4);
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
    float queries[QUERIES][SLICE_STRIDE], keys[KEYS][SLICE_STRIDE];
};

DEVICE void load_slice(Slices& to, const float* iq, int queries, const Pages& pages, int slot, int first, int n,
                       int at) {
    constexpr int PIECES = SLICE / 4;
    for (int e = threadIdx.x; e < queries * PIECES; e += TILE_THREADS)
        copy16(&to.queries[e / PIECES][e % PIECES * 4], iq + static_cast<long long>(e / PIECES) * pages.d + at + e % PIECES * 4);
    for (int e = threadIdx.x; e < n * PIECES; e += TILE_THREADS)
        copy16(&to.keys[e / PIECES][e % PIECES * 4], pages.key(slot, first + e / PIECES) + at + e % PIECES * 4);
    copies_commit();
}

// Dots of all queries of the tile with n keys of a slot, to dots[query][key].
DEVICE void tile_dots(Slices* slices, const float* iq, int queries, const Pages& pages, int slot, int first, int n,
                      float (*dots)[KEYS + 1]) {
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    float c[SIDE][SIDE][4];
#pragma unroll
    for (int a = 0; a < SIDE; a++)
#pragma unroll
        for (int b = 0; b < SIDE; b++)
#pragma unroll
            for (int j = 0; j < 4; j++) c[a][b][j] = 0.0f;
    load_slice(slices[0], iq, queries, pages, slot, first, n, 0);
    for (int at = 0, u = 0; at < pages.d; at += SLICE, u ^= 1) {
        if (at + SLICE < pages.d)
            load_slice(slices[u ^ 1], iq, queries, pages, slot, first, n, at + SLICE);
        else
            copies_commit();
        copies_wait<1>();
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i < SLICE; i += 4) {
            float4 q[SIDE], k[SIDE];
#pragma unroll
            for (int a = 0; a < SIDE; a++) q[a] = *reinterpret_cast<const float4*>(&slices[u].queries[y + 16 * a][i]);
#pragma unroll
            for (int b = 0; b < SIDE; b++) k[b] = *reinterpret_cast<const float4*>(&slices[u].keys[x + 16 * b][i]);
#pragma unroll
            for (int a = 0; a < SIDE; a++)
#pragma unroll
                for (int b = 0; b < SIDE; b++) add_products(c[a][b], q[a], k[b]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int a = 0; a < SIDE; a++)
#pragma unroll
        for (int b = 0; b < SIDE; b++) dots[y + 16 * a][x + 16 * b] = join(c[a][b]);
    __syncthreads();
}

KERNEL void __launch_bounds__(TILE_THREADS, 2)
    qsa_score_tile(const float* block, const int* tables, const int* slots, const int* positions, const float* iq,
                   float* scores, int stride, int pages_of_a_slot, int heads, int d, int r, int picked, int rows) {
    inputs_ready();
    __shared__ __align__(16) Slices slices[2];
    float(*dots)[KEYS + 1] = reinterpret_cast<float(*)[KEYS + 1]>(slices);
    const Pages pages = {block, tables, pages_of_a_slot, r, d};
    const int at_once = QUERIES / heads, begin = blockIdx.y * at_once, end = min(begin + at_once, rows);
    const int first = blockIdx.x * KEYS;
    iq += static_cast<long long>(begin) * heads * d;
    for (int run = begin; run < end;) {
        const int slot = slots[run];
        int blocks = 0, after = run;
        for (; after < end && slots[after] == slot; after++) blocks = max(blocks, competing(positions[after], r, picked));
        if (first < blocks) {
            tile_dots(slices, iq, (end - begin) * heads, pages, slot, first, min(KEYS, blocks - first), dots);
            for (int e = threadIdx.x; e < (after - run) * KEYS; e += TILE_THREADS) {
                const int row = run + e / KEYS, key = e % KEYS;
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
