// The first half of the attention of many rows (qsa_prompt_values.cu is the second): scores of the kept tokens.
//
// qsa_prompt_keys    a block has neighbouring rows, a warp each, and a window of WINDOW tokens of each row's list, for HEADS
//                    query heads that share keys. The keys of a slice of dims pass through shared memory, once for all
//                    rows that keep them: rows of a block attend to much the same tokens. A lane has all chains of
//                    WINDOW * HEADS / 32 dots. Also the largest score of each head and window, and where each kept token lies.
// Why        a row's keys are 2 MB; from the second cache alone, for each row again, they would allow half of this rate.
//            Four chains a lane: 10 reads of four words, of which neighbours share most, for 96 fma (twelve heads).
//
// Constants   HEAD_SIZE = D, HEADS, KEYS; WARPS of a block
#include "attend.cuh"

#ifndef HEAD_SIZE
#define HEAD_SIZE 256
#endif
#ifndef HEADS
#define HEADS 12
#endif
#ifndef WARPS
#define WARPS 6
#endif

constexpr int D = HEAD_SIZE;
constexpr int BLOCK = 32 * WARPS;
constexpr int WINDOW = 64;         // tokens of a warp
constexpr int QUADS = WINDOW / 4;  // runs of four tokens of its list: mostly neighbours in a page
constexpr int SLICE = 16;          // dims at a time
constexpr int SETS = HEADS % 2 ? 1 : 2, OWN = HEADS / SETS;        // lanes that share a token; heads of a lane
constexpr int GROUPS = 32 / SETS, TOKENS = WINDOW / GROUPS;        // lanes of different tokens; tokens of a lane
constexpr int MOST = QUADS * WARPS;                                // quads of a block
constexpr int TABLE = MOST <= 64 ? 128 : MOST <= 128 ? 256 : 512;  // at least twice as many places as quads
constexpr u32 EMPTY = ~0u;
constexpr int FEW_TOKENS = 8;  // rows with so few in a window, what follows the listed blocks, share nothing

// Held in a register: not computed again where it is used.
#define HOLD(x) asm volatile("" : "+r"(x))

// A slice of keys of a block's tokens, a quad after the other, and of its queries. Pitches keep eight tokens in different
// banks.
template <class Value>
struct Slices {
    static constexpr int PITCH = SLICE + 16 / sizeof(Value);
    Value k[4 * MOST][PITCH];
    float q[WARPS][HEADS][SLICE];
};

// Which tokens a block has: each quad that several rows keep once. `places`: where a token's keys lie, in 16 bytes. Even
// quads of a list are numbered even, odd ones odd, as far as they are not shared: neighbours lie in different banks.
struct Quads {
    u32 places[4 * MOST], table[TABLE];
    short index[TABLE], number[WARPS][QUADS];
    int n[2];

    DEVICE void clear() {
        for (int i = threadIdx.x; i < TABLE; i += BLOCK) table[i] = EMPTY;
        if (threadIdx.x < 2) n[threadIdx.x] = 0;
    }
    DEVICE int append(int parity, uint4 tokens) {
        const int number = 2 * atomicAdd(&n[parity], 1) + parity;
        *reinterpret_cast<uint4*>(&places[4 * number]) = tokens;
        return number;
    }
    // One of a warp's quads; neighbours lie `pitch` apart. Returns its entry of the table, or -1: it has its number already.
    DEVICE int enter(int warp, int quad, uint4 t, u32 pitch) {
        if (t.y != t.x + pitch || t.z != t.y + pitch || t.w != t.z + pitch) {
            number[warp][quad] = static_cast<short>(append(quad & 1, t));
            return -1;
        }
        for (u32 at = t.x * 2654435761u >> 20;; at++) {
            at &= TABLE - 1;
            const u32 there = atomicCAS(&table[at], EMPTY, t.x);
            if (there == EMPTY) index[at] = static_cast<short>(append(quad & 1, t));
            if (there == EMPTY || there == t.x) return static_cast<int>(at);
        }
    }
    // Numbers below this are there once gaps are filled: with what their neighbour has.
    DEVICE int end() const { return 2 * max(n[0], n[1]); }
    DEVICE void fill_gaps() {
        const int parity = n[0] < n[1] ? 0 : 1, number = 2 * (n[parity] + static_cast<int>(threadIdx.x)) + parity;
        if (number < end())
            *reinterpret_cast<uint4*>(&places[4 * number]) = *reinterpret_cast<const uint4*>(&places[4 * (number ^ 1)]);
    }
};

// Plain formats are copied asynchronously as they are; a thread takes the same piece of several tokens.
template <class Format>
struct Stage {
    typedef typename Format::Value Value;
    typedef Slices<Value> To;
    static constexpr int PIECE = 16 / sizeof(Value), PIECES = SLICE / PIECE, EACH = BLOCK / PIECES, N = 4 * MOST / EACH;
    const u8* at;
    const Quads& quads;
    u32 token, first;
    int left;

