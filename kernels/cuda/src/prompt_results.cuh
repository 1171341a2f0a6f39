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
    for (int i = 0; i < 2 * NT; i++) {
        const int c = column + 8 * (i >> 1) + (i & 1);
        at[i] = MODE == DENSE ? w.begin + c : ((const int*)(shared + AT_PLACES))[min(c, BN - 1)];
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
// silu(gate x) * (up x) of the whole tile to shared memory, then quantised as quantize.cu does it.
DEVICE void store_quantized(const Arguments& a, const float (&acc)[MT][NT][4], const Work& w, float* tile, int wm,
                            Part own) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int j = 0; j < NT; j++) {
        if (j >= own.eights) break;
#pragma unroll
        for (int i = 0; i < MT; i += 2)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int column = own.first + 8 * j + 2 * t + (k & 1), row = 8 * (MT * wm + i + (k >> 1)) + g;
                tile[column * LINE_H + row] = silu_f32(acc[i][j][k]) * acc[i + 1][j][k];
            }
    }
    __syncthreads();
    enum { OCTETS = BM / 16, SUM_OF = NEXT_SUMS ? NEXT_SUMS : 32 };  // octets of a column
    u8* q = (u8*)a.matrix[0].out;
    for (int first = 0; first < w.count * OCTETS; first += THREADS) {
        const int i = first + threadIdx.x, column = i / OCTETS, u = i % OCTETS, row = w.row + 8 * u;
        float v[8];
        load_octet(v, tile + min(column, BN - 1) * LINE_H + 8 * u);
        const Octet octet = quantize_octet(v);
        if (column >= w.count || row >= w.rows) continue;
        const long long block = (long long)a.order[w.begin + column] * (w.rows / 32) + row / 32;
        store_octet<NEXT_ORDER>(q + 32 * block, u & 3, octet);
        if ((u & 3) == 0) a.next_d[block] = octet.d;
        if (NEXT_SUMS) store_sums<SUM_OF>(a.next_sums + block * (32 / SUM_OF), u & 3, octet);
    }
}
#endif
