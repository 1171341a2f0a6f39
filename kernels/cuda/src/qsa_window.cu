// Attention of few rows: the work of a row is spread over the card.
//
// qsa_keys     a block is 32 kept tokens of one row and key head, for all query heads that share it
// qsa_values   a block is one part and 32 dims of a row's value head; the last block of a row's parts to end joins them
#include "attend.cuh"

constexpr int WARPS = THREADS / 32;

// 32 dims of a row in shared memory. A row is copied in COPIES parts.
template <class Format>
struct Slice {
    static constexpr int BYTES = Format::row(32), COPIES = BYTES / 16;
    DEVICE static void copy(u8* to, const u8* row, int, int slice, int part) {
        copy16(to + 16 * part, row + BYTES * slice + 16 * part);
    }
    DEVICE static float get(const u8* from, int, int lane) {
        return Format::get(reinterpret_cast<const typename Format::Value*>(from)[lane]);
    }
};
// A block of codes, then the word that holds its scale.
template <class Codes>
struct Slice<Packed<Codes>> {
    static constexpr int CODES = Codes::codes(32), BYTES = CODES + 16, COPIES = CODES / 16 + 1;
    DEVICE static void copy(u8* to, const u8* row, int d, int slice, int part) {
        if (part < COPIES - 1)
            copy16(to + 16 * part, row + CODES * slice + 16 * part);
        else
            copy4(to + CODES, row + Codes::codes(d) + slice / 2 * 4);
    }
    DEVICE static float get(const u8* from, int slice, int lane) {
        const Scale s(reinterpret_cast<const u16*>(from + CODES)[slice & 1], Codes::ZERO);
        return s.value(Codes::code(from, lane), 0);
    }
};
constexpr int AT_ONCE = 3;  // query heads of a warp at a time

KERNEL void __launch_bounds__(THREADS)
    qsa_keys(ROW_ARGUMENTS, const float* q, const u8* cached, float* s, int stride) {
    const Args g = ROW;
    extern __shared__ __align__(16) float memory[];
    __shared__ int tokens[32];
    const int row = blockIdx.z, kv = blockIdx.y, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int group = heads / kv_heads, bytes = Keys::row(d), pitch = bytes + 16;
    const Kept kept = g.kept(row);
    const long long first_head = static_cast<long long>(row) * g.heads + kv * group;
    float* query = memory;
    u8* tile = reinterpret_cast<u8*>(memory + group * d);
    const float scale = 1.0f / sqrtf(static_cast<float>(d));
    auto copy_keys = [&](int begin, int end) {
        const int pieces = bytes / 16;
        for (int e = begin * pieces + tid; e < end * pieces; e += THREADS) {
            const int t = e / pieces, x = e % pieces * 16;
            copy16(tile + t * pitch + x, cached + (static_cast<long long>(tokens[t]) * g.kv_heads + kv) * bytes + x);
        }
    };
    // Before the kernel that stores this launch's rows ends: keys of earlier ones, unless a list says which.
    const int begin = blockIdx.x * 32, before = kept.listed ? 0 : g.first_new(row, gridDim.z);
    int old = max(0, min(min(32, kept.count - begin), before - begin));
    if (tid < old) tokens[tid] = g.token(row, kept, begin + tid);
    __syncthreads();
    copy_keys(0, old);
    inputs_ready();
    if (begin >= kept.count) return;
    for (int e = tid; e < group * d / 4; e += THREADS) copy16(query + 4 * e, q + first_head * d + 4 * e);
    for (int first = begin; first < kept.count; first += gridDim.x * 32) {
        const int n = min(32, kept.count - first);
        if (tid >= old && tid < n) tokens[tid] = g.token(row, kept, first + tid);
        __syncthreads();
        copy_keys(old, n);
        old = 0;
        copies_commit();
        copies_wait<0>();
        __syncthreads();
        for (int h = warp; h < group; h += WARPS * AT_ONCE) {
            float c[AT_ONCE][4];
            const float* of_head[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0.0f;
                of_head[i] = query + min(h + WARPS * i, group - 1) * d;
            }
#pragma unroll 4
            for (int x = 0; x < d; x += 8) {
                float k[8];
                Keys::load8(tile + lane * pitch, d, x, k);
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++) add_products(c[i], of_head[i] + x, k);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                if (h + WARPS * i < group && lane < n)
                    s[(first_head + h + WARPS * i) * stride + first + lane] = join_chains(c[i]) * scale;
        }
        __syncthreads();
    }
}

// Where the parts of a row's value head and 32 dims leave what they have, until the last of them joins it.
struct Partial {
    float *peaks, *sums, *values;

