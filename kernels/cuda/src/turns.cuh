// Turns of a warp: as many items of weights, side by side in memory, as the warp has lanes for; also across the rows of a
// strip. A lane multiplies an item alone, or a half of one where two lanes share it (PARTS).

enum {
    TURN_BYTES = TURN_ITEMS * ITEM_BYTES,
    STAGE = (TURN_BYTES + 15 + 4 + 15) / 16 * 16,  // at any alignment, and a word past it
    CALLS = F::BLOCK == 256 ? 2 / PARTS : 1,       // of Item::run by a lane
    LANE_SPANS = SPANS / PARTS / CALLS,
    LANE_TERMS = ITEM_TERMS / PARTS / CALLS
};

// Where a turn lies, from its number in the block.
struct Turn {
    const u8* from;
    int strip, rows, turns;  // turns: of the strip's rows of one matrix
    int half, first;         // of GATE_UP: gate or up; first: the turn's first item in the strip
    int before, input;       // rows of the segment before the strip
    int segment;

    DEVICE Turn(const Arguments& a, const Segment* segments, int count, int number)
        : segment(segment_of(segments, count, number)) {
        const Segment& own = segments[segment];
        const int in_segment = number - own.turn, s = divide(in_segment, a.strip_turns, a.strip_turn_inverse);
        int in_strip = in_segment - s * a.strip_turns;
        before = s * a.strip;
        rows = min(a.strip, own.rows - before);
        turns = rows == a.strip ? a.turns : turns_of(rows * ITEMS);
        half = HALVES == 2 && in_strip >= turns;
        first = (in_strip - half * turns) * TURN_ITEMS;
        strip = own.strip + s;
        input = own.input;
        from = (HALVES == 2 && half ? own.second : own.from) + (before * ITEMS + first) * ITEM_BYTES;
    }
    DEVICE int items() const { return min((int)TURN_ITEMS, rows * ITEMS - first); }
};

// What a warp needs to do a turn. Its lanes make those of 32 turns at once and give them to each other.
struct Task {
    u64 from;
    u32 place;   // items, 6 bits; row of activations, 10; first item in the strip
    u32 terms;   // where those of the turn's half of the strip lie, in floats past the table's begin
    u32 strip;   // 16 bits, and how many turns it has

    // Of turn `number`, if there are so many.
    DEVICE static Task of(const Arguments& a, const Segment* segments, int number, const Found& found) {
        Task task{};
        if (number >= found.turns) return task;
        const Turn turn(a, segments, found.segments, number);
        const int region = turn.strip - divide(turn.strip, a.regions, a.region_inverse) * a.regions;
        task.from = (u64)turn.from;
        task.place = (u32)turn.items() | (u32)turn.input << 6 | (u32)turn.first << 16;
        task.terms = (u32)((region * HALVES + turn.half) * COLUMNS * a.strip * TERM_PITCH);
        task.strip = (u32)turn.strip | (u32)(HALVES * turn.turns) << 16;
        return task;
    }
    // That of another lane.
    DEVICE Task from_lane(int lane) const {
        Task task;
        task.from = __shfl_sync(~0u, from, lane), task.place = __shfl_sync(~0u, place, lane);
        task.terms = __shfl_sync(~0u, terms, lane), task.strip = __shfl_sync(~0u, strip, lane);
        return task;
    }
    DEVICE int items() const { return (int)(place & 63); }
    DEVICE int input() const { return (int)(place >> 6 & 1023); }
    DEVICE int first() const { return (int)(place >> 16); }
    DEVICE int shift() const { return (int)(from & 15); }
    DEVICE int of_strip() const { return (int)(strip & 0xFFFF); }
    DEVICE u32 turns() const { return strip >> 16; }
    // Bytes to copy, from the multiple of 16 before the first.
    DEVICE int bytes() const { return (shift() + items() * (int)ITEM_BYTES + 15) & ~15; }
};

// As one store, which the compiler does not always make of four.
DEVICE void store_four(float* to, float a, float b, float c, float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"((u32)__cvta_generic_to_shared(to)), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
}

DEVICE void store_terms(float* to, const float (&terms)[LANE_TERMS]) {
    if (LANE_TERMS % 4 == 0) {
#pragma unroll
        for (int i = 0; i < LANE_TERMS; i += 4) store_four(to + i, terms[i], terms[i + 1], terms[i + 2], terms[i + 3]);
    } else {
#pragma unroll
        for (int i = 0; i < LANE_TERMS; i++) to[i] = terms[i];
    }
}

// The terms of the lane's item to the table, rows of `terms`: of this half of the strip.
DEVICE void multiply_turn(const Arguments& a, u8* shared, const Task& task, const u8* stage, Grid grid, float* terms, int lane) {
    const int own = lane % TURN_ITEMS, part = lane / TURN_ITEMS, input = task.input();
    const int item = task.first() + own, r = (int)((u32)item / ITEMS), in_row = item - r * ITEMS;
    // Eight neighbours read different banks when their items follow each other, so a row's first items lie behind it again.
    const int place = in_row < __shfl_sync(~0u, in_row, lane & ~7) && in_row < EXTRA ? in_row + ITEMS : in_row;
    const u8* p = stage + task.shift() + own * ITEM_BYTES;
    const u8* q = shared + input * INPUT_PITCH + place * INPUT;
    const auto* sums = (const typename I::Sum*)(shared + a.at_sums) + input * SUM_PITCH + place * SUM_ITEM;
    float* to = terms + r * COLUMNS * TERM_PITCH + in_row * TERM_ITEM;
    const bool there = own < task.items();
#pragma unroll 1
    for (int call = 0; call < CALLS; call++) {
        const int of = PARTS == 2 ? part : call, first = of * LANE_SPANS;
        float made[LANE_TERMS];
#if COLUMNS == 1
        I::template run<LANE_SPANS>(made, p, first, grid, q + 32 * first, sums + first * PER_SPAN);
        if (there) store_terms(to + of * LANE_TERMS, made);
#else
        const Codes<F, LANE_SPANS> codes(p, first, grid);
#pragma unroll 2
        for (int c = 0; c < COLUMNS; c++) {
            const int row = min(c, a.n - 1);
            codes.terms(made, q + 32 * first + row * INPUT_PITCH, sums + first * PER_SPAN + row * SUM_PITCH);
            if (there) store_terms(to + of * LANE_TERMS + c * TERM_PITCH, made);
        }
#endif
    }
}
