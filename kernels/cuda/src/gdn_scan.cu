// The delta rule as a recurrence.
//
// gdn_scan takes what gdn_inputs.cu has convolved, and moves the kept inputs; windows have gdn_window.cu.
//
// A block is COLUMNS columns of one value head in one segment; its state lives in registers. A thread has two of the four
// chains of a group, of two columns, and neighbouring lanes have the same rows of two pairs of columns: a read of four words
// takes shared memory two turns where neighbours ask for the same, else four. With whole groups of one column a token would
// take twice the turns. Lanes join a column's halves by an exchange and its groups by three.
// The outputs of eight tokens are summed over the groups together, each lane keeping one of them: seven exchanges instead
// of 24. Tokens arrive 16 at a time by asynchronous copies, two tiles deep.
// Constants   HEAD_SIZE = D, TAPS
// Shapes   as in gdn_inputs.cu; o (n, V*D); state (slots, V, D, D), conv (slots, kernel - 1, channels), in place or to another
//          row
// Why      16 columns a block: 48 heads of 128 are 384 blocks of 4 warps, which spread over 132 multiprocessors to
//          within 3 % of even; 32 columns leave a quarter of them idle.
// Source   the order of every sum is that of `ops.Kernels.gdn`
#include "gdn_window.cuh"
#include "gdn_order.cuh"

constexpr int COLUMNS = 16;
constexpr int TOKENS = 16;
constexpr int SCAN_THREADS = GROUPS * COLUMNS;

// Shared memory of a scan block. Between the halves of a vector (gdn_order.cuh) is a gap, so that what half a warp reads
// lies in different banks.
struct Shape {
    static constexpr int VECTOR_HALF = D / 2 + (ROWS == 16 ? 4 : ROWS == 8 ? 16 : 0);
    static constexpr int VECTOR = 2 * VECTOR_HALF;
    static constexpr int STATE_GROUP = ROWS * COLUMNS + 4;
    struct Tile {
        float q[TOKENS][VECTOR], k[TOKENS][VECTOR], v[TOKENS][COLUMNS], decay[TOKENS], beta[TOKENS];
    };
    static constexpr int TILE_FLOATS = sizeof(Tile) / 4;
    static_assert(GROUPS * STATE_GROUP <= TILE_FLOATS, "the state passes through the memory of a tile");
};

// What a block works on.
struct Work {
    const float *c, *decay, *beta;  // of gdn_inputs
    int channels, key_heads, value_heads, head, key_head, column;
};

// Start the copies of the tokens from `first` (not past `end`) into a tile. A thread takes the same 16 bytes of every
// EACH-th token.
DEVICE void load_tile(Shape::Tile& tile, const Work& g, int first, int end) {
    constexpr u32 PIECES = D / 4, EACH = SCAN_THREADS / PIECES;
    const int n = min(TOKENS, end - first);
    const u32 x = threadIdx.x % PIECES * 4, at = threadIdx.x / PIECES, to = x + x / (D / 2) * (Shape::VECTOR_HALF - D / 2);
    const float* row = g.c + static_cast<long long>(first + at) * g.channels + g.key_head * D + x;
#pragma unroll
    for (u32 i = 0; i < TOKENS / EACH; i++) {
        if (at + i * EACH < n) {
            copy16(&tile.q[at + i * EACH][to], row);
            copy16(&tile.k[at + i * EACH][to], row + g.key_heads * D);
        }
        row += EACH * g.channels;
    }
    const u32 column = threadIdx.x % (COLUMNS / 4) * 4, token = threadIdx.x / (COLUMNS / 4);
    if (token < n)
        copy16(&tile.v[token][column], g.c + static_cast<long long>(first + token) * g.channels +
                                           (2 * g.key_heads + g.head) * D + g.column + column);
    if (threadIdx.x < n) {
        const long long from = static_cast<long long>(first + threadIdx.x) * g.value_heads + g.head;
        copy4(&tile.decay[threadIdx.x], g.decay + from);
        copy4(&tile.beta[threadIdx.x], g.beta + from);
    }
    copies_commit();
}
static_assert(SCAN_THREADS >= TOKENS * (COLUMNS / 4), "a tile's values are a copy of a thread at most");

// A thread's part of the state: M rows of each of its chains, of two columns. Lane bit 1 is which two chains of the four,
// bits 2 to 4 are the group; bit 0 and the warp are which two columns. Register column c is column c ^ half, so that what a
// lane keeps of an exchange between halves is in register 0 of both.
constexpr int HALF = 2, GROUP = 4;  // lanes this far apart differ in the half, in the lowest bit of the group
struct Place {
    int half, group, columns;

    DEVICE Place()
        : half(threadIdx.x >> 1 & 1), group(threadIdx.x >> 2 & 7), columns(threadIdx.x >> 5 << 2 | (threadIdx.x & 1) << 1) {}
    DEVICE int own() const { return columns + half; }
    DEVICE int column(int c) const { return columns + (c ^ half); }
    // Where row i = 2 m + chain lies in a group's rows.
    DEVICE int row(int i) const { return i / 2 * 4 + 2 * half + i % 2; }
    DEVICE int in_passage(int i, int c) const {
        return group * Shape::STATE_GROUP + row(i) * COLUMNS + column(c);
    }
};
constexpr int M = ROWS / 4;

