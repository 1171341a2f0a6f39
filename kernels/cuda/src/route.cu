// The experts of a row: the `used` best logits (equal: the lower index) and their softmax. A warp a row.
//
// Lane i holds the logits i + 32 m as ordered words. A step takes the best of all lanes; only the lane that gave it looks
// again. Lane i keeps ranks i and i + 32.
// Constants   PER_LANE logits of a lane: E <= 32 * PER_LANE
// Shapes      logits (n, E) -> experts, weights (n, used), used <= 64
// Source      `ops.Kernels.route`
#include "rows.cuh"

#ifndef PER_LANE
#define PER_LANE 16
#endif

struct Best {
    u32 key;
    int index;
};

// The best of a lane's words; of equal ones the first.
DEVICE Best best_of_lane(const u32 (&keys)[PER_LANE], int lane) {
    Best best = {0, lane};
#pragma unroll
    for (int m = 0; m < PER_LANE; m++)
        if (keys[m] > best.key) best = {keys[m], lane + 32 * m};
    return best;
}

KERNEL void __launch_bounds__(128)
    route(const float* logits, int* experts, float* weights, int n, int n_experts, int used) {
    inputs_ready();
    const long long row = blockIdx.x * 4ll + (threadIdx.x >> 5);
    const int lane = threadIdx.x & 31;
    if (row >= n) return;
    logits += row * n_experts;
    u32 keys[PER_LANE];
#pragma unroll
    for (int m = 0; m < PER_LANE; m++) keys[m] = lane + 32 * m < n_experts ? ordered(logits[lane + 32 * m]) : 0;
    Best own = best_of_lane(keys, lane);
    float e[2] = {0.0f, 0.0f};
    float first = 0.0f;
    for (int rank = 0; rank < used; rank++) {
        const u32 key = warp_max(own.key);
        const int index = static_cast<int>(warp_min(own.key == key ? static_cast<u32>(own.index) : ALL));
        const float logit = from_ordered(key);
        if (rank == 0) first = logit;
        if ((rank & 31) == lane) {
            const float x = exp_f32(logit - first);
            if (rank < 32)
                e[0] = x;
            else
                e[1] = x;
            experts[row * used + rank] = index;
        }
        if (own.index == index) {
#pragma unroll
            for (int m = 0; m < PER_LANE; m++)
                if (lane + 32 * m == index) keys[m] = 0;
            own = best_of_lane(keys, lane);
        }
    }
    float total = 0.0f;
    for (int rank = 0; rank < used; rank++) total = total + __shfl_sync(ALL, rank < 32 ? e[0] : e[1], rank & 31);
    for (int rank = lane; rank < used; rank += 32) weights[row * used + rank] = (rank < 32 ? e[0] : e[1]) / total;
}
