// The delta rule as a recurrence.
//
// gdn_scan takes what gdn_inputs.cu has convolved, and moves the kept inputs; windows have gdn_window.cu.
//
// A block is COLUMNS columns of each of HEADS value heads with the same query and key, in one segment; its state lives in
// registers. A thread has the rows of a group, of a column of each head, so that what it reads of a query or key serves
// all heads. Eight lanes have the groups of the same columns, and join them by three exchanges.
// With a warp for a scheduler, what lies between a token's exchanges must be its own: the sums over the query of the token
// before, which need the state as it was, and the exchanges of outputs made earlier still. The outputs of two tokens are
// exchanged together, each lane keeping one of them. Tokens arrive 8 at a time by asynchronous copies, two tiles ahead.
// Constants   HEAD_SIZE = D, TAPS, HEADS
// Shapes   as in gdn_inputs.cu; o (n, V*D); state (slots, V, D, D), conv (slots, kernel - 1, channels), in place or to another
//          row
// Why      3 heads: 16 key heads of 128 are 128 blocks of 4 warps, one for each scheduler of 132 multiprocessors.
// Source   the order of every sum is that of `ops.Kernels.gdn`
#include "gdn_window.cuh"

#ifndef HEADS
#define HEADS 3
#endif

constexpr int GROUPS = 8;
constexpr int ROWS = D / GROUPS;
constexpr int TOKENS = 8;
constexpr int SCAN_THREADS = 128;
constexpr int N = HEADS == 1 ? 2 : HEADS;                 // columns of a thread
constexpr int OF_HEAD = N / HEADS;                        // of them of one head
constexpr int COLUMNS = SCAN_THREADS / GROUPS * OF_HEAD;  // of a block's head
constexpr int GATES = 4;                                  // words of a token's decays or strengths: read at once
static_assert(HEADS <= GATES, "a head has a word");

// A token in shared memory. Behind a group's rows is a gap, so that the groups lie in different banks.
struct Token {
    static constexpr int VECTOR_GROUP = ROWS % 8 ? ROWS : ROWS + 4;
    static constexpr int VECTOR = GROUPS * VECTOR_GROUP;
    float q[VECTOR], k[VECTOR], v[HEADS][COLUMNS], o[HEADS][COLUMNS], gates[2][GATES];  // decays, strengths
};
constexpr int RING = 3 * TOKENS;  // tokens that a block has room for: three tiles

#define HOLD(p) asm volatile("" : "+l"(p))  // in a register: not computed again for every tile

// What a block works on: columns from `column` of the heads head + j * key_heads.
struct Work {
    const float *c, *decay, *beta;  // of gdn_inputs
    int channels, key_heads, value_heads, head, key_head, column;

    DEVICE int head_of(int j) const { return head + j * key_heads; }
};

// What a thread brings of every tile, and takes away: it knows where the next of each lies, so that a tile costs the few
// warps little besides the copies. Of queries and keys it has the same 16 bytes of every EACH-th token.
struct Feed {
    static constexpr u32 QUARTERS = D / 4, EACH = SCAN_THREADS / QUARTERS;
    static constexpr u32 PIECES = COLUMNS / 4;  // of a head's columns
    static_assert(TOKENS * HEADS * PIECES <= SCAN_THREADS, "a thread has a piece of a tile at most");

    int channels, value_heads, key;  // key: from a query to its key
    int token, x, to;                // of queries and keys
    int of_piece, head, column;      // the token of its values and outputs
    int of_gate, at_gate;
    const float *vectors, *values, *gates;
    float* outputs;  // of the second tile before

