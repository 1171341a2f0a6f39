// The work of a block, found by its first warp, and the arguments of the kernel. Needs device.cuh, WARPS, ROW_BYTES, and ITEMS and
// TURN_ITEMS unless TILED.
//
// All rows of all sources lie side by side, and a block has an equal part of them: of few sources a *segment* each. Rows of
// experts that several pairs have are taken in turn, row by row, so that a block reads them for all of these pairs. Of DOWN
// the rows of a token's output lie side by side, each with the rows of all its pairs.

#define DENSE 0
#define GATE_UP 1
#define DOWN 2
#define PAIRS 3
#define MATRICES 8
#define SKIPPED 0x7FFFFFFF

struct Matrix {
    const u8* data;
    float* out;
    int rows, last_tile;  // last_tile is not used here
};

struct Arguments {
    Matrix matrix[MATRICES];  // GATE_UP of matrices: gate, up
    const float* x;       // (inputs, cols), or null: then q, d as quantize.cu leaves them
    const u8* q;
    const float* d;
    const float* join;    // DENSE: null, or (n,): out = fma(sigmoid(join[row]), y, out). DOWN: (n,), with `beside`
    const u64* first;     // addresses of the experts' gate or down
    const u64* second;    // of up
    const int* ids;       // (n, used), or null: no experts
    const float* weights;
    const float* given;   // (n * used, rows), or null
    const float* beside;  // DOWN: null, or (n, rows): out = fma(sigmoid(join[row]), beside, out) at the end
    int early;            // works beside the kernel before it (intrinsics.cuh)
    int older;            // the inputs are older than the kernel before it, which has made the ids
    int n, used, experts, cols, matrices;  // cols: for those who look at launches; the kernel is compiled for its number
    int strip, strip_inverse;     // rows of a strip at most; inverses: 2^32 / divisor, rounded up
    int turns;                    // of a full strip of one matrix
    int strip_turns, strip_turn_inverse;  // of a full strip
    int strips;                   // of a block at most
    int regions, region_inverse;  // strips that the table of terms holds
    int at_scales, at_sums, at_keys, at_segments, at_arrived, at_terms, at_grid, at_stages, at_y;  // parts of shared memory, bytes
};

enum { HALVES = MODE == GATE_UP ? 2 : 1 };  // gate, then up

DEVICE int divide(int a, int by, int inverse) { return by == 1 ? a : (int)__umulhi((u32)a, (u32)inverse); }

#if TILED
DEVICE int turns_of_strip(int) { return 1; }
#else
DEVICE int turns_of(int items) { return (int)((u32)(items + TURN_ITEMS - 1) / TURN_ITEMS); }

// Of a strip of so many rows.
DEVICE int turns_of_strip(int rows) { return HALVES * turns_of(rows * ITEMS); }
#endif

DEVICE int clamp(int x, int least, int most) { return min(max(x, least), most); }

struct Segment {
    const u8 *from, *second;  // its first row; of GATE_UP: of gate, of up
    float* out;
    int turn, strip;  // numbers of its first ones in the block
    int rows, input;  // input: row of activations in shared memory
    int pitch;        // of out, floats from one row of activations to the next
};

struct Found {
    int segments, turns, strips;
};

// Which of so many segments has a turn: the last one that begins with it or before.
DEVICE int segment_of(const Segment* segments, int count, int turn) {
    int low = 0;
#pragma unroll 1
    for (int high = count; high - low > 1;) {
        const int middle = (low + high) / 2;
        if (turn >= segments[middle].turn) low = middle;
        else high = middle;
    }
    return low;
}

// The block's part of `rows`.
struct Share {
    int each, begin, end;

    DEVICE explicit Share(int rows) {
        each = (int)(((u32)rows + gridDim.x - 1) / gridDim.x);
        begin = min(each * (int)blockIdx.x, rows), end = min(begin + each, rows);
    }
};

// DOWN, and what lies beside it: tokens of the block's outputs.
struct Tokens {
    int first, count;

    DEVICE Tokens(const Share& share, int rows)
        : first(share.begin / rows), count(share.end > share.begin ? (share.end - 1) / rows - first + 1 : 0) {}
};

// Where weights of a pair lie while nobody knows its expert: bytes behind the begin of its gate or up.
struct Places {
    enum { PAIR_AT = 48, HALF_AT = 63 };

    DEVICE static u64 of(int pair, int half, long long bytes) { return (u64)half << HALF_AT | (u64)pair << PAIR_AT | (u64)bytes; }

    u64 gate, up;  // of the lane's pair

