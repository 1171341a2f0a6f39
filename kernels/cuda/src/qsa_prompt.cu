// Attention of many rows: a row is enough work for a block. HEADS query heads that share keys are computed together.
//
// qsa_keys_row    a block is one part of a row. A lane has two of the four chains of 8 tokens x HEADS / 2 query heads (4 x
//                 HEADS where HEADS is odd). Also the largest score of each head and part
// qsa_values_row  a block is a row and HEADS query heads; a warp takes a part, D / 32 dims of all heads a lane, and the
//                 block joins the parts of its warps in order
// Why two chains: shared memory gives 128 bytes a turn, and takes one turn for two words a lane where neighbouring lanes (or
//                 those two apart) ask for the same two. So 96 sums take 14 turns; of one chain 20, of whole dots 20.
//
// Constants   HEAD_SIZE = D, HEADS, KEYS, VALUES; ROWS_OF_A_BLOCK, KEY_CHAINS; of qsa_values_row VALUES_AHEAD, pairs of tokens under way,
//             and VALUES_BLOCKS, rows on a multiprocessor
#include "attend.cuh"

#ifndef HEAD_SIZE
#define HEAD_SIZE 256
#endif
#ifndef HEADS
#define HEADS 12
#endif
#ifndef VALUES_AHEAD
#define VALUES_AHEAD 2
#endif
#ifndef VALUES_BLOCKS
#define VALUES_BLOCKS 3
#endif

#ifndef KEY_CHAINS
#define KEY_CHAINS 2
#endif
#ifndef ROWS_OF_A_BLOCK
#define ROWS_OF_A_BLOCK 1
#endif

constexpr int D = HEAD_SIZE;
constexpr int WARPS = THREADS / 32;

// A block is ROWS_OF_A_BLOCK neighbouring rows with THREADS threads each, which never wait for another row: what one has
// brought to the first cache the next ones find there, as far as they attend to the same tokens.
constexpr int BLOCK = THREADS * ROWS_OF_A_BLOCK;
DEVICE int row_of_block() { return ROWS_OF_A_BLOCK == 1 ? 0 : threadIdx.x / THREADS; }
DEVICE int own_thread() { return ROWS_OF_A_BLOCK == 1 ? threadIdx.x : threadIdx.x % THREADS; }
DEVICE void row_meets() {
    if (ROWS_OF_A_BLOCK == 1)
        __syncthreads();
    else
        asm volatile("bar.sync %0, %1;" ::"r"(1 + row_of_block()), "r"(THREADS) : "memory");
}

// 16 bytes to shared memory as copy16 does, but through the first cache where other rows may want them.
DEVICE void copy16_of_rows(void* to, const void* from) {
#if ARCH >= 800 && !defined(ON_HOST)
    if (ROWS_OF_A_BLOCK > 1) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from)
                     : "memory");
        return;
    }
#endif
    copy16(to, from);
}

// ------------------------------------------------------------------------------------------------------------- keys

constexpr int SLICE = 16;      // dims at a time
constexpr int HEAD_SETS = HEADS % 2 || KEY_CHAINS == 1 ? 1 : 2;    // lanes that share tokens: head h is of set h % HEAD_SETS
constexpr int OWN_HEADS = HEADS / HEAD_SETS;
constexpr int CHAINS = KEY_CHAINS;              // of a lane
constexpr int TOKEN_GROUPS = 8 * CHAINS / HEAD_SETS;  // of a warp's 64 tokens: t is of group t % TOKEN_GROUPS
constexpr int TOKENS = 64 / TOKEN_GROUPS;       // of a lane
constexpr int EACH_KEPT = 4 / CHAINS;                // of so many tokens a lane keeps one
constexpr int FEW_TOKENS = 8;  // a part of so few, what follows the listed blocks, is computed from device memory

// SLICE dims of the keys of a part. The pitch keeps eight tokens in different banks.
template <class Value>
struct Slices {
    static constexpr int PITCH = SLICE + 16 / sizeof(Value);
    Value k[PART][PITCH];
};

