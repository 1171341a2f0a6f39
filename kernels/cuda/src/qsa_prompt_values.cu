// The second half of the attention of many rows (qsa_prompt_keys.cu is the first): exponentials, sums of values, the gate.
//
// qsa_prompt_values  a warp has a row and HEADS query heads that share values: D / 32 dims of all heads a lane. It goes
//                    through the kept tokens in order; at the end of a part it joins what it has to `out`. The warps of a
//                    block have neighbouring rows, begin together and have as much to do, so that what one has brought
//                    to the first cache the others find there, as far as their rows attend to the same tokens.
// Why        a row's values are 2 MB; from the second cache alone they would allow half of this rate. All that a warp has
//            in shared memory is a chunk of exponentials, which leaves three quarters of the first cache to values (the sums of
//            all parts lie in `out` meanwhile, and the exponentials where the scores were).
//
// Constants   HEAD_SIZE = D, HEADS, VALUES; blocks of up to MOST_ROWS warps
#include "attend.cuh"

#ifndef HEAD_SIZE
#define HEAD_SIZE 256
#endif
#ifndef HEADS
#define HEADS 12
#endif

constexpr int D = HEAD_SIZE;
constexpr int DIMS = D / 32;    // of a lane
constexpr int AHEAD = 4;        // tokens that a warp has under way
constexpr int CHUNK = 32;       // tokens whose exponentials are in shared memory
constexpr int AHEAD_OF_OTHERS = 2;  // chunks that a row may be further than the slowest of its block has ended
constexpr int MOST_ROWS = 12;   // of a block, which then has a multiprocessor for itself: 168 registers a lane
constexpr int HEADS_PITCH = (HEADS + 3) / 4 * 4;
constexpr int PARTS_TOGETHER = HEADS % 6 == 0 ? 6 : HEADS;  // heads of whom a part's scores, or sums, are read at once
constexpr int ENDED_TOGETHER = HEADS % 2 == 0 ? 2 : 1;      // heads whose sums are read at once at the end

typedef typename Values::template Raw<DIMS> Raw;
constexpr int WIDE = Raw::UNIT < 4 ? Raw::UNIT : 4;  // neighbouring dims of a lane that go to memory together
typedef typename Word<4 * WIDE>::T Dims;