    // The picks of the only row. `all`: whether each expert is there.
    DEVICE Places(const Arguments& a, bool& all) : gate(0), up(0) {
        const int lane = threadIdx.x & 31, e = lane < a.used ? __ldcg(a.ids + lane) : -1;
        if (e >= 0) gate = a.first[e], up = HALVES == 2 ? a.second[e] : 0;
        all = __popc(__ballot_sync(~0u, gate != 0)) == a.used;
    }
    // All lanes come.
    DEVICE u64 address(u64 place) const {
        const int pair = (int)(place >> PAIR_AT & 31);
        const u64 of_gate = __shfl_sync(~0u, gate, pair), of_up = __shfl_sync(~0u, up, pair);
        return (place >> HALF_AT ? of_up : of_gate) + (place & (1ull << PAIR_AT) - 1);
    }
};

struct Finder {
    const Arguments& a;
    Segment* segments;
    int* keys;  // experts of pairs, SKIPPED where one is not there; behind them the addresses; of DOWN the pairs' weights, and `join`
    float* y;   // DOWN: (used, outputs of the block); HERE: (outputs of the block)
    Found found;

    // Enter a segment a lane, of those with rows.
    DEVICE void enter(Segment own) {
        const int lane = threadIdx.x & 31;
        const bool there = own.rows > 0;
        const int strips = there ? divide(own.rows + a.strip - 1, a.strip, a.strip_inverse) : 0;
        const int last = own.rows - (strips - 1) * a.strip;
        const int turns = there ? (strips - 1) * a.strip_turns + turns_of_strip(last) : 0;
        const u32 mask = __ballot_sync(~0u, there);
        int number = found.segments;
        own.turn = found.turns, own.strip = found.strips;
        if (MODE == DOWN && TILED) {  // many: the sums of the lanes before
            int all_turns = turns, all_strips = strips;
#pragma unroll
            for (int d = 1; d < 32; d <<= 1) {
                const int more_turns = __shfl_up_sync(~0u, all_turns, d), more_strips = __shfl_up_sync(~0u, all_strips, d);
                if (lane >= d) all_turns += more_turns, all_strips += more_strips;
            }
            number += __popc(mask & ((1u << lane) - 1));
            own.turn += all_turns - turns, own.strip += all_strips - strips;
            found.segments += __popc(mask);
            found.turns += __shfl_sync(~0u, all_turns, 31), found.strips += __shfl_sync(~0u, all_strips, 31);
        } else {
#pragma unroll 1
            for (u32 left = mask; left; left &= left - 1) {  // few
                const int of = __ffs(left) - 1;
                const int more_turns = __shfl_sync(~0u, turns, of), more_strips = __shfl_sync(~0u, strips, of);
                found.segments++, found.turns += more_turns, found.strips += more_strips;
                if (lane > of) number++, own.turn += more_turns, own.strip += more_strips;
            }
        }
        if (there) segments[number] = own;
    }
    DEVICE long long row_bytes() const { return ROW_BYTES; }

    DEVICE void matrices() {
        const int m = threadIdx.x & 31;
        int all = 0, before = 0;
        for (int i = 0; i < a.matrices; i++) {
            if (i == m) before = all;
            all += a.matrix[i].rows;
        }
        const Share share(all);
        Segment own{};
        if (m < a.matrices) {
            const Matrix& matrix = a.matrix[m];
            const int from = clamp(share.begin - before, 0, matrix.rows);
            own.rows = clamp(share.end - before, 0, matrix.rows) - from;
            own.from = matrix.data + from * row_bytes(), own.out = matrix.out + from, own.pitch = matrix.rows;
            if (MODE == GATE_UP) own.second = a.matrix[1].data + from * row_bytes();
        }
        enter(own);
    }

    enum { EACH = 4 };  // pairs of a lane at most

