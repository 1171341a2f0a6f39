// What scores of index blocks are made of, for few rows and for many.
#pragma once
#include "cache.cuh"

struct Pages {
    const float* block;
    const int* tables;
    int pages_of_a_slot, r, d;

    DEVICE const float* key(int slot, int j) const {
        return block + token_row(tables, pages_of_a_slot, slot, j * r) / r * d;
    }
};

DEVICE float positive(float x) { return x > 0.0f ? x : 0.0f; }
