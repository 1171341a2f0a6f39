// The product of large quantised matrices with the 1 to 16 rows of a window; small ones go through product_row.cu
// (plans.py, `together`). Order of summation: ops.py, `product`.
//
// A warp takes a *tile* of 8 or 16 weight rows and a chunk of 256 columns: the raw blocks come to shared memory by
// asynchronous copies some chunks ahead, four lanes unpack a row, a matrix step multiplies with up to 8 activation rows
// at once, so weights are read once however many rows the window has. The chunks of a tile belong to the `ring` warps of
// a ring in turn: each computes its terms alone and then waits for the running sums of the chunk before it, adds its own
// in the order of the row and hands them on. With a single activation row the terms go to a table of the ring instead, and
// the warp of the tile's last chunk adds them up. The order is the order of the row, whatever the launch.
//
// Constants: TYPE a format, ROWS weight rows of a tile (8, 16), NT eights of activation rows (1, 2), ONE = 1 for a single
// activation row, WARPS of a block, STAGES of a warp, COPIES of the type's table. Several matrices of one type with the same
// input: out (n, rows) each.
#include "device.cuh"
#include "formats.cuh"
#include "quantize.cuh"

#if ARCH >= 800 && !defined(ON_HOST)
// A table that several warps fill, `parts` times a turn, and one reads when it is full.
struct Gate {
    u64 full, empty;
};

DEVICE void gate_init(Gate* gate, int parts) {
    const u32 at = (u32)__cvta_generic_to_shared(gate);
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(parts) : "memory");
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(at + 8) : "memory");
}

DEVICE void gate_wait_full(Gate* gate, u32 turn, int) { box_wait((u32)__cvta_generic_to_shared(gate), turn & 1); }
DEVICE void gate_wait_empty(Gate* gate, u32 turn) { box_wait((u32)__cvta_generic_to_shared(gate) + 8, (turn & 1) ^ 1); }
DEVICE void gate_part(Gate* gate, int lane) { box_arrive((u32)__cvta_generic_to_shared(gate), lane); }
DEVICE void gate_empty(Gate* gate, int lane) { box_arrive((u32)__cvta_generic_to_shared(gate) + 8, lane); }
#else
struct Gate {
    u32 parts, emptied;  // counted from the beginning
};

DEVICE void gate_init(Gate* gate, int) { gate->parts = gate->emptied = 0; }

DEVICE void gate_count(u32* word, int lane) {
    __threadfence();
    __syncwarp();
    if (lane == 0) atomicAdd(word, 1u);
}

DEVICE void gate_wait_full(Gate* gate, u32 turn, int parts) { wait_for(&gate->parts, parts * (turn + 1)); }
DEVICE void gate_wait_empty(Gate* gate, u32 turn) { wait_for(&gate->emptied, turn); }
DEVICE void gate_part(Gate* gate, int lane) { gate_count(&gate->parts, lane); }
DEVICE void gate_empty(Gate* gate, int lane) { gate_count(&gate->emptied, lane); }
#endif

#define MATRICES 8

struct Matrix {
    const u8* data;
    float* out;
    int rows, last_tile;  // tiles of this matrix and all before it
};

struct Arguments {
    Matrix matrix[MATRICES];
    const float* x;      // (inputs, cols), or null: then q, d, sums as quantize.cu leaves them
    const u8* q;
    const float* d;
    const float* sums;
    const float* join;   // null, or (n,): out = fma(sigmoid(join[row]), y, out)
    int early;           // works beside the kernel before it (intrinsics.cuh)
    int n, cols, tiles, ring;
    int at_scales, at_sums, at_mail, at_terms, at_grid, at_stages;  // parts of shared memory, bytes
    int input_pitch, scale_pitch, sum_pitch, term_pitch;
};

typedef TYPE F;
enum {
    CHUNK_BYTES = 256 / F::BLOCK * F::BYTES,
    PITCH = ((CHUNK_BYTES + 15 + 4 + 15) / 16 | 1) * 16,  // of a row in a stage; an odd number of 16s spreads the banks
    STAGE = ROWS * PITCH,
    GROUPS = 256 / F::GROUP,
    PER_SPAN = 32 / F::GROUP,
    LINES = ONE ? 1 : 2 * NT,        // columns whose scales a lane needs
    PART = ROWS / 8 * LINES,         // sums of a lane: row g, then row g + 8
    CHUNK_TERMS = GROUPS * (1 + F::OFFSET)  // ONE: floats of a row and chunk: products, then offsets
};

