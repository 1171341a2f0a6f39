// The `used` best logits of a row (equal: the lower index) and their softmax, by one warp.
//
// Lane i holds the logits i + 32 m as ordered words. A step takes the best of all lanes; only the lane that gave it looks
// again. Lane i keeps ranks i and i + 32.
// Constants   PER_LANE logits of a lane, a power of two: E <= 32 * PER_LANE
#pragma once
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
    u32 key[PER_LANE];
    int index[PER_LANE];
#pragma unroll
    for (int m = 0; m < PER_LANE; m++) key[m] = keys[m], index[m] = lane + 32 * m;
#pragma unroll
    for (int step = 1; step < PER_LANE; step *= 2)
#pragma unroll
        for (int m = 0; m + step < PER_LANE; m += 2 * step) {
            const bool later = key[m + step] > key[m];
            key[m] = later ? key[m + step] : key[m];
            index[m] = later ? index[m + step] : index[m];
        }
    return {key[0], index[0]};
}

// experts and weights: `used` of them, of this row. The logits may be what other blocks of the launch wrote.
DEVICE void pick(const float* logits, int n_experts, int used, int* experts, float* weights) {
    const int lane = threadIdx.x & 31;
    float logit[PER_LANE];  // all on their way together: a load that depends on a condition waits for the one before
    u32 keys[PER_LANE];
#pragma unroll
    for (int m = 0; m < PER_LANE; m++) logit[m] = read_early(logits + min(lane + 32 * m, n_experts - 1));
#pragma unroll
    for (int m = 0; m < PER_LANE; m++) {
        const u32 key = ordered(logit[m]);
        keys[m] = lane + 32 * m < n_experts ? key : 0;
    }
    Best own = best_of_lane(keys, lane);
    u32 best[2] = {0, 0};  // keys of the lane's ranks
    int picked[2] = {0, 0};
    for (int rank = 0; rank < used; rank++) {
        const u32 key = warp_max(own.key);
        const int index = static_cast<int>(warp_min(own.key == key ? static_cast<u32>(own.index) : ALL));
        if ((rank & 31) == lane) {
            if (rank < 32)
                best[0] = key, picked[0] = index;
            else
                best[1] = key, picked[1] = index;
        }
        if (own.index == index) {
#pragma unroll
            for (int m = 0; m < PER_LANE; m++)
                if (lane + 32 * m == index) keys[m] = 0;
            own = best_of_lane(keys, lane);
        }
    }
    const float first = from_ordered(__shfl_sync(ALL, best[0], 0));
    const float e[2] = {exp_f32(from_ordered(best[0]) - first), exp_f32(from_ordered(best[1]) - first)};
    float total = 0.0f;
    for (int rank = 0; rank < used; rank++) total = total + __shfl_sync(ALL, rank < 32 ? e[0] : e[1], rank & 31);
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (lane + 32 * i < used) experts[lane + 32 * i] = picked[i], weights[lane + 32 * i] = e[i] / total;
}
