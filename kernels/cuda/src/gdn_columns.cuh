// Columns of a head's state under the delta rule, few tokens at a time: what gdn_window.cu and gdn_again.cu do alike.
//
// A block is COLUMNS columns of one value head in one segment; thread (group, column) has the D / 8 rows of its group in
// registers, and eight neighbouring lanes are the eight groups of a column, so the tree over the groups is three
// exchanges. The state is on its way before the projections are there.
// Constants   HEAD_SIZE = D, TAPS, TOKENS of a segment at most
// Source      the order of every sum is that of `ops.Kernels.gdn`
#pragma once
#include "gdn_window.cuh"

#ifndef TOKENS
#define TOKENS 16
#endif

constexpr int GROUPS = 8;
constexpr int ROWS = D / GROUPS;
constexpr int COLUMNS = 16;
constexpr int THREADS = GROUPS * COLUMNS;
constexpr int PIECES = D * COLUMNS / 4;
constexpr int VECTOR_GROUP = ROWS % 8 ? ROWS : ROWS + 4;  // a group's rows and a gap: the groups lie in different banks
constexpr int VECTOR = GROUPS * VECTOR_GROUP;
constexpr int STATE_GROUP = ROWS * COLUMNS + 4;

struct Tokens {
    float q[TOKENS][VECTOR], k[TOKENS][VECTOR], v[TOKENS][COLUMNS], decay[TOKENS], beta[TOKENS];
};

// What a block works on.
struct Work {
    Window window;
    const float *b, *a, *w_a, *w_dt;
    int key_heads, value_heads, head, key_head, column;
};

// Where element x of a vector lies.
DEVICE int place_of(int x) { return x / ROWS * VECTOR_GROUP + x % ROWS; }

// A warp takes the query, the key, or the values and gates of a token.
DEVICE void convolve_tokens(Tokens& tokens, const Work& g) {
    const int lane = threadIdx.x & 31, n = g.window.s.end - g.window.s.begin;
#pragma unroll 1
    for (int e = threadIdx.x >> 5; e < 3 * n; e += THREADS / 32) {
        const int t = e / 3, part = e % 3, row = g.window.s.begin + t;
        if (part < 2) {
            const int channel = (part ? g.key_heads + g.key_head : g.key_head) * D;
            float v[PARTS], *to = part ? tokens.k[t] : tokens.q[t];
            convolve(g.window, row, channel + lane, v);
            make_unit(v, part ? 1.0f : query_scale());
#pragma unroll
            for (int m = 0; m < PARTS; m++) to[place_of(lane + 32 * m)] = v[m];
            continue;
        }
        const long long at = static_cast<long long>(row) * g.value_heads + g.head;
        if (lane < COLUMNS) {
            float v[1];
            convolve(g.window, row, (2 * g.key_heads + g.head) * D + g.column + lane, v);
            tokens.v[t][lane] = v[0];
        }
        if (lane == COLUMNS) tokens.decay[t] = decay_of(g.w_a[g.head], g.a[at], g.w_dt[g.head]);
        if (lane == COLUMNS + 1) tokens.beta[t] = sigmoid_f32(g.b[at]);
    }
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

struct Memory {
    __align__(16) float passage[GROUPS * STATE_GROUP];  // the state, on its way in and out
    __align__(16) Tokens tokens;
};

// Let the columns of a head advance over a segment. `arrive()` waits for the inputs, while the state is under way;
// `leave(t, sum)` takes a token's output of a column, from the threads of its first group.
template <class Arrive, class Leave>
DEVICE void advance(Memory& memory, float* state, const Work& g, const Arrive& arrive, const Leave& leave) {
    const int tid = threadIdx.x, group = tid & 7, mine = tid >> 3;
    const Segment& seg = g.window.s;
    Tokens& tokens = memory.tokens;
    const long long row_of_state = static_cast<long long>(D) * D;
    const float* before = state + (static_cast<long long>(seg.slot) * g.value_heads + g.head) * row_of_state + g.column;
    float* after = state + (static_cast<long long>(seg.to) * g.value_heads + g.head) * row_of_state + g.column;
    for (int e = tid; e < PIECES; e += THREADS) {
        const int row = e / (COLUMNS / 4), x = e % (COLUMNS / 4) * 4;
        copy16(memory.passage + row / ROWS * STATE_GROUP + row % ROWS * COLUMNS + x, before + row * D + x);
    }
    copies_commit();

    arrive();
    convolve_tokens(tokens, g);
    copies_wait<0>();
    __syncthreads();
    float s[ROWS];
    float* own = memory.passage + group * STATE_GROUP + mine;
#pragma unroll
    for (int i = 0; i < ROWS; i++) s[i] = own[i * COLUMNS];
#pragma unroll 1
    for (int t = 0; t < seg.end - seg.begin; t++) {
        const float sum = delta_step(s, tokens.q[t] + group * VECTOR_GROUP, tokens.k[t] + group * VECTOR_GROUP,
                                     tokens.v[t][mine], tokens.decay[t], tokens.beta[t]);
        if (group == 0) leave(t, sum);
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) own[i * COLUMNS] = s[i];
    __syncthreads();
    for (int e = tid; e < PIECES; e += THREADS) {
        const int row = e / (COLUMNS / 4), x = e % (COLUMNS / 4) * 4;
        *reinterpret_cast<float4*>(after + row * D + x) =
            *reinterpret_cast<const float4*>(memory.passage + row / ROWS * STATE_GROUP + row % ROWS * COLUMNS + x);
    }
}
