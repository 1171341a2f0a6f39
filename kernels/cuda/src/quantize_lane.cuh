// `quantize` of ops.py by a warp that holds blocks of 32 inputs, one of each a lane: int8 to the order of a format.
//
// quantize.cuh does the same with eight inputs a lane. Needs rows.cuh and the orders of formats.cuh.
#pragma once

// The scales of N blocks, v[i] the lane's input of block i. Lane l divides for block l (and l + 32), all at once.
template <int N>
struct LaneScales {
    enum { HELD = (N + 31) / 32 };
    float d[HELD], inv[HELD];  // lane l: of block l, l + 32

    DEVICE explicit LaneScales(const float (&v)[N]) {
        float amax[HELD] = {};
#pragma unroll
        for (int i = 0; i < N; i++) {
            const u32 most = warp_max(__float_as_uint(fabsf(v[i])));  // ordered as the floats are
            if ((threadIdx.x & 31) == (i & 31)) amax[i / 32] = __uint_as_float(most);
        }
#pragma unroll
        for (int h = 0; h < HELD; h++) {
            const BlockScale scale(amax[h]);
            inv[h] = scale.inv, d[h] = scale.d;
        }
    }
    // Rounded by the last bit of MAGIC + v: no conversion, of which a card does few at a time.
    DEVICE int quantized(float v, int i) const {
        return __float_as_int(v * __shfl_sync(ALL, inv[i / 32], i & 31) + MAGIC) - MAGIC_BITS;
    }
};

// The low bytes of four floats: what MAGIC + v rounds to, as int8.
DEVICE u32 low_bytes(float a, float b, float c, float d) {
    const u32 low = permute(__float_as_uint(a), __float_as_uint(b), 0x0040);
    return permute(low, permute(__float_as_uint(c), __float_as_uint(d), 0x0040), 0x5410);
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