    DEVICE Feed(const Work& g, int begin, float* o) : channels(g.channels), value_heads(g.value_heads), key(g.key_heads * D) {
        const u32 i = threadIdx.x;
        token = i / QUARTERS, x = i % QUARTERS * 4, to = x / ROWS * Token::VECTOR_GROUP + x % ROWS;
        of_piece = i / (PIECES * HEADS), head = i / PIECES % HEADS, column = i % PIECES * 4;
        const int gate = i % (TOKENS * HEADS), which = i / (TOKENS * HEADS);
        of_gate = which < 2 ? gate / HEADS : TOKENS, at_gate = which * GATES + gate % HEADS;
        const long long first = begin;
        vectors = g.c + (first + token) * channels + g.key_head * D + x;
        values = g.c + (first + of_piece) * channels + 2 * key + g.head_of(head) * D + g.column + column;
        gates = (which ? g.beta : g.decay) + (first + of_gate) * value_heads + g.head_of(gate % HEADS);
        outputs = o + ((first - 2 * TOKENS + of_piece) * value_heads + g.head_of(head)) * D + g.column + column;
    }
    // Start the copies of the next tile; behind its begin the segment has so many tokens left, or none.
    DEVICE void bring(Token* tile, int left) {
        const int n = min(TOKENS, left);
        const float* from = vectors;
#pragma unroll
        for (int i = 0; i < TOKENS; i += EACH) {
            if (token + i < n) {
                copy16(&tile[token + i].q[to], from);
                copy16(&tile[token + i].k[to], from + key);
            }
            from += static_cast<int>(EACH) * channels;
        }
        if (of_piece < n) copy16(&tile[of_piece].v[head][column], values);
        if (of_gate < n) copy4(&tile[of_gate].gates[0][0] + at_gate, gates);
        copies_commit();
        vectors += TOKENS * channels, values += TOKENS * channels, gates += TOKENS * value_heads;
        HOLD(vectors);
        HOLD(values);
        HOLD(gates);
    }
    // The outputs of a tile likewise.
    DEVICE void take(const Token* tile, int left) {
        if (of_piece < min(TOKENS, left))
            *reinterpret_cast<float4*>(outputs) = *reinterpret_cast<const float4*>(&tile[of_piece].o[head][column]);
        outputs += TOKENS * value_heads * D;
        HOLD(outputs);
    }
};

// A thread's part of the state: the rows of its group, lane bits 2 to 4, in column OF_HEAD * mine + j of head 0, or column
// `mine` of head j.
constexpr int GROUP = 4;  // lanes this far apart differ in the lowest bit of the group
struct Place {
    int group, mine;

    DEVICE Place() : group(threadIdx.x >> 2 & 7), mine(threadIdx.x >> 5 << 2 | (threadIdx.x & 3)) {}
    DEVICE static int head(int j) { return j / OF_HEAD; }
    DEVICE int column(int j) const { return mine * OF_HEAD + j % OF_HEAD; }
};

typedef float Rows[ROWS];

// A thread's rows of a query or key.
DEVICE void read_rows(Rows& v, const float* from) {
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
        const float4 four = reinterpret_cast<const float4*>(from)[i];
        v[4 * i] = four.x, v[4 * i + 1] = four.y, v[4 * i + 2] = four.z, v[4 * i + 3] = four.w;
    }
}

