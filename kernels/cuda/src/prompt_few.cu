// The product of quantised weights with a few rows of a prompt. Order of summation: ops.py, `product`.
//
// Where experts have a row or three each, or a matrix is narrow, what a block of product_prompt.cu unpacks for all of its warps
// is read once, and its steps wait for each other. Here a warp works alone: it brings the raw bytes of 16 rows to shared memory a
// chunk of 256 columns at a time, DEPTH - 1 chunks ahead, unpacks them to the operands of matrix steps in registers, and
// multiplies them with the block's columns, which lie in shared memory from the start. An output has one accumulator,
// which adds the groups of the row one after another: the bits are those of product_prompt.cu and product_window.cu.
//
// Constants: TYPE a format, NT eights of columns, WARPS of a block, DEPTH, COPIES of the type's table, and MODE:
//   DENSE    several matrices of one type with the same input, or with columns of it; out (n, rows) each
//   GATE_UP  experts by tile list: 16 rows of gate and of up; out (pairs, rows) = silu(gate x) * (up x)
//   PAIRS    experts by tile list, one matrix; out (pairs, rows)
#include "device.cuh"
#include "formats.cuh"

#define DENSE 0
#define GATE_UP 1
#define PAIRS 2

typedef TYPE F;
enum {
    CHUNK_BYTES = 256 / F::BLOCK * F::BYTES,
    PITCH = ((CHUNK_BYTES + 15 + 4 + 15) / 16 | 1) * 16,  // of a row of raw bytes
    ROWS = 16,                                            // of a tile, of each matrix
    MT = MODE == GATE_UP ? 2 : 1,                         // sixteens of rows of a warp
    PER_SPAN = 32 / F::GROUP,
    OWN_GROUPS = 2 * PER_SPAN,  // of a chunk, of a row: a lane has the scales of these
    THREADS = 32 * WARPS,
    BN = 8 * NT,
    RING = MT * 16 * PITCH,  // bytes of a chunk
    TABLE = F::GRID * COPIES * (F::LOOK == WORD ? 4 : 8),
    AT_SOURCE = WARPS * DEPTH * RING,
    AT_PLACES = AT_SOURCE + BN * 4,
    AT_TABLE = AT_PLACES + BN * 4,
    AT_INPUTS = (AT_TABLE + TABLE + 127) / 128 * 128
};

#include "prompt_work.cuh"

// The columns in shared memory: int8 rows at a pitch with which neighbours meet different banks, then the scales of all columns
// span by span, then their sums group by group.
struct Inputs {
    u8* q;
    float *d, *sums;
    int pitch;

    DEVICE Inputs(u8* shared, int cols)
        : q(shared + AT_INPUTS), pitch((cols + 127) / 128 * 128 + 32) {
        d = (float*)(q + BN * pitch);
        sums = d + cols / 32 * BN;
    }
    // Asynchronous copies of the columns that there are. `source`: where the row of each begins, in int8.
    DEVICE void fetch(const Arguments& a, const u32* source, int count) const {
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        for (int c = warp; c < count; c += WARPS) {
            const u8* from = a.q + source[c];
            for (int i = 16 * lane; i < a.cols; i += 512) copy16(q + c * pitch + i, from + i);
            const float* scales = a.d + source[c] / 32;
            for (int s = lane; s < a.cols / 32; s += 32) copy4(d + s * BN + c, scales + s);
            if (F::OFFSET) {
                const float* own = a.sums + source[c] / F::GROUP;
                for (int g = lane; g < a.cols / F::GROUP; g += 32) copy4(sums + g * BN + c, own + g);
            }
        }
    }
};

#include "prompt_sources.cuh"

// The raw bytes of a warp's tiles on their way: tile by tile, chunk by chunk.
struct Stream {
    const Work& w;
    u8* ring;
    int row_bytes, chunks;  // bytes of a row, chunks of it
    int tile, chunk, slot;  // to be fetched

