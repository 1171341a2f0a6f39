// The delta rule as a recurrence.
//
// gdn_scan     for prompts: takes what gdn_inputs (gdn.cu) has convolved, and moves the kept inputs
// gdn_window   for windows: convolves for itself, every block its own columns and the query and key of its head, which
//              costs little for few tokens and saves a launch; gdn_output moves the kept inputs
//
// A block is COLUMNS columns of one value head in one segment; its state lives in registers: thread (group, column) holds
// the D / 8 rows of its group. Eight neighbouring lanes are the eight groups of a column, so the tree over the groups is
// three exchanges. Tokens arrive 16 at a time by asynchronous copies, two tiles deep.
// Constants   HEAD_SIZE = D, TAPS
// Shapes   as in gdn.cu; state (slots, V, D, D), conv (slots, kernel - 1, channels), in place or to another row
// Why      16 columns a block: 48 heads of 128 are 384 blocks of 4 warps, which spread over 132 multiprocessors to
//          within 3 % of even; 32 columns leave a quarter of them idle.
// Source   the order of every sum is that of `ops.Kernels.gdn`
#include "gdn_window.cuh"

constexpr int GROUPS = 8;
constexpr int ROWS = D / GROUPS;
constexpr int COLUMNS = 16;
constexpr int TOKENS = 16;
constexpr int SCAN_THREADS = GROUPS * COLUMNS;

