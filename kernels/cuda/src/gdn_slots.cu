// The delta rule in a window of many sequences: bound by their states, each read and written once. gdn_window.cu is for few.
//
// A block is COLUMNS columns of one value head in one segment. Thread (group, quad) has the D / 8 rows of its group and four
// neighbouring columns in shared memory. Halves of a head it copies itself, so it waits for nobody else's, and begins with
// the first rows while the others are under way; of whole heads a warp's rows are one run of bytes (bulk.cuh), which is in no
// other load's way. The second pass over the rows takes them from there again, or
// IN_REGISTERS, with which fewer blocks are under way. Sums over the groups go through shared memory. A block with all
// columns of a head makes the head's output (gdn_output of gdn.cu) and moves the kept inputs; in place, those of a query and
// key head after the last block that reads them.
// With GATES a block also makes the products that its gates want, of two weight rows with each token, before the other
// projections are there.
// Constants   HEAD_SIZE = D, TAPS, TOKENS of a segment at most, COLUMNS (64 or 128, up to D), BULK (bulk.cuh), IN_REGISTERS;
//             GATES, and then TYPE of their weights and STEPS, elements of a chain under way
// Shapes   as in gdn.cu; state (slots, V, D, D), conv (slots, kernel - 1, channels), to another row or in place
// Source   the order of every sum is that of `ops.Kernels.gdn`
#define TRACES_ENTRY
#include "gdn_window.cuh"
#include "lanes.cuh"
#include "formats.cuh"
#include "quantize_lane.cuh"
#include "forms.cuh"

#define DEPTH 1
#include "bulk.cuh"

#ifndef TOKENS
#define TOKENS 1
#endif
#ifndef COLUMNS
#define COLUMNS 128
#endif
#ifndef IN_REGISTERS
#define IN_REGISTERS 0
#endif
#ifndef GATES
#define GATES 0
#define TYPE F32
#define STEPS 1
#endif

constexpr int GROUPS = 8;
constexpr int ROWS = D / GROUPS;
constexpr int FOURS = ROWS / 4;  // rows of a group by fours: one for each chain
constexpr int QUADS = COLUMNS / 4;
constexpr int THREADS = GROUPS * QUADS;
constexpr int BLOCKS = TOKENS > 1 ? 1 : (IN_REGISTERS ? 512 : 768) / THREADS;  // as many as registers or shared memory hold
constexpr int VALUE_PARTS = COLUMNS / 32;

struct Tokens {
    float q[TOKENS][D], k[TOKENS][D], v[TOKENS][COLUMNS], decay[TOKENS], beta[TOKENS], b[TOKENS], a[TOKENS];
};

constexpr bool WHOLE = COLUMNS == D;
constexpr int OF_WARP = 16 * 32 * ROWS;  // bytes of a warp's rows

struct Memory {
    float4 state[ROWS * THREADS];
    float4 keys[GROUPS][QUADS], queries[GROUPS][QUADS];  // sums of the groups
    Tokens tokens;
};

// Where a thread has four columns of a row of its group: of whole heads as they lie in memory.
DEVICE int place_of(int row) {
    return WHOLE ? (threadIdx.x / QUADS * ROWS + row) * QUADS + threadIdx.x % QUADS : row * THREADS + threadIdx.x;
}

// What a block works on.
struct Work {
    Window window;
    const float *b, *a, *w_a, *w_dt;  // b, a: not with GATES
    int key_heads, value_heads, head, column;
};

// A warp takes the query, the key, the values, or the gates of a token.
DEVICE void convolve_tokens(Tokens& tokens, const Work& g) {
    const int lane = threadIdx.x & 31, n = g.window.s.end - g.window.s.begin, key_head = g.head % g.key_heads;
#pragma unroll 1
    for (int e = threadIdx.x >> 5; e < 4 * n; e += THREADS / 32) {
        const int t = e >> 2, part = e & 3, row = g.window.s.begin + t;
        if (part < (WHOLE ? 3 : 2)) {  // the code is there once: it is cold when the kernel begins
            const int of_head = part == 0 ? key_head : part == 1 ? g.key_heads + key_head : 2 * g.key_heads + g.head;
            float v[PARTS], *to = part == 0 ? tokens.q[t] : part == 1 ? tokens.k[t] : tokens.v[t];
            convolve(g.window, row, of_head * D + lane, v);
            if (part < 2) make_unit(v, part ? 1.0f : query_scale());
#pragma unroll
            for (int m = 0; m < PARTS; m++) to[lane + 32 * m] = v[m];
        } else if (part == 2) {
            float v[VALUE_PARTS];
            convolve(g.window, row, (2 * g.key_heads + g.head) * D + g.column + lane, v);
#pragma unroll
            for (int m = 0; m < VALUE_PARTS; m++) tokens.v[t][lane + 32 * m] = v[m];
        } else {
            const long long at = static_cast<long long>(row) * g.value_heads + g.head;
            if (lane == 0) tokens.decay[t] = decay_of(g.w_a[g.head], GATES ? tokens.a[t] : g.a[at], g.w_dt[g.head]);
            if (lane == 1) tokens.beta[t] = sigmoid_f32(GATES ? tokens.b[t] : g.b[at]);
        }
    }
}