// What only one row reads, and once, past the first cache: there it would take the place of values that others want.
DEVICE float read_once(const float* p) {
#if ARCH >= 900
    float v;
    asm volatile("ld.global.L1::no_allocate.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
#else
    return *p;
#endif
}

DEVICE uint2 read_once(const uint2* p) {
#if ARCH >= 900
    uint2 v;
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
    return v;
#else
    return *p;
#endif
}

DEVICE uint4 read_once(const uint4* p) {
#if ARCH >= 900
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
#else
    return *p;
#endif
}

// What a row has in shared memory; qsa.py knows how much it is.
struct RowMemory {
    float next[HEADS][CHUNK];       // exponentials of the next chunk, as they lie in memory
    float e[CHUNK][HEADS_PITCH];    // those of this one: all heads of a token side by side
    u32 places[PART + AHEAD];       // where a token's values lie, in 16 bytes
    float tops[HEADS_PITCH], shares[HEADS_PITCH], sums[HEADS_PITCH];
};

// The sums over a part of e * v, each dim in the order of the tokens. AHEAD tokens are under way: one is asked for as soon
// as the one whose registers it gets has been added, and is wanted AHEAD - 1 tokens later.
struct Weighted {
    static constexpr bool AS_IT_IS = sizeof(Raw) == 4 * DIMS;  // float32 stays where it was fetched to
    float o[HEADS][DIMS];
    Raw ring[AHEAD];

    DEVICE void add_one(const float (&v)[DIMS], const float* e) {
        float w[HEADS_PITCH];
#pragma unroll
        for (int h = 0; h < HEADS_PITCH; h += 4)
            *reinterpret_cast<float4*>(w + h) = *reinterpret_cast<const float4*>(e + h);
#pragma unroll
        for (int h = 0; h < HEADS; h++)
#pragma unroll
            for (int i = 0; i < DIMS; i++) o[h][i] = fmaf(w[h], v[i], o[h][i]);
    }

    // `cached`: the values of the head, or what of them is the lane's (PLAIN).
    static constexpr bool PLAIN = !Values::PACKED;
    DEVICE static const u8* own(const u8* cached) {
        u64 at = reinterpret_cast<u64>(cached) + (PLAIN ? (threadIdx.x & 31) * sizeof(Raw().word[0]) : 0);
        asm volatile("" : "+l"(at));  // held in registers, not computed again for every token
        const u8* p = reinterpret_cast<const u8*>(at);
        __builtin_assume(__isGlobal(p));
        return p;
    }
    DEVICE static void fetch_one(Raw& to, u32 place, const u8* cached) {
        to.fetch(cached + place * 16ull, D, PLAIN ? 0 : threadIdx.x & 31);
    }
    DEVICE void begin(const u32* places, const u8* cached) {
#pragma unroll
        for (int j = 0; j < AHEAD; j++) fetch_one(ring[j], places[j], cached);
    }
    DEVICE void clear() {
#pragma unroll
        for (int h = 0; h < HEADS; h++)
#pragma unroll
            for (int i = 0; i < DIMS; i++) o[h][i] = 0.0f;
    }
    // n tokens at `places`, weighted with e; fewer than CHUNK are the last of a part.
    DEVICE void add(const float (*e)[HEADS_PITCH], const u32* places, int n, const u8* cached) {
        int t = 0;
#pragma unroll 1
        for (; t + AHEAD <= n; t += AHEAD) {
            const uint4 four = *reinterpret_cast<const uint4*>(places + t + AHEAD);
            const u32 next[AHEAD] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                float v[DIMS];
                ring[j].unpack(v);
                if (!AS_IT_IS) fetch_one(ring[j], next[j], cached);
                add_one(v, e[t + j]);
                if (AS_IT_IS) fetch_one(ring[j], next[j], cached);
                __syncwarp();  // now, not together with the next one
            }
        }
#pragma unroll 1
        for (; t < n; t++) {
            float v[DIMS];
            Raw raw;
            fetch_one(raw, places[t], cached);
            raw.unpack(v);
            add_one(v, e[t]);
        }
    }
};

// A row: its scores (then exponentials), gates and outputs of HEADS heads, and its values.
struct Row {
    float* s;
    const float *gate, *peaks;
    float* out;
    const u8* cached;
    int stride, parts;  // peaks of a head

