// The first half of the attention of many rows: scores. HEADS query heads that share keys are computed together.
//
// qsa_prompt_keys    a block is one part of a row. A lane has one of the four chains of 8 tokens x HEADS query heads: 8 +
//                    HEADS loads of a word from shared memory for 8 * HEADS fma. Also the largest score of each head and part
// Why one chain: of two chains of half the heads a lane reads 28 words for 96 sums and not 20, though in fewer reads, which
//                was no faster. Sum t of a lane is token t ^ chain, so the exchanges that join the chains find the token a
//                lane keeps in the same register in every lane.
//
// Constants   HEAD_SIZE = D, HEADS, KEYS
#include "attend.cuh"

#ifndef HEAD_SIZE
#define HEAD_SIZE 256
#endif
#ifndef HEADS
#define HEADS 12
#endif
constexpr int D = HEAD_SIZE;
constexpr int WARPS = THREADS / 32;

constexpr int SLICE = 16;      // dims at a time
constexpr int TOKENS = 8;      // of a lane
constexpr int FEW_TOKENS = 8;  // a part of so few, what follows the listed blocks, is computed from device memory

// Keys of a part, SLICE dims of them, and of its queries. Pitches keep eight tokens in different banks.
template <class Value>
struct Slices {
    static constexpr int PITCH = SLICE + 16 / sizeof(Value);
    Value k[PART][PITCH];
    float q[HEADS][SLICE];
};

// Plain formats are copied asynchronously as they are; a thread takes the same piece of several tokens.
template <class Format>
struct Stage {
    typedef typename Format::Value Value;
    typedef Slices<Value> To;
    static constexpr int PIECE = 16 / sizeof(Value), PIECES = SLICE / PIECE, EACH = THREADS / PIECES, N = PART / EACH;
    const u8* at;
    u32 rows[N];  // in 16 bytes

    DEVICE Stage(const u8* cached, const int* tokens, int kv_heads, int kv) {
        at = cached + threadIdx.x % PIECES * 16;
#pragma unroll
        for (int i = 0; i < N; i++)
            rows[i] = (static_cast<u32>(tokens[threadIdx.x / PIECES + i * EACH]) * kv_heads + kv) * (Format::row(D) / 16);
    }
    DEVICE void fetch(To& to, int slice) {
        const u8* from = at + slice * SLICE * sizeof(Value);
#pragma unroll
        for (int i = 0; i < N; i++)
            copy16(&to.k[threadIdx.x / PIECES + i * EACH][threadIdx.x % PIECES * PIECE], from + rows[i] * 16ull);
    }
    DEVICE void land(To&) {}
    DEVICE static float get(Value v) { return Format::get(v); }
};

// Codes are fetched to registers and land as float32; a thread takes the whole slice of several tokens.
template <class Codes>
struct Stage<Packed<Codes>> {
    typedef Packed<Codes> Format;
    typedef Slices<float> To;
    typedef typename Word<Codes::UNIT_BYTES(8)>::T Eight;
    static constexpr int N = PART / THREADS;
    const u8* row[N];
    Eight codes[N][2];
    u16 scales[N];

    DEVICE Stage(const u8* cached, const int* tokens, int kv_heads, int kv) {
#pragma unroll
        for (int i = 0; i < N; i++)
            row[i] = cached + (static_cast<long long>(tokens[threadIdx.x + i * THREADS]) * kv_heads + kv) * Format::row(D);
    }
    DEVICE void fetch(To&, int slice) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const Eight* from = reinterpret_cast<const Eight*>(row[i] + Codes::UNIT_BYTES(slice * SLICE));
            codes[i][0] = from[0], codes[i][1] = from[1];
            scales[i] = Format::scale_of(row[i], D, slice * SLICE);
        }
    }
    DEVICE void land(To& to) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const Scale s(scales[i], Codes::ZERO);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float v[8];
                Codes::template spread<8>(codes[i][half], s, v);
                float4* p = reinterpret_cast<float4*>(&to.k[threadIdx.x + i * THREADS][8 * half]);
                p[0] = make_float4(v[0], v[1], v[2], v[3]), p[1] = make_float4(v[4], v[5], v[6], v[7]);
            }
        }
    }
    DEVICE static float get(float v) { return v; }
};

// Scores of the few tokens of a part: a thread a dot.
DEVICE void few_keys(const float* q, const u8* cached, const int* tokens, int count, int kv_heads, int kv, float* s,
                     int stride, float scale) {
    for (int e = threadIdx.x; e < count * HEADS; e += THREADS) {
        const int t = e / HEADS, h = e % HEADS;
        const u8* row = cached + (static_cast<long long>(tokens[t]) * kv_heads + kv) * Keys::row(D);
        float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
        for (int x = 0; x < D; x += 8) {
            float k[8];
            Keys::load8(row, D, x, k);
            add_products(c, q + h * D + x, k);
        }
        s[h * static_cast<long long>(stride) + t] = join_chains(c) * scale;
    }
}

// Dots of 64 tokens with all heads by a warp, chains apart.
struct Dots {
    float c[TOKENS][HEADS];

