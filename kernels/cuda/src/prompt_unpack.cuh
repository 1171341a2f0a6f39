// Weights of a prompt's product from the bytes of their file to the operands of matrix steps: in product_prompt.cu, step
// by step, and in prompt_unpack.cu, once for all blocks. Needs device.cuh, formats.cuh and, of its source: the type F, MODE,
// BM rows and BN columns of a tile, LIFTS and PARTS.
#pragma once

enum {
    CHUNK_BYTES = 256 / F::BLOCK * F::BYTES,
    PITCH = ((CHUNK_BYTES + 15 + 4 + 15) / 16 | 1) * 16,  // of a row of raw bytes
    ROWS = MODE == GATE_UP ? BM / 2 : BM,                 // of a tile, of each matrix
    STEP = 128,
    PER_SPAN = 32 / F::GROUP,
    GROUPS = 4 * PER_SPAN,           // of a step
    SLABS = BM / 16,                 // of 16 rows: a warp unpacks one
    THREADS = 32 * SLABS,
    LINE = LIFTS ? 2 * BM : BM + 8,  // floats of a group's scales, and with LIFTS of -MAGIC times them
    LINE_O = BM + 8,                 // floats of a group's offsets
    CODES = BM * STEP,               // bytes of a step: int8, then scales, then offsets
    OFFSETS_AT = CODES + GROUPS * LINE * 4,
    UNPACKED = OFFSETS_AT + F::OFFSET * GROUPS * LINE_O * 4,
    SHARES = MODE == DENSE ? PARTS : 1
};

// The compiler keeps the address: without this it reads the launch's parameters again for every copy.
#define KEEP_ADDRESS(x) asm volatile("" : "+l"(x))

#include "prompt_work.cuh"

// A step, or a chunk, of a tile of the run. GATE_UP has runs of one tile: the places behind its end are none.
struct Place {
    int tile, at;

    DEVICE Place after(int length) const {
        return MODE != GATE_UP && at + 1 == length ? Place{tile + 1, 0} : Place{tile, at + 1};
    }
    DEVICE bool in(int tiles, int length) const { return MODE == GATE_UP ? at < length : tile < tiles; }
};

// Where row r of a tile begins. GATE_UP: 16 rows of gate, then the same 16 of up, so that one thread has both.
DEVICE const u8* row_of(const Work& w, int tile, int r, int row_bytes) {
    const int first = w.row + tile * ROWS, row = MODE == GATE_UP ? (r >> 5) * 16 + (r & 15) : r;
    const u8* matrix = MODE == GATE_UP && r & 16 ? w.second : w.first;
    return matrix + (u64)(u32)min(first + row, w.rows - 1) * (u32)row_bytes;
}

