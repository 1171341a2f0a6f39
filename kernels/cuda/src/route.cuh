// The `used` best logits of a row (equal: the lower index) and their softmax, by one warp.
//
// Lane i holds the logits i + 32 m as ordered words. The `used`-th best of what the lanes have best is a floor: the picks
// are among the logits that reach it, which are hardly more than the picks. Each of these counts those before it, all at
// once. When there are too many of them (equal logits), or too many picks, the picks are taken one by one: a step takes the
// best of all lanes, and only the lane that gave it looks again.
// Constants   PER_LANE logits of a lane, a power of two: E <= 32 * PER_LANE
#pragma once
#include "rows.cuh"

#ifndef PER_LANE
#define PER_LANE 16
#endif

// Of a warp, in shared memory: what reaches the floor by rising index; the exponentials of the picks by rank.
struct PickMemory {
    u32 keys[32];
    int indices[32];
    float exponentials[32];
};

// Where a pick goes: `used` experts and weights of this row.
struct Picks {
    int used;
    int* experts;
    float* weights;
};

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

// One after the other. `used` <= 64; lane i keeps ranks i and i + 32.
DEVICE void pick_in_turn(u32 (&keys)[PER_LANE], const Picks& to) {
    const int lane = threadIdx.x & 31;
    Best own = best_of_lane(keys, lane);
    u32 best[2] = {0, 0};  // keys of the lane's ranks
    int picked[2] = {0, 0};
    for (int rank = 0; rank < to.used; rank++) {
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
    for (int rank = 0; rank < to.used; rank++) total = total + __shfl_sync(ALL, rank < 32 ? e[0] : e[1], rank & 31);
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (lane + 32 * i < to.used) to.experts[lane + 32 * i] = picked[i], to.weights[lane + 32 * i] = e[i] / total;
}

// The floor, at most the `used`-th best key of all; 1 where lanes are fewer. `most`: the best key of the lane.
DEVICE u32 floor_of(u32 most, int used) {
    int reach = 0;
#pragma unroll
    for (int j = 0; j < 32; j++) reach += __shfl_sync(ALL, most, j) >= most;
    return max(1u, warp_max(reach >= used ? most : 0u));
}

// Put the keys that reach the floor into memory by rising index; returns their number, which may be more than 32.
DEVICE int gather(const u32 (&keys)[PER_LANE], u32 floor, PickMemory& memory) {
    const int lane = threadIdx.x & 31;
    int count = 0;
#pragma unroll
    for (int m = 0; m < PER_LANE; m++) {
        const u32 reach = __ballot_sync(ALL, keys[m] >= floor);
        const int place = count + __popc(reach & ((1u << lane) - 1));
        if (keys[m] >= floor && place < 32) memory.keys[place] = keys[m], memory.indices[place] = lane + 32 * m;
        count += __popc(reach);
    }
    __syncwarp();
    return count;
}

// The logits may be what other blocks of the launch wrote.
DEVICE void pick(const float* logits, int n_experts, const Picks& to, PickMemory& memory) {
    const int lane = threadIdx.x & 31;
    float logit[PER_LANE];  // all on their way together: a load that depends on a condition waits for the one before
    u32 keys[PER_LANE];
#pragma unroll
    for (int m = 0; m < PER_LANE; m++) logit[m] = read_early(logits + min(lane + 32 * m, n_experts - 1));
    u32 most = 0;
#pragma unroll
    for (int m = 0; m < PER_LANE; m++) {
        const u32 key = ordered(logit[m]);
        keys[m] = lane + 32 * m < n_experts ? key : 0;
        most = max(most, keys[m]);
    }
    const int count = to.used <= 32 ? gather(keys, floor_of(most, to.used), memory) : 33;
    if (count > 32) {
        pick_in_turn(keys, to);
        return;
    }
    const u32 own = lane < count ? memory.keys[lane] : 0;
    int rank = lane < count ? 0 : 32;
#pragma unroll 4
    for (int j = 0; j < count; j++) {
        const u32 other = memory.keys[j];
        rank += other > own || (other == own && j < lane);
    }
    const float e = exp_f32(from_ordered(own) - from_ordered(warp_max(most)));
    if (rank < to.used) memory.exponentials[rank] = e;
    __syncwarp();
    float total = 0.0f;
#pragma unroll 4
    for (int i = 0; i < to.used; i++) total = total + memory.exponentials[i];
    if (rank < to.used) to.experts[rank] = memory.indices[lane], to.weights[rank] = e / total;
}
