// One token id a row from its logits: penalties, top-k, temperature, softmax, top-p, min-p, draw; or the argmax.
//
// The way to the few ids that can be drawn:
//   sample_recent   a block a row with penalties: its recent ids once each with their number, their penalised scores, the
//                   MOST best of them; a bit a seen id
//   sample_runs     the best logit of every run of RUN ids, seen ids left out, as ordered words
//   sample_pick     a block a row. The top_k-th best of the best runs of GROUPS groups is a floor: top_k logits reach it, and
//                   hardly more do. When they are more than FEW, or top_k groups are not there: the MOST best runs, the
//                   MOST best logits of these. (Equal ones: the lower. Before an id outside of the MOST best runs come MOST
//                   ids that lie in them.) They are joined with the penalised ones.
// Scores are compared and drawn from in float64, in the order of steps of the reference. A row that has a logit that is
// not a number, or no finite best one, gets -1.
//
// settings   float64 (n, SETTINGS): temperature (0 or less: the argmax), top_k, top_p, min_p, repeat, freq, present
// seeds      uint64 (n,); positions int32 (n,), the sampled token's is `ahead` more
// recent     int32 (n, last), -1 = none
// seen       bits (n, words); best (n, MOST) and its ids: scores of recent ids, ids -1 past the end; runs (n, n_runs)
// Source     `ops.Kernels.sample`; Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011)
#include "select.cuh"

constexpr int MOST = 64;
constexpr int RUN = 64;
constexpr int GROUPS = 64;
constexpr int FEW = 256;  // runs, and logits, that reach the floor
constexpr int SETTINGS = 7;
constexpr int RECENT_MOST = 4096;
constexpr int NONE = 0x7fffffff;

struct Settings {
    double temperature;
    int top_k;
    double top_p, min_p, repeat, freq, present;

    DEVICE static Settings of(const double* s) { return {s[0], static_cast<int>(s[1]), s[2], s[3], s[4], s[5], s[6]}; }
    DEVICE bool greedy() const { return temperature <= 0.0; }
    DEVICE bool penalises() const { return !greedy() && (repeat != 1.0 || freq != 0.0 || present != 0.0); }
    DEVICE double penalised(double l, int count) const {
        const double once = l > 0.0 ? l / repeat : l * repeat;
        const double score = __dsub_rn(__dsub_rn(once, __dmul_rn(count, freq)), present);
        return l == l ? score : INFINITE;
    }
};

// ---------------------------------------------------------------------------------------------------------- recent ids

// Sort n (a power of two) keys of shared memory with their values, ascending by less(a, b). Barriers at both ends.
template <class Key, class Value, class Less>
DEVICE void sort(Key* keys, Value* values, int n, const Less& less) {
    for (int size = 2; size <= n; size <<= 1)
        for (int apart = size >> 1; apart; apart >>= 1) {
            __syncthreads();
            for (int i = threadIdx.x; i < n / 2; i += blockDim.x) {
                const int a = 2 * i - (i & (apart - 1)), b = a + apart;
                const bool up = (a & size) == 0;
                if (less(keys[b], values[b], keys[a], values[a]) == up) {
                    const Key key = keys[a];
                    const Value value = values[a];
                    keys[a] = keys[b], values[a] = values[b];
                    keys[b] = key, values[b] = value;
                }
            }
        }
    __syncthreads();
}

struct ById {
    DEVICE bool operator()(int a, int, int b, int) const { return a < b; }
};

// Higher scores first; equal: the lower id.
struct ByScore {
    DEVICE bool operator()(double a, int id_a, double b, int id_b) const { return a > b || (a == b && id_a < id_b); }
};

