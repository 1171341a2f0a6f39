// Results of product_prompt.cu to memory, from the sums of its warps. Part of that source: its constants, its layout.
#pragma once

// Results to memory. A tile of nothing but rows of the matrix, which most are, is stored without a look at each.
DEVICE void store_tile(const u8* shared, const Arguments& a, const float (&acc)[MT][NT][4], const Work& w, int tile, int wm,
                       Part own) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int first = w.row + tile * ROWS, left = w.rows - first;
    const int row = (MODE == GATE_UP ? 8 : 16) * MT * wm + g, column = own.first + 2 * t;
    float* out = a.matrix[w.matrix].out + first + row;
    const bool joins = MODE == DENSE && a.join;
    int at[2 * NT];
#pragma unroll
    for (int j = 0; j < NT; j++) {
        const int c = column + 8 * j;
        const int2* places = (const int2*)(shared + AT_PLACES + 4 * c);
        const int2 place = MODE == DENSE ? make_int2(w.begin + c, w.begin + c + 1) : *places;
        at[2 * j] = place.x, at[2 * j + 1] = place.y;
    }
    if (MODE != GATE_UP && left >= ROWS) {
#pragma unroll
        for (int i = 0; i < 2 * NT; i++) {
            if (column + 8 * (i >> 1) + (i & 1) >= w.count || (MODE != DENSE && i >> 1 >= own.eights)) continue;
            float* line = out + (u64)(u32)at[i] * (u32)w.rows;
            float y[2 * MT];
#pragma unroll
            for (int r = 0; r < 2 * MT; r++) y[r] = acc[r >> 1][i >> 1][2 * (r & 1) + (i & 1)];
            if (joins) {
                const float weight = sigmoid_f32(a.join[at[i]]);
                float before[2 * MT];
#pragma unroll
                for (int r = 0; r < 2 * MT; r++) before[r] = line[8 * r];
#pragma unroll
                for (int r = 0; r < 2 * MT; r++) y[r] = fmaf(weight, y[r], before[r]);
            }
#pragma unroll
            for (int r = 0; r < 2 * MT; r++) line[8 * r] = y[r];
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 2 * NT; i++) {
        const int j = i >> 1, c = i & 1;
        if (column + 8 * j + c >= w.count || (MODE != DENSE && j >= own.eights)) continue;
        float* line = out + (u64)(u32)at[i] * (u32)w.rows;
        const float weight = joins ? sigmoid_f32(a.join[at[i]]) : 0.0f;
#pragma unroll
        for (int r = 0; r < (MODE == GATE_UP ? MT : 2 * MT); r++) {
            if (row + 8 * r >= left) continue;
            if (MODE == GATE_UP) {  // 16 rows of gate, then the same of up
                const float gate = acc[r & ~1][j][2 * (r & 1) + c], up = acc[r | 1][j][2 * (r & 1) + c];
                line[8 * r] = silu_f32(gate) * up;
            } else {
                const float y = acc[r >> 1][j][2 * (r & 1) + c];
                line[8 * r] = joins ? fmaf(weight, y, line[8 * r]) : y;
            }
        }
    }
}

#ifdef NEXT_ORDER
static_assert(BN * LINE_H * 4 <= AT_PLACES, "a tile of results does not fit where the operands were");

// silu(gate x) * (up x), quantised as quantize.cu does it. The sums go to shared memory as they are, the rows of gate
// of a column and then those of up, and come back eight rows a lane: so what computes with them is a loop, which is
// there once and not for every sum of a thread. With MT = 4 a warp has whole blocks of 32 rows, and waits for no other.
DEVICE void store_quantized(u8* shared, const Arguments& a, const float (&acc)[MT][NT][4], const Work& w, int wm,
                            Part own) {
    enum { ALONE = MT == 4, OCTETS = ALONE ? 4 : BM / 16, AT_ONCE = ALONE ? 32 : THREADS };  // OCTETS of a column
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float* tile = (float*)shared;
    float* to = tile + (own.first + 2 * t) * LINE_H + 8 * MT * wm + g;
#pragma unroll
    for (int j = 0; j < NT; j++) {
        if (j >= own.eights) break;
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int k = 0; k < 4; k++)
                to[(8 * j + (k & 1)) * LINE_H + (i & 1) * (BM / 2) + 8 * ((i & ~1) + (k >> 1))] = acc[i][j][k];
    }
    if (ALONE) __syncwarp();
    else __syncthreads();
    enum { SUM_OF = NEXT_SUMS ? NEXT_SUMS : 32 };
    const int mine = ALONE ? lane : threadIdx.x, u = mine % OCTETS, begin = ALONE ? own.first : 0;
    const int end = ALONE ? min(own.first + 8 * own.eights, w.count) : w.count;
    const int of_tile = (ALONE ? 32 * wm : 0) + 8 * u, row = w.row + of_tile, blocks = w.rows / 32;
    const int* places = (const int*)(shared + AT_PLACES);
    u8* q = (u8*)a.matrix[0].out;
#pragma unroll 1
    for (int first = begin; first < end; first += AT_ONCE / OCTETS) {
        const int column = first + mine / OCTETS;
        float v[8], up[8];
        load_octet(v, tile + column * LINE_H + of_tile);
        load_octet(up, tile + column * LINE_H + BM / 2 + of_tile);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = silu_f32(v[i]) * up[i];
        const Octet octet = quantize_octet(v);
        if (column >= end || row >= w.rows) continue;
        const u32 block = (u32)places[column] * (u32)blocks + (u32)row / 32;
        store_octet<NEXT_ORDER>(q + 32ull * block, u & 3, octet);
        if ((u & 3) == 0) a.next_d[block] = octet.d;
        if (NEXT_SUMS) store_sums<SUM_OF>(a.next_sums + (u64)block * (32 / SUM_OF), u & 3, octet);
    }
}
#endif