// What the block will read as soon as the other projections are there, and what is read behind the delta rule.
DEVICE void fetch_constants(const Work& g, const float* norm) {
    constexpr int LINES = D / 32;  // of a head's channels
    const int lane = threadIdx.x & 31, part = threadIdx.x >> 5;
    if (part < 3) {
        const int channel = (part == 0 ? g.head % g.key_heads : part * g.key_heads + (part == 1 ? g.head % g.key_heads : g.head)) * D;
        for (int i = lane; i < LINES * TAPS; i += 32) fetch_line(g.window.w + static_cast<long long>(channel) * TAPS + 32 * i);
        for (int i = lane; i < LINES * (TAPS - 1); i += 32)
            fetch_line(g.window.kept + static_cast<long long>(i / LINES) * g.window.channels + channel + 32 * (i % LINES));
    } else if (part == 3) {
        if (WHOLE && lane < LINES) fetch_line(norm + 32 * lane);
        if (lane == 30) fetch_line(g.w_a + g.head);
        if (lane == 31) fetch_line(g.w_dt + g.head);
    }
}

// The inputs of the block and the weights (V, cols) of its gates. x was written before the kernel that made p.
struct GateProducts {
    const u8 *b, *a;
    const float* x;
    int cols;

    // `lanes` of a head's two weight rows with each token: a thread has a chain of one row, or of both.
    DEVICE void make(Tokens& tokens, float* buffer, const Segment& s, int head) const {
        constexpr int EACH = 2 * LANES / THREADS, SPAN = LANES * STEPS;  // rows of a thread
        const int j = threadIdx.x % LANES, first = threadIdx.x / LANES, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        const u8* row[EACH];
        float held[EACH][STEPS];
#pragma unroll
        for (int r = 0; r < EACH; r++) {
            row[r] = (first + r ? a : b) + static_cast<long long>(head) * cols * TYPE::BYTES;
            if (SPAN <= cols)
#pragma unroll
                for (int i = 0; i < STEPS; i++) held[r][i] = TYPE::load1(row[r] + (j + LANES * i) * TYPE::BYTES);
        }
#pragma unroll 1
        for (int t = 0; t < s.end - s.begin; t++) {
            const float* in = x + static_cast<long long>(s.begin + t) * cols;
            float sums[EACH] = {};
            int k = j;
            if (SPAN <= cols) {
                float v[STEPS];
#pragma unroll
                for (int i = 0; i < STEPS; i++) v[i] = read_early(in + j + LANES * i);
#pragma unroll
                for (int i = 0; i < STEPS; i++)
#pragma unroll
                    for (int r = 0; r < EACH; r++) sums[r] = fmaf(held[r][i], v[i], sums[r]);
                k += SPAN;
            }
#pragma unroll 1
            for (; k < cols; k += LANES)
#pragma unroll
                for (int r = 0; r < EACH; r++)
                    sums[r] = fmaf(TYPE::load1(row[r] + static_cast<long long>(k) * TYPE::BYTES), read_early(in + k), sums[r]);
            if (t) __syncthreads();
#pragma unroll
            for (int r = 0; r < EACH; r++) buffer[(first + r) * LANES + j] = sums[r];
            __syncthreads();
            if (warp < 2) {
                const float* p = buffer + warp * LANES + lane;
                const float sum = fold_warp((p[0] + p[64]) + (p[32] + p[96]));
                if (lane == 0) (warp ? tokens.a[t] : tokens.b[t]) = sum;
            }
        }
        __syncthreads();
    }
};