// How many of the n ascending ids are below an id.
DEVICE int lower_bound(const int* ids, int n, int id) {
    int low = 0, high = n;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (ids[middle] < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

KERNEL void __launch_bounds__(512)
    sample_recent(const float* logits, const double* settings, const int* recent, u32* seen, double* best, int* best_ids,
                  int vocab, int last, int words) {
    inputs_ready();
    __shared__ double scores[RECENT_MOST];
    __shared__ int ids[RECENT_MOST];
    const long long row = blockIdx.x;
    const Settings s = Settings::of(settings + row * SETTINGS);
    if (!s.penalises()) return;
    logits += row * vocab;
    recent += row * last;
    seen += row * words;
    best += row * MOST;
    best_ids += row * MOST;
    int n = MOST;
    while (n < last) n *= 2;
    int* unused = reinterpret_cast<int*>(scores);
    for (int i = threadIdx.x; i < words; i += blockDim.x) seen[i] = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const int id = i < last ? recent[i] : -1;
        ids[i] = id >= 0 && id < vocab ? id : NONE;
        unused[i] = 0;
    }
    sort(ids, unused, n, ById{});
    constexpr int EACH = RECENT_MOST / 512;
    double score[EACH];
    int first[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int i = threadIdx.x + 512 * e;
        score[e] = -INFINITE, first[e] = NONE;
        if (i >= n || ids[i] == NONE || (i && ids[i - 1] == ids[i])) continue;
        first[e] = ids[i];
        score[e] = s.penalised(logits[ids[i]], lower_bound(ids, n, ids[i] + 1) - i);
        atomicOr(&seen[ids[i] >> 5], 1u << (ids[i] & 31));
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int i = threadIdx.x + 512 * e;
        if (i < n) scores[i] = score[e], ids[i] = first[e];
    }
    sort(scores, ids, n, ByScore{});
    for (int i = threadIdx.x; i < MOST; i += blockDim.x) best[i] = scores[i], best_ids[i] = ids[i] == NONE ? -1 : ids[i];
}

// ---------------------------------------------------------------------------------------------------------------- runs

// The ordered word of an id's logit, 0 when it is seen or past the end.
DEVICE u32 word_of(const float* logits, const u32* seen, int vocab, int id) {
    if (id >= vocab || (seen && (seen[id >> 5] >> (id & 31) & 1))) return 0;
    return ordered(logits[id]);
}

KERNEL void __launch_bounds__(256)
    sample_runs(const float* logits, const double* settings, const u32* seen, u32* runs, int vocab, int n_runs, int words) {
    inputs_ready();
    const long long row = blockIdx.y;
    const int lane = threadIdx.x & 31, warps = gridDim.x * 8;
    const bool penalises = words && Settings::of(settings + row * SETTINGS).penalises();
    const u32* of_row = penalises ? seen + row * words : nullptr;
    logits += row * vocab;
    for (int run = blockIdx.x * 8 + (threadIdx.x >> 5); run < n_runs; run += warps) {
        const int id = run * RUN + lane;
        const u32 best = warp_max(max(word_of(logits, of_row, vocab, id), word_of(logits, of_row, vocab, id + 32)));
        if (lane == 0) runs[row * n_runs + run] = best;
    }
}

// ---------------------------------------------------------------------------------------------------------------- pick

// The first word of Philox-4x32-10 as a number in (0, 1).
DEVICE double uniform(u64 seed, long long position) {
    u32 c0 = static_cast<u32>(position), c1 = static_cast<u32>(position >> 32), c2 = 0, c3 = 0;
    u32 k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32);
    for (int i = 0; i < 10; i++) {
        const u64 even = 0xD2511F53ull * c0, odd = 0xCD9E8D57ull * c2;
        c0 = static_cast<u32>(odd >> 32) ^ c1 ^ k0, c1 = static_cast<u32>(odd);
        c2 = static_cast<u32>(even >> 32) ^ c3 ^ k1, c3 = static_cast<u32>(even);
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return (c0 + 0.5) * 2.3283064365386963e-10;
}

// The sum of n <= 64 numbers in the order of NumPy: eight chains, joined as a tree, then the rest.
DEVICE double sum(const double* v, int n) {
    double total = 0.0;
    int i = 0;
    if (n >= 8) {
        double r[8];
        for (int j = 0; j < 8; j++) r[j] = v[j];
        for (i = 8; i + 8 <= n; i += 8)
            for (int j = 0; j < 8; j++) r[j] = __dadd_rn(r[j], v[i + j]);
        total = __dadd_rn(__dadd_rn(__dadd_rn(r[0], r[1]), __dadd_rn(r[2], r[3])),
                          __dadd_rn(__dadd_rn(r[4], r[5]), __dadd_rn(r[6], r[7])));
    }
    for (; i < n; i++) total = __dadd_rn(total, v[i]);
    return total;
}

// Draw from n probabilities by falling size: top-p, min-p, the draw. Returns the place.
DEVICE int draw(const double* p, int n, const Settings& s, double u) {
    int kept = n;
    if (s.top_p < 1.0) {
        double up_to = 0.0;
        for (kept = 0; kept < n;) {
            up_to = __dadd_rn(up_to, p[kept++]);
            if (up_to >= s.top_p) break;
        }
    }
    const double floor = __dmul_rn(s.min_p, p[0]);
    while (kept > 1 && p[kept - 1] < floor) kept--;
    double whole = 0.0, up_to = 0.0;
    for (int i = 0; i < kept; i++) whole = __dadd_rn(whole, p[i]);
    const double wanted = __dmul_rn(u, whole);
    for (int i = 0; i < kept; i++) {
        up_to = __dadd_rn(up_to, p[i]);
        if (up_to > wanted) return i;
    }
    return kept - 1;
}

struct RunWords {
    const u32* runs;
    DEVICE u32 operator()(int i) const { return runs[i]; }
};

struct Place {
    int* to;
    DEVICE void operator()(int place, int index) const { to[place] = index; }
};

// The first word of a row's runs that is the largest: its run.
DEVICE int best_run(const u32* runs, int n, SelectMemory& m) {
    const u32 top = whole_range(RunWords{runs}, n, 1, m).high;
    u32 first = ALL;
    for (int i = threadIdx.x; i < n && first == ALL; i += blockDim.x)
        if (runs[i] == top) first = i;
    first = warp_min(first);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) m.low[threadIdx.x >> 5] = first;
    __syncthreads();
    return static_cast<int>(warp_min((threadIdx.x & 31) < blockDim.x >> 5 ? m.low[threadIdx.x & 31] : ALL));
}

