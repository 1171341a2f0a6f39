// `quantize` of ops.py: blocks of 32 inputs to int8 and a scale, stored in the order of a format (formats.cuh).
//
// Four neighbouring lanes share a block, eight inputs each. Needs device.cuh and the orders of formats.cuh.
#pragma once

struct Octet {
    u32 low, high;  // eight int8, in their natural order
    float d;        // scale of the block
    int sum8, sum16, sum32;  // sums of the int8: of the octet, of its pair of octets, of the block
};

// All 32 lanes take part.
DEVICE Octet quantize_octet(const float (&v)[8]) {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) amax = fmaxf(amax, fabsf(v[i]));
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
    const BlockScale scale(amax);
    u32 q[8];
#pragma unroll
    for (int i = 0; i < 8; i++) q[i] = __float_as_uint(v[i] * scale.inv + MAGIC);  // the low byte: no conversion, which is slow
    Octet o;
    o.low = permute(permute(q[0], q[1], 0x0040), permute(q[2], q[3], 0x0040), 0x5410);
    o.high = permute(permute(q[4], q[5], 0x0040), permute(q[6], q[7], 0x0040), 0x5410);
    o.d = scale.d;
    o.sum8 = __dp4a((int)o.low, 0x01010101, __dp4a((int)o.high, 0x01010101, 0));
    o.sum16 = o.sum8 + __shfl_xor_sync(~0u, o.sum8, 1);
    o.sum32 = o.sum16 + __shfl_xor_sync(~0u, o.sum16, 2);
    return o;
}

// Octet u (0..3) of a block to its place in the block's 32 bytes.
template <int ORDER>
DEVICE void store_octet(u8* block, int u, const Octet& o) {
    if (ORDER == NATIVE) {
        u8* p = block + 16 * (u & 1) + 4 * (u >> 1);
        *(u32*)p = o.low;
        *(u32*)(p + 8) = o.high;
    } else if (ORDER == EVEN_ODD) {
        *(uint2*)(block + 8 * u) = make_uint2(permute(o.low, o.high, 0x6420), permute(o.low, o.high, 0x7531));
    } else {
        *(uint2*)(block + 8 * u) = make_uint2(o.low, o.high);
    }
}

// The sums that a format with offsets wants: float, one a group of 16 or 32, at `sums` for the block's first group.
template <int GROUP>
DEVICE void store_sums(float* sums, int u, const Octet& o) {
    if (GROUP == 32) {
        if (u == 0) sums[0] = (float)o.sum32;
    } else if ((u & 1) == 0) {
        sums[u >> 1] = (float)o.sum16;
    }
}

DEVICE void load_octet(float (&v)[8], const float* x) {
    const float4 a = *(const float4*)x, b = *(const float4*)(x + 4);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