DEVICE float4 operator+(const float4& a, const float4& b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
DEVICE float4 operator-(const float4& a, const float4& b) { return {a.x - b.x, a.y - b.y, a.z - b.z, a.w - b.w}; }
DEVICE float4 operator*(const float4& a, float b) { return {a.x * b, a.y * b, a.z * b, a.w * b}; }
DEVICE float4 fma4(const float4& a, float b, const float4& c) {
    return {fmaf(a.x, b, c.x), fmaf(a.y, b, c.y), fmaf(a.z, b, c.z), fmaf(a.w, b, c.w)};
}

// The tree over the groups.
template <class T>
DEVICE T fold_groups(const T* sums, int pitch) {
    return ((sums[0] + sums[pitch]) + (sums[2 * pitch] + sums[3 * pitch])) +
           ((sums[4 * pitch] + sums[5 * pitch]) + (sums[6 * pitch] + sums[7 * pitch]));
}

// A thread's rows by fours, in order: its own copies of four rows are waited for when they are wanted first.
template <class F>
DEVICE void for_fours(const Runs& runs, const F& work) {
    if (WHOLE) runs.wait(0);
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
        if (WHOLE) {
            work(i);
            continue;
        }
        if (i == 0) copies_wait<(FOURS > 1 ? FOURS - 1 : 0)>();
        if (i == 1) copies_wait<(FOURS > 2 ? FOURS - 2 : 0)>();
        if (i == 2) copies_wait<(FOURS > 3 ? FOURS - 3 : 0)>();
        if (i == 3) copies_wait<0>();
        work(i);
    }
}

// The state of a thread, in shared memory or, once it has been read, in registers.
struct State {
    float4 held[IN_REGISTERS ? ROWS : 1];

    DEVICE float4 get(const Memory& memory, int row) const {
        return IN_REGISTERS ? held[row % (IN_REGISTERS ? ROWS : 1)] : memory.state[place_of(row)];
    }
    DEVICE void put(Memory& memory, int row, const float4& s) {
        if (IN_REGISTERS)
            held[row % (IN_REGISTERS ? ROWS : 1)] = s;
        else
            memory.state[place_of(row)] = s;
    }
};

// One token: s = s * decay; e = beta * (v - sum(s * k)); s = fma(k, e, s); the sums s * q of the group to memory.
// `keep(row, s)` takes the new state of four columns.
template <class Keep>
DEVICE void delta_step(Memory& memory, State& state, const Runs& runs, int t, const Keep& keep) {
    const Tokens& tokens = memory.tokens;
    const int group = threadIdx.x / QUADS, quad = threadIdx.x % QUADS;
    const float4* keys = reinterpret_cast<const float4*>(tokens.k[t]) + group * FOURS;
    const float4* queries = reinterpret_cast<const float4*>(tokens.q[t]) + group * FOURS;
    const float decay = tokens.decay[t];
    float4 p[4] = {};
    for_fours(runs, [&](int i) {
        const float4 k = keys[i];
        const float ks[4] = {k.x, k.y, k.z, k.w};
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const float4 s = (t ? state.get(memory, 4 * i + c) : memory.state[place_of(4 * i + c)]) * decay;
            if (IN_REGISTERS) state.put(memory, 4 * i + c, s);
            p[c] = fma4(s, ks[c], p[c]);
        }
    });
    memory.keys[group][quad] = (p[0] + p[1]) + (p[2] + p[3]);
    __syncthreads();
    const float4 v = reinterpret_cast<const float4*>(tokens.v[t])[quad];
    const float4 e = (v - fold_groups(memory.keys[0] + quad, QUADS)) * tokens.beta[t];
    p[0] = p[1] = p[2] = p[3] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
        const float4 k = keys[i], q = queries[i];
        const float ks[4] = {k.x, k.y, k.z, k.w}, qs[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const float4 decayed = IN_REGISTERS ? state.get(memory, 4 * i + c) : memory.state[place_of(4 * i + c)] * decay;
            const float4 s = fma4(e, ks[c], decayed);
            p[c] = fma4(s, qs[c], p[c]);
            keep(4 * i + c, s);
        }
    }
    memory.queries[group][quad] = (p[0] + p[1]) + (p[2] + p[3]);
    __syncthreads();
}

// What a block with a whole head does behind the delta rule. `ended`: a word that is 0 for each segment and key head.
struct Output {
    const float *z, *w;
    float* y;
    u32* ended;
    Forms forms;
    int n;
    float eps;

    // The output of a token's head from the sums of the groups, by a warp.
    DEVICE void leave(const float (&gate)[PARTS], const float* sums, long long head) const {
        const int lane = threadIdx.x & 31;
        float v[PARTS], factor[PARTS];
#pragma unroll
        for (int m = 0; m < PARTS; m++) v[m] = fold_groups(sums + lane + 32 * m, COLUMNS), factor[m] = w[lane + 32 * m];
        gated_norm(v, factor, gate, eps);
#pragma unroll
        for (int m = 0; m < PARTS; m++) y[head * D + lane + 32 * m] = v[m];
        forms.leave(v, head * PARTS, static_cast<long long>(n) * gridDim.y * D);
    }
};

// The inputs of one head to the row that the state advances to, by a warp.
DEVICE void keep_head(const Window& window, float* conv, int head) {
    const int channel = head * D + (threadIdx.x & 31);
    float v[TAPS - 1][PARTS];
    window.last(v, channel);
    window.keep(conv, channel, v);
}

