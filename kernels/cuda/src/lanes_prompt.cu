// The product of float weights with many rows (a prompt). Order of summation: ops.py, `lanes`.
//
// A tile is 16 weight rows times 16 activation rows. A thread has one chain of 8 x 16 of its sums: 24 loads of a word from
// shared memory for 128 fma. A block keeps its 16 activation rows in shared memory (RESIDENT) and goes through `each` row
// tiles; the weights pass through a ring of stages.
//
// The eight warps are two halves with eight weight rows each, which read their own part of the ring and then meet only among
// themselves: a multiprocessor has room for one block, and of two warps of a scheduler one adds while the other reads.
//
// Chain j is element j mod 4 of the quad j / 4 = 4 i + w. lane: j mod 4 + 4 i; warp: w, and which 8 rows (bit 2).
// So the first three folds (64, 32, 16 chains apart) are exchanges of lanes, and the others go through shared memory.
// Sum r of a thread is row r ^ i: what a lane keeps of an exchange then lies in the same registers in every lane.
//
// Why one chain: the words that come back from shared memory are what limits such a tile; of four chains of 8 x 4 sums a
//          thread would get 48 for its 128 fma. `place` puts the 32 words of a warp in different banks.
// Limit    the registers hold 256 sums of 128 chains, so each weight is read from the L2 once for 16 rows: 1/4 byte a
//          multiply-add
//
// RESIDENT: a chain's inputs of the two steps of a stage lie beside each other and are read at once, 32 reads for 256 fma
// and not 48. They are stored once for all row tiles, word by word; weights, of which each is read once, are not worth it.
//
// Constants: TYPE (F32, F16, BF16), VEC (4 when cols % 4 == 0, else 1), MODE (DENSE; GATE_UP: 8 rows of gate and 8 of up
// a tile; PAIRS), RESIDENT, STEPS of 128 columns a stage, STAGES, WHOLE (a row is a whole number of stages, and begins at a
// multiple of 16 bytes).
#include "device.cuh"
#include "lanes.cuh"

#define DENSE 0
#define GATE_UP 1
#define PAIRS 2
#define MATRICES 8

enum {
    R = 8,
    C = 16,
    SIDE = 16,
    THREADS = 256,
    OWN = MODE == GATE_UP ? SIDE / 2 : SIDE,  // rows of the output in a tile
    STEP = 128,
    WIDTH = STEPS * STEP,                     // columns of a stage
    W_STEP = SIDE * STEP * TYPE::BYTES,       // bytes of a step's weights, and of its inputs
    X_STEP = SIDE * STEP * 4,
    SLOT = STEPS * (W_STEP + (RESIDENT ? 0 : X_STEP)),
};

static_assert(!RESIDENT || STEPS == 2, "a stage that stays has pairs of words");

// A barrier of one half of the block's warps.
DEVICE void half_meets(int half) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + half), "r"((int)THREADS / 2) : "memory");
}

// Held in a register: not computed again where it is used.
#define HOLD(x) asm volatile("" : "+r"(x))

struct Matrix {
    const u8* data;
    float* out;
    int rows, last_tile;  // tiles of OWN rows of this matrix and all before it
};

struct Arguments {
    Matrix matrix[MATRICES];
    const float* x;      // (inputs, cols)
    const float* join;   // DENSE: null, or (n,): out = fma(sigmoid(join[row]), y, out)
    const u64* first;    // addresses of the experts' gate or down
    const u64* second;   // of up
    const int* order;    // pairs sorted by expert
    const int4* tile_list;  // (expert, first, count) of at most SIDE pairs
    const int* n_tiles;
    int n, divide, cols, row_tiles, each;  // the input of a pair is pair / divide; `each`: row tiles of a block
};

// Where a piece of 16 bytes lies in a row of a step: the quads 4 i + w of a warp, which are 64 bytes apart (or 32), in
// different banks.
template <int BYTES>
DEVICE int place(int piece) {
    return piece ^ (piece >> 3 & (BYTES == 4 ? 3 : 1));
}

