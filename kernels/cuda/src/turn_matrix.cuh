// Turns of a window of three to eight rows: matrix steps of 8 or 16 rows of weights and 8 of activations.
//
// A turn is an item of TALL rows of a strip, 8 or 16; of GATE_UP of 8 rows of gate and the same of up. Four lanes unpack a
// row, as formats.cuh says. PITCH: bytes from row to row in a stage. A lane has the sums of rows g and g + 8 and columns 2 t and 2 t + 1.
#pragma once

enum {
    LINES = MODE == GATE_UP ? 16 : TALL,            // rows of weights of a turn
    ROWS = MODE == GATE_UP ? 8 : TALL,              // of the strip
    STAGE = LINES * PITCH,
    MOST_PIECES = (ITEM_BYTES + 30) / 16,
    LINE_LANES = MOST_PIECES <= 8 ? 8 : MOST_PIECES <= 16 ? 16 : 32,  // neighbours that copy a line
    AT_ONCE = 1,
    ARRIVALS = 1,
    PAIRS_OF_COLUMNS = COLUMNS / 2
};

struct Turn {
    Strip strip;
    const u8* second;  // of GATE_UP: the rows of up
    int piece, row, item, in_piece;  // row: first of the turn in the strip; item: in the row, and in the piece's row
    bool there;

    DEVICE Turn(const Arguments& a, const Strip* strips, int all, int number) {
        piece = divide(number, a.turns, a.turn_inverse);
        const int j = number - piece * a.turns, row_of_band = piece / SUMMERS, band = divide(row_of_band, a.parts, a.part_inverse);
        const int part = row_of_band - band * a.parts, of = band * SUMMERS + piece % SUMMERS;
        in_piece = divide(j, a.groups, a.group_inverse);
        row = (j - in_piece * a.groups) * ROWS;
        item = part * a.part_items + in_piece;
        there = of < all && item < a.items && in_piece < a.part_items;
        const int known = min(of, all - 1);
        strip = strips[HALVES * known];
        second = strips[HALVES * known + HALVES - 1].from;
    }
    // A line's bytes: of row g of the turn, and of row g + 8 or of up.
    DEVICE const u8* line(const Arguments& a, int g, int upper) const {
        const int row_bytes = a.cols / F::BLOCK * F::BYTES, r = row + g + (MODE == GATE_UP ? 0 : 8 * upper);
        return (MODE == GATE_UP && upper ? second : strip.from) + ((long long)r * row_bytes + item * ITEM_BYTES);
    }
};

static_assert(PITCH >= ITEM_BYTES + 15 + 4, "a row at any alignment, and a word past it");

DEVICE int first_number(int warp, int) { return warp; }

DEVICE bool ends_turn(int lane) { return lane == 0; }

DEVICE void load_turn(const Arguments& a, const Strip* strips, int all, u8* stage, int number, int lane) {
    const Turn turn(a, strips, all, number);
    if (!turn.there) return;
    const int piece = 16 * (lane % LINE_LANES), begin = lane / LINE_LANES, row_bytes = a.cols / F::BLOCK * F::BYTES;
    const u8* from = turn.line(a, begin, 0);
    int left = turn.strip.rows - turn.row - begin;  // rows from this line on
#pragma unroll
    for (int i = 0; i < LINES * LINE_LANES / 32; i++) {
        enum { STEP = 32 / LINE_LANES };  // lines at once
        if (MODE == GATE_UP && i * STEP == 8) from = turn.line(a, begin, 1), left += 8;
        const int shift = (int)((u64)from & 15);
        if (left > 0 && piece < shift + ITEM_BYTES) copy16(stage + (begin + i * STEP) * PITCH + piece, from - shift + piece);
        from += STEP * row_bytes, left -= STEP;
    }
}

// The terms of the lane's sums, four of a row and column together.
struct Places {
    float* to[LINES / 8][2];
    bool there[LINES / 8][2];
    float ready[LINES / 8][2][4];

    DEVICE Places(const Arguments& a, u8* shared, const Turn& turn, int region, int g, int t, bool all) {
#pragma unroll
        for (int h = 0; h < LINES / 8; h++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int r = turn.row + g + (MODE == GATE_UP ? 0 : 8 * h), half = MODE == GATE_UP ? h : 0;
                const int at = i * (a.strip * PAIRS_OF_COLUMNS) + r * PAIRS_OF_COLUMNS + t;
                const int place = (region * HALVES + half) * (a.strip * COLUMNS) + at;
                to[h][i] = (float*)(shared + a.at_terms) + place * a.term_pitch + turn.in_piece * TERM_ITEM;
                there[h][i] = all && turn.there && r < turn.strip.rows && 2 * t + i < a.n;
            }
    }
    // Term `at` of all four; a constant.
    DEVICE void put(int h, int i, int at, float term) {
        if (ITEM_TERMS % 4) {
            if (there[h][i]) to[h][i][at] = term;
            return;
        }
        float (&four)[4] = ready[h][i];
        four[at & 3] = term;
        if ((at & 3) == 3 && there[h][i]) *(float4*)(to[h][i] + at - 3) = make_float4(four[0], four[1], four[2], four[3]);
    }
};

