// What the maker of activations leaves beside them for the products that read them: int8 in the three orders of formats.cuh,
// one after the other, scales, sums of groups of 16 and of 32; of a prompt the first order and scales alone. Needs rows.cuh, formats.cuh, quantize_lane.cuh.
#pragma once

struct Forms {
    u8* q;  // null: nothing is left
    float *d, *sums16, *sums32;  // sums null: the first order alone

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
            u8* own = q + 32 * (first + i);
            own[NATIVE * all + place_in_block<NATIVE>(lane)] = (u8)each;
            if (!sums16) continue;
            const int sum16 = sum_of_group<16>(each), sum32 = sum16 + __shfl_xor_sync(ALL, sum16, 16);
            own[EIGHT * all + place_in_block<EIGHT>(lane)] = (u8)each;
            own[EVEN_ODD * all + place_in_block<EVEN_ODD>(lane)] = (u8)each;
            if (lane % 16 == 0) sums16[2 * (first + i) + lane / 16] = (float)sum16;
            if (lane == 0) sums32[first + i] = (float)sum32;
        }
    }

    // Quad `quad` of all inputs, in the first order; eight lanes hold the quads of a block.
    DEVICE void leave_quad(float4 v, long long quad) const {
        if (!q) return;
        float most = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
#pragma unroll
        for (int s = 1; s < 8; s *= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, s));
        const BlockScale scale(most);
        const float inv = scale.inv;
        u8* own = q + 4 * (quad & ~7ll) + place_in_block<NATIVE>(4 * static_cast<int>(quad & 7));
        *reinterpret_cast<u32*>(own) = low_bytes(v.x * inv + MAGIC, v.y * inv + MAGIC, v.z * inv + MAGIC, v.w * inv + MAGIC);
        if ((quad & 7) == 0) d[quad >> 3] = scale.d;
    }
};