// Whether the best word stands for a finite number.
DEVICE bool is_finite(u32 word) { return word > ordered(-INFINITE) && word < ordered(INFINITE); }

struct Candidates {
    double scores[FEW + MOST], sorted[FEW + MOST];
    int ids[FEW + MOST], sorted_ids[FEW + MOST];
    int n;

    // By any thread, in any order.
    DEVICE void add(double score, int id) {
        const int at = atomicAdd(&n, 1);
        if (at < FEW + MOST) scores[at] = score, ids[at] = id;
    }
};

// A word that stands for a number, or for none: that comes first, and is refused.
DEVICE double score_of(u32 word) { return word == ALL ? INFINITE : from_ordered(word); }

// Put the candidates in order, by rank. Barriers before and behind.
DEVICE void rank(Candidates& c) {
    __syncthreads();
    const int n = c.n;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const double own = c.scores[i];
        const int id = c.ids[i];
        int before = 0;
#pragma unroll 4
        for (int j = 0; j < n; j++) before += ByScore{}(c.scores[j], c.ids[j], own, id);  // not before itself
        c.sorted[before] = own, c.sorted_ids[before] = id;
    }
    __syncthreads();
}

// What a row of logits is searched in.
struct Row {
    const float* logits;
    const u32 *seen, *runs;
    int vocab, n_runs;

    DEVICE u32 word(int run, int i) const { return word_of(logits, seen, vocab, run * RUN + i); }
};

struct PickRuns {
    u32 groups[GROUPS], floor;
    int chosen[FEW], n;
};

// All logits that reach the floor to the candidates; false when they are too many or the floor is nothing.
DEVICE bool gather(const Row& row, int top_k, PickRuns& m, Candidates& c) {
    constexpr int EACH = 1024 / GROUPS;
    u32 most = 0;
    for (int i = threadIdx.x; i < row.n_runs; i += blockDim.x) most = max(most, row.runs[i]);
#pragma unroll
    for (int s = EACH / 2; s; s >>= 1) most = max(most, __shfl_xor_sync(ALL, most, s));
    if (threadIdx.x % EACH == 0) m.groups[threadIdx.x / EACH] = most;
    if (threadIdx.x == 0) m.floor = 0, m.n = 0;
    __syncthreads();
    if (threadIdx.x < GROUPS) {
        const u32 own = m.groups[threadIdx.x];
        int reach = 0;
#pragma unroll 8
        for (int j = 0; j < GROUPS; j++) reach += m.groups[j] >= own;
        if (reach >= top_k) atomicMax(&m.floor, own);
    }
    __syncthreads();
    const u32 floor = m.floor;
    if (!floor) return false;
    for (int i = threadIdx.x; i < row.n_runs; i += blockDim.x)
        if (row.runs[i] >= floor) {
            const int at = atomicAdd(&m.n, 1);
            if (at < FEW) m.chosen[at] = i;
        }
    __syncthreads();
    if (m.n > FEW) return false;
    for (int i = threadIdx.x; i < m.n * RUN; i += blockDim.x) {
        const int run = m.chosen[i / RUN];
        const u32 word = row.word(run, i % RUN);
        if (word >= floor) c.add(score_of(word), run * RUN + i % RUN);
    }
    __syncthreads();
    return c.n <= FEW;
}