    template <class Value>
    DEVICE void add(const Slices<Value>& tile, int first, int chain, int group) {
        const Value* k[4];
#pragma unroll
        for (int t = 0; t < 4; t++) k[t] = &tile.k[first + group + 8 * (t ^ chain)][chain];
#pragma unroll
        for (int x = 0; x < SLICE; x += 4) {
            float keys[TOKENS], queries[HEADS];
#pragma unroll
            for (int t = 0; t < TOKENS; t++)
                keys[t] = Stage<Keys>::get(k[t % 4][(t & 4) * 8 * Slices<Value>::PITCH + x]);
#pragma unroll
            for (int h = 0; h < HEADS; h++) queries[h] = tile.q[h][x + chain];
#pragma unroll
            for (int t = 0; t < TOKENS; t++)
#pragma unroll
                for (int h = 0; h < HEADS; h++) c[t][h] = fmaf(queries[h], keys[t], c[t][h]);
        }
    }

    // (c0 + c1) + (c2 + c3). Lane (group, chain) keeps the tokens group + 8 * chain in c[0], and 32 more in c[4].
    DEVICE void join() {
#pragma unroll
        for (int t = 0; t < TOKENS; t += 2)
#pragma unroll
            for (int h = 0; h < HEADS; h++) c[t][h] = c[t][h] + __shfl_xor_sync(ALL, c[t + 1][h], 1);
#pragma unroll
        for (int t = 0; t < TOKENS; t += 4)
#pragma unroll
            for (int h = 0; h < HEADS; h++) c[t][h] = c[t][h] + __shfl_xor_sync(ALL, c[t + 2][h], 2);
    }
};

KERNEL void __launch_bounds__(THREADS, 3)
    qsa_prompt_keys(ROW_ARGUMENTS, const float* q, const u8* cached, float* s, int stride, float* peaks, int* found) {
    inputs_ready();
    const Args g = ROW;
    typedef Stage<Keys> Staged;
    __shared__ __align__(16) typename Staged::To tiles[2];
    __shared__ int tokens[PART];
    __shared__ float tops[WARPS][HEADS];
    const int row = blockIdx.z, tid = threadIdx.x, chunks = g.heads / g.kv_heads / HEADS, kv = blockIdx.y / chunks;
    const Kept kept = g.kept(row);
    const int first = blockIdx.x * PART, count = min(PART, kept.count - first);
    if (count <= 0) return;
    const long long first_head = static_cast<long long>(row) * g.heads + blockIdx.y * HEADS;
    q += first_head * D, s += first_head * stride + first, peaks += first_head * gridDim.x + blockIdx.x;
    for (int t = tid; t < PART; t += THREADS) {
        tokens[t] = g.token(row, kept, first + min(t, count - 1));
        if (blockIdx.y == 0 && t < count) found[static_cast<long long>(row) * stride + first + t] = tokens[t];
    }
    __syncthreads();
    const float scale = 1.0f / sqrtf(static_cast<float>(D));
    if (count <= FEW_TOKENS) {
        few_keys(q, cached, tokens, count, g.kv_heads, kv, s, stride, scale);
        __syncthreads();
        if (tid >= HEADS) return;
        float top = -INFINITE;
        for (int t = 0; t < count; t++) top = fmaxf(top, s[tid * static_cast<long long>(stride) + t]);
        peaks[tid * gridDim.x] = top;
        return;
    }
    const int lane = tid & 31, warp = tid >> 5, chain = lane & 3, group = lane >> 2;
    Staged stage(cached, tokens, g.kv_heads, kv);
    auto fetch = [&](typename Staged::To& to, int slice) {
        stage.fetch(to, slice);
        if (tid < HEADS * SLICE / 4) {
            const int h = tid / (SLICE / 4), x = tid % (SLICE / 4) * 4;
            copy16(&to.q[h][x], q + h * D + slice * SLICE + x);
        }
    };
    Dots dots;
#pragma unroll
    for (int t = 0; t < TOKENS; t++)
#pragma unroll
        for (int h = 0; h < HEADS; h++) dots.c[t][h] = 0.0f;
    fetch(tiles[0], 0);
    copies_commit();
    stage.land(tiles[0]);
#pragma unroll 1
    for (int slice = 0, u = 0; slice < D / SLICE; slice++, u ^= 1) {
        copies_wait<0>();
        __syncthreads();
        const bool more = slice + 1 < D / SLICE;
        if (more) fetch(tiles[u ^ 1], slice + 1);
        copies_commit();
        dots.add(tiles[u], warp * TOKENS * 8, chain, group);
        if (more) stage.land(tiles[u ^ 1]);
    }
    __syncwarp();
    dots.join();
    const int t0 = warp * TOKENS * 8 + group + 8 * chain, t1 = t0 + 32;
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        const float a = dots.c[0][h] * scale, b = dots.c[4][h] * scale;
        float* to = s + h * static_cast<long long>(stride);
        if (t0 < count) to[t0] = a;
        if (t1 < count) to[t1] = b;
        const float top = warp_max(fmaxf(t0 < count ? a : -INFINITE, t1 < count ? b : -INFINITE));
        if (lane == 0) tops[warp][h] = top;
    }
    __syncthreads();
    if (tid >= HEADS) return;
    float top = tops[0][tid];
#pragma unroll
    for (int w = 1; w < WARPS; w++) top = fmaxf(top, tops[w][tid]);
    peaks[tid * gridDim.x] = top;
}