    DEVICE Stage(const u8* cached, const Quads& quads)
        : at(cached + threadIdx.x % PIECES * 16), quads(quads), token(threadIdx.x / PIECES),
          first(threadIdx.x / PIECES * To::PITCH + threadIdx.x % PIECES * PIECE),
          left(4 * quads.end() - static_cast<int>(threadIdx.x / PIECES)) {
        HOLD(token);
        HOLD(first);
    }
    DEVICE void fetch(To& to) {
        Value* k = &to.k[0][0] + first;
        constexpr int HALF = (N + 1) / 2;
#pragma unroll
        for (int half = 0; half < N; half += HALF) {
            if (half * EACH >= left) break;  // mostly what rows share leaves no second half
            u32 places[HALF];                // all are read before the first copy: a copy after a read waits
#pragma unroll
            for (int i = 0; i < HALF; i++) places[i] = quads.places[token + min(half + i, N - 1) * EACH];
#pragma unroll
            for (int i = 0; i < HALF; i++)
                if (half + i < N && (half + i) * EACH < left)
                    copy16(k + (half + i) * EACH * To::PITCH, at + places[i] * 16ull);
        }
        at += SLICE * sizeof(Value);
    }
    DEVICE void land(To&) {}
    DEVICE static float4 get(const float* v) { return *reinterpret_cast<const float4*>(v); }
    DEVICE static float4 get(const u16* v) {
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
    static constexpr int N = 4 * MOST / BLOCK;
    const u8* row[N];
    int slice;
    Eight codes[N][2];
    u16 scales[N];

    DEVICE Stage(const u8* cached, const Quads& quads) : slice(0) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int token = threadIdx.x + i * BLOCK;
            row[i] = token < 4 * quads.end() ? cached + quads.places[token] * 16ull : nullptr;
        }
    }
    DEVICE void fetch(To&) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (!row[i]) continue;
            const Eight* from = reinterpret_cast<const Eight*>(row[i] + Codes::UNIT_BYTES(slice * SLICE));
            codes[i][0] = from[0], codes[i][1] = from[1];
            scales[i] = Format::scale_of(row[i], D, slice * SLICE);
        }
        slice++;
    }
    DEVICE void land(To& to) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (!row[i]) continue;
            const Scale s(scales[i], Codes::ZERO);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float v[8];
                Codes::template spread<8>(codes[i][half], s, v);
                float4* p = reinterpret_cast<float4*>(&to.k[threadIdx.x + i * BLOCK][8 * half]);
                p[0] = make_float4(v[0], v[1], v[2], v[3]), p[1] = make_float4(v[4], v[5], v[6], v[7]);
            }
        }
    }
    DEVICE static float4 get(const float* v) { return *reinterpret_cast<const float4*>(v); }
};

typedef Stage<Keys> Staged;
typedef typename Staged::To Tile;

// Dots of a warp's tokens with all heads: tokens group + GROUPS * t, heads set + SETS * o of a lane.
struct Dots {
    float c[TOKENS][OWN][4];

    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < TOKENS * OWN * 4; i++) (&c[0][0][0])[i] = 0.0f;
    }
    DEVICE void add(const Tile& tile, const int (&tokens)[TOKENS], const float* q) {
#pragma unroll
        for (int x = 0; x < SLICE; x += 4) {
            float4 k[TOKENS];
#pragma unroll
            for (int t = 0; t < TOKENS; t++) k[t] = Staged::get(&tile.k[0][tokens[t] + x]);
#pragma unroll
            for (int o = 0; o < OWN; o++) {
                const float4 a = *reinterpret_cast<const float4*>(q + SETS * o * SLICE + x);
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
    // Scores of the tokens that there are, and the largest of each head.
    DEVICE void leave(int set, int group, int count, float* s, int stride, float* peaks) const {
        const float scale = 1.0f / sqrtf(static_cast<float>(D));
#pragma unroll
        for (int o = 0; o < OWN; o++) {
            const int h = set + SETS * o;
            float top = -INFINITE;
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                const int token = group + GROUPS * t;
                const float score = join_chains(c[t][o]) * scale;
                if (token < count) s[h * static_cast<long long>(stride) + token] = score, top = fmaxf(top, score);
            }
#pragma unroll
            for (int apart = SETS; apart < 32; apart *= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, apart));
            if (group == 0) peaks[h * static_cast<long long>(gridDim.x)] = top;
        }
    }
};

// Scores of the few tokens of a warp: a lane a dot.
DEVICE void few_keys(const Args& g, const Kept& kept, int row, int first, int count, const float* q, const u8* cached,
                     float* s, int stride, float* peak, int* found) {
    const int lane = threadIdx.x & 31;
    const float scale = 1.0f / sqrtf(static_cast<float>(D));
    for (int e = lane; e < count * HEADS; e += 32) {
        const int t = e / HEADS, h = e % HEADS, at = g.token(row, kept, first + t);
        const u8* key = cached + static_cast<long long>(at) * g.kv_heads * Keys::row(D);
        float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
        for (int x = 0; x < D; x += 8) {
            float k[8];
            Keys::load8(key, D, x, k);
            add_products(c, q + h * D + x, k);
        }
        s[h * static_cast<long long>(stride) + t] = join_chains(c) * scale;
        if (h == 0 && found) found[t] = at;
    }
    __syncwarp();
    if (lane >= HEADS) return;
    float top = -INFINITE;
    for (int t = 0; t < count; t++) top = fmaxf(top, s[lane * static_cast<long long>(stride) + t]);
    *peak = top;
}