    DEVICE void find_tops(RowMemory& m, int own) const {
        float tops[HEADS];
#pragma unroll
        for (int h = 0; h < HEADS; h++) tops[h] = -INFINITE;
        for (int p = threadIdx.x & 31; p < own; p += 32)
#pragma unroll
            for (int h = 0; h < HEADS; h++) tops[h] = fmaxf(tops[h], peaks[h * parts + p]);
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            const float top = warp_max(tops[h]);
            if ((threadIdx.x & 31) == 0) m.tops[h] = top;
        }
        __syncwarp();
    }

    // `load_scores` of scores that nobody else reads. Rows of scores are whole runs of 32, so lanes agree on what they read.
    DEVICE static void read_scores(PartScores& v, const float* s, int count) {
        const int lane = threadIdx.x & 31;
        u64 at = reinterpret_cast<u64>(s + lane);
        asm volatile("" : "+l"(at));  // one place for all reads
#pragma unroll
        for (int m = 0; m < PART / 32; m++)
            v[m] = 32 * m < count ? read_once(reinterpret_cast<const float*>(at) + 32 * m) : -INFINITE;
#pragma unroll
        for (int m = 0; m < PART / 32; m++)
            if (lane + 32 * m >= count) v[m] = -INFINITE;
    }

    // Scores of a part to exponentials, where they are; the part's share and sum of each head. All rows of a block do this
    // at about the same time, so nobody computes while one waits: what several heads need is read before any is used.
    DEVICE void weigh(RowMemory& m, int first, int count) const {
#pragma unroll 1
        for (int begin = 0; begin < HEADS; begin += PARTS_TOGETHER) {
            float* e = s + static_cast<long long>(begin) * stride + first;
            PartScores v[PARTS_TOGETHER];
#pragma unroll
            for (int h = 0; h < PARTS_TOGETHER; h++) read_scores(v[h], e + static_cast<long long>(h) * stride, count);
#pragma unroll
            for (int h = 0; h < PARTS_TOGETHER; h++) {
                const float2 peak_and_sum = exponentials(v[h], count, e + static_cast<long long>(h) * stride);
                if ((threadIdx.x & 31) == 0)
                    m.shares[begin + h] = exp_f32(peak_and_sum.x - m.tops[begin + h]), m.sums[begin + h] = peak_and_sum.y;
            }
        }
        __threadfence();  // they are read again by asynchronous copies
        __syncwarp();
    }

    // Scores of a part to the second cache, where they are read next.
    DEVICE void expect_scores(int first) const {
        constexpr int LINES = PART / 32;  // of a head
        for (int line = threadIdx.x & 31; line < HEADS * LINES; line += 32)
            fetch_line(s + static_cast<long long>(line / LINES) * stride + min(first + line % LINES * 32, stride - 1));
    }

    DEVICE void fetch(RowMemory& m, int first) const {
        constexpr int PIECES = CHUNK / 4;
#pragma unroll
        for (int i = 0; i < (HEADS * PIECES + 31) / 32; i++) {
            const int piece = (threadIdx.x & 31) + 32 * i, h = piece / PIECES, x = piece % PIECES * 4;
            if (HEADS * PIECES % 32 == 0 || h < HEADS)
                copy16(&m.next[h][x], s + static_cast<long long>(h) * stride + first + x);
        }
        copies_commit();
    }

    // The chunk that has come is the one that is used. Its copies are read by all lanes before the next ones begin.
    DEVICE static void turn(RowMemory& m) {
        copies_wait<0>();
        __syncwarp();  // this chunk is there, and the one before is read
        const int t = threadIdx.x & 31;
        float of_token[HEADS_PITCH] = {};
#pragma unroll
        for (int h = 0; h < HEADS; h++) of_token[h] = m.next[h][t];
#pragma unroll
        for (int h = 0; h < HEADS_PITCH; h += 4)
            *reinterpret_cast<float4*>(&m.e[t][h]) = *reinterpret_cast<const float4*>(of_token + h);
        __syncwarp();
    }

    // out = fma(share, sum, out) of a part.
    DEVICE void join(const RowMemory& m, const Weighted& w, bool is_first) const {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int begin = 0; begin < HEADS; begin += PARTS_TOGETHER) {
            float totals[PARTS_TOGETHER][DIMS] = {};
            if (!is_first)
#pragma unroll
                for (int h = 0; h < PARTS_TOGETHER; h++)
#pragma unroll
                    for (int i = 0; i < DIMS; i += WIDE)
                        *reinterpret_cast<Dims*>(totals[h] + i) =
                            read_once(reinterpret_cast<const Dims*>(out + (begin + h) * D + Raw::dim(lane, i)));
#pragma unroll
            for (int h = 0; h < PARTS_TOGETHER; h++)
#pragma unroll
                for (int i = 0; i < DIMS; i += WIDE) {
#pragma unroll
                    for (int j = i; j < i + WIDE; j++)
                        totals[h][j] = fmaf(m.shares[begin + h], w.o[begin + h][j], totals[h][j]);
                    *reinterpret_cast<Dims*>(out + (begin + h) * D + Raw::dim(lane, i)) =
                        *reinterpret_cast<const Dims*>(totals[h] + i);
                }
        }
    }

    // After all parts, with what the exponentials of all sum to. A lane ends the sums that it has joined.
    DEVICE void finish(const RowMemory& m) const {
        const int lane = threadIdx.x & 31;
        __syncwarp();
#pragma unroll 1
        for (int begin = 0; begin < HEADS; begin += ENDED_TOGETHER) {
            float o[ENDED_TOGETHER][DIMS], gates[ENDED_TOGETHER][DIMS];
#pragma unroll
            for (int h = 0; h < ENDED_TOGETHER; h++)
#pragma unroll
                for (int i = 0; i < DIMS; i += WIDE) {
                    const int x = (begin + h) * D + Raw::dim(lane, i);
                    *reinterpret_cast<Dims*>(o[h] + i) = *reinterpret_cast<const Dims*>(out + x);
                    *reinterpret_cast<Dims*>(gates[h] + i) = *reinterpret_cast<const Dims*>(gate + (begin + h) * D + x);
                }
#pragma unroll
            for (int h = 0; h < ENDED_TOGETHER; h++)
#pragma unroll
                for (int i = 0; i < DIMS; i += WIDE) {
                    float ended[WIDE];
#pragma unroll
                    for (int j = 0; j < WIDE; j++)
                        ended[j] = mean(o[h][i + j], m.sums[begin + h]) * sigmoid_f32(gates[h][i + j]);
                    *reinterpret_cast<Dims*>(out + (begin + h) * D + Raw::dim(lane, i)) =
                        *reinterpret_cast<const Dims*>(ended);
                }
        }
    }
};

