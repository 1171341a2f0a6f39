// `quantize` of ops.py by a warp that holds a block of 32 inputs, one a lane: int8 to its place in the order of a format.
//
// quantize.cuh does the same with eight inputs a lane. Needs rows.cuh and the orders of formats.cuh.
#pragma once

struct LaneQuantized {
    int q;
    float d;  // scale of the block
};

DEVICE LaneQuantized quantize_lane(float v) {
    const float amax = __uint_as_float(warp_max(__float_as_uint(fabsf(v))));
    const bool tiny = amax < 1e-30f;
    const float inv = tiny ? 0.0f : 127.0f / amax;
    return {(int)rintf(v * inv), tiny ? 0.0f : amax / 127.0f};
}

// Where input e (0..31) of a block lies among the block's bytes.
template <int ORDER>
DEVICE int place_in_block(int e) {
    if (ORDER == NATIVE) return 16 * (e >> 3 & 1) + 4 * (e >> 4) + 8 * (e >> 2 & 1) + (e & 3);
    if (ORDER == EVEN_ODD) return (e & 24) + 4 * (e & 1) + (e >> 1 & 3);
    return e;
}

// The sum over the lanes of a group of 16 or 32; every lane of the group gets it.
template <int GROUP>
DEVICE int sum_of_group(int q) {
#pragma unroll
    for (int s = GROUP / 2; s; s >>= 1) q += __shfl_xor_sync(ALL, q, s);
    return q;
}
