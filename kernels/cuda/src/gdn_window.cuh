// The convolution window of a gated delta net: rows of this call, then kept inputs.
#pragma once
#include "rows.cuh"

// Input j of the convolution window of row t: a row of this call, or a kept one.
DEVICE const float* window_row(const float* p, const float* kept, int channels, const Segment& s, int source,
                               int kernel) {
    return source >= s.begin ? p + static_cast<long long>(source) * channels
                             : kept + static_cast<long long>(source - s.begin + kernel - 1) * channels;
}
