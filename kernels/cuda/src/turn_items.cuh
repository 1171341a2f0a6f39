// Turns of a window of one or two rows: a lane has an item of weights, or half of one, and multiplies it alone.
//
// A unit is 8 items that lie side by side in memory, also across the rows of a strip; 8 lanes, or 16 where two share an
// item, copy it, 16 bytes each, and multiply it. A turn is as many units as a warp has lanes for. A piece is a strip.
// PITCH: bytes from unit to unit in a stage, chosen so that the lanes read from different banks.
#pragma once

enum {
    UNIT_BYTES = 8 * ITEM_BYTES,
    UNIT_LANES = 8 * PARTS,
    AT_ONCE = 32 / UNIT_LANES,    // units of a turn
    STAGE = AT_ONCE * PITCH,
    CALLS = F::BLOCK == 256 ? 2 / PARTS : 1,  // of Item::run by a lane
    LANE_SPANS = SPANS / PARTS / CALLS,
    LANE_TERMS = ITEM_TERMS / PARTS / CALLS,
    ARRIVALS = HALVES             // of a piece, times a.turns
};

static_assert(PITCH >= UNIT_BYTES + 15 + 4, "a unit at any alignment, and a word past it");

// The compiler must have the value here.
#define KEEP_POINTER(x) asm volatile("" : "+l"(x))

struct Turn {  // of a lane: its unit, which half of a strip it belongs to
    Strip strip;
    int piece, half, unit;

    DEVICE Turn(const Arguments& a, const Strip* strips, int, int number) {
        const int rows = divide(number, a.turns, a.turn_inverse);
        unit = number - rows * a.turns;
        half = MODE == GATE_UP ? rows & 1 : 0;
        piece = rows / HALVES;
        strip = strips[rows];
    }
    DEVICE const u8* from() const { return strip.from + unit * UNIT_BYTES; }
};

DEVICE int first_number(int warp, int lane) { return AT_ONCE * warp + lane / UNIT_LANES; }

DEVICE bool ends_turn(int lane) { return lane % UNIT_LANES == 0; }

DEVICE void load_turn(const Arguments& a, const Strip* strips, int all, u8* stage, int number, int lane) {
    const Turn turn(a, strips, all, number);
    const int own = lane % UNIT_LANES, shift = (int)((u64)turn.from() & 15), left = turn.strip.rows * a.items - 8 * turn.unit;
    const int end = shift + min((int)UNIT_BYTES, left * ITEM_BYTES) - 16 * own;  // of the unit, for this lane
    const u8* from = turn.from() + (16 * own - shift);
    KEEP_POINTER(from);  // the addresses below are this one and a constant
    u8* to = stage + lane / UNIT_LANES * PITCH + 16 * own;
    enum { STEP = 16 * UNIT_LANES };
#pragma unroll
    for (int i = 0; i < (UNIT_BYTES + 15 + STEP - 1) / STEP; i++)
        if (STEP * i < end) copy16(to + STEP * i, from + STEP * i);
}

DEVICE void store_terms(float* to, const float (&terms)[LANE_TERMS]) {
    if (LANE_TERMS % 4 == 0) {
#pragma unroll
        for (int i = 0; i < LANE_TERMS / 4; i++)
            ((float4*)to)[i] = make_float4(terms[4 * i], terms[4 * i + 1], terms[4 * i + 2], terms[4 * i + 3]);
    } else {
#pragma unroll
        for (int i = 0; i < LANE_TERMS; i++) to[i] = terms[i];
    }
}

// The terms of the lane's item to the table, when `free()` says that their place is free. `there`: it is one to be computed.
template <class Free>
DEVICE void multiply_turn(const Arguments& a, u8* shared, const Turn& turn, const u8* stage, Grid grid, int region, int lane,
                          bool there, Free free) {
    const int own = lane & 7;
    const int item = 8 * turn.unit + own, r = divide(item, a.items, a.item_inverse), in_row = item - r * a.items;
    const u8* p = stage + lane / UNIT_LANES * PITCH + (int)((u64)turn.from() & 15) + own * ITEM_BYTES;
    const u8* q = shared + turn.strip.input * a.input_pitch + in_row * INPUT;
    const auto* sums = (const typename I::Sum*)(shared + a.at_sums) + turn.strip.input * a.sum_pitch + in_row * SUM_ITEM;
    const int row = ((region * HALVES + turn.half) * a.strip + r) * COLUMNS;
    float* to = (float*)(shared + a.at_terms) + row * a.term_pitch + in_row * TERM_ITEM;
    there &= r < turn.strip.rows;
#pragma unroll 1
    for (int call = 0; call < CALLS; call++) {
        const int part = PARTS == 2 ? lane >> 3 & 1 : call, first = part * LANE_SPANS;
        float terms[LANE_TERMS];
#if COLUMNS == 1
        I::template run<LANE_SPANS>(terms, p, first, grid, q + 32 * first, sums + first * PER_SPAN);
        if (call == 0) free();
        if (there) store_terms(to + part * LANE_TERMS, terms);
#else
        const Codes<F, LANE_SPANS> codes(p, first, grid);
        if (call == 0) free();
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const int row = min(c, a.n - 1);
            codes.terms(terms, q + 32 * first + row * a.input_pitch, sums + first * PER_SPAN + row * a.sum_pitch);
            if (there) store_terms(to + part * LANE_TERMS + c * a.term_pitch, terms);
        }
#endif
    }
}

// A lane's sum: its row, its column, its place in the table of a piece.
DEVICE int row_of_sum(int lane, int) { return lane / COLUMNS; }
DEVICE int column_of_sum(int lane, int) { return lane % COLUMNS; }
DEVICE int place_of_sum(const Arguments&, int, int lane, int) { return lane; }

DEVICE int piece_of(const Arguments&, int strip, int) { return strip; }
DEVICE int pieces_of(const Arguments&, int strips) { return strips; }
