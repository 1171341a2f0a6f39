// What the items of a block read beside weights, in shared memory: activations, their scales and sums, the type's table.
//
// Activations lie item by item, in the order that the items want. Needs items.cuh, quantize.cuh, strips.cuh and, of an
// item: SPANS, INPUT and SUM_ITEM (bytes and sums from one to the next), NEEDS_SUMS, PER_SPAN, and its type I.
#pragma once

DEVICE void store_input(const Arguments& a, u8* shared, int row, int o, uint2 words, float d, int group_sum) {
    const int span = o >> 2, u = o & 3, item = span / SPANS, s = span - item * SPANS;
    *(uint2*)(shared + row * a.input_pitch + item * INPUT + 32 * s + 8 * u) = words;
    if (u == 0) ((float*)(shared + a.at_scales))[row * a.scale_pitch + span] = d;
    if (NEEDS_SUMS && u < PER_SPAN) {
        int* sums = (int*)(shared + a.at_sums) + row * a.sum_pitch + item * SUM_ITEM + s * PER_SPAN + u;
        *sums = F::OFFSET ? __float_as_int((float)group_sum) : group_sum;
    }
}

// The words of thread u in the order of the items, from those in the order of the format.
DEVICE uint2 ordered(u32 x, u32 y) {
    if ((int)I::ORDER != PAIRED) return make_uint2(x, y);
    return make_uint2(permute(x, y, 0x5140), permute(x, y, 0x7362));
}

// Inputs as the items want them. A warp takes 32 octets of a row at a time.
DEVICE void inputs_to_shared(const Arguments& a, u8* shared, int inputs) {
    const int octets = a.cols / 8, turns = (octets + 31) / 32, lane = threadIdx.x & 31;
    for (int i = threadIdx.x >> 5; i < inputs * turns; i += WARPS) {
        const int row = i / turns, o = (i - row * turns) * 32 + lane, u = o & 3, here = min(o, octets - 1);
        u32 x, y;
        float d;
        if (a.x) {
            float v[8];
            load_octet(v, a.x + (long long)row * a.cols + 8 * here);
            const Octet octet = quantize_octet(v);
            d = octet.d;
            if ((int)F::ORDER == NATIVE) {  // octets 0, 1 and 2, 3 of a block: threads 0 to 3 take a word of either half
                const int from = (lane & ~3) + (u >> 1);
                const u32 low = __shfl_sync(~0u, octet.low, from), high = __shfl_sync(~0u, octet.high, from);
                const u32 low2 = __shfl_sync(~0u, octet.low, from + 2), high2 = __shfl_sync(~0u, octet.high, from + 2);
                x = u & 1 ? high : low, y = u & 1 ? high2 : low2;
            } else if ((int)F::ORDER == EVEN_ODD) {
                x = permute(octet.low, octet.high, 0x6420), y = permute(octet.low, octet.high, 0x7531);
            } else {
                x = octet.low, y = octet.high;
            }
        } else {
            const long long at = (long long)row * octets + here;
            const uint2 q = *(const uint2*)(a.q + 8 * at);
            x = q.x, y = q.y, d = a.d[at >> 2];
        }
        int sum = 0;
        if (NEEDS_SUMS) {
            int of_x = __dp4a((int)x, 0x01010101, 0), of_y = __dp4a((int)y, 0x01010101, 0);
            if (PER_SPAN == 1) of_x += of_y;
            of_x += __shfl_xor_sync(~0u, of_x, 1), of_y += __shfl_xor_sync(~0u, of_y, 1);
            of_x += __shfl_xor_sync(~0u, of_x, 2), of_y += __shfl_xor_sync(~0u, of_y, 2);
            sum = PER_SPAN == 2 && u == 1 ? of_y : of_x;
        }
        if (o < octets) store_input(a, shared, row, o, ordered(x, y), d, sum);
    }
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