// What a row of qsa_keys_row has; qsa.py knows how much it is.
template <class Tile>
struct KeysMemory {
    Tile tiles[2];
    float q[HEADS][D + 16];  // two heads in different banks
    int tokens[PART];
    float tops[WARPS][HEADS];
};

// CHAINS neighbouring words.
DEVICE void read_words(float (&v)[CHAINS], const float* p) {
    const typename Word<4 * CHAINS>::T raw = *reinterpret_cast<const typename Word<4 * CHAINS>::T*>(p);
    const u32* words = reinterpret_cast<const u32*>(&raw);
#pragma unroll
    for (int i = 0; i < CHAINS; i++) v[i] = __uint_as_float(words[i]);
}

// Plain formats are copied asynchronously as they are; a thread takes the same piece of several tokens.
template <class Format>
struct Stage {
    typedef typename Format::Value Value;
    typedef Slices<Value> To;
    static constexpr int PIECE = 16 / sizeof(Value), PIECES = SLICE / PIECE, EACH = THREADS / PIECES, N = PART / EACH;
    const u8* at;
    u32 rows[N];  // in 16 bytes

    DEVICE Stage(const u8* cached, const int* tokens, int kv_heads, int kv) {
        at = cached + own_thread() % PIECES * 16;
#pragma unroll
        for (int i = 0; i < N; i++)
            rows[i] = (static_cast<u32>(tokens[own_thread() / PIECES + i * EACH]) * kv_heads + kv) * (Format::row(D) / 16);
    }
    DEVICE void fetch(To& to, int slice) {
        const u8* from = at + slice * SLICE * sizeof(Value);
#pragma unroll
        for (int i = 0; i < N; i++)
            copy16_of_rows(&to.k[own_thread() / PIECES + i * EACH][own_thread() % PIECES * PIECE], from + rows[i] * 16ull);
    }
    DEVICE void land(To&) {}
    DEVICE static void read(float (&v)[CHAINS], const Value* p) {
        if (CHAINS == 1) {
            v[0] = Format::get(*p);
            return;
        }
        const typename Word<CHAINS * sizeof(Value)>::T raw =
            *reinterpret_cast<const typename Word<CHAINS * sizeof(Value)>::T*>(p);
        const u32* words = reinterpret_cast<const u32*>(&raw);
#pragma unroll
        for (int i = 0; i < CHAINS; i++)
            v[i] = sizeof(Value) == 4 ? __uint_as_float(words[i % CHAINS])
                                      : Format::get(static_cast<Value>(words[i / 2] >> i % 2 * 16));
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
            row[i] = cached + (static_cast<long long>(tokens[own_thread() + i * THREADS]) * kv_heads + kv) * Format::row(D);
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
                float4* p = reinterpret_cast<float4*>(&to.k[own_thread() + i * THREADS][8 * half]);
                p[0] = make_float4(v[0], v[1], v[2], v[3]), p[1] = make_float4(v[4], v[5], v[6], v[7]);
            }
        }
    }
    DEVICE static void read(float (&v)[CHAINS], const float* p) { read_words(v, p); }
};

