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
constexpr int AHEAD = 2;        // pairs of tokens that a warp has under way
constexpr int CHUNK = 32;       // tokens whose exponentials are in shared memory
constexpr int AHEAD_OF_OTHERS = 2;  // chunks that a row may be further than the slowest of its block has ended
constexpr int MOST_ROWS = 12;   // of a block, which then has a multiprocessor for itself: 168 registers a lane
constexpr int HEADS_PITCH = (HEADS + 3) / 4 * 4;

typedef typename Values::template Raw<DIMS> Raw;
constexpr int WIDE = Raw::UNIT < 4 ? Raw::UNIT : 4;  // neighbouring dims of a lane that go to memory together
typedef typename Word<4 * WIDE>::T Dims;

// What a row has in shared memory; qsa.py knows how much it is.
struct RowMemory {
    float e[2][HEADS][CHUNK];  // exponentials
    u32 places[PART + 2 * AHEAD];  // where a token's values lie, in 16 bytes
    float tops[HEADS_PITCH], shares[HEADS_PITCH], sums[HEADS_PITCH];
};

// The sums over a part of e * v: pairs of tokens, each dim in the order of the tokens. AHEAD pairs are under way.
struct Weighted {
    static constexpr bool AS_IT_IS = sizeof(Raw) == 4 * DIMS;  // float32 stays where it was fetched to
    float o[HEADS][DIMS];
    Raw ring[AHEAD][2];

    DEVICE void add_pair(const float (&a)[DIMS], const float (&b)[DIMS], const float (*e)[CHUNK], int t) {
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            const float2 w = *reinterpret_cast<const float2*>(&e[h][t]);
#pragma unroll
            for (int i = 0; i < DIMS; i++) o[h][i] = fmaf(w.y, b[i], fmaf(w.x, a[i], o[h][i]));
        }
    }

    // `cached`: the values of the head, or what of them is the lane's (PLAIN); `places`: those of two tokens.
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
    DEVICE static void fetch(Raw (&to)[2], const u32* places, const u8* cached) {
        const uint2 two = *reinterpret_cast<const uint2*>(places);
        fetch_one(to[0], two.x, cached);
        fetch_one(to[1], two.y, cached);
        __syncwarp();  // now, not together with those of the next pair
    }
    DEVICE void begin(const u32* places, const u8* cached) {
#pragma unroll
        for (int h = 0; h < HEADS; h++)
#pragma unroll
            for (int i = 0; i < DIMS; i++) o[h][i] = 0.0f;
#pragma unroll
        for (int j = 0; j < AHEAD; j++) fetch(ring[j], places + 2 * j, cached);
    }
    // n tokens at `places`, weighted with e; fewer than CHUNK are the last of a part.
    DEVICE void add(const float (*e)[CHUNK], const u32* places, int n, const u8* cached) {
        int t = 0;
#pragma unroll 1
        for (; t + 2 * AHEAD <= n; t += 2 * AHEAD)
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                float a[DIMS], b[DIMS];
                ring[j][0].unpack(a);
                ring[j][1].unpack(b);
                if (!AS_IT_IS) fetch(ring[j], places + t + 2 * (j + AHEAD), cached);
                add_pair(a, b, e, t + 2 * j);
                if (AS_IT_IS) fetch(ring[j], places + t + 2 * (j + AHEAD), cached);
            }
#pragma unroll 1
        for (; t < n; t++) {
            float v[DIMS];
            Raw raw;
            fetch_one(raw, places[t], cached);
            raw.unpack(v);
#pragma unroll
            for (int h = 0; h < HEADS; h++)
#pragma unroll
                for (int i = 0; i < DIMS; i++) o[h][i] = fmaf(e[h][t], v[i], o[h][i]);
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
#pragma unroll 1
        for (int h = 0; h < HEADS; h++) {
            float top = -INFINITE;
            for (int p = threadIdx.x & 31; p < own; p += 32) top = fmaxf(top, peaks[h * parts + p]);
            top = warp_max(top);
            if ((threadIdx.x & 31) == 0) m.tops[h] = top;
        }
        __syncwarp();
    }

    // Scores of a part to exponentials, where they are; the part's share and sum of each head.
    DEVICE void weigh(RowMemory& m, int first, int count) const {
#pragma unroll 4
        for (int h = 0; h < HEADS; h++) {
            float* e = s + static_cast<long long>(h) * stride + first;
            const float2 peak_and_sum = count == PART ? exponentials(e, PART, e) : exponentials(e, count, e);
            if ((threadIdx.x & 31) == 0) m.shares[h] = exp_f32(peak_and_sum.x - m.tops[h]), m.sums[h] = peak_and_sum.y;
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

    DEVICE void fetch(float (*to)[CHUNK], int first) const {
        constexpr int PIECES = CHUNK / 4;
#pragma unroll
        for (int i = 0; i < (HEADS * PIECES + 31) / 32; i++) {
            const int piece = (threadIdx.x & 31) + 32 * i, h = piece / PIECES, x = piece % PIECES * 4;
            if (HEADS * PIECES % 32 == 0 || h < HEADS)
                copy16(&to[h][x], s + static_cast<long long>(h) * stride + first + x);
        }
        copies_commit();
    }

    // out = fma(share, sum, out) of a part.
    DEVICE void join(const RowMemory& m, const Weighted& w, bool is_first) const {
#pragma unroll
        for (int h = 0; h < HEADS; h++)
#pragma unroll
            for (int i = 0; i < DIMS; i += WIDE) {
                Dims* to = reinterpret_cast<Dims*>(out + h * D + Raw::dim(threadIdx.x & 31, i));
                float total[WIDE] = {};
                if (!is_first) *reinterpret_cast<Dims*>(total) = *to;
#pragma unroll
                for (int j = 0; j < WIDE; j++) total[j] = fmaf(m.shares[h], w.o[h][i + j], total[j]);
                *to = *reinterpret_cast<const Dims*>(total);
            }
    }

    // After all parts, with what the exponentials of all sum to.
    DEVICE void finish(const RowMemory& m) const {
        __syncwarp();
#pragma unroll 2
        for (int x = threadIdx.x & 31; x < HEADS * D; x += 32)
            out[x] = (out[x] / m.sums[x / D]) * sigmoid_f32(gate[x / D * D + x]);
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
    const int parts = (kept.count + PART - 1) / PART, kv = blockIdx.x / (g.heads / g.kv_heads / HEADS);
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
        for (int t = lane; t < PART + 2 * AHEAD; t += 32) m.places[t] = found[first + min(t, count - 1)] * pitch;
        own.weigh(m, first, count);
        own.fetch(m.e[0], first);
        if (p + 1 < parts) own.expect_scores(first + PART);
        Weighted weighted;
        weighted.begin(m.places, own.cached);
#pragma unroll 1
        for (int t = 0, u = 0; t < count; t += CHUNK, u ^= 1) {
            pace.next();
            copies_wait<0>();
            __syncwarp();  // this chunk is there, and the one before is read
            if (t + CHUNK < count) own.fetch(m.e[u ^ 1], first + t + CHUNK);
            weighted.add(m.e[u], m.places + t, min(CHUNK, count - t), own.cached);
        }
        if (lane < HEADS) l = fmaf(m.shares[lane], m.sums[lane], l);
        own.join(m, weighted, p == 0);
        __syncwarp();
    }
    pace.end();
    if (lane < HEADS) m.sums[lane] = l;
    own.finish(m);
}
