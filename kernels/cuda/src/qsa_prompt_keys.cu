// The first half of the attention of many rows: scores. HEADS query heads that share keys are computed together.
//
// qsa_prompt_keys    a block is one part of a row, a warp 64 of its tokens: it finds them, copies their keys, SLICE dims at a
//                    time and STAGES - 1 slices ahead, and waits for no other warp until all have their scores; only the
//                    queries are the block's. A lane has one of the four chains of 8 tokens x HEADS query heads: 8 +
//                    HEADS words from shared memory for 8 * HEADS fma. Also the largest score of each head and part
// Why one chain: of two chains of half the heads a lane reads 28 words for 96 sums and not 20, though in fewer reads, which
//                was no faster. Of float32 four reads are one instruction (load_rows), whose lanes get just these chains.
//
// Constants   HEAD_SIZE = D, HEADS, KEYS; STAGES: 3 where three blocks find room for them
#include "attend.cuh"

#ifndef HEAD_SIZE
#define HEAD_SIZE 256
#endif
#ifndef HEADS
#define HEADS 12
#endif
#ifndef STAGES
#define STAGES 2
#endif
constexpr int D = HEAD_SIZE;
constexpr int WARPS = THREADS / 32;

constexpr int SLICE = 16;               // dims at a time
constexpr int TOKENS = 8;               // of a lane
constexpr int OF_WARP = 8 * TOKENS;     // tokens
constexpr int QUADS = (HEADS + 3) / 4;  // of heads
constexpr int FEW_TOKENS = 8;           // a part of so few, what follows the listed blocks, is computed from device memory
static_assert(WARPS * OF_WARP == PART, "a warp has its tokens of a part");

// SLICE dims of a warp's keys.
template <class Value>
struct Slice {
    Value k[OF_WARP][SLICE];
};

// What a block has in shared memory; qsa.py knows how much it is. Reads of four heads at a time may go past the last one.
template <class Value>
struct BlockMemory {
    float q[HEADS][D];
    Slice<Value> slices[WARPS][STAGES];
};

// Lane 4 g + c gets word c of row g of each of four groups of eight rows of 16 bytes; lane 8 i + g tells where row g of
// group i lies.
DEVICE void load_rows(float (&v)[4], u32 row) {
    u32 w[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(row)
                 : "memory");
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = float_bits(w[i]);
}

DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// Where a piece of 16 bytes of a token's slice lies: eight tokens' have different banks. Four pieces of float32.
template <class Value>
DEVICE int piece_at(int token, int piece) {
    return sizeof(Value) == 4 ? piece ^ (token >> 1 & 3) : piece ^ (token >> 2 & 1);
}

// The tokens of a warp, as rows of keys in all pages: lane l has the l-th and the (l + 32)-th.
struct Tokens {
    u32 row[2];
};

// Plain formats are copied asynchronously as they are; a lane takes the same piece of several tokens.
template <class Format>
struct Stage {
    typedef typename Format::Value Value;
    static constexpr int PIECE = 16 / sizeof(Value), PIECES = SLICE / PIECE, EACH = 32 / PIECES, N = OF_WARP / EACH;
    const u8* at;
    u32 rows[N];  // in 16 bytes
    u32 to;

    DEVICE Stage(const u8* cached, const Tokens& tokens, const Slice<Value>* slices) {
        const int lane = threadIdx.x & 31, first = lane / PIECES;
        at = cached + lane % PIECES * 16;
#pragma unroll
        for (int i = 0; i < N; i++) {
            const u32 row = i * EACH < 32 ? tokens.row[0] : tokens.row[1];
            rows[i] = __shfl_sync(ALL, row, (first + i * EACH) & 31) * (Format::row(D) / 16);
        }
        to = shared_address(&slices->k[first][piece_at<Value>(first, lane % PIECES) * PIECE]);
        asm volatile("" : "+r"(to));  // held, not computed again for every slice
    }
    // The next slice.
    DEVICE void fetch(int stage) {
        u64 from = reinterpret_cast<u64>(at);
        asm volatile("" : "+l"(from));  // so that each place is one multiply-add, and not held in two registers
        const u32 begin = to + stage * sizeof(Slice<Value>);
#pragma unroll
        for (int i = 0; i < N; i++)
            copy16_to(begin + i * EACH * SLICE * sizeof(Value), reinterpret_cast<const u8*>(from) + rows[i] * 16ull);
        at = reinterpret_cast<const u8*>(from) + SLICE * sizeof(Value);
    }
    DEVICE void land(Slice<Value>&) {}
};

// Codes are fetched to registers and land as float32; a lane takes the whole slice of two tokens.
template <class Codes>
struct Stage<Packed<Codes>> {
    typedef Packed<Codes> Format;
    typedef float Value;
    typedef typename Word<Codes::UNIT_BYTES(8)>::T Eight;
    const u8* row[2];
    Eight codes[2][2];
    u16 scales[2];
    int slice;