// Scores of the few tokens of a part: a thread a dot.
DEVICE void few_keys(const float* q, const u8* cached, const int* tokens, int count, int kv_heads, int kv, float* s,
                     int stride, float scale) {
    for (int e = own_thread(); e < count * HEADS; e += THREADS) {
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

// What a lane is: lanes 1 apart differ in the set of heads; where a lane has two chains, lanes 4 apart differ in which; the
// others differ in the tokens.
struct Place {
    int heads, chains, group;

    DEVICE Place() {
        const int lane = threadIdx.x & 31;
        heads = HEAD_SETS == 2 ? lane & 1 : 0;
        chains = CHAINS == 1 ? lane & 3 : CHAINS == 2 ? lane >> 2 & 1 : 0;
        if (CHAINS == 1) {
            group = lane >> 2;
            return;
        }
        const int rest = CHAINS == 2 ? lane & 3 | lane >> 3 << 2 : lane;
        group = HEAD_SETS == 2 ? rest >> 1 : rest;
    }
    DEVICE int head(int h) const { return h * HEAD_SETS + heads; }
    // Sum t of a lane is this one of its warp's tokens: what a lane keeps of an exchange of chains is in the same registers
    // in every lane.
    DEVICE int token(int t) const { return group + TOKEN_GROUPS * (t ^ chains); }
};

// Dots of 64 tokens with all heads by a warp, chains apart.
struct Dots {
    float c[TOKENS][OWN_HEADS][CHAINS];

    DEVICE void clear() {
#pragma unroll
        for (int t = 0; t < TOKENS; t++)
#pragma unroll
            for (int h = 0; h < OWN_HEADS; h++)
#pragma unroll
                for (int i = 0; i < CHAINS; i++) c[t][h][i] = 0.0f;
    }

    template <class Value>
    DEVICE void add(const Slices<Value>& tile, const float* q, int first, const Place& place) {
        const Value* from[EACH_KEPT];
#pragma unroll
        for (int t = 0; t < EACH_KEPT; t++) from[t] = &tile.k[first + place.token(t)][CHAINS * place.chains];
#pragma unroll
        for (int x = 0; x < SLICE; x += 4) {
            float keys[TOKENS][CHAINS], queries[OWN_HEADS][CHAINS];
#pragma unroll
            for (int t = 0; t < TOKENS; t++)
                Stage<Keys>::read(keys[t],
                                  from[t % EACH_KEPT] + t / EACH_KEPT * EACH_KEPT * TOKEN_GROUPS * Slices<Value>::PITCH + x);
#pragma unroll
            for (int h = 0; h < OWN_HEADS; h++) read_words(queries[h], q + h * HEAD_SETS * (D + 16) + x);
#pragma unroll
            for (int t = 0; t < TOKENS; t++)
#pragma unroll
                for (int h = 0; h < OWN_HEADS; h++)
#pragma unroll
                    for (int i = 0; i < CHAINS; i++) c[t][h][i] = fmaf(queries[h][i], keys[t][i], c[t][h][i]);
        }
    }

    // (c0 + c1) + (c2 + c3) in c[t][h][0] of the tokens that a lane keeps.
    DEVICE void join() {
        if (CHAINS == 1) {
#pragma unroll
            for (int apart = 1; apart < 4; apart *= 2)
#pragma unroll
                for (int t = 0; t < TOKENS; t += 2 * apart)
#pragma unroll
                    for (int h = 0; h < OWN_HEADS; h++)
                        c[t][h][0] = c[t][h][0] + __shfl_xor_sync(ALL, c[(t + apart) % TOKENS][h][0], apart);
            return;
        }
#pragma unroll
        for (int t = 0; t < TOKENS; t += EACH_KEPT)
#pragma unroll
            for (int h = 0; h < OWN_HEADS; h++) {
                const float mine = c[t][h][0] + c[t][h][1 % CHAINS];
                if (CHAINS == 4) {
                    c[t][h][0] = mine + (c[t][h][2 % CHAINS] + c[t][h][3 % CHAINS]);
                } else {
                    const float theirs = c[(t + 1) % TOKENS][h][0] + c[(t + 1) % TOKENS][h][1 % CHAINS];
                    c[t][h][0] = mine + __shfl_xor_sync(ALL, theirs, 4);
                }
            }
    }
};

KERNEL void __launch_bounds__(BLOCK, 3 / ROWS_OF_A_BLOCK)
    qsa_keys_row(ROW_ARGUMENTS, const float* q, const u8* cached, float* s, int stride, float* peaks, int* found, int rows) {
    inputs_ready();
    const Args g = ROW;
    typedef Stage<Keys> Staged;
    extern __shared__ __align__(16) u8 keys_memory[];
    KeysMemory<typename Staged::To>& m = reinterpret_cast<KeysMemory<typename Staged::To>*>(keys_memory)[row_of_block()];
    auto& tiles = m.tiles;
    const int row = blockIdx.z * ROWS_OF_A_BLOCK + row_of_block(), tid = own_thread();
    if (row >= rows) return;
    const int chunks = g.heads / g.kv_heads / HEADS, kv = blockIdx.y / chunks;
    const Kept kept = g.kept(row);
    const int first = blockIdx.x * PART, count = min(PART, kept.count - first);
    if (count <= 0) return;
    const long long first_head = static_cast<long long>(row) * g.heads + blockIdx.y * HEADS;
    q += first_head * D, s += first_head * stride + first, peaks += first_head * gridDim.x + blockIdx.x;
    for (int t = tid; t < PART; t += THREADS) {
        m.tokens[t] = g.token(row, kept, first + min(t, count - 1));
        if (blockIdx.y == 0 && t < count) found[static_cast<long long>(row) * stride + first + t] = m.tokens[t];
    }
    row_meets();
    const float scale = 1.0f / sqrtf(static_cast<float>(D));
    if (count <= FEW_TOKENS) {
        few_keys(q, cached, m.tokens, count, g.kv_heads, kv, s, stride, scale);
        row_meets();
        if (tid >= HEADS) return;
        float top = -INFINITE;
        for (int t = 0; t < count; t++) top = fmaxf(top, s[tid * static_cast<long long>(stride) + t]);
        peaks[tid * gridDim.x] = top;
        return;
    }
    const int warp = tid >> 5;
    const Place place;
    Staged stage(cached, m.tokens, g.kv_heads, kv);
    for (int e = tid; e < HEADS * D / 4; e += THREADS) copy16(&m.q[e / (D / 4)][e % (D / 4) * 4], q + 4 * e);
    Dots dots;
    dots.clear();
    stage.fetch(tiles[0], 0);
    copies_commit();
    stage.land(tiles[0]);
    const float* own_q = &m.q[place.heads][CHAINS * place.chains];
#pragma unroll 1
    for (int slice = 0, u = 0; slice < D / SLICE; slice++, u ^= 1) {
        copies_wait<0>();
        row_meets();
        const bool more = slice + 1 < D / SLICE;
        if (more) stage.fetch(tiles[u ^ 1], slice + 1);
        copies_commit();
        dots.add(tiles[u], own_q + slice * SLICE, warp * 64, place);
        if (more) stage.land(tiles[u ^ 1]);
    }
    __syncwarp();
    dots.join();
#pragma unroll
    for (int h = 0; h < OWN_HEADS; h++) {
        float* to = s + place.head(h) * static_cast<long long>(stride);
        float top = -INFINITE;
#pragma unroll
        for (int i = 0; i < TOKENS; i += EACH_KEPT) {
            const int t = warp * 64 + place.token(i);
            const float a = dots.c[i][h][0] * scale;
            if (t < count) to[t] = a, top = fmaxf(top, a);
        }
#pragma unroll
        for (int apart = HEAD_SETS; apart < 32; apart *= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, apart));
        if ((tid & 31) < HEAD_SETS) m.tops[warp][place.head(h)] = top;
    }
    row_meets();
    if (tid >= HEADS) return;
    float top = m.tops[0][tid];
#pragma unroll
    for (int w = 1; w < WARPS; w++) top = fmaxf(top, m.tops[w][tid]);
    peaks[tid * gridDim.x] = top;
}

// ----------------------------------------------------------------------------------------------------------- values

constexpr int DIMS = D / 32;  // of a lane

struct PartMemory {
    float e[HEADS][PART];  // exponentials of a part, then what its values sum to: HEADS vectors of D
    int tokens[PART];
};

// What a row has; qsa.py knows how much it is.
struct ValuesMemory {
    PartMemory parts[WARPS];
    float total[HEADS * D];  // the sums of all parts; a thread has its own elements of them
};

// The sums over a part of e * v: pairs of tokens, each dim in the order of the tokens. AHEAD pairs are under way.
struct Weighted {
    typedef typename Values::template Raw<DIMS> Raw;
    static constexpr bool AS_IT_IS = sizeof(Raw) == 4 * DIMS;  // float32 stays where it was fetched to
    static constexpr int AHEAD = VALUES_AHEAD;
    float o[HEADS][DIMS];

    DEVICE void add_pair(const float (&a)[DIMS], const float (&b)[DIMS], const PartMemory& m, int t) {
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            const float2 w = *reinterpret_cast<const float2*>(&m.e[h][t]);
#pragma unroll
            for (int i = 0; i < DIMS; i++) o[h][i] = fmaf(w.y, b[i], fmaf(w.x, a[i], o[h][i]));
        }
    }

    // `cached` is the first row of the head; token t's is t * pitch bytes after it.
    DEVICE void sum(const PartMemory& m, int count, const u8* cached, u32 pitch) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int h = 0; h < HEADS; h++)
