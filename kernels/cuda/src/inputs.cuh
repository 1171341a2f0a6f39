// What the items of a block read beside weights, in shared memory: activations, their scales and sums, the type's table.
//
// Activations lie item by item, in the order that the items want, a row's first ones behind it again (turns.cuh). Needs
// items.cuh, quantize.cuh, segments.cuh and the constants of an item that row_job.cuh has.

DEVICE void store_input(const Arguments& a, u8* shared, int row, int o, uint2 words, float d, int group_sum) {
    const int span = o >> 2, u = o & 3, item = span / SPANS, s = span - item * SPANS;
    const bool twice = item < EXTRA;
    u8* to = shared + row * INPUT_PITCH + item * INPUT + 32 * s + 8 * u;
    *(uint2*)to = words;
    if (twice) *(uint2*)(to + ITEMS * INPUT) = words;
    if (u == 0) ((float*)(shared + a.at_scales))[row * SCALE_PITCH + span] = d;
    if (NEEDS_SUMS && u < PER_SPAN) {
        int* sums = (int*)(shared + a.at_sums) + row * SUM_PITCH + item * SUM_ITEM + s * PER_SPAN + u;
        const int sum = F::OFFSET ? __float_as_int((float)group_sum) : group_sum;
        *sums = sum;
        if (twice) sums[ITEMS * SUM_ITEM] = sum;
    }
}

// The words of thread u in the order of the items, from those in the order of the format.
DEVICE uint2 ordered(u32 x, u32 y) {
    if ((int)I::ORDER != PAIRED) return make_uint2(x, y);
    return make_uint2(permute(x, y, 0x5140), permute(x, y, 0x7362));
}

// An octet's words and scale in shared memory. All 32 lanes take part; `there`: whether the lane has one.
DEVICE void put_octet(const Arguments& a, u8* shared, int number, int octets, u32 x, u32 y, float d, bool there) {
    const int row = number / octets, o = number - row * octets, u = o & 3;
    int sum = 0;
    if (NEEDS_SUMS) {
        int of_x = __dp4a((int)x, 0x01010101, 0), of_y = __dp4a((int)y, 0x01010101, 0);
        if (PER_SPAN == 1) of_x += of_y;
        of_x += __shfl_xor_sync(~0u, of_x, 1), of_y += __shfl_xor_sync(~0u, of_y, 1);
        of_x += __shfl_xor_sync(~0u, of_x, 2), of_y += __shfl_xor_sync(~0u, of_y, 2);
        sum = PER_SPAN == 2 && u == 1 ? of_y : of_x;
    }
    if (there) store_input(a, shared, row, o, ordered(x, y), d, sum);
}

DEVICE void quantize_to_shared(const Arguments& a, u8* shared, int number, int octets, const float (&v)[8], bool there) {
    const Octet octet = quantize_octet(v);
    const int lane = threadIdx.x & 31, u = lane & 3;
    u32 x = octet.low, y = octet.high;
    if ((int)F::ORDER == NATIVE) {  // octets 0, 1 and 2, 3 of a block: threads 0 to 3 take a word of either half
        const int from = (lane & ~3) + (u >> 1);
        const u32 low = __shfl_sync(~0u, octet.low, from), high = __shfl_sync(~0u, octet.high, from);
        const u32 low2 = __shfl_sync(~0u, octet.low, from + 2), high2 = __shfl_sync(~0u, octet.high, from + 2);
        x = u & 1 ? high : low, y = u & 1 ? high2 : low2;
    } else if ((int)F::ORDER == EVEN_ODD) {
        x = permute(octet.low, octet.high, 0x6420), y = permute(octet.low, octet.high, 0x7531);
    }
    put_octet(a, shared, number, octets, x, y, octet.d, there);
}