// All that a block has to keep, by the warps 1 to 3. In place the inputs of a query and key head move when all its blocks
// have read them; a block says so when it has, so that the answer is there when its own work is done.
struct Kept {
    static constexpr int KEEPERS = 96, ASKS = 32;
    u32 before;

    DEVICE static bool in_place(const Work& g) { return g.window.s.to == g.window.s.slot; }
    // After a barrier behind the block's reads.
    DEVICE void ask(const Work& g, u32* ended) {
        if (threadIdx.x == ASKS && in_place(g))
            before = atomicInc(ended + blockIdx.z * g.key_heads + g.head % g.key_heads, g.value_heads / g.key_heads - 1);
    }
    DEVICE void keep(const Work& g, float* conv) const {
        __shared__ bool last;
        const int key_head = g.head % g.key_heads, warp = threadIdx.x >> 5;
        if (warp == 0 || warp > KEEPERS / 32) return;
        if (threadIdx.x == ASKS) last = before == g.value_heads / g.key_heads - 1;
        threads_meet(1, KEEPERS);
        if (warp > 1 && !(in_place(g) ? last : g.head < g.key_heads)) return;
        keep_head(g.window, conv, warp == 1 ? 2 * g.key_heads + g.head : warp == 2 ? key_head : g.key_heads + key_head);
    }
};

KERNEL void __launch_bounds__(THREADS, BLOCKS)
    gdn_slots(const float* p, const float* conv_w, float* conv, const float* b, const float* a, const float* w_a,
              const float* w_dt, float* state, const int* segments, float* o, int key_heads, int value_heads,
              PARAMETER Output output, PARAMETER GateProducts gates) {
    extern __shared__ __align__(16) char dynamic[];
    trace_entry();
    Memory& memory = *reinterpret_cast<Memory*>(dynamic);
    const int tid = threadIdx.x, group = tid / QUADS, head = blockIdx.y, column = blockIdx.x * COLUMNS;
    const Segment seg = segment_at(segments, blockIdx.z);
    const int own = group * ROWS * D + column + tid % QUADS * 4;
    const float* before = state + (static_cast<long long>(seg.slot) * value_heads + head) * (D * D) + own;
    float* after = state + (static_cast<long long>(seg.to) * value_heads + head) * (D * D) + own;
    __shared__ u64 arrived[THREADS / 32];
    const Runs runs(arrived + tid / 32);
    if (WHOLE) {
        const u8* rows = reinterpret_cast<const u8*>(before - own) + tid / 32 * OF_WARP;
        runs.begin<OF_WARP>(0, reinterpret_cast<u8*>(memory.state) + tid / 32 * OF_WARP, rows, OF_WARP);
        runs.commit();
    } else {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            copy16(&memory.state[place_of(i)], before + i * D);
            if (i % 4 == 3) copies_commit();
        }
    }

    const int channels = (2 * key_heads + value_heads) * D;
    const Work work = {Window::of(p, conv_w, conv, channels, seg), b, a, w_a, w_dt, key_heads, value_heads, head, column};
    if (IN_REGISTERS) fetch_constants(work, output.w);  // of many sequences somebody else has read them
    if (GATES) gates.make(memory.tokens, reinterpret_cast<float*>(memory.keys), seg, head);
    inputs_ready();
    convolve_tokens(memory.tokens, work);
    __syncthreads();
    trace_mark(2);
    Kept kept{};
    if (WHOLE) kept.ask(work, output.ended);
    const float* sums = reinterpret_cast<const float*>(memory.queries);
    const bool first_warp = tid < 32;
    State held;
#pragma unroll 1
    for (int row = seg.begin; row < seg.end; row++) {
        const long long vector = static_cast<long long>(row) * value_heads + head;
        const int t = row - seg.begin;
        float gate[PARTS];
        if (WHOLE && first_warp)
#pragma unroll
            for (int m = 0; m < PARTS; m++) gate[m] = output.z[vector * D + tid + 32 * m];
        if (TOKENS == 1 || row == seg.end - 1)
            delta_step(memory, held, runs, t, [&](int i, const float4& s) { *reinterpret_cast<float4*>(after + i * D) = s; });
        else
            delta_step(memory, held, runs, t, [&](int i, const float4& s) { held.put(memory, i, s); });
        if (WHOLE && first_warp) output.leave(gate, sums, vector);
        if (!WHOLE && tid < COLUMNS) o[vector * D + column + tid] = fold_groups(sums + tid, COLUMNS);
    }
    trace_mark(3);
    if (WHOLE) kept.keep(work, conv);
}