    DEVICE Partial(float* memory, long long unit, int parts, int group) {
        memory += unit * parts * group * 34;
        peaks = memory;
        sums = peaks + parts * group;
        values = sums + parts * group;
    }
};

// o and l of a head over all its parts, dim `lane` of the slice. The reads of several parts are under way together.
DEVICE float2 join_parts(const Partial& own, int parts, int group, int h) {
    constexpr int BATCH = 8;
    const int lane = threadIdx.x & 31;
    float top = -INFINITE, l = 0.0f, o = 0.0f;
    for (int p = lane; p < parts; p += 32) top = fmaxf(top, __ldcg(own.peaks + p * group + h));
    top = warp_max(top);
    for (int first = 0; first < parts; first += BATCH) {
        float peak[BATCH], sum[BATCH], value[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int at = min(first + i, parts - 1) * group + h;
            peak[i] = __ldcg(own.peaks + at), sum[i] = __ldcg(own.sums + at), value[i] = __ldcg(own.values + at * 32 + lane);
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (first + i >= parts) break;
            const float share = exp_f32(peak[i] - top);
            l = fmaf(share, sum[i], l);
            o = fmaf(share, value[i], o);
        }
    }
    return make_float2(o, l);
}

KERNEL void __launch_bounds__(THREADS)
    qsa_values(ROW_ARGUMENTS, const float* s, int stride, const u8* cached, const float* q_gate,
               float* partial, int* ended, float* out) {
    const Args g = ROW;
    typedef Slice<Values> Tile;
    extern __shared__ __align__(16) float memory[];
    __shared__ int tokens[PART];
    __shared__ int last;
    const int row = blockIdx.z, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, part = blockIdx.x;
    const int slices = g.d / 32, kv = blockIdx.y / slices, slice = blockIdx.y % slices, group = g.heads / g.kv_heads;
    const Kept kept = g.kept(row);
    const int first = part * PART, count = min(PART, kept.count - first), parts = (kept.count + PART - 1) / PART;
    if (count <= 0) {
        inputs_ready();
        return;
    }
    float* e = memory;
    u8* tile = reinterpret_cast<u8*>(e + group * PART);
    for (int t = tid; t < count; t += THREADS) tokens[t] = g.token(row, kept, first + t);
    __syncthreads();
    for (int i = tid; i < count * Tile::COPIES; i += THREADS) {
        const int t = i / Tile::COPIES;
        const u8* from = cached + (static_cast<long long>(tokens[t]) * g.kv_heads + kv) * Values::row(g.d);
        Tile::copy(tile + t * Tile::BYTES, from, g.d, slice, i % Tile::COPIES);
    }
    copies_commit();
    inputs_ready();  // values and the list are older than the scores
    const long long unit = static_cast<long long>(row) * gridDim.y + blockIdx.y;
    const Partial own(partial, unit, gridDim.x, group);
    const long long first_head = static_cast<long long>(row) * g.heads + kv * group;
    for (int h = warp; h < group; h += WARPS * AT_ONCE) {
        PartScores v[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            load_scores(v[i], s + (first_head + min(h + WARPS * i, group - 1)) * stride + first, count);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int head = h + WARPS * i;
            if (head >= group) break;
            const float2 peak_and_sum = exponentials(v[i], count, e + head * PART);
            if (lane == 0) own.peaks[part * group + head] = peak_and_sum.x, own.sums[part * group + head] = peak_and_sum.y;
        }
    }
    copies_wait<0>();
    __syncthreads();
    for (int h = warp; h < group; h += WARPS * AT_ONCE) {
        float o[AT_ONCE];
        const float* of_head[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) o[i] = 0.0f, of_head[i] = e + min(h + WARPS * i, group - 1) * PART;
#pragma unroll 4
        for (int t = 0; t < count; t++) {
            const float v = Tile::get(tile + t * Tile::BYTES, slice, lane);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) o[i] = fmaf(of_head[i][t], v, o[i]);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (h + WARPS * i < group) own.values[(part * group + h + WARPS * i) * 32 + lane] = o[i];
    }
    __threadfence();
    __syncthreads();
    if (tid == 0) {
        last = atomicAdd(ended + unit, 1) == parts - 1;
        if (last) ended[unit] = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int h = warp; h < group; h += WARPS) {
        const long long head = first_head + h, x = 32 * slice + lane;
        const float gate = q_gate[(2 * head + 1) * g.d + x];
        const float2 joined = join_parts(own, parts, group, h);
        out[head * g.d + x] = (joined.x / joined.y) * sigmoid_f32(gate);
    }
}