    // Asynchronous copies of 16 bytes, dealt to the lanes; nothing behind the last tile, but a group all the same.
    DEVICE void fetch() {
        enum { MOST = (CHUNK_BYTES + 30) / 16, ALL = (16 * MT * MOST + 31) / 32, EVEN = 16 * MT * MOST % 32 == 0 };
        if (tile < w.tiles) {
            const int lane = threadIdx.x & 31, at = chunk * CHUNK_BYTES;
            const int bytes = F::BLOCK == 256 ? (int)CHUNK_BYTES : min((int)CHUNK_BYTES, row_bytes - at);
            const int first = w.row + tile * ROWS, last = w.rows - 1;
            u8* to = ring + slot * RING;
#pragma unroll
            for (int i = 0; i < ALL; i++) {
                const int copy = lane + 32 * i, r = copy / MOST, piece = 16 * (copy % MOST);
                if (!EVEN && r >= 16 * MT) break;
                const u8* matrix = MT == 2 && r >= 16 ? w.second : w.first;
                const u64 p = (u64)matrix + (u64)(u32)min(first + (r & 15), last) * (u32)row_bytes + at;
                if (piece - bytes < (int)(p & 15)) copy16(to + r * PITCH + piece, (const u8*)((p & ~15ull) + piece));
            }
            if (++chunk == chunks) chunk = 0, tile += WARPS;
        }
        slot = slot + 1 == DEPTH ? 0 : slot + 1;
        copies_commit();
    }
};

// What a lane reads of the columns of one eight: 8 int8 of column g, scales and sums of columns 2 t and 2 t + 1.
struct Column {
    uint2 q;
    float2 d, sum[PER_SPAN];
};

// Rows g and g + 8 of a sixteen in a chunk: their bytes, and the scales and offsets of groups t, t + 4, ..
struct Lines {
    const u8* p[2];
    float scale[2][OWN_GROUPS], offset[2][OWN_GROUPS];

    DEVICE void enter(int t) {
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int k = 0; k < OWN_GROUPS; k++) {
                scale[h][k] = F::scale(p[h], 4 * k + t);
                offset[h][k] = F::OFFSET ? F::offset(p[h], 4 * k + t) : 0.0f;
            }
    }
    DEVICE float2 scales(int lane, int group) const {
        const int from = (lane & 28) | (group & 3);
        return make_float2(__shfl_sync(~0u, scale[0][group >> 2], from), __shfl_sync(~0u, scale[1][group >> 2], from));
    }
    DEVICE float2 offsets(int lane, int group) const {
        const int from = (lane & 28) | (group & 3);
        return make_float2(__shfl_sync(~0u, offset[0][group >> 2], from), __shfl_sync(~0u, offset[1][group >> 2], from));
    }
};

DEVICE void add(float (&out)[4], const int (&c)[4], float2 scale, float2 offset, float2 d, float2 sum) {
    const float2 lift = make_float2(scale.x * -MAGIC, scale.y * -MAGIC);
    out[0] = fmaf(scaled(c[0], scale.x, lift.x), d.x, out[0]);
    out[1] = fmaf(scaled(c[1], scale.x, lift.x), d.y, out[1]);
    out[2] = fmaf(scaled(c[2], scale.y, lift.y), d.x, out[2]);
    out[3] = fmaf(scaled(c[3], scale.y, lift.y), d.y, out[3]);
    if (F::OFFSET) {
        out[0] = fmaf(sum.x * offset.x, d.x, out[0]);
        out[1] = fmaf(sum.y * offset.x, d.y, out[1]);
        out[2] = fmaf(sum.x * offset.y, d.x, out[2]);
        out[3] = fmaf(sum.y * offset.y, d.y, out[3]);
    }
}

// One chunk, of which the row has `spans`: every group in order.
DEVICE void multiply(float (&acc)[MT][NT][4], Lines (&lines)[MT], const Inputs& in, int chunk, int spans, Grid grid) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const u8* q = in.q + g * in.pitch + 256 * chunk + 8 * t;
    const float* d = in.d + 8 * chunk * BN + 2 * t;
    const float* sums = in.sums + 8 * PER_SPAN * chunk * BN + 2 * t;
#pragma unroll
    for (int i = 0; i < MT; i++) lines[i].enter(t);