    DEVICE Stage(const u8* cached, const Tokens& tokens, const Slice<float>*) : slice(0) {
#pragma unroll
        for (int i = 0; i < 2; i++) row[i] = cached + static_cast<u64>(tokens.row[i]) * Format::row(D);
    }
    DEVICE void fetch(int) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const Eight* from = reinterpret_cast<const Eight*>(row[i] + Codes::UNIT_BYTES(slice * SLICE));
            codes[i][0] = from[0], codes[i][1] = from[1];
            scales[i] = Format::scale_of(row[i], D, slice * SLICE);
        }
        slice++;
    }
    DEVICE void land(Slice<float>& to) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const Scale s(scales[i], Codes::ZERO);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float v[8];
                Codes::template spread<8>(codes[i][half], s, v);
#pragma unroll
                for (int j = 0; j < 2; j++)
                    *reinterpret_cast<float4*>(&to.k[lane + 32 * i][piece_at<float>(lane, 2 * half + j) * 4]) =
                        make_float4(v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
            }
        }
    }
};

// Scores of the few tokens of a part: a thread a dot. `rows`: where the keys of each lie.
DEVICE void few_keys(const float* q, const u8* cached, const u32* rows, int count, float* s, int stride, float scale) {
    for (int e = threadIdx.x; e < count * HEADS; e += THREADS) {
        const int t = e / HEADS, h = e % HEADS;
        const u8* row = cached + static_cast<u64>(rows[t]) * Keys::row(D);
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

// The keys of a lane's chain of dims x to x + 3, of the tokens group + 8 t.
template <class Value>
struct KeysOfLane;

template <>
struct KeysOfLane<float> {
    u32 row;

    DEVICE explicit KeysOfLane(const Slice<float>* slices) {
        const int lane = threadIdx.x & 31;
        row = shared_address(&slices->k[lane][4 * piece_at<float>(lane, 0)]);
        asm volatile("" : "+r"(row));  // held, not computed again for every slice
    }
    DEVICE void load(float (&keys)[TOKENS], int stage, int x) const {
        const u32 at = (row + stage * static_cast<u32>(sizeof(Slice<float>))) ^ (4 * x);  // rows lie at multiples of 64
#pragma unroll
        for (int i = 0; i < TOKENS; i += 4) {
            float four[4];
            load_rows(four, at + 8 * i * SLICE * 4);
#pragma unroll
            for (int j = 0; j < 4; j++) keys[i + j] = four[j];
        }
    }
};

template <>
struct KeysOfLane<u16> {
    const Slice<u16>* slices;

    DEVICE explicit KeysOfLane(const Slice<u16>* slices) : slices(slices) {}
    DEVICE void load(float (&keys)[TOKENS], int stage, int x) const {
        const int lane = threadIdx.x & 31, group = lane >> 2, at = piece_at<u16>(group, x / 8) * 8 + x % 8 + (lane & 3);
#pragma unroll
        for (int t = 0; t < TOKENS; t++) keys[t] = half_value(slices[stage].k[group + 8 * t][at]);
    }
};

// Dots of a warp's tokens with all heads, chains apart: sum t of lane (group, chain) is of token group + 8 t.
struct Dots {
    float c[TOKENS][HEADS];

    DEVICE void clear() {
#pragma unroll
        for (int t = 0; t < TOKENS; t++)
#pragma unroll
            for (int h = 0; h < HEADS; h++) c[t][h] = 0.0f;
    }

    DEVICE void add_one(const float (&keys)[TOKENS], const float (&queries)[4 * QUADS]) {
#pragma unroll
        for (int t = 0; t < TOKENS; t++)
#pragma unroll
            for (int h = 0; h < HEADS; h++) c[t][h] = fmaf(queries[h], keys[t], c[t][h]);
    }

    // `q`: the lane's row of the first four heads, for load_rows. Where a lane's head is not there its row is another's,
    // and nobody uses what it brings.
    DEVICE static void load_queries(float (&queries)[4 * QUADS], u32 q, int x) {
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            float four[4];
            load_rows(four, q + (4 * i * D + x) * 4);
#pragma unroll
            for (int j = 0; j < 4; j++) queries[4 * i + j] = four[j];
        }
    }

    template <class Value>
    DEVICE void add(const KeysOfLane<Value>& lane, int stage, u32 q) {
#pragma unroll
        for (int x = 0; x < SLICE; x += 4) {
            float keys[TOKENS], queries[4 * QUADS];
            lane.load(keys, stage, x);
            load_queries(queries, q, x);
            add_one(keys, queries);
        }
    }

    // (c0 + c1) + (c2 + c3). Lane (group, chain) keeps the tokens group + 8 * chain in c[0], and 32 more in c[4].
    DEVICE void join() {
        const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
        for (int t = 0; t < TOKENS; t += 2)
#pragma unroll
            for (int h = 0; h < HEADS; h++) join_one(c[t][h], c[t + 1][h], odd, 1);
#pragma unroll
        for (int t = 0; t < TOKENS; t += 4)
#pragma unroll
            for (int h = 0; h < HEADS; h++) join_one(c[t][h], c[t + 2][h], upper, 2);
    }
    // A lane that `is_second` keeps the second of two sums, its partner the first.
    DEVICE static void join_one(float& first, float second, bool is_second, int partner) {
        const float given = is_second ? first : second, kept = is_second ? second : first;
        first = kept + __shfl_xor_sync(ALL, given, partner);
    }
};

// Scores of a warp's tokens, if it has `any`: `slices` are its own, and `queries` those of the block.
DEVICE void find_dots(Dots& dots, Slice<Stage<Keys>::Value>* slices, const Tokens& tokens, bool any, const u8* cached,
                      const float (*queries)[D]) {
    constexpr int AHEAD = STAGES - 1, SLICES = D / SLICE;
    static_assert(SLICES >= AHEAD, "slices are under way before the first is used");
    Stage<Keys> stage(cached, tokens, slices);
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        if (any) stage.fetch(i);
        copies_commit();
        if (any) stage.land(slices[i]);
    }
    dots.clear();
    const KeysOfLane<Stage<Keys>::Value> keys(slices);
    u32 q = shared_address(&queries[min(static_cast<int>(threadIdx.x & 31) / 8, HEADS - 1)][0]);
    copies_wait<AHEAD - 1>();
    __syncthreads();  // the queries, whose copies began before those of keys
    if (!any) return;
#pragma unroll 1
    for (int slice = 0, used = 0, next = AHEAD; slice < SLICES; slice++, q += SLICE * 4) {
        copies_wait<AHEAD - 1>();
        __syncwarp();  // this slice is there, and the one before is read
        const bool more = slice + AHEAD < SLICES;
        if (more) stage.fetch(next);
        copies_commit();
        dots.add(keys, used, q);
        if (more) stage.land(slices[next]);
        used = used + 1 == STAGES ? 0 : used + 1, next = next + 1 == STAGES ? 0 : next + 1;
    }
    __syncwarp();
    dots.join();
}