    // The experts of pairs first + 0, 1, ... count - 1: keys, and addresses behind them.
    DEVICE void read(int first, int count) {
        const int lane = threadIdx.x & 31, padded = (count + 3) & ~3;
        int e[EACH];
        u64 gate[EACH], up[EACH];
#pragma unroll
        for (int k = 0; k < EACH; k++) e[k] = 32 * k + lane < count ? __ldcg(a.ids + first + 32 * k + lane) : -1;
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            gate[k] = e[k] >= 0 ? a.first[e[k]] : 0;
            up[k] = MODE == GATE_UP && e[k] >= 0 ? a.second[e[k]] : 0;
        }
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const int p = 32 * k + lane;
            if (p < padded) keys[p] = gate[k] ? e[k] : SKIPPED, gates(count)[p] = gate[k], ups(count)[p] = up[k];
        }
        __syncwarp();
    }
    DEVICE u64* gates(int count) const { return (u64*)(keys + ((count + 3) & ~3)); }
    DEVICE u64* ups(int count) const { return gates(count) + ((count + 3) & ~3); }
    DEVICE float* weights(int count) const { return (float*)(ups(count) + ((count + 3) & ~3)); }
    DEVICE float* joins(int count) const { return weights(count) + ((count + 3) & ~3); }

    // A token's pairs have different experts.
    DEVICE void pairs_of_one() {
        const int rows = a.matrix[0].rows, p = threadIdx.x & 31;
        Share share(a.used * rows);  // if all experts are there
        const int e = p < a.used ? __ldcg(a.ids + p) : -1;
        const u64 gate = e >= 0 ? a.first[e] : 0, up = MODE == GATE_UP && e >= 0 ? a.second[e] : 0;
        const u32 there = __ballot_sync(~0u, gate != 0);
        if (__popc(there) < a.used) share = Share(__popc(there) * rows);
        const int before = __popc(there & ((1u << p) - 1)) * rows, from = clamp(share.begin - before, 0, rows);
        Segment own{};
        if (gate) {
            own.rows = clamp(share.end - before, 0, rows) - from;
            own.from = (const u8*)gate + from * row_bytes(), own.second = (const u8*)up + from * row_bytes();
            own.out = a.matrix[0].out + p * rows + from;
        }
        enter(own);
    }
    // The same before the experts are known, as if all were there: instead of an address how far behind its matrix's begin
    // the rows lie, and which pair's they are (`Places`). used <= 32.
    DEVICE void expect_pairs(Found* to) {
        const int rows = a.matrix[0].rows, p = threadIdx.x & 31;
        const Share share(a.used * rows);
        const int from = clamp(share.begin - p * rows, 0, rows);
        found = Found{};
        Segment own{};
        if (p < a.used) {
            own.rows = clamp(share.end - p * rows, 0, rows) - from;
            own.from = (const u8*)Places::of(p, 0, from * row_bytes()), own.second = (const u8*)Places::of(p, 1, from * row_bytes());
            own.out = a.matrix[0].out + p * rows + from;
        }
        enter(own);
        if (p == 0) *to = found;
    }
    DEVICE void pairs() {
        const int count = a.n * a.used, rows = a.matrix[0].rows;
        if (a.n == 1 && count <= 32) return pairs_of_one();
        read(0, count);
        const int present = sort(count), lane = threadIdx.x & 31;
        const Share share(present * rows);
#pragma unroll 1
        for (int first = 0; first < present; first += 32) {
            Segment own{};
            const int place = first + lane;
            if (place < present) {
                // Pairs of this expert, from `before` on.
                const int key = keys[place] >> PAIR_BITS, p = keys[place] & ((1 << PAIR_BITS) - 1);
                int before = place, end = place + 1;
                while (before > 0 && keys[before - 1] >> PAIR_BITS == key) before--;
                while (end < present && keys[end] >> PAIR_BITS == key) end++;
                const int same = end - before, index = place - before;
                int from = clamp(share.begin - before * rows, 0, same * rows);
                int to = clamp(share.end - before * rows, 0, same * rows);
                if (same > 1) from = (from - index + same - 1) / same, to = (to - index + same - 1) / same;
                own.rows = to - from;
                own.from = (const u8*)gates(count)[p] + from * row_bytes();
                own.second = (const u8*)ups(count)[p] + from * row_bytes();
                own.out = a.matrix[0].out + (long long)p * rows + from, own.input = p / a.used;
            }
            enter(own);
        }
    }
    // Makes of the keys (expert, pair) in ascending order, skipped pairs last -> how many are there. A lane compares its pairs
    // with all: nothing of the block begins before.
    enum { PAIR_BITS = 7 };
    DEVICE int sort(int count) {
        const int lane = threadIdx.x & 31, padded = (count + 3) & ~3, last = SKIPPED >> PAIR_BITS << PAIR_BITS;
        int own[EACH], rank[EACH], present = 0;
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const int p = 32 * k + lane, key = p < count ? keys[p] : SKIPPED;
            own[k] = (key == SKIPPED ? last : key << PAIR_BITS) | p, rank[k] = 0;
            present += __popc(__ballot_sync(~0u, key != SKIPPED));
        }
#pragma unroll
        for (int k = 0; k < EACH; k++)
            if (32 * k + lane < padded) keys[32 * k + lane] = own[k];
        __syncwarp();
