// Attention of few rows: the work of a row is spread over the card.
//
// qsa_keys     a block is 32 kept tokens of one row and key head, for all query heads that share it
// qsa_values   a block is one part and 32 dims of a row's value head, for some of the query heads that share it; the last
//              block of the parts to end joins them
// With PREPARES rows come as they are projected, where no blocks compete (qsa_prepare.cu is for the others): every block of
// qsa_keys turns the queries and the new keys that it wants, and a block more of each row and key head stores what is new; a
// block more of each row of qsa_values stores its indexer key, which may be made between the two.
// Constants    KEYS, VALUES as in cache.cuh; HEADS_OF_WARP query heads of a warp of qsa_values at a time; KEY_WARPS of a block
//              of qsa_keys: with few rows a warp takes one head; PREPARES; FAR: tokens below 0 are read in RAM
#include "attend.cuh"
#include "qsa_store.cuh"

#ifndef HEADS_OF_WARP
#define HEADS_OF_WARP 3
#endif
#ifndef PREPARES
#define PREPARES 0
#endif

#ifndef KEY_WARPS
#define KEY_WARPS 4
#endif

constexpr int WARPS = THREADS / 32;
constexpr int KEY_THREADS = 32 * KEY_WARPS;

// 32 dims of a row in shared memory. A row is copied in COPIES parts.
template <class Format>
struct Slice {
    static constexpr int BYTES = Format::row(32), COPIES = BYTES / 16;
    DEVICE static void copy(u8* to, const u8* row, int, int slice, int part) {
        copy16(to + 16 * part, row + BYTES * slice + 16 * part);
    }
    DEVICE static float get(const u8* from, int, int lane) {
        return Format::get(reinterpret_cast<const typename Format::Value*>(from)[lane]);
    }
};
// A block of codes, then the word that holds its scale.
template <class Codes>
struct Slice<Packed<Codes>> {
    static constexpr int CODES = Codes::codes(32), BYTES = CODES + 16, COPIES = CODES / 16 + 1;
    DEVICE static void copy(u8* to, const u8* row, int d, int slice, int part) {
        if (part < COPIES - 1)
            copy16(to + 16 * part, row + CODES * slice + 16 * part);
        else
            copy4(to + CODES, row + Codes::codes(d) + slice / 2 * 4);
    }
    DEVICE static float get(const u8* from, int slice, int lane) {
        const Scale s(reinterpret_cast<const u16*>(from + CODES)[slice & 1], Codes::ZERO);
        return s.value(Codes::code(from, lane), 0);
    }
};
constexpr int AT_ONCE = KEY_WARPS > 4 ? 1 : 3;  // query heads of a warp at a time

// Rows as they are projected, and where what is new is stored.
struct Projected {
    const float *k, *v, *index_k, *q_gate, *norm_k, *norm_index_k, *norm_q, *cos, *sin;
    u8 *cached_k, *cached_v, *far_k, *far_v;
    float *raw, *far_raw, *block;
    const int* numbers;  // tables of the pages of `block`
    int index_dim, half;
    float eps;

    DEVICE Angles rope() const { return {cos, sin, half}; }
    // The norm's factors of queries and keys and the angles of a position, before the rows are there.
    DEVICE void fetch(int d, int position) const {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n = warp < 2 ? d : half;
        const float* from = warp == 0 ? norm_q : warp == 1 ? norm_k : warp == 2 ? cos : sin;
        if (warp < 4 && 32 * lane < n) fetch_line(from + (warp < 2 ? 0 : static_cast<long long>(position) * half) + 32 * lane);
    }
};

// Which row of the launch is the token of a position in the slot of a row. By a warp; there is one.
DEVICE int row_of(const Args& g, int row, int rows, int position) {
    const int lane = threadIdx.x & 31;
    return __ffs(__ballot_sync(ALL, lane < rows && g.slots[lane] == g.slots[row] && g.positions[lane] == position)) - 1;
}

// What a block turns itself: its query heads and the keys of this launch's rows in its tile.
struct Turned {
    const Projected& p;
    const Args& g;
    int row, rows, kv, position;
    float* query;  // (heads of the group, d)
    u8* tile;      // keys as they are kept, `pitch` apart
    int pitch;