#pragma unroll
    for (int s = 0; s < 8; s++) {
        if (F::BLOCK < 256 && s >= spans) break;
        u32 w[MT][4];
#pragma unroll
        for (int i = 0; i < MT; i++) {
            F::span(lines[i].p[0], s, t, grid, w[i][0], w[i][2]);
            F::span(lines[i].p[1], s, t, grid, w[i][1], w[i][3]);
        }
        Column column[NT];
#pragma unroll
        for (int j = 0; j < NT; j++) {
            column[j].q = *(const uint2*)(q + 8 * j * in.pitch + 32 * s);
            column[j].d = *(const float2*)(d + s * BN + 8 * j);
            for (int k = 0; k < PER_SPAN; k++)
                column[j].sum[k] = F::OFFSET ? *(const float2*)(sums + (s * PER_SPAN + k) * BN + 8 * j) : float2();
        }
#pragma unroll
        for (int k = 0; k < PER_SPAN; k++)
#pragma unroll
            for (int i = 0; i < MT; i++) {
                const float2 scale = lines[i].scales(lane, s * PER_SPAN + k);
                const float2 offset = F::OFFSET ? lines[i].offsets(lane, s * PER_SPAN + k) : float2();
#pragma unroll
                for (int j = 0; j < NT; j++) {
                    int c[4];
                    if (F::GROUP == 32) multiply32<16, MAGIC_BITS>(c, w[i], column[j].q.x, column[j].q.y);
                    else multiply16<16, MAGIC_BITS>(c, w[i][2 * k], w[i][2 * k + 1], k ? column[j].q.y : column[j].q.x);
                    add(acc[i][j], c, scale, offset, column[j].d, column[j].sum[k]);
                }
            }
    }
}

// The results of a tile to memory.
DEVICE void store(const u8* shared, const Arguments& a, const float (&acc)[MT][NT][4], const Work& w, int tile) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, first = w.row + tile * ROWS + g;
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int column = 8 * j + 2 * t + c;
            if (column >= w.count) continue;
            const int place = ((const int*)(shared + AT_PLACES))[column];
            float* line = a.matrix[w.matrix].out + (u64)(u32)place * (u32)w.rows;
            const bool joins = MODE == DENSE && a.join;
            const float weight = joins ? sigmoid_f32(a.join[place]) : 0.0f;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = first + 8 * h;
                if (row >= w.rows) continue;
                const float y = acc[0][j][2 * h + c];
                if (MODE == GATE_UP) line[row] = silu_f32(y) * acc[MT - 1][j][2 * h + c];
                else line[row] = joins ? fmaf(weight, y, line[row]) : y;
            }
        }
}

KERNEL __launch_bounds__(THREADS) void prompt_few(PARAMETER Arguments a) {
    extern __shared__ __align__(16) u8 shared[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2;
    if (MODE != DENSE) inputs_ready();
    Work w;
    if (!find_work(a, w) || !w.first) return;
    const int row_bytes = a.pitch / F::BLOCK * F::BYTES, chunks = (a.cols + 255) / 256;
    Stream stream{w, shared + warp * (DEPTH * RING), row_bytes, chunks, warp, 0, 0};
#pragma unroll
    for (int i = 0; i < DEPTH - 1; i++) stream.fetch();
    find_sources(shared, a, w);
    const Grid grid = fill_table(shared);
    if (MODE == DENSE) inputs_ready();  // the weights do not wait for the kernel before
    __syncthreads();
    const Inputs in(shared, a.cols);
    in.fetch(a, (const u32*)(shared + AT_SOURCE), w.count);
    copies_commit();
    copies_wait<0>();
    __syncthreads();

    int slot = 0;
    for (int tile = warp; tile < w.tiles; tile += WARPS) {
        float acc[MT][NT][4] = {};
        u32 low[MT][2];  // address bits of the lane's rows
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                low[i][h] = (u32)(u64)(i ? w.second : w.first) +
                            (u32)min(w.row + tile * ROWS + 8 * h + g, w.rows - 1) * (u32)row_bytes;
        for (int chunk = 0; chunk < chunks; chunk++) {
            stream.fetch();
            copies_wait<DEPTH - 1>();
            __syncwarp();
            const u8* raw = shared + (warp * DEPTH + slot) * RING + g * PITCH;
            Lines lines[MT];
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    lines[i].p[h] = raw + (16 * i + 8 * h) * PITCH + (low[i][h] + chunk * CHUNK_BYTES & 15);
            multiply(acc, lines, in, chunk, min(8, a.cols / 32 - 8 * chunk), grid);
            slot = slot + 1 == DEPTH ? 0 : slot + 1;
            __syncwarp();  // the chunk's place is free
        }
        store(shared, a, acc, w, tile);
    }
    copies_wait<0>();
}