// Rows begin + 0, 1, ... rows - 1 of the inputs as the items want them, by `threads` threads of which this is number
// `thread`: whole warps. The rows lie side by side; a warp takes 32 octets at a time and reads AHEAD times first.
DEVICE void inputs_to_shared(const Arguments& a, u8* shared, int begin, int rows, int thread, int threads) {
    enum { AHEAD = 4, FLOATS_AHEAD = COLUMNS == 1 && !TILED ? 2 : 4 };
    const int octets = ITEMS * SPANS * 4, total = rows * octets, lane = threadIdx.x & 31;
    const long long before = (long long)begin * octets;
#if TILED
    if (!a.x) {  // they lie as they are wanted
        const u8* q = a.q + before * 8;
        const float* d = a.d + (long long)begin * ITEMS;
        for (int i = thread; i < rows * ITEMS * 2; i += threads) copy16(shared + 16 * i, q + 16 * i);
        for (int i = thread; i < rows * ITEMS; i += threads)
            copy4((float*)(shared + a.at_scales) + i / ITEMS * SCALE_PITCH + i % ITEMS, d + i);
        copies_commit();
        copies_wait<0>();
        return;
    }
#endif
    for (int first = thread & ~31; first < total; first += (a.x ? FLOATS_AHEAD : AHEAD) * threads) {
        if (a.x) {
            float v[FLOATS_AHEAD][8];
#pragma unroll
            for (int k = 0; k < FLOATS_AHEAD; k++)
                if (first + k * threads < total) load_octet(v[k], a.x + 8 * (before + min(first + k * threads + lane, total - 1)));
#pragma unroll
            for (int k = 0; k < FLOATS_AHEAD; k++) {
                const int number = first + k * threads + lane;
                if (first + k * threads < total)
                    quantize_to_shared(a, shared, min(number, total - 1), octets, v[k], number < total);
            }
        } else {
            uint2 q[AHEAD];
            float d[AHEAD];
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                const long long number = before + min(first + k * threads + lane, total - 1);
                if (first + k * threads < total) q[k] = ((const uint2*)a.q)[number], d[k] = a.d[number >> 2];
            }
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                const int number = first + k * threads + lane;
                if (first + k * threads < total)
                    put_octet(a, shared, min(number, total - 1), octets, q[k].x, q[k].y, d[k], number < total);
            }
        }
    }
}

// The activations that the block needs, by the warps from this one on, before the end.
DEVICE void prepare_inputs(const Arguments& a, u8* shared, int first_warp, int end = WARPS) {
    int begin = 0, rows = a.n;
    if (MODE == DOWN || HERE) {
        const Tokens tokens(Share(a.n * a.matrix[0].rows), a.matrix[0].rows);
        const int each = HERE ? 1 : a.used;
        begin = tokens.first * each, rows = tokens.count * each;
    }
    inputs_to_shared(a, shared, begin, rows, (int)threadIdx.x - 32 * first_warp, 32 * (end - first_warp));
}

#if HAS_TABLE
// The table with COPIES of each entry side by side; of an odd code c what items.cuh wants, (c - 1) / 2.
DEVICE void table_to_shared(u8* to) {
    enum { WORDS = F::LOOK == WORD ? 1 : 2, EACH = WORDS * COPIES, AT_ONCE = EACH % 4 == 0 ? 4 : EACH };
#pragma unroll 4
    for (int i = threadIdx.x * AT_ONCE; i < F::GRID * EACH; i += 32 * WARPS * AT_ONCE) {
        u32 words[2];
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            words[w] = table_words[i / EACH * WORDS + w];
            if (I::ODD_CODES) words[w] = (words[w] - 0x01010101u) >> 1;
        }
        if (AT_ONCE == 4) *(uint4*)(to + 4 * i) = make_uint4(words[0], words[WORDS - 1], words[0], words[WORDS - 1]);
        else
            for (int k = 0; k < AT_ONCE; k++) ((u32*)to)[i + k] = words[k % WORDS];
    }
}
#else
DEVICE void table_to_shared(u8*) {}
#endif