#pragma unroll
            for (int i = 0; i < DIMS; i++) o[h][i] = 0.0f;
        Raw ring[AHEAD][2];
        auto fetch = [&](Raw (&to)[2], int t) {
            const int2 two = *reinterpret_cast<const int2*>(&m.tokens[min(t, PART - 2)]);
            to[0].fetch(cached + static_cast<u64>(static_cast<u32>(two.x)) * pitch, D, lane);
            to[1].fetch(cached + static_cast<u64>(static_cast<u32>(two.y)) * pitch, D, lane);
        };
#pragma unroll
        for (int j = 0; j < AHEAD; j++) fetch(ring[j], 2 * j);
        int t = 0;
#pragma unroll 1
        for (; t + 2 * AHEAD <= count; t += 2 * AHEAD)
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                float a[DIMS], b[DIMS];
                ring[j][0].unpack(a);
                ring[j][1].unpack(b);
                if (!AS_IT_IS) fetch(ring[j], t + 2 * (j + AHEAD));
                add_pair(a, b, m, t + 2 * j);
                if (AS_IT_IS) fetch(ring[j], t + 2 * (j + AHEAD));
            }
#pragma unroll 1
        for (; t < count; t++) {
            float v[DIMS];
            Raw raw;
            raw.fetch(cached + static_cast<u64>(static_cast<u32>(m.tokens[t])) * pitch, D, lane);
            raw.unpack(v);
#pragma unroll
            for (int h = 0; h < HEADS; h++)
#pragma unroll
                for (int i = 0; i < DIMS; i++) o[h][i] = fmaf(m.e[h][t], v[i], o[h][i]);
        }
    }
};

