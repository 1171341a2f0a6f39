// What the maker of activations leaves beside them for the products that read them: int8 in the three orders of formats.cuh,
// one after the other, scales, sums of groups of 16 and of 32. Needs rows.cuh, formats.cuh, quantize_lane.cuh.
#pragma once

struct Forms {
    u8* q;  // null: nothing is left
    float *d, *sums16, *sums32;

    // N blocks of 32 by a warp, v[i] the lane's input of block first + i. `all`: inputs of all rows.
    template <int N>
    DEVICE void leave(const float (&v)[N], long long first, long long all) const {
        if (!q) return;
        const int lane = threadIdx.x & 31;
        const LaneScales<N> scales(v);
        if (lane < N) d[first + lane] = scales.d[0];
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int each = scales.quantized(v[i], i);
            const int sum16 = sum_of_group<16>(each), sum32 = sum16 + __shfl_xor_sync(ALL, sum16, 16);
            u8* own = q + 32 * (first + i);
            own[NATIVE * all + place_in_block<NATIVE>(lane)] = (u8)each;
            own[EIGHT * all + place_in_block<EIGHT>(lane)] = (u8)each;
            own[EVEN_ODD * all + place_in_block<EVEN_ODD>(lane)] = (u8)each;
            if (lane % 16 == 0) sums16[2 * (first + i) + lane / 16] = (float)sum16;
            if (lane == 0) sums32[first + i] = (float)sum32;
        }
    }
};