typedef float State[2][2 * M];

// A thread's rows of a query or key.
DEVICE void read_rows(float (&v)[2 * M], const float* from) {
    if (M % 2) {
#pragma unroll
        for (int m = 0; m < M; m++) {
            const float2 two = reinterpret_cast<const float2*>(from)[m];
            v[2 * m] = two.x, v[2 * m + 1] = two.y;
        }
    } else {
#pragma unroll
        for (int m = 0; m < M / 2; m++) {
            const float4 four = reinterpret_cast<const float4*>(from)[m];
            v[4 * m] = four.x, v[4 * m + 1] = four.y, v[(4 * m + 2) % (2 * M)] = four.z, v[(4 * m + 3) % (2 * M)] = four.w;
        }
    }
}

// The sum over all groups of a column; every lane of the column gets it.
DEVICE float sum_groups(float p) {
    p = p + __shfl_xor_sync(ALL, p, GROUP);
    p = p + __shfl_xor_sync(ALL, p, 2 * GROUP);
    return p + __shfl_xor_sync(ALL, p, 4 * GROUP);
}

// (c0 + c1) + (c2 + c3) of a lane's own column.
DEVICE float join_halves(const float (&p)[2]) { return p[0] + __shfl_xor_sync(ALL, p[1], HALF); }

// The lanes of bit BIT keep the upper half of p, the others the lower one, each with what its partner has of it.
template <int N, int BIT>
DEVICE void halve(float* p, int lane) {
    const bool upper = lane & BIT;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float mine = upper ? p[i + N] : p[i], theirs = upper ? p[i] : p[i + N];
        p[i] = mine + __shfl_xor_sync(ALL, theirs, BIT);
    }
}

// The sums over all groups of what they have of eight tokens; a lane gets that of token `token_of`.
DEVICE float sum_eight(float (&p)[8], int lane) {
    halve<4, GROUP>(p, lane);
    halve<2, 2 * GROUP>(p, lane);
    halve<1, 4 * GROUP>(p, lane);
    return p[0];
}
DEVICE int token_of(int lane) { return (lane & GROUP) | (lane & 2 * GROUP) >> 2 | (lane & 4 * GROUP) >> 4; }

// One token: s = s * decay; e = beta * (v - sum(s * k)); s = fma(k, e, s); returns the group's part of sum(s * q) of the
// lane's own column. v: of that column; q, k: from the lane's first row.
DEVICE float delta_step(State& s, const float* q, const float* k, float v, float decay, float beta) {
    float keys[2 * M], queries[2 * M], p[2][2] = {}, o[2][2] = {};
    read_rows(keys, k);
#pragma unroll
    for (int i = 0; i < 2 * M; i++)
#pragma unroll
        for (int c = 0; c < 2; c++) p[c][i % 2] = fmaf(s[c][i] *= decay, keys[i], p[c][i % 2]);
    const float parts[2] = {p[0][0] + p[0][1], p[1][0] + p[1][1]};
    float e[2];
    e[0] = beta * (v - sum_groups(join_halves(parts)));
    e[1] = __shfl_xor_sync(ALL, e[0], HALF);
    read_rows(queries, q);
#pragma unroll
    for (int i = 0; i < 2 * M; i++)
#pragma unroll
        for (int c = 0; c < 2; c++) o[c][i % 2] = fmaf(s[c][i] = fmaf(keys[i], e[c], s[c][i]), queries[i], o[c][i % 2]);
    const float sums[2] = {o[0][0] + o[0][1], o[1][0] + o[1][1]};
    return join_halves(sums);
}

// The tokens of a tile, their outputs to out[token][column].
DEVICE void scan_tile(State& s, const Shape::Tile& tile, int n, float (*out)[COLUMNS]) {
    const Place place;
    const int first = place.half * Shape::VECTOR_HALF + place.group * 2 * M, own = place.own();
    const float *q = &tile.q[0][first], *k = &tile.k[0][first];
    auto step = [&](int t) {
        return delta_step(s, q + t * Shape::VECTOR, k + t * Shape::VECTOR, tile.v[t][own], tile.decay[t], tile.beta[t]);
    };
    int t = 0;
#pragma unroll 1
    for (; t + 8 <= n; t += 8) {
        float p[8];
#pragma unroll
        for (int i = 0; i < 8; i++) p[i] = step(t + i);
        const float sum = sum_eight(p, threadIdx.x);
        out[t + token_of(threadIdx.x)][own] = sum;
    }
#pragma unroll 1
    for (; t < n; t++) {
        const float sum = sum_groups(step(t));
        if (place.group == 0) out[t][own] = sum;
    }
}

