// Keys and values in pages, of the type CACHE (Float32 or Float16), and which tokens a row attends to.
#pragma once
#include "rows.cuh"

struct Float32 {
    typedef float Value;
    DEVICE static Value put(float v) { return v; }
    DEVICE static float get(Value v) { return v; }
    // Eight values from shared memory, aligned to 16 bytes.
    DEVICE static void load8(const Value* p, float (&v)[8]) {
        const float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    }
    // Two values from memory.
    DEVICE static float2 load2(const Value* p) { return *reinterpret_cast<const float2*>(p); }
};

struct Float16 {
    typedef u16 Value;
    DEVICE static Value put(float v) {
        u16 bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
        return bits;
    }
    DEVICE static float get(Value v) { return half_value(v); }
    DEVICE static void two(u32 word, float& a, float& b) {
        a = half_value(static_cast<u16>(word));
        b = half_value(static_cast<u16>(word >> 16));
    }
    DEVICE static void load8(const Value* p, float (&v)[8]) {
        const uint4 w = *reinterpret_cast<const uint4*>(p);
        two(w.x, v[0], v[1]);
        two(w.y, v[2], v[3]);
        two(w.z, v[4], v[5]);
        two(w.w, v[6], v[7]);
    }
    DEVICE static float2 load2(const Value* p) {
        float2 v;
        two(*reinterpret_cast<const u32*>(p), v.x, v.y);
        return v;
    }
};

#ifndef CACHE
#define CACHE Float32
#endif
typedef CACHE Cache;

// The tokens that a row attends to, ascending: the blocks of its list and the tail after the last complete block, or
// all tokens up to its own when no more than `picked` blocks are complete (r = 0: a dense layer).
struct Kept {
    int count;   // tokens
    int listed;  // tokens that come from the list
    int tail;    // first token after them

    // Where the t-th of them lies in the sequence.
    DEVICE int position(const int* list, int r, int t) const {
        return t < listed ? list[t / r] * r + t % r : tail + (t - listed);
    }
};

// Complete blocks of a row that compete; 0 when it keeps all tokens.
DEVICE int competing(int position, int r, int picked) {
    const int complete = r ? (position + 1) / r : 0;
    return complete > picked ? complete : 0;
}

DEVICE Kept kept_tokens(int position, int r, int picked) {
    const int complete = competing(position, r, picked);
    if (!complete) return {position + 1, 0, 0};
    return {picked * r + position + 1 - complete * r, picked * r, complete * r};
}