// Scores of a part's `count` tokens, and the largest of each head.
DEVICE void write_scores(const Dots& dots, int count, float scale, float* s, int stride, float* peaks) {
    __shared__ float tops[WARPS][HEADS];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int t0 = warp * OF_WARP + lane / 4 + 8 * (lane & 3), t1 = t0 + 32;
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

KERNEL void __launch_bounds__(THREADS, 3)
    qsa_prompt_keys(ROW_ARGUMENTS, const float* q, const u8* cached, float* s, int stride, float* peaks, int* found) {
    inputs_ready();
    const Args g = ROW;
    extern __shared__ __align__(128) u8 memory[];
    typedef BlockMemory<Stage<Keys>::Value> Memory;
    Memory& m = *reinterpret_cast<Memory*>(memory);
    __shared__ u32 few[FEW_TOKENS];
    const int row = blockIdx.z, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const Kept kept = g.kept(row);
    const int first = blockIdx.x * PART, count = min(PART, kept.count - first);
    if (count <= 0) return;
    const int kv = g.kv_of<HEADS>(blockIdx.y);
    const long long first_head = static_cast<long long>(row) * g.heads + blockIdx.y * HEADS;
    q += first_head * D, s += first_head * stride + first, peaks += first_head * gridDim.x + blockIdx.x;
    if (count > FEW_TOKENS) {
#pragma unroll
        for (int i = 0; i < HEADS * D; i += THREADS * 4)
            if (HEADS * D % (THREADS * 4) == 0 || i + tid * 4 < HEADS * D)
                copy16(&m.q[0][0] + i + tid * 4, q + i + tid * 4);
        copies_commit();
    }
    Tokens tokens;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int t = warp * OF_WARP + 32 * i + lane, token = g.token(row, kept, first + min(t, count - 1));
        if (blockIdx.y == 0 && t < count) found[static_cast<long long>(row) * stride + first + t] = token;
        tokens.row[i] = static_cast<u32>(token) * g.kv_heads + kv;
        if (t < FEW_TOKENS) few[t] = tokens.row[i];
    }
    const float scale = 1.0f / sqrtf(static_cast<float>(D));
    if (count <= FEW_TOKENS) {
        __syncthreads();
        few_keys(q, cached, few, count, s, stride, scale);
        __syncthreads();
        if (tid >= HEADS) return;
        float top = -INFINITE;
        for (int t = 0; t < count; t++) top = fmaxf(top, s[tid * static_cast<long long>(stride) + t]);
        peaks[tid * gridDim.x] = top;
        return;
    }
    Dots dots;
    find_dots(dots, m.slices[warp], tokens, warp * OF_WARP < count, cached, m.q);
    write_scores(dots, count, scale, s, stride, peaks);
}
