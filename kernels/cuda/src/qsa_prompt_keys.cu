// The first half of the attention of many rows: scores. HEADS query heads that share keys are computed together.
//
// qsa_prompt_keys    a block is one part of a row. A lane has all chains of WINDOW * HEADS / 32 dots: for twelve heads 10 reads
//                    of four words for 96 fma, and neighbours share the key. Also the largest score of each head and part
// Why four chains: shared memory is the limit, as what is copied there and what is read pass through one door. Of one chain
//                a lane reads 20 single words, in 20 turns, for 96 sums; so it is 14, and the chains need no exchange.
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
constexpr int WINDOW = 64;     // tokens of a warp
constexpr int SETS = HEADS % 2 ? 1 : 2, OWN = HEADS / SETS;     // lanes that share a token; heads of a lane
constexpr int GROUPS = 32 / SETS, TOKENS = WINDOW / GROUPS;     // lanes of different tokens; tokens of a lane
static_assert(WARPS * WINDOW == PART, "a warp has a window of the part");
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
        for (int i = 0; i < N; i++) {
            asm volatile("" : "+r"(rows[i]));  // held as it is: eight addresses are too many registers
            copy16(&to.k[threadIdx.x / PIECES + i * EACH][threadIdx.x % PIECES * PIECE], from + rows[i] * 16ull);
        }
    }
    DEVICE void land(To&) {}
    DEVICE static float4 four(const float* v) { return *reinterpret_cast<const float4*>(v); }
    DEVICE static float4 four(const u16* v) {
        const uint2 two = *reinterpret_cast<const uint2*>(v);
        return make_float4(half_value(static_cast<u16>(two.x)), half_value(static_cast<u16>(two.x >> 16)),
                           half_value(static_cast<u16>(two.y)), half_value(static_cast<u16>(two.y >> 16)));
    }
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
    DEVICE static float4 four(const float* v) { return *reinterpret_cast<const float4*>(v); }
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

// Dots of a warp's tokens with all heads: tokens group + GROUPS * t, heads set + SETS * o of a lane.
struct Dots {
    float c[TOKENS][OWN][4];

    DEVICE void clear() {
#pragma unroll
        for (int t = 0; t < TOKENS; t++)
#pragma unroll
            for (int o = 0; o < OWN; o++)
#pragma unroll
                for (int i = 0; i < 4; i++) c[t][o][i] = 0.0f;
    }
    template <class Value>
    DEVICE void add(const Slices<Value>& tile, int first, int set) {
#pragma unroll
        for (int x = 0; x < SLICE; x += 4) {
            float4 k[TOKENS];
#pragma unroll
            for (int t = 0; t < TOKENS; t++) k[t] = Stage<Keys>::four(&tile.k[first + GROUPS * t][x]);
#pragma unroll
            for (int o = 0; o < OWN; o++) {
                const float4 a = *reinterpret_cast<const float4*>(&tile.q[set + SETS * o][x]);
#pragma unroll
                for (int t = 0; t < TOKENS; t++) {
                    c[t][o][0] = fmaf(a.x, k[t].x, c[t][o][0]);
                    c[t][o][1] = fmaf(a.y, k[t].y, c[t][o][1]);
                    c[t][o][2] = fmaf(a.z, k[t].z, c[t][o][2]);
                    c[t][o][3] = fmaf(a.w, k[t].w, c[t][o][3]);
                }
            }
        }
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
    const int lane = tid & 31, warp = tid >> 5, set = lane % SETS, own_token = warp * WINDOW + lane / SETS;
    Staged stage(cached, tokens, g.kv_heads, kv);
    auto fetch = [&](typename Staged::To& to, int slice) {
        stage.fetch(to, slice);
        if (tid < HEADS * SLICE / 4) {
            const int h = tid / (SLICE / 4), x = tid % (SLICE / 4) * 4;
            copy16(&to.q[h][x], q + h * D + slice * SLICE + x);
        }
    };
    Dots dots;
    dots.clear();
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
        dots.add(tiles[u], own_token, set);
        if (more) stage.land(tiles[u ^ 1]);
    }
#pragma unroll
    for (int o = 0; o < OWN; o++) {
        const int h = set + SETS * o;
        float top = -INFINITE;
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            const int token = own_token + GROUPS * t;
            const float score = join_chains(dots.c[t][o]) * scale;
            if (token < count) s[h * static_cast<long long>(stride) + token] = score, top = fmaxf(top, score);
        }
#pragma unroll
        for (int apart = SETS; apart < 32; apart *= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, apart));
        if (lane < SETS) tops[warp][h] = top;
    }
    __syncthreads();
    if (tid >= HEADS) return;
    float top = tops[0][tid];
#pragma unroll
    for (int w = 1; w < WARPS; w++) top = fmaxf(top, tops[w][tid]);
    peaks[tid * gridDim.x] = top;
}