// Rows of a block keep together, or the first cache would have forgotten what one has brought before the next one comes:
// of the warps of a scheduler the oldest would run far ahead. `ended`: chunks that each row has ended.
struct Pace {
    volatile int* ended;
    int chunk;

    static constexpr int ALL_ENDED = 0x7fffffff;

    DEVICE void next() {
        __syncwarp();
        if ((threadIdx.x & 31) == 0) ended[threadIdx.x >> 5] = chunk;
        const int other = min(threadIdx.x & 31, (blockDim.x >> 5) - 1);
        while (!__all_sync(ALL, ended[other] >= chunk - AHEAD_OF_OTHERS)) rest(100);
        chunk++;
    }
    DEVICE void end() {
        if ((threadIdx.x & 31) == 0) ended[threadIdx.x >> 5] = ALL_ENDED;
    }
};

// peaks (rows, heads, parts): the largest score of each head and part; found (rows, stride): which row of all pages holds
// each kept token. Both of qsa_prompt_keys. The scores s are used up.
KERNEL void __launch_bounds__(32 * MOST_ROWS)
    qsa_prompt_values(ROW_ARGUMENTS, float* s, int stride, const float* peaks, const int* found, int parts_of_a_row,
                      const u8* values, const float* q_gate, float* out, int rows) {
    inputs_ready();
    const Args g = ROW;
    extern __shared__ __align__(16) u8 memory[];
    __shared__ int ended[MOST_ROWS];
    const int lane = threadIdx.x & 31, row = blockIdx.y * (blockDim.x >> 5) + (threadIdx.x >> 5);
    Pace pace = {ended, 0};
    if (lane == 0) ended[threadIdx.x >> 5] = row < rows ? 0 : Pace::ALL_ENDED;
    __syncthreads();
    if (row >= rows) return;
    RowMemory& m = reinterpret_cast<RowMemory*>(memory)[threadIdx.x >> 5];
    const Kept kept = g.kept(row);
    const int parts = (kept.count + PART - 1) / PART, kv = g.kv_of<HEADS>(blockIdx.x);
    const long long head = static_cast<long long>(row) * g.heads + blockIdx.x * HEADS;
    const Row own = {s + head * stride,
                     q_gate + (2 * head + 1) * D,
                     peaks + head * parts_of_a_row,
                     out + head * D,
                     Weighted::own(values + static_cast<long long>(kv) * Values::row(D)),
                     stride,
                     parts_of_a_row};
    const u32 pitch = g.kv_heads * (Values::row(D) / 16);
    found += static_cast<long long>(row) * stride;
    own.find_tops(m, parts);
    float l = 0.0f;
#pragma unroll 1
    for (int p = 0; p < parts; p++) {
        const int first = p * PART, count = min(PART, kept.count - first);
        for (int t = lane; t < PART + AHEAD; t += 32) m.places[t] = found[first + min(t, count - 1)] * pitch;
        __syncwarp();
        Weighted weighted;
        weighted.begin(m.places, own.cached);  // they come while scores become exponentials
        own.weigh(m, first, count);
        own.fetch(m, first);
        if (p + 1 < parts) own.expect_scores(first + PART);
        weighted.clear();
#pragma unroll 1
        for (int t = 0; t < count; t += CHUNK) {
            pace.next();
            own.turn(m);
            if (t + CHUNK < count) own.fetch(m, first + t + CHUNK);
            weighted.add(m.e, m.places + t, min(CHUNK, count - t), own.cached);
        }
        if (lane < HEADS) l = fmaf(m.shares[lane], m.sums[lane], l);
        own.join(m, weighted, p == 0);
        __syncwarp();
    }
    pace.end();
    if (lane < HEADS) m.sums[lane] = l;
    own.finish(m);
}