struct Mail {
    float sums[32][PART];
};

struct Tile {  // where the rows of a tile lie
    const u8* data;
    int row, rows, matrix;  // first row, rows of the matrix, its number
};

DEVICE Tile tile_of(const Arguments& a, int item) {
    int m = 0, before = 0;
    while (item >= a.matrix[m].last_tile) before = a.matrix[m++].last_tile;
    return Tile{a.matrix[m].data, (item - before) * ROWS, a.matrix[m].rows, m};
}

// Row r of the tile; past the end the last row again (its results are dropped).
DEVICE const u8* row_of(const Tile& tile, int r, int row_bytes) {
    return tile.data + min(tile.row + r, tile.rows - 1) * (long long)row_bytes;
}

// A warp takes 32 octets of a row at a time, and reads AHEAD times first.
DEVICE void inputs_to_shared(const Arguments& a, u8* shared) {
    enum { AHEAD = 4 };
    const int octets = a.cols / 8, turns = (octets + 31) / 32, lane = threadIdx.x & 31;
    float* const d = (float*)(shared + a.at_scales);
    float* const sums = (float*)(shared + a.at_sums);
    int row = 0, turn = threadIdx.x >> 5;  // of the row
    const auto advance = [&]() {
        for (turn += WARPS; turn >= turns && row < a.n; turn -= turns) row++;
    };
    for (; turn >= turns && row < a.n; turn -= turns) row++;
    while (row < a.n) {
        int rows[AHEAD], at[AHEAD];
        float v[AHEAD][8], scale[AHEAD];
        uint2 q[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            rows[k] = row, at[k] = turn * 32 + lane;
            if (row >= a.n) break;
            const long long first = (long long)row * a.cols;
            if (a.x) {
                load_octet(v[k], a.x + first + 8 * min(at[k], octets - 1));
            } else if (at[k] < octets) {
                q[k] = *(const uint2*)(a.q + first + 8 * at[k]);
                scale[k] = a.d[row * (octets / 4) + (at[k] >> 2)];
            }
            advance();
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            const int o = at[k], block = o >> 2, u = o & 3;
            if (rows[k] >= a.n) break;
            u8* const to = shared + rows[k] * a.input_pitch;
            float* const own = sums + rows[k] * a.sum_pitch + block * PER_SPAN;
            if (a.x) {
                const Octet octet = quantize_octet(v[k]);
                if (o < octets) store_octet<F::ORDER>(to + 32 * block, u, octet);
                if (o < octets && F::OFFSET) store_sums<F::GROUP>(own, u, octet);
                scale[k] = octet.d;
            } else if (o < octets) {
                *(uint2*)(to + 8 * o) = q[k];
                if (F::OFFSET && u < PER_SPAN) own[u] = a.sums[(rows[k] * (octets / 4) + block) * PER_SPAN + u];
            }
            if (o < octets && u == 0) d[rows[k] * a.scale_pitch + block] = scale[k];
        }
    }
}

// The table with COPIES of each entry side by side. A thread reads an entry once, early (`Entries`), and stores 16 bytes of
// copies a turn, beginning at another place than its neighbours, so that their stores meet different banks.
#if HAS_TABLE
enum { WORDS = F::LOOK == WORD ? 1 : 2, OWN_ENTRIES = (F::GRID + 32 * WARPS - 1) / (32 * WARPS) };
struct Entries {
    u32 word[OWN_ENTRIES][WORDS];

    DEVICE Entries() {
#pragma unroll
        for (int i = 0; i < OWN_ENTRIES; i++)
#pragma unroll
            for (int w = 0; w < WORDS; w++)
                word[i][w] = table_words[min((int)threadIdx.x + i * 32 * WARPS, F::GRID - 1) * WORDS + w];
    }
    DEVICE void store(u8* to) const {
#pragma unroll
        for (int i = 0; i < OWN_ENTRIES; i++) {
            const int entry = threadIdx.x + i * 32 * WARPS;
            if (entry >= F::GRID) break;
            u8* own = to + entry * (COPIES * WORDS * 4);
            if (COPIES * WORDS < 4) {
                for (int k = 0; k < COPIES * WORDS; k++) ((u32*)own)[k] = word[i][k % WORDS];
                continue;
            }
            const uint4 four = make_uint4(word[i][0], word[i][1 % WORDS], word[i][0], word[i][1 % WORDS]);
            enum { TURNS = COPIES * WORDS / 4 > 0 ? COPIES * WORDS / 4 : 1 };
#pragma unroll
            for (int k = 0; k < TURNS; k++) ((uint4*)own)[(k + threadIdx.x) % TURNS] = four;
        }
    }
};
#else
struct Entries {
    DEVICE void store(u8*) const {}
};
#endif