// Columns of 16 rows into shared memory, a stage at a time: 16 threads a row, each every 16th piece of 16 bytes.
template <class T>
struct Loader {
    enum { PIECES = STEP * T::BYTES / 16, TURNS = PIECES / 16, BYTES_OF_STEP = SIDE * PIECES * 16, ELEMENTS = 16 / T::BYTES };
    const u8* from;   // the thread's first piece of the next stage
    int cols, first;  // first: its first column
    u32 to[TURNS];    // where its pieces of a step lie

    DEVICE explicit Loader(int cols) : cols(cols) {
        const int row = threadIdx.x >> 4, piece = threadIdx.x & 15;
#pragma unroll
        for (int j = 0; j < TURNS; j++) {
            to[j] = (row * PIECES + place<T::BYTES>(piece + 16 * j)) * 16;
            HOLD(to[j]);
        }
    }

    DEVICE void begin(const u8* row) {
        first = (threadIdx.x & 15) * ELEMENTS;
        from = row + first * T::BYTES;
    }

    DEVICE void load(u8* slot) {
        if (WHOLE) {
#pragma unroll
            for (int e = 0; e < STEPS * TURNS; e++)
                copy16(slot + to[e % TURNS] + e / TURNS * BYTES_OF_STEP, from + e * 256);
            from += STEPS * TURNS * 256;
            return;
        }
        const bool aligned = VEC == 4 && (T::BYTES == 4 || cols % ELEMENTS == 0);
        if (aligned && first + (STEPS * PIECES - 16) * ELEMENTS < cols) {
#pragma unroll
            for (int e = 0; e < STEPS * TURNS; e++)
                copy16(slot + to[e % TURNS] + e / TURNS * BYTES_OF_STEP, from + e * 256);
        } else {
#pragma unroll
            for (int e = 0; e < STEPS * TURNS; e++)
                part(slot + to[e % TURNS] + e / TURNS * BYTES_OF_STEP, from + e * 256, cols - first - e * 16 * ELEMENTS,
                     aligned);
        }
        from += STEPS * TURNS * 256;
        first += STEPS * TURNS * 16 * ELEMENTS;
    }

    // One piece, of which `left` elements are inside the row, perhaps at an address that is no multiple of 16.
    DEVICE static void part(u8* p, const u8* at, int left, bool aligned) {
        if (aligned) {
            if (left > 0) copy16(p, at);
        } else if (VEC == 4) {
            for (int i = 0; i < 4 && i * 4 / T::BYTES < left; i++) copy4(p + 4 * i, at + 4 * i);
        } else {
            for (int i = 0; i < ELEMENTS && i < left; i++)
                if (T::BYTES == 4)
                    ((u32*)p)[i] = ((const u32*)at)[i];
                else
                    ((u16*)p)[i] = ((const u16*)at)[i];
        }
    }
};

// Inputs of a stage that stays: 16 rows of 128 chains, of each the words of both steps. 16 threads a row, each every
// 16th word.
struct PairLoader {
    enum { PITCH = 2 * STEP * 4 };
    const u8* from;  // the thread's first word of the next stage
    int left;        // columns from there to the row's end
    u32 to;          // where its first word of a stage lies

    DEVICE PairLoader(const u8* row, int cols) {
        const int own = threadIdx.x & 15;
        from = row + 4 * own, left = cols - own;
        to = (threadIdx.x >> 4) * PITCH + place(own / 4) + own % 4 * 8;
        HOLD(to);
    }

    // Where the pairs of a quad lie: those of a warp's quads 4 i + w, which are 128 bytes apart, in different banks.
    DEVICE static u32 place(int quad) { return (quad ^ (quad >> 2 & 3)) * 32; }

    DEVICE void load(u8* stage) {
#pragma unroll
        for (int e = 0; e < 2 * STEP / 16; e++)
            if (WHOLE || 16 * e < left)
                copy4(stage + (to ^ e % 4 * 32) + e % (STEP / 16) * 128 + e / (STEP / 16) * 4, from + 64 * e);
        from += PITCH, left -= 2 * STEP;
    }
};