    // Query heads from `begin` on, then the keys `stored` to n of a tile, whose first position is `first`. A warp takes one
    // at a time and reads the next one meanwhile; the code is there once, since it is cold when the kernel begins.
    DEVICE void make(int begin, int first, int stored, int n, float* buffer) const {
        const int group = g.heads / g.kv_heads, end = group + n - stored;
        int job = begin + (threadIdx.x >> 5);
        if (job >= end) return;
        WarpVector v = load_vector(source(job, group, first + stored), g.d);
#pragma unroll 1
        while (job < end) {
            const int following = job + KEY_WARPS, t = stored + job - group;
            WarpVector next;
            if (following < end) next = load_vector(source(following, group, first + stored), g.d);
            const bool asks = job < group;
            const Angles rope = p.rope();
            const long long at = static_cast<long long>(asks ? position : first + t) * rope.half;
            norm_and_rotate(v, g.d, asks ? p.norm_q : p.norm_k, p.eps, rope.cos + at, rope.sin + at, rope.half,
                            asks ? query + job * g.d : buffer);
            if (!asks) {
                Keys::put_row(tile + t * pitch, g.d, [&](int i) { return buffer[i]; });
                __syncwarp();
            }
            job = following, v = next;
        }
    }

  private:
    DEVICE const float* source(int job, int group, int first_new) const {
        if (job < group) return p.q_gate + (static_cast<long long>(row) * g.heads + kv * group + job) * 2 * g.d;
        return p.k + (static_cast<long long>(row_of(g, row, rows, first_new + job - group)) * g.kv_heads + kv) * g.d;
    }
};

// By a warp: what a row stores of a key head.
DEVICE void store_row(const Projected& p, const Args& g, int row, int kv, float* buffer) {
    const int position = g.positions[row];
    const long long from = (static_cast<long long>(row) * g.kv_heads + kv) * g.d;
    const long long to = token_row(g.tables, g.pages_of_a_slot, g.slots[row], position);
    store_key_and_value(p.k + from, p.v + from, g.d, p.norm_k, p.eps, p.rope(), position,
                        cell(p.cached_k, p.far_k, to, g.kv_heads, kv, Keys::row(g.d)),
                        cell(p.cached_v, p.far_v, to, g.kv_heads, kv, Values::row(g.d)), buffer);
}

// grid (tiles at once, key heads, rows), with PREPARES a tile more
KERNEL void __launch_bounds__(KEY_THREADS)
    qsa_keys(ROW_ARGUMENTS, const float* q, const u8* cached, const u8* far, float* s, int stride,
             PARAMETER Projected projected) {
    const Args g = ROW;
    extern __shared__ __align__(16) float memory[];
    __shared__ int tokens[32];
    __shared__ float buffers[PREPARES ? KEY_WARPS : 1][VECTOR_MOST];
    const int row = blockIdx.z, kv = blockIdx.y, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int group = heads / kv_heads, bytes = Keys::row(d), pitch = bytes + 16, tiles = gridDim.x - PREPARES;
    const Kept kept = g.kept(row);
    const long long first_head = static_cast<long long>(row) * g.heads + kv * group;
    float* query = memory;
    u8* tile = reinterpret_cast<u8*>(memory + group * d);
    const float scale = 1.0f / sqrtf(static_cast<float>(d));
    if (PREPARES) projected.fetch(d, g.positions[row]);
    auto copy_keys = [&](int begin, int end) {
        const int pieces = bytes / 16;
        for (int e = begin * pieces + tid; e < end * pieces; e += KEY_THREADS) {
            const int t = e / pieces, x = e % pieces * 16;
            copy16(tile + t * pitch + x, cell(cached, far, tokens[t], g.kv_heads, kv, bytes) + x);
        }
    };
    if (PREPARES && static_cast<int>(blockIdx.x) == tiles) {
        inputs_ready();
        if (warp == 0) store_row(projected, g, row, kv, buffers[0]);
        return;
    }
    // Before the kernel that stores this launch's rows ends: keys of earlier ones, unless a list says which.
    const int begin = blockIdx.x * 32, before = kept.listed ? 0 : g.first_new(row, gridDim.z);
    int old = max(0, min(min(32, kept.count - begin), before - begin));
    if (tid < old) tokens[tid] = g.token(row, kept, begin + tid);
    __syncthreads();
    copy_keys(0, old);
    inputs_ready();
    if (begin >= kept.count) return;
    const Turned turned = {projected, g, row, static_cast<int>(gridDim.z), kv, g.positions[row], query, tile, pitch};
    if (!PREPARES)
        for (int e = tid; e < group * d / 4; e += KEY_THREADS) copy16(query + 4 * e, q + first_head * d + 4 * e);
    for (int first = begin; first < kept.count; first += tiles * 32) {
        const int n = min(32, kept.count - first), stored = PREPARES ? max(0, min(n, before - first)) : n;
        if (tid >= old && tid < stored) tokens[tid] = g.token(row, kept, first + tid);
        __syncthreads();
        copy_keys(old, stored);
        old = 0;
        if (PREPARES) turned.make(first == begin ? 0 : group, first, stored, n, buffers[warp]);
        copies_commit();
        copies_wait<0>();
        __syncthreads();
        for (int h = warp; h < group; h += KEY_WARPS * AT_ONCE) {
            float c[AT_ONCE][4];
            const float* of_head[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0.0f;
                of_head[i] = query + min(h + KEY_WARPS * i, group - 1) * d;
            }
#pragma unroll 4
            for (int x = 0; x < d; x += 8) {
                float k[8];
                Keys::load8(tile + lane * pitch, d, x, k);
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++) add_products(c[i], of_head[i] + x, k);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                if (h + KEY_WARPS * i < group && lane < n)
                    s[(first_head + h + KEY_WARPS * i) * stride + first + lane] = join_chains(c[i]) * scale;
        }
        __syncthreads();
    }
}

