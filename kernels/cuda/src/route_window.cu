// The router of a window: logits of all experts and of the shared one, then each row's picks, in one launch.
//
// A warp computes one weight row for up to INPUTS activation rows: lane l holds the chains 4 l to 4 l + 3 of each sum. Its
// weights are on their way before the activations are there. The last block to end picks.
// Constants   TYPE (F32, F16, BF16), WARPS of a block, INPUTS activation rows at once (1, 8), PER_LANE as in route.cuh
// Shapes      router (E, cols), shared (1, cols), x (n, cols) -> logits (n, E), shared_logits (n,), experts and weights
//             (n, used); cols % 4 == 0. Dynamic shared memory: n * cols floats
// Source      `lanes` and `ops.Kernels.route`
#include "device.cuh"
#include "lanes.cuh"
#include "route.cuh"

constexpr int AHEAD = 20;  // loads of a weight row under way: all of 2560 columns

struct Logits {
    float *experts, *shared;
    int n_experts;

    DEVICE float* at(int input, int row) const {
        return row < n_experts ? experts + static_cast<long long>(input) * n_experts + row : shared + input;
    }
};

// A weight row with the activation rows in shared memory.
DEVICE void row_logits(const Logits& logits, int row, const float4 (&held)[AHEAD], const u8* w, const float* x, int n,
                       int cols) {
    const int lane = threadIdx.x & 31;
    for (int first = 0; first < n; first += INPUTS) {
        float p[INPUTS][4] = {};
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int k = 4 * lane + 128 * i;
            if (k >= cols) break;
#pragma unroll
            for (int c = 0; c < INPUTS; c++)
                add_products<4>(p[c], held[i], inputs4<4>(x + min(first + c, n - 1) * cols, k, cols), 4);
        }
        for (int k = 4 * lane + 128 * AHEAD; k < cols; k += 128) {
            const float4 v = weights4<TYPE, 4>(w, k, cols);
#pragma unroll
            for (int c = 0; c < INPUTS; c++)
                add_products<4>(p[c], v, inputs4<4>(x + min(first + c, n - 1) * cols, k, cols), 4);
        }
        __syncwarp();
#pragma unroll
        for (int c = 0; c < INPUTS; c++) {
            const float sum = fold_lanes(make_float4(p[c][0], p[c][1], p[c][2], p[c][3]));
            if (lane == 0 && first + c < n) *logits.at(first + c, row) = sum;
        }
    }
}

KERNEL void __launch_bounds__(32 * WARPS)
    route_window(const u8* router, const u8* shared, const float* x, float* logits, float* shared_logits, int* experts,
                 float* weights, u32* ended, int n, int n_experts, int cols, int used) {
    extern __shared__ __align__(16) float inputs[];
    __shared__ PickMemory memory[WARPS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = blockIdx.x * WARPS + warp;
    const u8* w = row < n_experts ? router + static_cast<long long>(row) * cols * TYPE::BYTES : shared;
    float4 held[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        if (row <= n_experts && 4 * lane + 128 * i < cols) held[i] = weights4<TYPE, 4>(w, 4 * lane + 128 * i, cols);

    inputs_ready();
    for (int i = 4 * threadIdx.x; i < n * cols; i += 4 * 32 * WARPS) copy16(inputs + i, x + i);
    copies_commit();
    copies_wait<0>();
    __syncthreads();
    if (row <= n_experts) row_logits({logits, shared_logits, n_experts}, row, held, w, inputs, n, cols);
    if (!last_block(ended, gridDim.x)) return;
    for (int r = warp; r < n; r += WARPS)
        pick(logits + static_cast<long long>(r) * n_experts, n_experts, {used, experts + r * used, weights + r * used},
             memory[warp]);
}