// What a thread is and what it has.
struct Thread {
    enum { W_PITCH = STEP * TYPE::BYTES, X_PITCH = STEP * 4 };
    int i, w, half, element, chain;  // half: which eight rows; element: of the quad
    u32 from_w[R], from_x;           // bytes from the begin of a step; from_x with RESIDENT: of a stage
    float p[R * C];

    DEVICE Thread() {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        i = lane >> 2, element = lane & 3, w = warp & 3, half = warp >> 2, chain = 4 * (4 * i + w) + element;
#pragma unroll
        for (int r = 0; r < R; r++) {
            from_w[r] = (half * R + (r ^ i)) * W_PITCH + in_row<TYPE::BYTES>(chain);
            HOLD(from_w[r]);
        }
        from_x = RESIDENT ? PairLoader::place(chain / 4) + 8 * element : in_row<4>(chain);
        HOLD(from_x);
    }

    template <int BYTES>
    DEVICE static u32 in_row(int chain) {
        return place<BYTES>(chain * BYTES / 16) * 16 + chain * BYTES % 16;
    }

    DEVICE void clear() {
#pragma unroll
        for (int o = 0; o < R * C; o++) p[o] = 0.0f;
    }

    // What it reads of a step: weights, and inputs of the columns C / 2 * SECOND and those after it.
    DEVICE void read_weights(float (&w)[R], const u8* step) const {
#pragma unroll
        for (int r = 0; r < R; r++) w[r] = TYPE::load1(step + from_w[r]);
    }
    template <int SECOND>
    DEVICE void read_inputs(float (&x)[C / 2], const u8* step) const {
#pragma unroll
        for (int c = 0; c < C / 2; c++) x[c] = *(const float*)(step + from_x + (C / 2 * SECOND + c) * X_PITCH);
    }

    // The same of both steps of a stage that stays.
    template <int SECOND>
    DEVICE void read_pairs(float2 (&x)[C / 2], const u8* stage) const {
#pragma unroll
        for (int c = 0; c < C / 2; c++)
            x[c] = *(const float2*)(stage + from_x + (C / 2 * SECOND + c) * PairLoader::PITCH);
    }

    template <int SECOND, int STEP_OF_TWO>
    DEVICE void add_pairs(const float (&w)[R], const float2 (&x)[C / 2]) {
        float own[C / 2];
#pragma unroll
        for (int c = 0; c < C / 2; c++) own[c] = STEP_OF_TWO ? x[c].y : x[c].x;
        add<SECOND>(w, own);
    }

    template <int SECOND>
    DEVICE void add(const float (&w)[R], const float (&x)[C / 2]) {
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int c = 0; c < C / 2; c++) {
                float& sum = p[r * C + C / 2 * SECOND + c];
                sum = fmaf(w[r], x[c], sum);
            }
    }

    // A fold of the chains 16 * APART apart.
    template <int APART>
    DEVICE void exchange() {
#pragma unroll
        for (int o = 0; o < APART * C; o++) p[o] = p[o] + __shfl_xor_sync(~0u, p[o + APART * C], 4 * APART);
    }

    // The folds of chains 64, 32 and 16 apart; row i remains, in the first C sums.
    DEVICE void fold() {
        exchange<4>();
        exchange<2>();
        exchange<1>();
    }
};

struct Yes {
    static constexpr bool value = true;
};
struct No {
    static constexpr bool value = false;
};

struct Mail {
    float4 part[4][SIDE][SIDE];  // w, column, row: the four elements of a quad

    DEVICE void put(const Thread& t) {
#pragma unroll
        for (int c = 0; c < C; c++) ((float*)&part[t.w][c][t.half * R + t.i])[t.element] = t.p[c];
    }

    // The folds 8, 4, 2 and 1.
    DEVICE float sum(int row, int column) const {
        const float4 a = part[0][column][row], b = part[1][column][row], c = part[2][column][row], d = part[3][column][row];
        const float x = (a.x + c.x) + (b.x + d.x), y = (a.y + c.y) + (b.y + d.y), z = (a.z + c.z) + (b.z + d.z),
                    w = (a.w + c.w) + (b.w + d.w);
        return (x + z) + (y + w);
    }
};

