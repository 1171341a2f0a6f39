// A prompt's DENSE product by matrix steps of four warps (sm_90a): what product_prompt.cu computes, to the bit, for long
// products of types without offsets. Weights and inputs come as halves (wide.cuh), whose products and sums are integers
// below 2^24: exact in the float that a matrix step adds them to. So a group's sum is there without a conversion, nobody
// takes turns of a scheduler to load operands, and what is left for the warps is to scale and add sums, two multiply-adds
// for each, in the order of ops.py.
//
// A block has tiles of 128 weight rows and 192 columns, a team of four warps all of the rows and 64 of the columns: while its
// matrix steps are under way the other teams scale and add, by turns, without which all of them come to do the same at the
// same time. One warp sends for the operands of a step, some steps ahead, when everybody has left their place. A block goes
// from tile to tile without a pause.
//
// No branch of a step depends on a lane: the compiler then knows that the addresses of operands are the same for a warp, and
// keeps them in the registers from which matrix steps want them.
//
// Constants: GROUP of a scale (16, 32), STAGES of operands, SHARED bytes that wide_plans.py asks for. Arguments: of
// product_prompt.cu; matrices and q as prompt_wide_weights.cu and prompt_wide_inputs.cu made them; run: column tiles of a
// band, whose blocks follow each other row tile by row tile, so that blocks which work at the same time share rows and
// columns.
#include "device.cuh"
#include "warpgroup.cuh"
#include "wide.cuh"

#define DENSE 0
#define GATE_UP 1
#define MODE DENSE

enum { BN = WIDE_COLUMNS, ROWS = WIDE_ROWS };

#include "prompt_work.cuh"

enum {
    TEAMS = WIDE_COLUMNS / 64,
    THREADS = 128 * TEAMS,
    PAIR_OF_TEAMS = 256,  // threads: one passes its turn on, one waits for it
    GROUPS = WIDE_STEP / GROUP,
    CODES = WIDE_ROWS * WIDE_STEP * 2,
    UNPACKED = CODES + GROUPS * WIDE_ROWS * 4,
    STAGE = UNPACKED + WIDE_FETCHED,
    AT_BARRIERS = STAGES * STAGE,  // of stages that are full, then of those that are empty
    SHARED_BYTES = AT_BARRIERS + STAGES * 16
};
static_assert(SHARED_BYTES == SHARED, "wide_plans.py asks for another size than this layout has");

// Where a tile lies: its matrix, first weight row, first column.
struct Tile {
    int matrix, row, column;
};

DEVICE Tile find_tile(const Arguments& a, int tile) {
    const int columns = (a.n + BN - 1) / BN, of_band = a.run * a.row_tiles, band = tile / of_band, rest = tile % of_band;
    const int across = min(a.run, columns - band * a.run);
    Tile found{0, rest / across, (band * a.run + rest % across) * BN};
    int before = 0;
    while (found.row >= a.matrix[found.matrix].last_tile) before = a.matrix[found.matrix++].last_tile;
    found.row = (found.row - before) * ROWS;
    return found;
}

// Sends for operands, step after step of tile after tile. All lanes of a warp come, and one of them sends.
struct Sender {
    const Arguments& a;
    u32 shared;
    int tile, tiles, step, steps, stage;
    u32 parity;  // of the round before, when the stage was last used
    const u8 *weights, *inputs;

    DEVICE void enter() {
        if (tile >= tiles) return;
        const Tile t = find_tile(a, tile);
        weights = a.matrix[t.matrix].data + (u64)(u32)(t.row / ROWS * steps) * UNPACKED;
        inputs = a.q + (u64)(u32)(t.column / BN * (a.pitch / WIDE_STEP) + t.matrix * (a.apart / WIDE_STEP)) * WIDE_FETCHED;
    }

    DEVICE void send(bool lane) {
        if (tile >= tiles) return;
        const u32 to = shared + stage * STAGE, full = shared + AT_BARRIERS + 8 * stage;
        barrier_wait(full + 8 * STAGES, parity);
        barrier_expect(full, STAGE, lane);
        copy_bulk(to, weights, UNPACKED, full, lane);
        copy_bulk(to + UNPACKED, inputs, WIDE_FETCHED, full, lane);
        weights += UNPACKED, inputs += WIDE_FETCHED;
        if (++stage == STAGES) stage = 0, parity ^= 1;
        if (++step < steps) return;
        step = 0, tile += gridDim.x;
        enter();
    }
};

// The steps of a group for all rows and the team's columns: of 16 inputs, or two of these.
DEVICE void multiply_group(float (&sums)[2][32], u32 weights, u32 inputs, int group) {
    enum { SIXTEEN = 256 >> 4, LOWER = 8 * WIDE_OCTET >> 4 };  // operands: 16 columns further, 64 rows further
    sums_there(sums[0]);
    sums_there(sums[1]);
    steps_begin();
#pragma unroll
    for (int k = 0; k < GROUP / 16; k++)
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const u32 at = (group * (GROUP / 16) + k) * SIXTEEN;
            if (k) multiply64x64<true>(sums[m], weights + at + m * LOWER, inputs + at);
            else multiply64x64<false>(sums[m], weights + at + m * LOWER, inputs + at);
        }
    steps_commit();
}