DEVICE Work work_of(const float* c, const float* decay, const float* beta, int key_heads, int value_heads) {
    const int head = blockIdx.y;
    return {c,         decay,       beta, (2 * key_heads + value_heads) * D,
            key_heads, value_heads, head, head % key_heads,
            static_cast<int>(blockIdx.x) * COLUMNS};
}

// All tokens of a segment; `fill(tile, first)` brings those from `first` to a tile, and commits its copies.
template <class Fill>
DEVICE void scan(const Work& g, const Segment& seg, float* state, float* o, const Fill& fill) {
    __shared__ __align__(16) float memory[2 * Shape::TILE_FLOATS];
    __shared__ __align__(16) float out[2][TOKENS][COLUMNS];
    Shape::Tile* tiles = reinterpret_cast<Shape::Tile*>(memory);
    const int tid = threadIdx.x;
    const Place place;
    const long long matrix = static_cast<long long>(D) * D;
    const float* before = state + (static_cast<long long>(seg.slot) * g.value_heads + g.head) * matrix + g.column;
    float* after = state + (static_cast<long long>(seg.to) * g.value_heads + g.head) * matrix + g.column;

    // The state passes through the second tile's memory, so that its way and that of the first tokens overlap.
    constexpr int PIECES = D * COLUMNS / 4;
    float* passage = memory + Shape::TILE_FLOATS;
    for (int e = tid; e < PIECES; e += SCAN_THREADS) {
        const int row = e / (COLUMNS / 4), x = e % (COLUMNS / 4) * 4;
        copy16(passage + row / ROWS * Shape::STATE_GROUP + row % ROWS * COLUMNS + x, before + row * D + x);
    }
    copies_commit();
    inputs_ready();  // the state is older than they are
    fill(tiles[0], seg.begin);
    copies_wait<1>();
    __syncthreads();
    State s;
#pragma unroll
    for (int i = 0; i < 2 * M; i++)
#pragma unroll
        for (int c = 0; c < 2; c++) s[c][i] = passage[place.in_passage(i, c)];
    __syncthreads();

    auto write = [&](int first, int u) {
        const int n = min(TOKENS, seg.end - first), x = tid % COLUMNS;
        float* to = o + (static_cast<long long>(first + tid / COLUMNS) * g.value_heads + g.head) * D + g.column + x;
#pragma unroll
        for (int i = 0; i < TOKENS; i += SCAN_THREADS / COLUMNS) {
            const int t = tid / COLUMNS + i;
            if (t < n) *to = out[u][t][x];
            to += SCAN_THREADS / COLUMNS * g.value_heads * D;
        }
    };
    int u = 0;
    for (int first = seg.begin; first < seg.end; first += TOKENS, u ^= 1) {
        copies_wait<0>();
        __syncthreads();
        if (first + TOKENS < seg.end) fill(tiles[u ^ 1], first + TOKENS);
        if (first > seg.begin) write(first - TOKENS, u ^ 1);
        scan_tile(s, tiles[u], min(TOKENS, seg.end - first), out[u]);
    }
    __syncthreads();
    write(seg.end - 1 - (seg.end - 1 - seg.begin) % TOKENS, u ^ 1);

#pragma unroll
    for (int i = 0; i < 2 * M; i++)
#pragma unroll
        for (int c = 0; c < 2; c++) passage[place.in_passage(i, c)] = s[c][i];
    __syncthreads();
    for (int e = tid; e < PIECES; e += SCAN_THREADS) {
        const int row = e / (COLUMNS / 4), x = e % (COLUMNS / 4) * 4;
        *reinterpret_cast<float4*>(after + row * D + x) =
            *reinterpret_cast<const float4*>(passage + row / ROWS * Shape::STATE_GROUP + row % ROWS * COLUMNS + x);
    }
}

struct Load {
    const Work& g;
    int end;
    DEVICE void operator()(Shape::Tile& tile, int first) const { load_tile(tile, g, first, end); }
};

KERNEL void __launch_bounds__(SCAN_THREADS, 4)
    gdn_scan(const float* c, const float* decay, const float* beta, const float* p, float* conv, float* state,
             const int* segments, float* o, int key_heads, int value_heads) {
    const Work g = work_of(c, decay, beta, key_heads, value_heads);
    const Segment seg = segment_at(segments, blockIdx.z);
    scan(g, seg, state, o, Load{g, seg.end});
    // Nobody reads the kept inputs any more. A block moves its columns of the value head, and of the query and key head
    // with the same number where there is one.
    const int part = threadIdx.x / COLUMNS;
    if (part >= (g.head < key_heads ? 3 : 1)) return;
    const int vector = part == 0 ? 2 * key_heads + g.head : part == 1 ? g.head : key_heads + g.head;
    const Window window = Window::of(p, nullptr, conv, g.channels, seg);
    const int channel = vector * D + g.column + threadIdx.x % COLUMNS;
    float kept[TAPS - 1][1];
    window.last(kept, channel);
    window.keep(conv, channel, kept);
}