struct Columns {  // what a lane reads of the activations: inputs of column g, scales and sums of columns 2 t, 2 t + 1
    const u8* input[NT];
    const float* scales[LINES];
    const float* sums[LINES];
};

// The sums of codes of span s, one or two groups: sum[k][0, 1] row g and columns 2 t, 2 t + 1, sum[k][2, 3] row g + 8.
DEVICE void span_sums(int (&sum)[PER_SPAN][4], const u32 (&c)[4], const u8* input) {
    const uint2 b = *(const uint2*)input;
    if (F::GROUP == 32) {
        multiply32<ROWS>(sum[0], c, b.x, b.y);
    } else {
        multiply16<ROWS>(sum[0], c[0], c[1], b.x);
        multiply16<ROWS>(sum[PER_SPAN - 1], c[2], c[3], b.y);
    }
}

DEVICE void span_codes(u32 (&c)[4], const u8* p0, const u8* p1, int s, int t, Grid grid) {
    c[1] = c[3] = 0;
    F::span(p0, s, t, grid, c[0], c[2]);
    if (ROWS == 16) F::span(p1, s, t, grid, c[1], c[3]);
}

// The terms of a chunk: products scaled, not yet by the activations' scales.
DEVICE void chunk_terms(float (&terms)[GROUPS][PART], const u8* p0, const u8* p1, Grid grid, const Columns& columns,
                        int chunk, int t, int spans) {
#pragma unroll
    for (int s = 0; s < 8; s++) {
        if (F::BLOCK < 256 && s == 4 && spans <= 4) break;  // what lies past a short chunk is computed and not added
        u32 c[4];
        span_codes(c, p0, p1, s, t, grid);
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            int sum[PER_SPAN][4];
            span_sums(sum, c, columns.input[nt] + 256 * chunk + 32 * s);
#pragma unroll
            for (int k = 0; k < PER_SPAN; k++)
#pragma unroll
                for (int h = 0; h < ROWS / 8; h++) {
                    const float scale = F::scale(h ? p1 : p0, s * PER_SPAN + k), lift = scale * -MAGIC;
#pragma unroll
                    for (int i = 0; i < 2; i++)
                        terms[s * PER_SPAN + k][h * LINES + 2 * nt + i] = scaled(sum[k][2 * h + i], scale, lift);
                }
        }
    }
}

// The same for a single activation row. All columns are that row, so every lane of a quad has the sums of its weight row:
// lane t scales every fourth group, and the terms meet in shared memory.
DEVICE void chunk_terms_of_one(float* terms, int pitch, const u8* p0, const u8* p1, Grid grid, const Columns& columns, int chunk,
                               int t, int spans) {
    enum { OWN = GROUPS / 4 };
    float mine[ROWS / 8][OWN * (1 + F::OFFSET)] = {};  // stored at the end: a store between loads would make them again
#pragma unroll
    for (int q = 0; q < OWN; q++) {
        if (F::BLOCK < 256 && q == OWN / 2 && spans <= 4) break;
        if (F::GROUP == 16 && q == OWN / 2) __syncwarp();  // keeps the loads of the upper half here: registers
        int sums[4][2];
#pragma unroll
        for (int i = 0; i < 4 / PER_SPAN; i++) {
            const int s = 4 / PER_SPAN * q + i;
            u32 c[4];
            int sum[PER_SPAN][4];
            span_codes(c, p0, p1, s, t, grid);
            span_sums(sum, c, columns.input[0] + 256 * chunk + 32 * s);
#pragma unroll
            for (int k = 0; k < PER_SPAN; k++) sums[i * PER_SPAN + k][0] = sum[k][0], sums[i * PER_SPAN + k][1] = sum[k][2];
        }
        const int group = 4 * q + t;
#pragma unroll
        for (int h = 0; h < ROWS / 8; h++) {
            const int low = t & 1 ? sums[1][h] : sums[0][h], high = t & 1 ? sums[3][h] : sums[2][h];
            const float scale = F::scale(h ? p1 : p0, group);
            mine[h][q] = scaled(t & 2 ? high : low, scale, scale * -MAGIC);
            if (F::OFFSET) mine[h][OWN + q] = columns.sums[0][chunk * GROUPS + group] * F::offset(h ? p1 : p0, group);
        }
    }
#pragma unroll
    for (int h = 0; h < ROWS / 8; h++)
#pragma unroll
        for (int i = 0; i < OWN * (1 + F::OFFSET); i++) terms[8 * h * pitch + 4 * i + t] = mine[h][i];
}