// Where the parts of a block's heads and 32 dims leave what they have, until the last of them joins it.
struct Partial {
    float *peaks, *sums, *values;

    DEVICE Partial(float* memory, long long unit, int parts, int heads) {
        memory += unit * parts * heads * 34;
        peaks = memory;
        sums = peaks + parts * heads;
        values = sums + parts * heads;
    }
};

constexpr int N = HEADS_OF_WARP;

// What a block of qsa_values works on: `heads` query heads that share a value head, the first of them `first_head` of all
// rows'; 32 dims; `count` tokens. e: exponentials [heads][PART]; tile: values.
struct Part {
    const float* scores;  // of the first head and token
    float* e;
    const u8* tile;
    Partial own;
    long long first_head;
    int heads, pitch, stride, part, parts, count, slice, d;  // pitch: heads of a block that has them all
};

// Scores to exponentials; peaks and sums of the part. A warp takes N heads at a time, WARPS apart.
DEVICE void part_exponentials(const Part& g) {
    const int lane = threadIdx.x & 31;
    for (int h = threadIdx.x >> 5; h < g.heads; h += WARPS * N) {
        PartScores v[N];
#pragma unroll
        for (int i = 0; i < N; i++)
            load_scores(v[i], g.scores + static_cast<long long>(min(h + WARPS * i, g.heads - 1)) * g.stride, g.count);
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int head = h + WARPS * i;
            if (head >= g.heads) break;
            const float2 peak_and_sum = exponentials(v[i], g.count, g.e + head * PART);
            if (lane == 0)
                g.own.peaks[g.part * g.pitch + head] = peak_and_sum.x, g.own.sums[g.part * g.pitch + head] = peak_and_sum.y;
        }
    }
}

// The sums e * v of the part.
DEVICE void part_values(const Part& g) {
    typedef Slice<Values> Tile;
    const int lane = threadIdx.x & 31;
    for (int h = threadIdx.x >> 5; h < g.heads; h += WARPS * N) {
        float o[N];
        const float* of_head[N];
#pragma unroll
        for (int i = 0; i < N; i++) o[i] = 0.0f, of_head[i] = g.e + min(h + WARPS * i, g.heads - 1) * PART;
        int t = 0;
#pragma unroll 2
        for (; t + 4 <= g.count; t += 4) {
            float v[4];
#pragma unroll
            for (int k = 0; k < 4; k++) v[k] = Tile::get(g.tile + (t + k) * Tile::BYTES, g.slice, lane);
#pragma unroll
            for (int i = 0; i < N; i++) {
                const float4 e = *reinterpret_cast<const float4*>(of_head[i] + t);
                o[i] = fmaf(e.w, v[3], fmaf(e.z, v[2], fmaf(e.y, v[1], fmaf(e.x, v[0], o[i]))));
            }
        }
        for (; t < g.count; t++) {
            const float v = Tile::get(g.tile + t * Tile::BYTES, g.slice, lane);
#pragma unroll
            for (int i = 0; i < N; i++) o[i] = fmaf(of_head[i][t], v, o[i]);
        }
#pragma unroll
        for (int i = 0; i < N; i++)
            if (h + WARPS * i < g.heads) g.own.values[(g.part * g.pitch + h + WARPS * i) * 32 + lane] = o[i];
    }
}