// Which matrix, and which of its rows, a tile of rows is.
struct Tile {
    int matrix, row;

    DEVICE Tile(const Arguments& a, int tile) {
        int before = 0;
        matrix = 0;
        if (MODE == DENSE)
            while (tile >= a.matrix[matrix].last_tile) before = a.matrix[matrix++].last_tile;
        row = (tile - before) * OWN;
    }
};

// Rows 8 h to 8 h + 7 of a tile are those of half h. GATE_UP: four of gate, then four of up.
DEVICE int row_in_tile(int own) { return MODE == GATE_UP ? own / 8 * 4 + own % 4 : own; }
DEVICE bool is_up(int own) { return MODE == GATE_UP && own & 4; }

KERNEL __launch_bounds__(THREADS, 1) void lanes_prompt(PARAMETER Arguments a) {
    extern __shared__ __align__(128) u8 memory[];
    inputs_ready();
    const int parts = (a.row_tiles + a.each - 1) / a.each, column_tile = blockIdx.x / parts;
    const int first_tile = blockIdx.x % parts * a.each, tiles = min(a.each, a.row_tiles - first_tile);
    int begin = column_tile * SIDE, count = min((int)SIDE, a.n - begin);
    const u8 *first = 0, *second = 0;
    if (MODE != DENSE) {
        if (column_tile >= *a.n_tiles) return;
        const int4 tile = a.tile_list[column_tile];
        begin = tile.y, count = tile.z;
        first = (const u8*)a.first[tile.x];
        if (MODE == GATE_UP) second = (const u8*)a.second[tile.x];
        if (!first) return;
    }
    const int stages = (a.cols + WIDTH - 1) / WIDTH, tid = threadIdx.x;
    u8* inputs = memory + STAGES * SLOT;
    Mail& mail = *(Mail*)(inputs + (RESIDENT ? stages * STEPS * X_STEP : 0));

    const int own = tid >> 4, column = begin + min(own, count - 1);
    const int input = MODE == DENSE ? column : a.order[column] / a.divide;
    const u8* own_input = (const u8*)(a.x + (long long)input * a.cols);
    Loader<TYPE> w(a.cols);
    Loader<F32> x(a.cols);
    x.begin(own_input);
    PairLoader pairs(own_input, a.cols);
    int load_tile = -1, load_stage = stages - 1, load_slot = STAGES - 1;
    auto next_stage = [&] {
        if (++load_slot == STAGES) load_slot = 0;
        if (++load_stage < stages) return;
        load_stage = 0, load_tile++;
        if (load_tile >= tiles) load_tile = WHOLE ? tiles - 1 : tiles;  // WHOLE: nobody reads the last tile again
        if (load_tile == tiles) return;
        const Tile tile(a, first_tile + load_tile);
        const u8* data = MODE == DENSE ? a.matrix[tile.matrix].data : is_up(own) ? second : first;
        w.begin(data + (long long)min(tile.row + row_in_tile(own), a.matrix[tile.matrix].rows - 1) * a.cols * TYPE::BYTES);
        if (!RESIDENT) x.begin(own_input);
    };
    auto load = [&](bool with_inputs) {
        u8* slot = memory + load_slot * SLOT;
        if (WHOLE || load_tile < tiles) {
            w.load(slot);
            if (!RESIDENT)
                x.load(slot + STEPS * W_STEP);
            else if (with_inputs)
                pairs.load(inputs + load_stage * STEPS * X_STEP);
        }
        copies_commit();
    };
    int inputs_left = RESIDENT ? stages : 0;  // stages of inputs that are not under way
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
        next_stage();
        load(inputs_left > 0);
        inputs_left--;
    }
    copies_wait<STAGES - 1>();
    __syncthreads();

    // Half of a step's words are read while the other half is computed. When the last of a stage are in registers, the next
    // stage is waited for, and the stage's place in the ring is free.
    Thread t;
    int slot = 0;
    auto weights = [&](int step) { return memory + slot * SLOT + step * W_STEP; };
    auto inputs_of = [&](int step) { return memory + slot * SLOT + STEPS * W_STEP + step * X_STEP; };
    auto staying = [&](int stage) { return inputs + stage * STEPS * X_STEP; };
    auto next_slot = [&](auto inputs_come) {
        if (++slot == STAGES) slot = 0;
        copies_wait<STAGES - 2>();
        if (inputs_come.value)
            __syncthreads();
        else
            half_meets(t.half);
    };
    auto load_next = [&](auto inputs_come) { load(inputs_come.value && inputs_left-- > 0); };
    // A chain that has no element here is left alone: adding 0 * 0 would turn a -0 into 0.
    auto adds = [&](int stage, int step) { return WHOLE || t.chain < a.cols - stage * WIDTH - step * STEP; };
    float ws[2][R], xs[2][C / 2];
    float2 two[2][C / 2];
    t.read_weights(ws[0], weights(0));
    if (RESIDENT)
        t.read_pairs<0>(two[0], staying(0));
    else
        t.read_inputs<0>(xs[0], inputs_of(0));

    auto stage_of_pairs = [&](int s, auto inputs_come) {
        t.read_weights(ws[1], weights(1));
        t.read_pairs<1>(two[1], staying(s));
        if (adds(s, 0)) t.add_pairs<0, 0>(ws[0], two[0]);
        if (adds(s, 1)) t.add_pairs<0, 1>(ws[1], two[0]);
        if (adds(s, 0)) t.add_pairs<1, 0>(ws[0], two[1]);
        next_slot(inputs_come);
        t.read_weights(ws[0], weights(0));
        t.read_pairs<0>(two[0], staying(s + 1 < stages ? s + 1 : 0));
        next_stage();  // its branches keep the assembler from moving the reads down behind the last sums
        load_next(inputs_come);
        if (adds(s, 1)) t.add_pairs<1, 1>(ws[1], two[1]);
    };
    auto stage_of_steps = [&](int s) {
        next_stage();
#pragma unroll
        for (int u = 0; u < STEPS; u++) {
            t.read_inputs<1>(xs[1], inputs_of(u));
            if (adds(s, u)) t.add<0>(ws[u % 2], xs[0]);
            const int next = u + 1 < STEPS ? u + 1 : 0;
            if (!next) next_slot(Yes()), load_next(Yes());
            t.read_weights(ws[(u + 1) % 2], weights(next));
            t.read_inputs<0>(xs[0], inputs_of(next));
            if (adds(s, u)) t.add<1>(ws[u % 2], xs[1]);
        }
        if (STEPS % 2)
#pragma unroll
            for (int r = 0; r < R; r++) ws[0][r] = ws[1][r];
    };
    auto sums = [&](auto inputs_come) {
        t.clear();
        int s = 0;  // there is a stage: what is cleared is not cleared again for none
#pragma unroll 1
        do {
            if (RESIDENT)
                stage_of_pairs(s, inputs_come);
            else
                stage_of_steps(s);
        } while (++s < stages);
    };
    for (int tile = 0; tile < tiles; tile++) {
        if (RESIDENT && WHOLE && tile > 0)
            sums(No());
        else
            sums(Yes());
        __syncwarp();
        t.fold();
        mail.put(t);
        half_meets(t.half);
        const int r = t.half * R + tid % R, c = tid % (THREADS / 2) / R;
        const Tile at_row(a, first_tile + tile);
        const Matrix& m = a.matrix[at_row.matrix];
        const int row = at_row.row + row_in_tile(r);
        if (is_up(r) || row >= m.rows || c >= count) continue;
        float y = mail.sum(r, c);
        if (MODE == GATE_UP) y = silu_f32(y) * mail.sum(r + 4, c);
        const int at = MODE == DENSE ? begin + c : a.order[begin + c];
        float* out = m.out + (long long)at * m.rows + row;
        *out = MODE == DENSE && a.join ? fmaf(sigmoid_f32(a.join[at]), y, *out) : y;
    }
}
