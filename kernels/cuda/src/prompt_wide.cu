// A prompt's DENSE product by matrix steps of four warps (sm_90a): what product_prompt.cu computes, to the bit, for long
// products of types without offsets. Weights and inputs come as halves (wide.cuh), whose products and sums are integers
// below 2^24: exact in the float that a matrix step adds them to. So a group's sum is there without a conversion, nobody
// takes turns of a scheduler to load operands, and what is left for the warps is to scale and add sums, two multiply-adds
// for each, in the order of ops.py.
//
// A team of four warps has 64 of the block's 192 weight rows and all of its 128 columns, in two halves: while one half's
// sums are scaled, the other's steps are under way. Three teams share the inputs. One thread sends for the operands of a
// step, some steps ahead, when everybody has left their place. A block goes from tile to tile without a pause.
//
// Constants: TYPE, STAGES of operands. Arguments: of product_prompt.cu; matrices and q as prompt_wide_weights.cu and
// prompt_wide_inputs.cu made them; run: column tiles of a band, in which blocks that work at the same time share rows and columns.
#include "device.cuh"
#include "formats.cuh"
#include "warpgroup.cuh"
#include "wide.cuh"

#define DENSE 0
#define GATE_UP 1
#define MODE DENSE

typedef TYPE F;
enum { BN = WIDE_COLUMNS, ROWS = WIDE_ROWS };

#include "prompt_work.cuh"

enum {
    TEAMS = WIDE_ROWS / 64,
    THREADS = 128 * TEAMS,
    GROUPS = WIDE_STEP / F::GROUP,
    CODES = WIDE_ROWS * WIDE_STEP * 2,
    UNPACKED = CODES + GROUPS * WIDE_ROWS * 4,
    STAGE = UNPACKED + WIDE_FETCHED,
    AT_BARRIERS = STAGES * STAGE,  // of stages that are full, then of those that are empty
    SHARED_BYTES = AT_BARRIERS + STAGES * 16
};
static_assert(SHARED_BYTES == SHARED, "wide_plans.py asks for another size than this layout has");
static_assert(!F::OFFSET, "offsets are not added here");

// Where a tile lies: its matrix, first weight row, first column.
struct Tile {
    int matrix, row, column;
};

DEVICE Tile find_tile(const Arguments& a, int tile) {
    const int columns = (a.n + BN - 1) / BN, of_band = a.run * a.row_tiles, band = tile / of_band, rest = tile % of_band;
    const int wide = min(a.run, columns - band * a.run);
    Tile found{0, rest / wide, (band * a.run + rest % wide) * BN};
    int before = 0;
    while (found.row >= a.matrix[found.matrix].last_tile) before = a.matrix[found.matrix++].last_tile;
    found.row = (found.row - before) * ROWS;
    return found;
}

// Sends for operands, step after step of tile after tile.
struct Sender {
    const Arguments& a;
    u32 shared;
    int tile, tiles, step, steps, stage;
    u32 parity;          // of the round before, when the stage was last used
    const u8 *weights, *inputs;

    DEVICE void enter() {
        if (tile >= tiles) return;
        const Tile t = find_tile(a, tile);
        weights = a.matrix[t.matrix].data + (u64)(u32)(t.row / ROWS * steps) * UNPACKED;
        inputs = a.q + (u64)(u32)(t.column / BN * (a.pitch / WIDE_STEP) + t.matrix * (a.apart / WIDE_STEP)) * WIDE_FETCHED;
    }

    DEVICE void send() {
        if (tile >= tiles) return;
        const u32 to = shared + stage * STAGE, full = shared + AT_BARRIERS + 8 * stage;
        barrier_wait(full + 8 * STAGES, parity);
        barrier_expect(full, STAGE);
        copy_bulk(to, weights, UNPACKED, full);
        copy_bulk(to + UNPACKED, inputs, WIDE_FETCHED, full);
        weights += UNPACKED, inputs += WIDE_FETCHED;
        if (++stage == STAGES) stage = 0, parity ^= 1;
        if (++step < steps) return;
        step = 0, tile += gridDim.x;
        enter();
    }
};

// The steps of a group for half of the columns: of 16 inputs, or two of these.
DEVICE void multiply_group(float (&sums)[32], u32 weights, u32 inputs, int group) {
    enum { BYTES = 256 };  // of 16 columns of eight rows
    const u32 at = group * (F::GROUP / 16) * BYTES;
    multiply64<false>(sums, operand(weights + at), operand(inputs + at));
    if (F::GROUP == 32) multiply64<true>(sums, operand(weights + at + BYTES), operand(inputs + at + BYTES));
    steps_commit();
}