DEVICE void add_terms(float (&acc)[PART], const float (&terms)[GROUPS][PART], const float (&d)[LINES][8], const u8* p0,
                      const u8* p1, const Columns& columns, int chunk, int spans) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const int s = g / PER_SPAN;
        if (F::BLOCK < 256 && s >= spans) continue;
#pragma unroll
        for (int h = 0; h < ROWS / 8; h++) {
            const float offset = F::OFFSET ? F::offset(h ? p1 : p0, g) : 0.0f;
#pragma unroll
            for (int i = 0; i < LINES; i++) {
                float& sum = acc[h * LINES + i];
                sum = fmaf(terms[g][h * LINES + i], d[i][s], sum);
                if (F::OFFSET) sum = fmaf(columns.sums[i][chunk * GROUPS + g] * offset, d[i][s], sum);
            }
        }
    }
}

struct RowTerms {  // of a chunk: terms of rows g and g + 8, scales of the activations
    float4 terms[ROWS / 8][CHUNK_TERMS / 4];
    float d[8];

    DEVICE void load(const float* from, int pitch, const float* scales) {
#pragma unroll
        for (int h = 0; h < ROWS / 8; h++)
#pragma unroll
            for (int k = 0; k < CHUNK_TERMS / 4; k++) terms[h][k] = *(const float4*)(from + 8 * h * pitch + 4 * k);
        const float4 u = *(const float4*)scales, v = *(const float4*)(scales + 4);
        d[0] = u.x, d[1] = u.y, d[2] = u.z, d[3] = u.w, d[4] = v.x, d[5] = v.y, d[6] = v.z, d[7] = v.w;
    }
};

DEVICE void add_row_terms(float (&acc)[PART], const RowTerms& row, int spans) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const int s = g / PER_SPAN;
        if (F::BLOCK < 256 && s >= spans) continue;
#pragma unroll
        for (int h = 0; h < ROWS / 8; h++) {
            const auto at = [&](int k) {
                const float4& v = row.terms[h][k / 4];
                return k % 4 == 0 ? v.x : k % 4 == 1 ? v.y : k % 4 == 2 ? v.z : v.w;
            };
            acc[h] = fmaf(at(g), row.d[s], acc[h]);
            if (F::OFFSET) acc[h] = fmaf(at(GROUPS + g), row.d[s], acc[h]);
        }
    }
}

DEVICE void add_chunk_of_one(float (&acc)[PART], const RowTerms& row, int spans) {
    if (F::BLOCK == 256 || spans >= 8) add_row_terms(acc, row, 8);
    else add_row_terms(acc, row, spans);
}

// A whole row from the ring's table, in order; the next chunk is read while this one is added.
DEVICE void add_table(float (&acc)[PART], const float* table, int pitch, const float* scales, int spans) {
    const int chunks = (spans + 7) / 8;
    enum { AHEAD = ROWS / 8 * CHUNK_TERMS <= 32 };  // else it takes too many registers
    RowTerms row, next;
    if (AHEAD) next.load(table, pitch, scales);
#pragma unroll
    for (int i = 0; i < PART; i++) acc[i] = 0.0f;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++) {
        if (AHEAD) row = next;
        else row.load(table + chunk * CHUNK_TERMS, pitch, scales + 8 * chunk);
        if (AHEAD && chunk + 1 < chunks) next.load(table + (chunk + 1) * CHUNK_TERMS, pitch, scales + 8 * (chunk + 1));
        add_chunk_of_one(acc, row, spans - 8 * chunk);
    }
}

DEVICE void take_sums(float (&acc)[PART], Mail* mail, Box* box, u32 turn, int lane) {
    box_wait_full(box, turn);
#pragma unroll
    for (int i = 0; i < PART; i++) acc[i] = mail->sums[lane][i];
    box_empty(box, lane);
}

DEVICE void hand_sums(const float (&acc)[PART], Mail* mail, Box* box, u32 turn, int lane) {
    box_wait_empty(box, turn);
#pragma unroll
    for (int i = 0; i < PART; i++) mail->sums[lane][i] = acc[i];
    box_fill(box, lane);
}