// Shared memory of a scan block. A group's rows are followed by a gap, so that the eight groups of a column lie in
// different banks.
struct Shape {
    static constexpr int VECTOR_GROUP = ROWS % 8 ? ROWS : ROWS + 4;
    static constexpr int VECTOR = GROUPS * VECTOR_GROUP;
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

// What a window's block convolves from.
struct Raw {
    Window window;
    const float *b, *a, *w_a, *w_dt;
};

// Where element x of a vector lies in a tile.
DEVICE int place_of(int x) { return x / ROWS * Shape::VECTOR_GROUP + x % ROWS; }

// Start the copies of the tokens from `first` (not past `end`) into a tile.
DEVICE void load_tile(Shape::Tile& tile, const Work& g, int first, int end) {
    constexpr int PIECES = D / 4;
    const int n = min(TOKENS, end - first);
    for (int e = threadIdx.x; e < n * PIECES; e += SCAN_THREADS) {
        const int t = e / PIECES, x = e % PIECES * 4, to = place_of(x);
        const float* row = g.c + static_cast<long long>(first + t) * g.channels + g.key_head * D + x;
        copy16(&tile.q[t][to], row);
        copy16(&tile.k[t][to], row + g.key_heads * D);
    }
    for (int e = threadIdx.x; e < n * (COLUMNS / 4); e += SCAN_THREADS) {
        const int t = e / (COLUMNS / 4), x = e % (COLUMNS / 4) * 4;
        copy16(&tile.v[t][x], g.c + static_cast<long long>(first + t) * g.channels + (2 * g.key_heads + g.head) * D +
                                  g.column + x);
    }
    if (threadIdx.x < n) {
        const long long at = static_cast<long long>(first + threadIdx.x) * g.value_heads + g.head;
        tile.decay[threadIdx.x] = g.decay[at];
        tile.beta[threadIdx.x] = g.beta[at];
    }
    copies_commit();
}

// Convolve the tokens from `first` into a tile: a warp takes the query, the key, or the values and gates of a token.
DEVICE void convolve_tile(Shape::Tile& tile, const Work& g, const Raw& raw, int first, int end) {
    const int lane = threadIdx.x & 31, n = min(TOKENS, end - first);
    for (int e = threadIdx.x >> 5; e < 3 * n; e += SCAN_THREADS / 32) {
        const int t = e / 3, part = e % 3, row = first + t;
        if (part < 2) {
            const int channel = (part ? g.key_heads + g.key_head : g.key_head) * D;
            float v[PARTS], *to = part ? tile.k[t] : tile.q[t];
            convolve(raw.window, row, channel + lane, v);
            make_unit(v, part ? 1.0f : query_scale());
#pragma unroll
            for (int m = 0; m < PARTS; m++) to[place_of(lane + 32 * m)] = v[m];
            continue;
        }
        const long long at = static_cast<long long>(row) * g.value_heads + g.head;
        if (lane < COLUMNS) {
            float v[1];
            convolve(raw.window, row, (2 * g.key_heads + g.head) * D + g.column + lane, v);
            tile.v[t][lane] = v[0];
        }
        if (lane == COLUMNS) tile.decay[t] = decay_of(raw.w_a[g.head], raw.a[at], raw.w_dt[g.head]);
        if (lane == COLUMNS + 1) tile.beta[t] = sigmoid_f32(raw.b[at]);
    }
    copies_commit();
}

// The sum over all groups of a column; every lane of the column gets it.
DEVICE float sum_groups(float p) {
    p = p + __shfl_xor_sync(ALL, p, 1);
    p = p + __shfl_xor_sync(ALL, p, 2);
    return p + __shfl_xor_sync(ALL, p, 4);
}

// One token: s = s * decay; e = beta * (v - sum(s * k)); s = fma(k, e, s); returns sum(s * q).
DEVICE float delta_step(float (&s)[ROWS], const float* q, const float* k, float v, float decay, float beta) {
    float4 keys[ROWS / 4];
    float p0 = 0.0f, p1 = 0.0f, p2 = 0.0f, p3 = 0.0f;
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
        keys[i] = reinterpret_cast<const float4*>(k)[i];
        p0 = fmaf(s[4 * i] *= decay, keys[i].x, p0);
        p1 = fmaf(s[4 * i + 1] *= decay, keys[i].y, p1);
        p2 = fmaf(s[4 * i + 2] *= decay, keys[i].z, p2);
        p3 = fmaf(s[4 * i + 3] *= decay, keys[i].w, p3);
    }
    const float e = beta * (v - sum_groups((p0 + p1) + (p2 + p3)));
    p0 = p1 = p2 = p3 = 0.0f;
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
        const float4 query = reinterpret_cast<const float4*>(q)[i];
        p0 = fmaf(s[4 * i] = fmaf(keys[i].x, e, s[4 * i]), query.x, p0);
        p1 = fmaf(s[4 * i + 1] = fmaf(keys[i].y, e, s[4 * i + 1]), query.y, p1);
        p2 = fmaf(s[4 * i + 2] = fmaf(keys[i].z, e, s[4 * i + 2]), query.z, p2);
        p3 = fmaf(s[4 * i + 3] = fmaf(keys[i].w, e, s[4 * i + 3]), query.w, p3);
    }
    return sum_groups((p0 + p1) + (p2 + p3));
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
    __shared__ __align__(16) float out[TOKENS][COLUMNS];
    Shape::Tile* tiles = reinterpret_cast<Shape::Tile*>(memory);
    const int tid = threadIdx.x, group = tid & 7, mine = tid >> 3;
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
    fill(tiles[0], seg.begin);
    copies_wait<1>();
    __syncthreads();
    float s[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) s[i] = passage[group * Shape::STATE_GROUP + i * COLUMNS + mine];
    __syncthreads();

    for (int first = seg.begin, u = 0; first < seg.end; first += TOKENS, u ^= 1) {
        if (first + TOKENS < seg.end)
            fill(tiles[u ^ 1], first + TOKENS);
        else
            copies_commit();
        copies_wait<1>();
        __syncthreads();
        const Shape::Tile& tile = tiles[u];
        const int n = min(TOKENS, seg.end - first);
        const float *q = &tile.q[0][group * Shape::VECTOR_GROUP], *k = &tile.k[0][group * Shape::VECTOR_GROUP];
#pragma unroll 4
        for (int t = 0; t < n; t++) {
            const float sum = delta_step(s, q + t * Shape::VECTOR, k + t * Shape::VECTOR, tile.v[t][mine],
                                         tile.decay[t], tile.beta[t]);
            if (group == (t & 7)) out[t][mine] = sum;
        }
        __syncthreads();
        for (int e = tid; e < n * COLUMNS; e += SCAN_THREADS)
            o[(static_cast<long long>(first + e / COLUMNS) * g.value_heads + g.head) * D + g.column + e % COLUMNS] =
                out[e / COLUMNS][e % COLUMNS];
    }

#pragma unroll
    for (int i = 0; i < ROWS; i++) passage[group * Shape::STATE_GROUP + i * COLUMNS + mine] = s[i];
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

struct Convolve {
    const Work& g;
    const Raw& raw;
    DEVICE void operator()(Shape::Tile& tile, int first) const { convolve_tile(tile, g, raw, first, raw.window.s.end); }
};

KERNEL void __launch_bounds__(SCAN_THREADS)
    gdn_scan(const float* c, const float* decay, const float* beta, const float* p, float* conv, float* state,
             const int* segments, float* o, int key_heads, int value_heads) {
    inputs_ready();
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

KERNEL void __launch_bounds__(SCAN_THREADS)
    gdn_window(const float* p, const float* conv_w, const float* conv, const float* b, const float* a, const float* w_a,
               const float* w_dt, float* state, const int* segments, float* o, int key_heads, int value_heads) {
    inputs_ready();
    const Work g = work_of(nullptr, nullptr, nullptr, key_heads, value_heads);
    const Segment seg = segment_at(segments, blockIdx.z);
    const Raw raw = {Window::of(p, conv_w, conv, g.channels, seg), b, a, w_a, w_dt};
    scan(g, seg, state, o, Convolve{g, raw});
}