// acc += sums, scaled: s of the lane's two rows, d of its columns.
DEVICE void add_sums(float (&acc)[32], const float (&sums)[32], const float4* d, float2 s) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        const float4 v = d[2 * j];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float by = i < 4 ? (i & 1 ? v.y : v.x) : (i & 1 ? v.w : v.z);
            float& sum = acc[4 * j + i];
            sum = fmaf(fmaf(sums[4 * j + i], i & 2 ? s.y : s.x, 0.0f), by, sum);  // + 0: no sum is -0 in the written order
        }
    }
}

DEVICE void store_half(const Arguments& a, const float (&acc)[32], const Tile& tile, int row, int column) {
    const int rows = a.matrix[tile.matrix].rows;
    float* out = a.matrix[tile.matrix].out;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int c = column + 8 * (i >> 1) + (i & 1);
        if (c >= a.n) continue;
        float* line = out + (u64)(u32)c * (u32)rows + row;
        const float weight = a.join ? sigmoid_f32(a.join[c]) : 0.0f;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (row + 8 * r >= rows) continue;
            const float y = acc[4 * (i >> 1) + 2 * r + (i & 1)];
            line[8 * r] = a.join ? fmaf(weight, y, line[8 * r]) : y;
        }
    }
}

KERNEL __launch_bounds__(THREADS, 1) void prompt_wide(PARAMETER Arguments a) {
    extern __shared__ __align__(1024) u8 shared[];
    const u32 base = shared_address(shared), barriers = base + AT_BARRIERS;
    const int warp = threadIdx.x >> 5, team = warp >> 2, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int tiles = a.row_tiles * ((a.n + BN - 1) / BN), steps = a.cols / WIDE_STEP;
    const bool sends = threadIdx.x == 0;
    if (sends) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(barriers + 8 * i, 1);
            barrier_init(barriers + 8 * (STAGES + i), THREADS / 32);
        }
        barriers_made();
    }
    inputs_ready();
    __syncthreads();

    Sender sender{a, base, (int)blockIdx.x, tiles, 0, steps, 0, 1, nullptr, nullptr};  // a new barrier's phase before is over
    if (sends) {
        sender.enter();
#pragma unroll 1
        for (int i = 0; i < STAGES - 1; i++) sender.send();
    }

    float acc[2][32] = {}, sums[2][32] = {};
    int stage = 0;
    u32 parity = 0;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            const u8* place = shared + stage * STAGE;
            const float2* scales = (const float2*)(place + CODES) + 8 * warp + g;
            const float4* d = (const float4*)(place + UNPACKED + WIDE_INPUTS) + t;
            const u32 weights = base + stage * STAGE + team * (8 * WIDE_OCTET), inputs = base + stage * STAGE + UNPACKED;
            barrier_wait(barriers + 8 * stage, parity);
            steps_begin();
            multiply_group(sums[0], weights, inputs, 0);
            multiply_group(sums[1], weights, inputs + 8 * WIDE_OCTET, 0);
            float2 s = scales[0];
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                const bool last = group + 1 == GROUPS;
                const float4* of_span = d + group / (32 / F::GROUP) * (WIDE_COLUMNS / 4);
                steps_wait<1>();
                sums_there(sums[0]);
                add_sums(acc[0], sums[0], of_span, s);
                if (!last) {
                    sums_there(sums[0]);
                    steps_begin();
                    multiply_group(sums[0], weights, inputs, group + 1);
                    steps_wait<1>();
                } else {
                    steps_wait<0>();
                }
                sums_there(sums[1]);
                add_sums(acc[1], sums[1], of_span + 16, s);
                if (!last) {
                    sums_there(sums[1]);
                    steps_begin();
                    multiply_group(sums[1], weights, inputs + 8 * WIDE_OCTET, group + 1);
                    s = scales[(group + 1) * (WIDE_ROWS / 2)];
                }
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(barriers + 8 * (STAGES + stage));
            if (++stage == STAGES) stage = 0, parity ^= 1;
            if (sends) sender.send();  // where everybody was a step ago
        }
        const Tile here = find_tile(a, tile);
        const int row = here.row + 16 * warp + g;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            store_half(a, acc[half], here, row, here.column + 64 * half + 2 * t);
#pragma unroll
            for (int i = 0; i < 32; i++) acc[half][i] = 0.0f;
        }
    }
}