// The slow way for rows that have too many equal logits or ask for very many. n_best runs, then as many logits.
DEVICE void gather_exactly(const Row& row, SelectMemory& memory, int* chosen, int* best, u32* words, Candidates& c) {
    const int n_best = min(MOST, row.n_runs), n_words = n_best * RUN;
    __syncthreads();
    if (threadIdx.x == 0) c.n = 0;
    list_best(RunWords{row.runs}, row.n_runs, n_best, memory, Place{chosen});
    __syncthreads();
    for (int i = threadIdx.x; i < n_words; i += blockDim.x) words[i] = row.word(chosen[i / RUN], i % RUN);
    __syncthreads();
    list_best(RunWords{words}, n_words, min(MOST, n_words), memory, Place{best});
    __syncthreads();
    if (threadIdx.x < min(MOST, n_words)) {
        const int i = best[threadIdx.x];
        if (words[i]) c.add(score_of(words[i]), chosen[i / RUN] * RUN + i % RUN);
    }
}

KERNEL void __launch_bounds__(1024, 1)
    sample_pick(const float* logits, const double* settings, const u64* seeds, const int* positions, const u32* seen,
                const double* best, const int* best_ids, const u32* runs, int* out, int vocab, int n_runs, int words,
                int ahead) {
    inputs_ready();
    __shared__ SelectMemory memory;
    __shared__ Candidates c;
    __shared__ PickRuns few;
    __shared__ int best_words[MOST];
    __shared__ u32 run_words[MOST * RUN];
    __shared__ double total;
    const long long at = blockIdx.x;
    const int tid = threadIdx.x;
    const Settings s = Settings::of(settings + at * SETTINGS);
    const bool penalises = words && s.penalises();
    const Row row = {logits + at * vocab, penalises ? seen + at * words : nullptr, runs + at * n_runs, vocab, n_runs};
    if (s.greedy()) {
        const int id = best_run(row.runs, n_runs, memory) * RUN + (tid & 31);
        const u32 a = word_of(row.logits, nullptr, vocab, id), b = word_of(row.logits, nullptr, vocab, id + 32);
        const u32 top = warp_max(max(a, b));
        const u32 first = warp_min(a == top ? id : b == top ? id + 32 : ALL);
        if (tid == 0) out[at] = is_finite(top) ? static_cast<int>(first) : -1;
        return;
    }
    const int k = min(s.top_k, MOST);
    double u = 0.0;
    if (tid == 0) c.n = 0, u = uniform(seeds[at], positions[at] + (long long)ahead);
    if (!gather(row, k, few, c)) gather_exactly(row, memory, few.chosen, best_words, run_words, c);
    if (penalises && tid < MOST && best_ids[at * MOST + tid] >= 0) c.add(best[at * MOST + tid], best_ids[at * MOST + tid]);
    rank(c);
    const int n = min(k, c.n);
    if (tid < n) c.scores[tid] = exp((c.sorted[tid] - c.sorted[0]) / s.temperature);
    __syncthreads();
    if (tid == 0) total = n ? sum(c.scores, n) : 1.0;
    __syncthreads();
    if (tid < n) c.scores[tid] = c.scores[tid] / total;
    __syncthreads();
    if (tid == 0) {
        const bool valid = n > 0 && c.sorted[0] - c.sorted[0] == 0.0;
        out[at] = valid ? c.sorted_ids[draw(c.scores, n, s, u)] : -1;
    }
}