// What a row's block has between its parts, beside the sums.
struct Joined {
    float tops[HEADS], totals[HEADS], shares[WARPS][HEADS], sums[WARPS][HEADS];
};

// Exponentials of a part and head to e, its share and sum to the warp's `which` place; by one warp.
DEVICE void weigh(Joined& all, int which, int h, const float* s, int count, float* e) {
    const float2 peak_and_sum = count == PART ? exponentials(s, PART, e) : exponentials(s, count, e);  // without branches
    if ((threadIdx.x & 31) == 0)
        all.shares[which][h] = exp_f32(peak_and_sum.x - all.tops[h]), all.sums[which][h] = peak_and_sum.y;
}

// A part of few tokens: all warps share its heads, and a thread has eight dims of a head.
DEVICE void join_few(Joined& all, float* total, PartMemory& m, const float* s, int stride, int count, const u8* cached,
                     u32 pitch) {
    for (int h = own_thread() >> 5; h < HEADS; h += WARPS)
        weigh(all, 0, h, s + h * static_cast<long long>(stride), count, m.e[h]);
    row_meets();
    for (int unit = own_thread(); unit < HEADS * D / 8; unit += THREADS) {
        const int h = unit / (D / 8), x = unit % (D / 8) * 8;
        float o[8] = {};
#pragma unroll 4
        for (int t = 0; t < count; t++) {
            float v[8];
            Values::load8(cached + static_cast<u64>(static_cast<u32>(m.tokens[t])) * pitch, D, x, v);
#pragma unroll
            for (int i = 0; i < 8; i++) o[i] = fmaf(m.e[h][t], v[i], o[i]);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) total[h * D + x + i] = fmaf(all.shares[0][h], o[i], total[h * D + x + i]);
    }
}

