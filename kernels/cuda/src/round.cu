// A round: a window of one sequence that verifies drafts, decides about them, and leaves the next round's inputs.
//
// round_accept   after the sampling, a warp. Row 0 has fed the known token, row i draft i; a row stays when its draft is what
//                the row before says and no end token. kept[0] = rows that stay; `again` is the segment of what has to be
//                done over: its rows, none where all of them stay
// round_choose   the draft behind the last row that stays becomes the first of the chain; the residual that it came from, its
//                place and its token are what the next step of the draft layer takes
// round_next     the next round's rows: the last id that stays and the chain, one position after the other. A segment of
//                every length reads what this one wrote. An id below 0 (there was none) becomes token 0: the host stops
// Shapes   tokens, ids, drafts, p, positions, places (n,); chain, likely (m,) with m >= 1; segments (most, 3); out (n, width)
#include "rows.cuh"

KERNEL void __launch_bounds__(32) round_accept(const int* ids, const int* tokens, const int* ends, int n_ends,
                                               const int* segment, int* kept, int* again, int n) {
    inputs_ready();
    const int i = threadIdx.x;
    bool right = i + 1 < n && tokens[i + 1] == ids[i];
    for (int e = 0; right && e < n_ends; e++) right = ends[e] != ids[i];
    const u32 wrong = ~__ballot_sync(ALL, right);
    if (i) return;
    const int stay = __ffs(wrong);  // the first row whose draft is wrong has an id that counts
    kept[0] = stay;
    again[0] = segment[0], again[1] = 0, again[2] = stay < n ? stay : 0;
}

KERNEL void __launch_bounds__(256) round_choose(const float4* out, long long quarters, const int* kept, const int* drafts,
                                                const float* p, const int* places, const int* slot, int* chain,
                                                float* likely, float4* fed, int* step) {
    inputs_ready();
    const int last = kept[0] - 1;
    const long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i < quarters) fed[i] = out[last * quarters + i];
    if (i) return;
    chain[0] = step[0] = drafts[last], likely[0] = p[last];
    step[1] = places[0] + last + 1, step[2] = slot[0];
}

KERNEL void __launch_bounds__(32) round_next(const int* ids, const int* kept, const int* chain, int* tokens,
                                             int* positions, int* places, int* segments, int m, int most) {
    inputs_ready();
    const int i = threadIdx.x, n = kept[0], position = positions[0], place = places[0];
    __syncwarp();
    if (i <= m) {
        tokens[i] = i ? chain[i - 1] : max(ids[n - 1], 0);
        positions[i] = position + n + i;
        places[i] = place + n + i;
    }
    if (i < most) segments[3 * i] ^= segments[3 * i] >> 16;
}