// The tokens of every warp get their numbers.
DEVICE void number_tokens(Quads& quads, const Args& g, const Kept& kept, int row, int first, int count, int* found) {
    const u32 pitch = g.kv_heads * (Keys::row(D) / 16);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane % QUADS;
    int entered = -1;
    quads.clear();
    __syncthreads();
    if (lane < QUADS && 4 * quad < count) {
        int at[4];
#pragma unroll
        for (int i = 0; i < 4; i++) at[i] = g.token(row, kept, first + min(4 * quad + i, count - 1));
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (found && 4 * quad + i < count) found[4 * quad + i] = at[i];
        entered = quads.enter(warp, quad, make_uint4(at[0] * pitch, at[1] * pitch, at[2] * pitch, at[3] * pitch), pitch);
    } else if (lane < QUADS) {
        quads.number[warp][quad] = 0;  // not there: any will do
    }
    __syncthreads();
    if (entered >= 0) quads.number[warp][quad] = quads.index[entered];
    quads.fill_gaps();
    __syncthreads();
}

struct KeysMemory {
    Tile tiles[2];
    Quads quads;
};

// peaks (rows, heads, windows), found (rows, stride). grid (windows, chunks of heads, blocks of rows)
KERNEL void __launch_bounds__(BLOCK, 12 / WARPS)
    qsa_prompt_keys(ROW_ARGUMENTS, const float* q, const u8* cached, float* s, int stride, float* peaks, int* found,
                    int rows) {
    inputs_ready();
    const Args g = ROW;
    extern __shared__ __align__(16) u8 memory[];
    KeysMemory& m = *reinterpret_cast<KeysMemory*>(memory);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = blockIdx.z * WARPS + warp;
    const int chunks = g.heads / g.kv_heads / HEADS, kv = blockIdx.y / chunks, first = blockIdx.x * WINDOW;
    int count = 0;
    Kept kept = {0, 0, 0};
    if (row < rows) kept = g.kept(row), count = max(0, min(WINDOW, kept.count - first));
    int most = 0;
    for (int r = blockIdx.z * WARPS; r < min(rows, static_cast<int>(blockIdx.z + 1) * WARPS); r++)
        most = max(most, g.kept(r).count - first);
    if (most <= 0) return;
    const long long first_head = static_cast<long long>(row) * g.heads + blockIdx.y * HEADS;
    q += first_head * D, s += first_head * stride + first, peaks += first_head * gridDim.x + blockIdx.x;
    cached += static_cast<long long>(kv) * Keys::row(D);
    found = blockIdx.y ? nullptr : found + static_cast<long long>(row) * stride + first;
    if (most <= FEW_TOKENS) {
        if (count)
            few_keys(g, kept, row, first, count, q, cached, s, stride, peaks + lane * static_cast<long long>(gridDim.x),
                     found);
        return;
    }
    number_tokens(m.quads, g, kept, row, first, count, found);
    const int set = lane % SETS, group = lane / SETS;
    int tokens[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; t++)
        tokens[t] = (4 * m.quads.number[warp][(group + GROUPS * t) / 4] + group % 4) * Tile::PITCH;

    Staged stage(cached, m.quads);
    constexpr int PIECES = SLICE / 4;  // of a query
    const float* own_q = q + lane / PIECES * D + lane % PIECES * 4;
    int to_q = warp * HEADS * SLICE + 4 * lane, from_q = (warp * HEADS + set) * SLICE;
    int q_left = count ? HEADS * PIECES - lane : 0;
    HOLD(to_q);
    HOLD(from_q);
    HOLD(q_left);
    auto fetch = [&](Tile& to) {
        stage.fetch(to);
#pragma unroll
        for (int i = 0; i < HEADS * PIECES; i += 32)
            if (i < q_left) copy16(&to.q[0][0][0] + to_q + 4 * i, own_q + i / PIECES * D);
        own_q += SLICE;
        copies_commit();
    };
    Dots dots;
    dots.clear();
    fetch(m.tiles[0]);
    stage.land(m.tiles[0]);
#pragma unroll 1
    for (int slice = 0, u = 0; slice < D / SLICE; slice++, u ^= 1) {
        copies_wait<0>();
        __syncthreads();
        const bool more = slice + 1 < D / SLICE;
        if (more) fetch(m.tiles[u ^ 1]);
        if (count) dots.add(m.tiles[u], tokens, &m.tiles[u].q[0][0][0] + from_q);
        if (more) stage.land(m.tiles[u ^ 1]);
    }
    if (!count) return;
    dots.leave(set, group, count, s, stride, peaks);
}