// peaks (rows, heads, parts): the largest score of each head and part; found (rows, stride): which row of all pages holds
// each kept token. Both of qsa_keys_row.
KERNEL void __launch_bounds__(BLOCK, VALUES_BLOCKS / ROWS_OF_A_BLOCK)
    qsa_values_row(ROW_ARGUMENTS, const float* s, int stride, const float* peaks, const int* found, int parts_of_a_row,
                   const u8* cached, const float* q_gate, float* out, int rows) {
    inputs_ready();
    const Args g = ROW;
    extern __shared__ __align__(16) u8 values_memory[];
    __shared__ Joined joined[ROWS_OF_A_BLOCK];
    ValuesMemory& own = reinterpret_cast<ValuesMemory*>(values_memory)[row_of_block()];
    PartMemory* memory = own.parts;
    Joined& all = joined[row_of_block()];
    const int row = blockIdx.y * ROWS_OF_A_BLOCK + row_of_block(), tid = own_thread();
    if (row >= rows) return;
    const int lane = tid & 31, warp = tid >> 5;
    const int chunks = g.heads / g.kv_heads / HEADS, kv = blockIdx.x / chunks;
    const Kept kept = g.kept(row);
    const int parts = (kept.count + PART - 1) / PART;
    const long long first_head = static_cast<long long>(row) * g.heads + blockIdx.x * HEADS;
    s += first_head * stride, peaks += first_head * parts_of_a_row, found += static_cast<long long>(row) * stride;
    cached += static_cast<long long>(kv) * Values::row(D);
    if (tid < HEADS) {
        float top = -INFINITE;
        for (int p = 0; p < parts; p++) top = fmaxf(top, peaks[tid * parts_of_a_row + p]);
        all.tops[tid] = top;
    }
    float* total = own.total;
    for (int x = tid; x < HEADS * D; x += THREADS) total[x] = 0.0f;
    row_meets();
    const u32 pitch = g.kv_heads * Values::row(D);
    PartMemory& m = memory[warp];
    float l = 0.0f;
#pragma unroll 1
    for (int begin = 0; begin < parts; begin += WARPS) {
        const int left = kept.count - begin * PART, first = (begin + warp) * PART, count = min(PART, kept.count - first);
        if (left <= FEW_TOKENS) {
            if (tid < left) memory[0].tokens[tid] = found[begin * PART + tid];
            join_few(all, total, memory[0], s + begin * PART, stride, left, cached, pitch);
            if (tid < HEADS) l = fmaf(all.shares[0][tid], all.sums[0][tid], l);
            break;
        }
        if (count > 0) {
            for (int t = lane; t < PART; t += 32) m.tokens[t] = found[first + min(t, count - 1)];
#pragma unroll 4
            for (int h = 0; h < HEADS; h++)
                weigh(all, warp, h, s + static_cast<long long>(h) * stride + first, count, m.e[h]);
            __syncwarp();
            Weighted weighted;
            weighted.sum(m, count, cached, pitch);
            __syncwarp();
            float* o = &m.e[0][0];
#pragma unroll
            for (int h = 0; h < HEADS; h++)
#pragma unroll
                for (int i = 0; i < DIMS; i++) o[h * D + Weighted::Raw::dim(lane, i)] = weighted.o[h][i];
        }
        row_meets();
        const int here = min(WARPS, parts - begin);
        for (int w = 0; w < here; w++) {
            const float* o = &memory[w].e[0][0];
            for (int x = tid; x < HEADS * D; x += THREADS) total[x] = fmaf(all.shares[w][x / D], o[x], total[x]);
            if (tid < HEADS) l = fmaf(all.shares[w][tid], all.sums[w][tid], l);
        }
        row_meets();
    }
    if (tid < HEADS) all.totals[tid] = l;
    row_meets();
    for (int x = tid; x < HEADS * D; x += THREADS) {
        const long long head = first_head + x / D;
        out[head * D + x % D] = (total[x] / all.totals[x / D]) * sigmoid_f32(q_gate[(2 * head + 1) * D + x % D]);
    }
}