// The words of all heads.
DEVICE void read_gates(float (&to)[GATES], const float (&from)[GATES]) {
    const float4 v = *reinterpret_cast<const float4*>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

// The sum over all groups of a column; every lane of the column gets it.
DEVICE float sum_groups(float p) {
    p = p + __shfl_xor_sync(ALL, p, GROUP);
    p = p + __shfl_xor_sync(ALL, p, 2 * GROUP);
    return p + __shfl_xor_sync(ALL, p, 4 * GROUP);
}

// The same of what the groups have of two tokens: even groups get that of the first, odd ones that of the second.
DEVICE float sum_two(float first, float second, int group) {
    const bool odd = group & 1;
    float p = odd ? second : first;
    p = p + __shfl_xor_sync(ALL, odd ? first : second, GROUP);
    p = p + __shfl_xor_sync(ALL, p, 2 * GROUP);
    return p + __shfl_xor_sync(ALL, p, 4 * GROUP);
}

// What a token's step begins with: read during the step before it.
struct Begun {
    Rows k;
    float decays[GATES];

    DEVICE void read(const Token& token, int first) {
        read_rows(k, &token.k[first]);
        read_gates(decays, token.gates[0]);
    }
};

// A group's part of sum(s * q) of every column.
DEVICE void outputs(float (&o)[N], const Rows (&s)[N], const Rows& q) {
#pragma unroll
    for (int j = 0; j < N; j++) {
        float p[4] = {};
#pragma unroll
        for (int i = 0; i < ROWS; i++) p[i % 4] = fmaf(s[j][i], q[i], p[i % 4]);
        o[j] = (p[0] + p[1]) + (p[2] + p[3]);
    }
}

// A token: s = s * decay; e = beta * (v - sum(s * k)); s = fma(k, e, s). To o the outputs of the token before, whose query
// is q: their sums lie between the exchanges.
DEVICE void delta_step(Rows (&s)[N], const Begun& now, const Token& token, const Place& place, const Rows& q,
                       float (&o)[N]) {
    Rows decayed[N];
    float strengths[GATES], sums[N], values[N];
    read_gates(strengths, token.gates[1]);
#pragma unroll
    for (int j = 0; j < N; j++) values[j] = token.v[place.head(j)][place.column(j)];
#pragma unroll
    for (int j = 0; j < N; j++) {
        float p[4] = {};
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            p[i % 4] = fmaf(decayed[j][i] = s[j][i] * now.decays[place.head(j)], now.k[i], p[i % 4]);
        sums[j] = (p[0] + p[1]) + (p[2] + p[3]);
    }
#pragma unroll
    for (int apart = GROUP; apart <= 4 * GROUP; apart *= 2) {
#pragma unroll
        for (int j = 0; j < N; j++) sums[j] = sums[j] + __shfl_xor_sync(ALL, sums[j], apart);
    }
    outputs(o, s, q);
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float e = strengths[place.head(j)] * (values[j] - sums[j]);
#pragma unroll
        for (int i = 0; i < ROWS; i++) s[j][i] = fmaf(now.k[i], e, decayed[j][i]);
    }
}

// A thread's walk over the tokens of a segment, which lie in a ring. A step leaves the output of its token to the next one,
// and a pair of tokens its sums to the next pair: so nothing waits for them.
struct Scan {
    const Place place;
    const int first = place.group * Token::VECTOR_GROUP;
    Rows s[N], q = {};                     // q: of the token before
    Begun now;                             // of the token that comes
    float early[N] = {}, made[2][N] = {};  // outputs of the second token before, and of the two before that

    DEVICE static int back(int at, int n) { return at >= n ? at - n : at + RING - n; }

    // The outputs of two tokens. All lanes that have a sum store it: no address is made under a condition.
    DEVICE void leave(const float (&one)[N], const float (&two)[N], Token* tokens) const {
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float sum = sum_two(one[j], two[j], place.group);
            tokens[place.group & 1].o[place.head(j)][place.column(j)] = sum;
        }
    }
    // Pairs of the n tokens at `at`.
    DEVICE void pairs(Token* ring, int at, int n) {
#pragma unroll 1
        for (const int last = at + n - 2; at <= last; at += 2) {
            Rows query;
            Begun second;
            Token* pair = ring + at;
            second.read(pair[1], first);
            read_rows(query, &pair[0].q[first]);
            float late[N], next[N];
            delta_step(s, now, pair[0], place, q, late);
            now.read(ring[at == RING - 2 ? 0 : at + 2], first);
            read_rows(q, &pair[1].q[first]);
            delta_step(s, second, pair[1], place, query, next);
            leave(made[0], made[1], ring + back(at, 4));
#pragma unroll
            for (int j = 0; j < N; j++) made[0][j] = early[j], made[1][j] = late[j], early[j] = next[j];
        }
    }
    // What the pairs before `at` have not left, and a token that is left over.
    DEVICE void end(Token* ring, int at, bool odd) {
        Token* pair = ring + back(at, 2);
        leave(made[0], made[1], ring + back(at, 4));
        if (!odd) {
            outputs(made[1], s, q);
            leave(early, made[1], pair);
            return;
        }
        delta_step(s, now, ring[at], place, q, made[1]);
        leave(early, made[1], pair);
        read_rows(q, &ring[at].q[first]);
        outputs(early, s, q);
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float sum = sum_groups(early[j]);
            if (place.group == 0) ring[at].o[place.head(j)][place.column(j)] = sum;
        }
    }
};
static_assert(TOKENS % 4 == 0, "a tile's outputs have been left when the second tile after it begins");