// All parts of the block's heads, joined and gated. The reads of several parts and of N heads are under way together.
DEVICE void join_parts(const Part& g, const float* q_gate, float* out) {
    constexpr int BATCH = N == 1 ? 12 : 4;  // all parts of 2,048 kept tokens and an open block at once
    const int lane = threadIdx.x & 31, x = 32 * g.slice + lane;
    for (int h = threadIdx.x >> 5; h < g.heads; h += WARPS * N) {
        float top[N], l[N], o[N], gate[N];
        int head[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            head[i] = min(h + WARPS * i, g.heads - 1);
            gate[i] = q_gate[(2 * (g.first_head + head[i]) + 1) * g.d + x];
            top[i] = -INFINITE, l[i] = 0.0f, o[i] = 0.0f;
        }
        if (g.parts > BATCH) {
#pragma unroll
            for (int i = 0; i < N; i++) {
                for (int p = lane; p < g.parts; p += 32) top[i] = fmaxf(top[i], __ldcg(g.own.peaks + p * g.pitch + head[i]));
                top[i] = warp_max(top[i]);
            }
        }
        for (int first = 0; first < g.parts; first += BATCH) {
            float peak[N][BATCH], sum[N][BATCH], value[N][BATCH];
#pragma unroll
            for (int i = 0; i < N; i++)
#pragma unroll
                for (int k = 0; k < BATCH; k++) {
                    const int at = min(first + k, g.parts - 1) * g.pitch + head[i];
                    peak[i][k] = __ldcg(g.own.peaks + at), sum[i][k] = __ldcg(g.own.sums + at);
                    value[i][k] = __ldcg(g.own.values + at * 32 + lane);
                }
#pragma unroll
            for (int i = 0; i < N; i++) {
                if (g.parts <= BATCH)
#pragma unroll
                    for (int k = 0; k < BATCH; k++) top[i] = fmaxf(top[i], peak[i][k]);
#pragma unroll
                for (int k = 0; k < BATCH; k++) {
                    if (first + k >= g.parts) break;
                    const float share = exp_f32(peak[i][k] - top[i]);
                    l[i] = fmaf(share, sum[i][k], l[i]);
                    o[i] = fmaf(share, value[i][k], o[i]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < N; i++)
            if (h + WARPS * i < g.heads) out[(g.first_head + head[i]) * g.d + x] = (o[i] / l[i]) * sigmoid_f32(gate[i]);
    }
}

// grid (parts, value heads x slices, rows x chunks), with PREPARES a part more: a chunk of the query heads that share a value
// head
KERNEL void __launch_bounds__(THREADS)
    qsa_values(ROW_ARGUMENTS, const float* s, int stride, const u8* cached, const u8* far, const float* q_gate,
               float* partial, u32* ended, float* out, int chunks, PARAMETER Projected projected) {
    const Args g = ROW;
    typedef Slice<Values> Tile;
    extern __shared__ __align__(16) float memory[];
    __shared__ int tokens[PART];
    const int row = blockIdx.z / chunks, chunk = blockIdx.z % chunks, tid = threadIdx.x, part = blockIdx.x;
    const int slices = g.d / 32, kv = blockIdx.y / slices, slice = blockIdx.y % slices, group = g.heads / g.kv_heads;
    const int each = (group + chunks - 1) / chunks, own_heads = min(each, group - chunk * each);
    const int most_parts = gridDim.x - PREPARES;
    if (PREPARES && part == most_parts) {
        inputs_ready();
        if (blockIdx.y == 0 && chunk == 0 && tid < 32)
            store_index_key(projected.index_k, row, tables, projected.numbers, pages_of_a_slot, slots, positions,
                            projected.raw, projected.far_raw, projected.block, projected.norm_index_k, projected.eps,
                            projected.rope(), projected.index_dim, r, memory);
        return;
    }
    const Kept kept = g.kept(row);
    const int first = part * PART, count = min(PART, kept.count - first), parts = (kept.count + PART - 1) / PART;
    if (count <= 0) {
        inputs_ready();
        return;
    }
    u8* tile = reinterpret_cast<u8*>(memory + each * PART);
    for (int t = tid; t < count; t += THREADS) tokens[t] = g.token(row, kept, first + t);
    __syncthreads();
    auto copy_values = [&](int begin, int end) {
        for (int i = begin * Tile::COPIES + tid; i < end * Tile::COPIES; i += THREADS) {
            const int t = i / Tile::COPIES;
            const u8* from = cell(cached, far, tokens[t], g.kv_heads, kv, Values::row(g.d));
            Tile::copy(tile + t * Tile::BYTES, from, g.d, slice, i % Tile::COPIES);
        }
        copies_commit();
    };
    // Values and the list are older than the scores; but with PREPARES those of this launch's rows are not.
    const int old = PREPARES ? max(0, min(count, g.first_new(row, gridDim.z / chunks) - first)) : count;
    copy_values(0, old);
    inputs_ready();
    copy_values(old, count);
    const long long unit = static_cast<long long>(blockIdx.z) * gridDim.y + blockIdx.y;
    const long long first_head = static_cast<long long>(row) * g.heads + kv * group + chunk * each;
    const Part work = {s + first_head * stride + first, memory, tile, Partial(partial, unit, most_parts, each),
                       first_head, own_heads, each, stride, part, parts, count, slice, g.d};
    part_exponentials(work);
    copies_wait<0>();
    __syncthreads();
    part_values(work);
    if (!last_block(ended + unit, parts)) return;
    join_parts(work, q_gate, out);
}