// The finished sums of a tile to where they go.
DEVICE void finish(const Arguments& a, const float (&acc)[PART], const Tile& tile, int g, int t) {
#pragma unroll
    for (int i = 0; i < LINES; i++) {
        const int column = ONE ? t : 8 * (i / 2) + 2 * t + i % 2;
        if (column >= a.n) continue;
        float* out = a.matrix[tile.matrix].out + (long long)column * tile.rows;
        const float weight = a.join ? sigmoid_f32(a.join[column]) : 0.0f;
#pragma unroll
        for (int h = 0; h < ROWS / 8; h++) {
            const int row = tile.row + 8 * h + g;
            const float sum = acc[h * LINES + i];
            if (row < tile.rows) out[row] = a.join ? fmaf(weight, sum, out[row]) : sum;
        }
    }
}

KERNEL __launch_bounds__(32 * WARPS, 1) void product_window(PARAMETER Arguments a) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ Box boxes[WARPS];
    __shared__ Gate gates[WARPS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int chunks = (a.cols + 255) / 256, row_bytes = a.cols / F::BLOCK * F::BYTES;
    if (lane == 0) {
        if (ONE) gate_init(&gates[warp], chunks);
        else box_init(&boxes[warp]);
    }
    if (a.early) next_may_come();
    const Entries entries;

    // The items of this ring: item, then + step, below items.
    const int ring = warp / a.ring, place = warp - ring * a.ring, rings = WARPS / a.ring;
    const int items = ring >= rings ? 0 : a.tiles;  // left-over warps rest
    const int begin = ring * gridDim.x + blockIdx.x, step = rings * gridDim.x;

    // Copies run STAGES - 1 chunks ahead. LANES neighbours copy a row, 16 bytes each: whole sectors of the cache at once.
    enum {
        MOST = (CHUNK_BYTES + 30) / 16,
        LANES = MOST <= 8 ? 8 : MOST <= 16 ? 16 : 32,
        AT_ONCE = 32 / LANES,  // rows
        TURNS = ROWS / AT_ONCE
    };
    u8* const stages = shared + a.at_stages + warp * (STAGES * STAGE);
    const int copy_row = lane / LANES, copy_piece = 16 * (lane % LANES);
    u8* const copy_to = stages + copy_row * PITCH + copy_piece;
    int load_item = begin, load_chunk = place, load_stage = 0, loaded_item = -1, load_rows = 0;  // rows: from this lane's first on
    const u8* load_from = 0;  // of this lane's first row
    auto load = [&]() {
        while (load_chunk >= chunks) load_chunk -= chunks, load_item += step;
        if (load_item < items) {
            if (load_item != loaded_item) {
                const Tile tile = tile_of(a, load_item);
                load_from = tile.data + (tile.row + copy_row) * (long long)row_bytes;
                load_rows = tile.rows - tile.row - copy_row;
                loaded_item = load_item;
            }
            const int at = load_chunk * CHUNK_BYTES;
            const int end = (F::BLOCK == 256 ? (int)CHUNK_BYTES : min((int)CHUNK_BYTES, row_bytes - at)) - copy_piece;
            const u8* from = load_from + at;
            u8* to = copy_to + load_stage;
#pragma unroll
            for (int i = 0; i < TURNS; i++) {  // rows past the last are not copied, and what comes of them is dropped
                const int shift = (int)((u64)from & 15);
                if (i * AT_ONCE < load_rows && -shift < end) copy16(to + i * (AT_ONCE * PITCH), from + (copy_piece - shift));
                from += AT_ONCE * row_bytes;
            }
        }
        copies_commit();
        load_chunk += a.ring;
        load_stage = load_stage == (STAGES - 1) * STAGE ? 0 : load_stage + STAGE;
    };
#pragma unroll 1
    for (int i = 1; i < STAGES; i++) load();

    if (!a.early) inputs_ready();
    inputs_to_shared(a, shared);
    entries.store(shared + a.at_grid);
    __syncthreads();

    const int copy = COPIES == 1 ? 0 : (F::LOOK == HALF ? lane >> 1 : lane) % COPIES;
    const Grid grid{shared + a.at_grid + copy * (F::LOOK == WORD ? 4 : 8)};
    Mail* const mail = (Mail*)(shared + a.at_mail);
    const int next = place + 1 == a.ring ? warp - place : warp + 1;
    float* const table = (float*)(shared + a.at_terms) + (ring * ROWS + g) * a.term_pitch;  // of the ring

    Columns columns;  // activation rows by number, past the last the last again
#pragma unroll
    for (int nt = 0; nt < NT; nt++) columns.input[nt] = shared + min(8 * nt + g, a.n - 1) * a.input_pitch + 8 * t;
#pragma unroll
    for (int i = 0; i < LINES; i++) {
        const int row = ONE ? 0 : min(8 * (i / 2) + 2 * t + i % 2, a.n - 1);
        columns.scales[i] = (const float*)(shared + a.at_scales) + row * a.scale_pitch;
        columns.sums[i] = (const float*)(shared + a.at_sums) + row * a.sum_pitch;
    }

    Tile tile;
    int item = begin, chunk = place, stage = 0, seen_item = -1, turn = 0;  // turn: tiles of the ring before this one
    u32 low = 0, high = 0;  // address bits of rows g and g + 8
    u32 taken = 0, handed = 0;
    float acc[PART];
    for (;;) {
        while (chunk >= chunks) chunk -= chunks, item += step, turn++;
        if (item >= items) break;
        if (item != seen_item) {
            tile = tile_of(a, item);
            low = (u32)(u64)row_of(tile, g, row_bytes);
            if (ROWS == 16) high = (u32)(u64)row_of(tile, g + 8, row_bytes);
            seen_item = item;
        }
        load();
        copies_wait<STAGES - 1>();
        __syncwarp();

        const u8* from = stages + stage + g * PITCH;
        const u8* p0 = from + ((low + chunk * CHUNK_BYTES) & 15);
        const u8* p1 = from + 8 * PITCH + ((high + chunk * CHUNK_BYTES) & 15);
        const int spans = min(8, a.cols / 32 - 8 * chunk);
        if (ONE && a.ring > 1) {
            if (turn > 0) gate_wait_empty(&gates[ring], turn);
            chunk_terms_of_one(table + chunk * CHUNK_TERMS, a.term_pitch, p0, p1, grid, columns, chunk, t, spans);
            gate_part(&gates[ring], lane);
            if (chunk + 1 == chunks) {
                gate_wait_full(&gates[ring], turn, chunks);
                add_table(acc, table, a.term_pitch, columns.scales[0], a.cols / 32);
                gate_empty(&gates[ring], lane);
                finish(a, acc, tile, g, t);
            }
        } else if (ONE) {
            RowTerms row;
            chunk_terms_of_one(table, a.term_pitch, p0, p1, grid, columns, chunk, t, spans);
            __syncwarp();
            row.load(table, a.term_pitch, columns.scales[0] + 8 * chunk);
            if (chunk == 0) {
#pragma unroll
                for (int i = 0; i < PART; i++) acc[i] = 0.0f;
            }
            add_chunk_of_one(acc, row, spans);
            if (chunk + 1 == chunks) finish(a, acc, tile, g, t);
        } else {
            float terms[GROUPS][PART] = {}, d[LINES][8];
            chunk_terms(terms, p0, p1, grid, columns, chunk, t, spans);
#pragma unroll
            for (int i = 0; i < GROUPS * PART; i++) KEEP(terms[i / PART][i % PART]);
#pragma unroll
            for (int i = 0; i < LINES; i++) {
                const float4 u = *(const float4*)(columns.scales[i] + 8 * chunk);
                const float4 v = *(const float4*)(columns.scales[i] + 8 * chunk + 4);
                d[i][0] = u.x, d[i][1] = u.y, d[i][2] = u.z, d[i][3] = u.w;
                d[i][4] = v.x, d[i][5] = v.y, d[i][6] = v.z, d[i][7] = v.w;
            }
            if (chunk == 0) {
#pragma unroll
                for (int i = 0; i < PART; i++) acc[i] = 0.0f;
            } else if (a.ring > 1) {
                take_sums(acc, mail + warp, &boxes[warp], taken++, lane);
            }
            if (F::BLOCK == 256 || spans == 8) add_terms(acc, terms, d, p0, p1, columns, chunk, 8);
            else add_terms(acc, terms, d, p0, p1, columns, chunk, spans);
            if (chunk + 1 == chunks) finish(a, acc, tile, g, t);
            else if (a.ring > 1) hand_sums(acc, mail + next, &boxes[next], handed++, lane);
        }
        __syncwarp();  // the stage is free for the copies of the next turn
        chunk += a.ring;
        stage = stage == (STAGES - 1) * STAGE ? 0 : stage + STAGE;
    }
    if (a.early) inputs_ready();
}