// All tokens of a segment.
DEVICE void scan(const Work& g, const Segment& seg, float* state, float* o) {
    __shared__ __align__(16) Token ring[RING];
    Scan scan;
    const auto element = [&](int slot, int i, int j) -> float& {
        const int head = g.head_of(scan.place.head(j)), row = scan.place.group * ROWS + i;
        return state[((static_cast<long long>(slot) * g.value_heads + head) * D + row) * D + g.column +
                     scan.place.column(j)];
    };
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int i = 0; i < ROWS; i++) scan.s[j][i] = read_early(&element(seg.slot, i, j));
    inputs_ready();  // the state is older than they are
    Feed feed(g, seg.begin, o);
    int left = seg.end - seg.begin;
    feed.bring(ring, left);
    feed.bring(ring + TOKENS, left - TOKENS);
    copies_wait<0>();
    __syncthreads();
    scan.now.read(ring[0], scan.first);
    int before = 2 * TOKENS, at = 0, after = TOKENS, made = 0;
#pragma unroll 1
    while (true) {
        feed.take(ring + after, made - TOKENS);
        feed.bring(ring + before, left - 2 * TOKENS);
        scan.pairs(ring, at, min(TOKENS, left));
        if (left <= TOKENS) break;
        const int free = before;
        before = at, at = after, after = free, left -= TOKENS, made += TOKENS;
        copies_wait<0>();
        __syncthreads();
    }
    const int pairs = at + left / 2 * 2;
    scan.end(ring, pairs == RING ? 0 : pairs, left % 2);
    __syncthreads();
    feed.take(ring + before, made);
    feed.take(ring + at, left);
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int i = 0; i < ROWS; i++) element(seg.to, i, j) = scan.s[j][i];
}

KERNEL void __launch_bounds__(SCAN_THREADS, 2)
    gdn_scan(const float* c, const float* decay, const float* beta, const float* p, float* conv, float* state,
             const int* segments, float* o, int key_heads, int value_heads) {
    const int key_head = static_cast<int>(blockIdx.y) % key_heads, heads = static_cast<int>(blockIdx.y) / key_heads;
    const int channels = (2 * key_heads + value_heads) * D, head = key_head + heads * HEADS * key_heads;
    const Work g = {c, decay, beta, channels, key_heads, value_heads, head, key_head, static_cast<int>(blockIdx.x) * COLUMNS};
    const Segment seg = segment_at(segments, blockIdx.z);
    scan(g, seg, state, o);
    // Nobody reads the kept inputs any more. A block moves its columns of the value heads; the first of a key head's blocks
    // also those of the query and the key.
    const int part = threadIdx.x / COLUMNS;
    if (part >= (heads ? HEADS : HEADS + 2)) return;
    const int vector = part < HEADS ? 2 * key_heads + g.head_of(part) : (part - HEADS) * key_heads + key_head;
    const Window window = Window::of(p, nullptr, conv, g.channels, seg);
    const int channel = vector * D + g.column + threadIdx.x % COLUMNS;
    float kept[TAPS - 1][1];
    window.last(kept, channel);
    window.keep(conv, channel, kept);
}
static_assert((HEADS + 2) * COLUMNS <= SCAN_THREADS, "a thread moves one channel at most");