#pragma unroll 4
        for (int i = 0; i < padded; i += 4) {
            const int4 four = *(const int4*)(keys + i);
#pragma unroll
            for (int k = 0; k < EACH; k++)
                if (32 * k < padded)
                    rank[k] += (four.x < own[k]) + (four.y < own[k]) + (four.z < own[k]) + (four.w < own[k]);
        }
        __syncwarp();
#pragma unroll
        for (int k = 0; k < EACH; k++)
            if (32 * k + lane < padded) keys[rank[k]] = own[k];
        __syncwarp();
        return present;
    }
    DEVICE void down() {
        const int rows = a.matrix[0].rows;
        const Share share(a.n * rows);
        const Tokens tokens(share, rows);
        const int count = tokens.count * a.used, lane = threadIdx.x & 31;
        float weight[EACH];  // as old as the picks, and on their way together with them
#pragma unroll
        for (int k = 0; k < EACH; k++) weight[k] = 32 * k + lane < count ? read_early(a.weights + tokens.first * a.used + 32 * k + lane) : 0.0f;
        const float join = a.join && lane < tokens.count ? read_early(a.join + tokens.first + lane) : 0.0f;
        read(tokens.first * a.used, count);
#pragma unroll
        for (int k = 0; k < EACH; k++)
            if (32 * k + lane < count) weights(count)[32 * k + lane] = weight[k];
        if (lane < tokens.count) joins(count)[lane] = join;
#pragma unroll 1
        for (int p = threadIdx.x & 31; p - (int)(threadIdx.x & 31) < count; p += 32) {
            Segment own{};
            if (p < count && keys[p] != SKIPPED) {
                const int t = p / a.used, begin = (tokens.first + t) * rows, from = max(share.begin - begin, 0);
                own.rows = min(share.end - begin, rows) - from, own.input = p;
                own.from = (const u8*)gates(count)[p] + from * row_bytes();
                own.out = y + (p - t * a.used) * share.each + (begin + from - share.begin);
            }
            enter(own);
        }
    }
    // Of one matrix, the rows of the outputs that a block of DOWN has.
    DEVICE void beside_down() {
        const int rows = a.matrix[0].rows, t = threadIdx.x & 31;
        const Share share(a.n * rows);
        const Tokens tokens(share, rows);
        Segment own{};
        if (t < tokens.count) {
            const int begin = (tokens.first + t) * rows, from = max(share.begin - begin, 0);
            own.rows = min(share.end - begin, rows) - from, own.input = t;
            own.from = a.matrix[0].data + from * row_bytes(), own.out = y + (begin + from - share.begin);
        }
        enter(own);
    }
    DEVICE void find(Found* to) {
        found = Found{};
        if (HERE) beside_down();
        else if (MODE == DENSE || (MODE == GATE_UP && !a.ids)) matrices();
        else if (MODE == DOWN) down();
        else pairs();
        if ((threadIdx.x & 31) == 0) *to = found;
    }
};

// Whether the picks say which weights: those of DOWN are older.
DEVICE bool has_picks(const Arguments& a) { return (MODE == GATE_UP && a.ids) || MODE == PAIRS; }

// The addresses of the experts, to the second cache: the weights of a window have driven them out, and a pick would wait
// for them. A few blocks do for all.
DEVICE void expect_picks(const Arguments& a) {
    const int line = blockIdx.x * 32 * WARPS + threadIdx.x, lines = (a.experts + 15) / 16;
    if (a.ids && line < HALVES * lines) expect((line < lines ? a.first : a.second) + line % lines * 16);
}

// The pairs of the block's outputs joined in rank order. `beside`: null, or what is added to them.
DEVICE void join_pairs(const Arguments& a, const Finder& found, const float* beside) {
    const int rows = a.matrix[0].rows;
    const Share share(a.n * rows);
    const Tokens tokens(share, rows);
    const int count = tokens.count * a.used;
    const float *weights = found.weights(count), *joins = found.joins(count);
    for (int i = threadIdx.x; i < share.end - share.begin; i += 32 * WARPS) {
        const int at = share.begin + i, token = at / rows, r = at - token * rows, t = token - tokens.first;
        float acc = 0.0f;
#pragma unroll 4
        for (int k = 0; k < a.used; k++) {
            const int p = t * a.used + k;
            float own = found.y[k * share.each + i];
            if (found.keys[p] == SKIPPED) own = a.given[((long long)token * a.used + k) * rows + r];
            acc = fmaf(weights[p], own, acc);
        }
        a.matrix[0].out[at] = beside ? fmaf(sigmoid_f32(joins[t]), beside[i], acc) : acc;
    }
}