// Asynchronous copies of part `part` of SHARES of the raw bytes of one chunk, 16 bytes each: LANES neighbours copy a
// row, or for DENSE, where many of these would have nothing to do, the pieces of all rows are dealt to the threads.
DEVICE void fetch_rows(u8* raw, const Work& w, int row_bytes, Place chunk, int part) {
    enum {
        MOST = (CHUNK_BYTES + 30) / 16,  // pieces of a row
        LANES = MOST <= 8 ? 8 : MOST <= 16 ? 16 : 32,
        DEALT = MODE == DENSE && (MOST + 1) / 2 < LANES / 2,
        AT_ONCE = THREADS / LANES,  // rows
        ALL = DEALT ? (MOST + 1) / 2 : BM / AT_ONCE,
        OF_A_PART = (ALL + SHARES - 1) / SHARES,
        EVEN = ALL % SHARES == 0 && !(DEALT && MOST % 2),
        PAIR = MODE == GATE_UP ? 16 : 0  // rows of gate, then as many of up
    };
    const int at = chunk.at * CHUNK_BYTES, lane = threadIdx.x % LANES;
    const int begin = threadIdx.x / LANES + part * (OF_A_PART * AT_ONCE);
    const int bytes = F::BLOCK == 256 ? (int)CHUNK_BYTES : min((int)CHUNK_BYTES, row_bytes - at);
    const int first = w.row + chunk.tile * ROWS, last = w.rows - 1 - first;
    const u64 from = (u64)(u32)first * (u32)row_bytes + at + (DEALT ? 0 : 16 * lane);
    u64 one = (u64)w.first + from, other = (u64)w.second + from;
    KEEP_ADDRESS(one);
    KEEP_ADDRESS(other);
    u8* to = raw + begin * PITCH + 16 * lane;
#pragma unroll
    for (int i = 0; i < OF_A_PART; i++) {
        if (DEALT) {
            const u32 copy = threadIdx.x + (part * OF_A_PART + i) * THREADS;
            const int r = copy / MOST, piece = 16 * (copy % MOST);
            if (!EVEN && r >= BM) break;
            const u64 p = one + (u64)(u32)min(r, last) * (u32)row_bytes;
            if (piece - bytes < (int)(p & 15)) copy16(raw + r * PITCH + piece, (const u8*)((p & ~15ull) + piece));
        } else {
            const int on = i * AT_ONCE, own = AT_ONCE > 16 && PAIR ? begin & 15 : begin;
            if (!EVEN && begin + on >= BM) break;
            const int row = own + (PAIR ? (on >> 5) * 16 + (on & 15) : on);
            const bool up = AT_ONCE > 16 ? begin & PAIR : on & PAIR;
            const u64 p = (up ? other : one) + (u64)(u32)min(row, last) * (u32)row_bytes;
            if (16 * lane - bytes < (int)(p & 15)) copy16(to + on * PITCH, (const u8*)(p & ~15ull));
        }
    }
}

// Half a chunk of the warp's 16 rows to int8, scales and offsets. The int8 lie as the matrix step wants them: for a span
// 512 bytes, 16 a lane (the words of rows g and g + 8, twice). Spans past the row's end have codes without meaning, which
// nobody reads. With LIFTS the scales of rows g and g + 8 of span t lie at place g ^ 2 t of their slab, so that a quad's meet
// different banks. `chunk`: its raw bytes. low, high: address bits of the thread's two rows.
DEVICE void unpack_step(const u8* chunk, u8* unpacked, u32 low, u32 high, int step, Grid grid) {
    const int slab = threadIdx.x >> 5, g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3, upper = 4 * (step & 1);
    const u32 at = (step >> 1) * CHUNK_BYTES;
    const u8* raw = chunk + (16 * slab + g) * PITCH;
    const u8* p0 = raw + ((low + at) & 15);
    const u8* p1 = raw + 8 * PITCH + ((high + at) & 15);
    u8* to = unpacked + slab * (16 * STEP) + (threadIdx.x & 31) * 16;
    uint4 c[4];  // stored at the end: a store between loads would make them again
#pragma unroll
    for (int s = 0; s < 4; s++) {
        F::span(p0, upper + s, t, grid, c[s].x, c[s].z);
        F::span(p1, upper + s, t, grid, c[s].y, c[s].w);
    }
#pragma unroll
    for (int s = 0; s < 4; s++) *(uint4*)(to + 512 * s) = c[s];
    float2* scales = (float2*)(unpacked + CODES) + slab * 8 + g;
    float4* lifted = (float4*)(unpacked + CODES) + slab * 8 + (g ^ 2 * t);
    float2* offsets = (float2*)(unpacked + OFFSETS_AT) + slab * 8 + g;
#pragma unroll
    for (int k = 0; k < PER_SPAN; k++) {
        const int group = t * PER_SPAN + k, of = upper * PER_SPAN + group;
        const float s0 = F::scale(p0, of), s1 = F::scale(p1, of);
        if (LIFTS) lifted[group * (LINE / 4)] = make_float4(s0, s1, s0 * -MAGIC, s1 * -MAGIC);
        else scales[group * (LINE / 2)] = make_float2(s0, s1);
        if (F::OFFSET) offsets[group * (LINE_O / 2)] = make_float2(F::offset(p0, of), F::offset(p1, of));
    }
}