// acc += sums, scaled: s of the lane's four rows, d of its columns. Four rows follow each other with a number of d, which is
// then read from shared memory, and from its register, once for them. With + 0, since the written order
// has no sum of -0. A quarter of them is done when the next team, whose barrier is `turn`, may begin with its own.
DEVICE void add_sums(float (&acc)[2][32], const float (&sums)[2][32], u32 d, const float2 (&s)[2], int turn) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        if (j == 2) pass_turn(turn, PAIR_OF_TEAMS);
        const float4 v = four_at(d + 32 * j);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const float by = c == 0 ? v.x : c == 1 ? v.y : c == 2 ? v.z : v.w;
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const int m = r >> 1, at = 4 * (j + c / 2) + c % 2 + 2 * (r & 1);
                acc[m][at] = fmaf(fmaf(sums[m][at], r & 1 ? s[m].y : s[m].x, 0.0f), by, acc[m][at]);
            }
        }
    }
}

// Sums of two rows of a lane, and its columns. WHOLE: all are rows and columns of the result, and written as they are.
template <bool WHOLE>
DEVICE void store(const Arguments& a, const float (&acc)[32], const Tile& tile, int row, int column) {
    const int rows = a.matrix[tile.matrix].rows;
    float* out = a.matrix[tile.matrix].out + (u64)(u32)column * (u32)rows + row;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int c = 8 * (i >> 1) + (i & 1);
        if (!WHOLE && column + c >= a.n) continue;
        float* line = out + (u64)(u32)c * (u32)rows;
        const float weight = !WHOLE && a.join ? sigmoid_f32(a.join[column + c]) : 0.0f;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (!WHOLE && row + 8 * r >= rows) continue;
            const float y = acc[4 * (i >> 1) + 2 * r + (i & 1)];
            line[8 * r] = !WHOLE && a.join ? fmaf(weight, y, line[8 * r]) : y;
        }
    }
}

KERNEL __launch_bounds__(THREADS, 1) void prompt_wide(PARAMETER Arguments a) {
    extern __shared__ __align__(1024) u8 shared[];
    const u32 base = __reduce_max_sync(~0u, shared_address(shared)), barriers = base + AT_BARRIERS;
    const int warp = (int)__reduce_max_sync(~0u, threadIdx.x >> 5), team = warp >> 2;  // a register that the lanes share
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int tiles = a.row_tiles * ((a.n + BN - 1) / BN), steps = a.cols / WIDE_STEP;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(barriers + 8 * i, 1);
            barrier_init(barriers + 8 * (STAGES + i), THREADS / 32);
        }
        barriers_made();
    }
    inputs_ready();
    __syncthreads();

    Sender sender{a, base, (int)blockIdx.x, tiles, 0, steps, 0, 1, nullptr, nullptr};  // a new barrier's phase before is over
    if (warp == 0) {
        sender.enter();
#pragma unroll 1
        for (int i = 0; i < STAGES - 1; i++) sender.send(lane == 0);
    }

    float acc[2][32] = {}, sums[2][32] = {};  // of 64 rows, and of 64 rows
    const int next_team = team == TEAMS - 1 ? 0 : team + 1;
    const u32 at_scales = CODES + 8 * (8 * (warp & 3) + g), at_d = UNPACKED + WIDE_INPUTS + 16 * (16 * team + t);
    int stage = 0;
    u32 parity = 0;
    if (team == TEAMS - 1) pass_turn(1, PAIR_OF_TEAMS);
    barrier_wait(barriers, 0);
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            const u32 place = base + stage * STAGE;
            const u32 scales = place + at_scales, d = place + at_d;
            const u32 weights = operand(place), inputs = weights + (UNPACKED + team * (8 * WIDE_OCTET) >> 4);
            const bool around = stage + 1 == STAGES, more = step + 1 < steps || tile + (int)gridDim.x < tiles;
            const int next = around ? 0 : stage + 1;
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                multiply_group(sums, weights, inputs, group);
                const u32 of_group = scales + group * (4 * WIDE_ROWS);
                const float2 s[2] = {two_at(of_group), two_at(of_group + 256)};
                if (group + 1 == GROUPS && more) barrier_wait(barriers + 8 * next, parity ^ (u32)around);
                steps_wait<0>();
                sums_there(sums[0]);
                sums_there(sums[1]);
                threads_meet(1 + team, PAIR_OF_TEAMS);
                add_sums(acc, sums, d + group / (32 / GROUP) * (4 * WIDE_COLUMNS), s, 1 + next_team);
            }
            __syncwarp();
            barrier_arrive(barriers + 8 * (STAGES + stage), lane == 0);
            stage = next, parity ^= (u32)around;
            if (warp == 0) sender.send(lane == 0);  // to where everybody was a step ago
        }
        const Tile here = find_tile(a, tile);
        const int row = here.row + 16 * (warp & 3) + g, column = here.column + 64 * team + 2 * t;
        const bool whole = !a.join && here.column + BN <= a.n && here.row + ROWS <= a.matrix[here.matrix].rows;
#pragma unroll
        for (int m = 0; m < 2; m++) {
            if (whole) store<true>(a, acc[m], here, row + 64 * m, column);
            else store<false>(a, acc[m], here, row + 64 * m, column);
#pragma unroll
            for (int i = 0; i < 32; i++) acc[m][i] = 0.0f;
        }
    }
}