// The scales of a row of an item by their number, a constant.
template <class T>
struct Scales {
    const u8* p;

    DEVICE explicit Scales(const u8* at) : p(at) {}
    DEVICE float of(int group) const { return T::scale(p, group); }
};

template <>
struct Scales<Q6_K> {
    u32 biased[4];
    float d, shift;

    DEVICE explicit Scales(const u8* at) : d(half_at(at + 208) * 0.25f), shift(d * -32896.0f) {  // FACTOR is 4
        const Halves bytes(at + 192);
#pragma unroll
        for (int i = 0; i < 4; i++) biased[i] = bytes.word(4 * i) ^ 0x80808080u;
    }
    DEVICE float of(int group) const { return byte_times(biased[group >> 2], group & 3, d, shift); }
};

template <class Free>
DEVICE void multiply_turn(const Arguments& a, u8* shared, const Turn& turn, const u8* stage, Grid grid, int region, int lane,
                          bool there, Free free) {
    const int g = lane >> 2, t = lane & 3, item = min(turn.item, a.items - 1);
    const u8* p0 = stage + g * PITCH + (int)((u64)turn.line(a, g, 0) & 15);
    const u8* p1 = stage + (g + 8) * PITCH + (int)((u64)turn.line(a, g, 1) & 15);
    const u8* q = shared + min(g, a.n - 1) * a.input_pitch + item * INPUT + 8 * t;
    const float* sums[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
        sums[i] = (const float*)(shared + a.at_sums) + min(2 * t + i, a.n - 1) * a.sum_pitch + item * SUM_ITEM;
    Places places(a, shared, turn, region, g, t, there && t < PAIRS_OF_COLUMNS);
    int sum[SPANS * PER_SPAN][4];  // all of them before a place in the table is asked for: places are few
#pragma unroll
    for (int s = 0; s < SPANS; s++) {
        u32 c[4] = {};
        F::span(p0, s, t, grid, c[0], c[2]);
        if (LINES == 16) F::span(p1, s, t, grid, c[1], c[3]);
        const uint2 b = *(const uint2*)(q + 32 * s);
        if (F::GROUP == 32) {
            multiply32<LINES>(sum[s], c, b.x, b.y);
        } else {
            multiply16<LINES>(sum[PER_SPAN * s], c[0], c[1], b.x);
            multiply16<LINES>(sum[PER_SPAN * s + PER_SPAN - 1], c[2], c[3], b.y);
        }
    }
    free();
    const Scales<F> scales[2] = {Scales<F>(p0), Scales<F>(LINES == 16 ? p1 : p0)};
#pragma unroll
    for (int group = 0; group < SPANS * PER_SPAN; group++)
#pragma unroll
        for (int h = 0; h < LINES / 8; h++) {
            const u8* p = h ? p1 : p0;
            const int at = group * (1 + F::OFFSET);
            const float scale = scales[h].of(group), lift = scale * -MAGIC, offset = F::OFFSET ? F::offset(p, group) : 0.0f;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                places.put(h, i, at, scaled(sum[group][2 * h + i], scale, lift));
                if (F::OFFSET) places.put(h, i, at + 1, sums[i][group] * offset);
            }
        }
}

// A lane's sums: row, column and place of sum c in the table of a piece. Even columns come first there; sums c and c + 2 are
// of the same column.
DEVICE int row_of_sum(int lane, int c) { return lane / PAIRS_OF_COLUMNS + (c >> 1) * (SUMS / PAIRS_OF_COLUMNS); }
DEVICE int column_of_sum(int lane, int odd) { return 2 * (lane % PAIRS_OF_COLUMNS) + odd; }
DEVICE int place_of_sum(const Arguments& a, int row, int lane, int c) {
    return (c & 1) * (a.strip * PAIRS_OF_COLUMNS) + min(row, a.strip - 1) * PAIRS_OF_COLUMNS + lane % PAIRS_OF_COLUMNS;
}

// Pieces go by bands of SUMMERS strips, part by part, so that all of them have something to add.
DEVICE int piece_of(const Arguments& a, int strip, int part) {
    return (strip / SUMMERS * a.parts + part) * SUMMERS + strip % SUMMERS;
}
DEVICE int pieces_of(const Arguments& a, int strips) { return (strips + SUMMERS - 1) / SUMMERS * SUMMERS * a.parts; }
