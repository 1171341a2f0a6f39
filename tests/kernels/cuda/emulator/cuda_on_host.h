// CUDA blocks on one host thread: what a .cu file needs to be compiled as C++ and run without a card.
//
// Every thread of a block is a fibre with its own stack. A fibre runs until it meets a barrier (of its warp or of the
// block) and the scheduler then runs the next one, in an order that can be reversed or shuffled: a missing barrier shows
// as a result that depends on the order. Blocks run one after another, in an order that can be shuffled too. Shared
// memory is filled with NaN before each block. Asynchronous copies land when they are waited for, not before; with an odd
// order at once, since a card may do either.
// A barrier that can never be met, a shuffle met at different lines and a copy that was never committed end the program.
//
// The instructions that sources write as `asm` become calls of the functions `ptx_...` at the end (emulator.py).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#undef INFINITY  // NVRTC has neither
#undef NAN

#define __CUDA_ARCH__ 800
#define ON_HOST 1
#define __global__ __attribute__((visibility("default")))
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ SHARED_MEMORY
#define __constant__ static

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulated {

enum Wait { RUNNING, AT_WARP, AT_BLOCK, AT_GROUP, ENDED };

struct Copy { void* to; uint64_t words[2]; int n; };

struct Fibre {
    void* stack_pointer;
    uint3 thread;
    Wait wait;
    int site;
    unsigned steps;
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open;
};


struct Warp { uint64_t slots[2][32]; unsigned steps[2][32]; };

inline dim3 grid, block;
inline uint3 block_index;
inline Fibre* self;
inline std::vector<Fibre> fibres;
inline std::vector<Warp> warps;
inline void* scheduler_pointer;
inline void (*body)();
inline char* dynamic_shared;
inline size_t dynamic_bytes;
inline int group_sizes[16];  // threads that a numbered barrier waits for
inline bool early;  // asynchronous copies land at once

struct Bulk { unsigned barrier; char* to; const void* from; int n; };
inline std::vector<Bulk> bulk;                // copies that a barrier tells the end of
inline std::map<unsigned, long> bytes_to_come;  // of a barrier

struct Range { char* begin; size_t bytes; };
inline std::vector<Range>& shared_ranges() {
    static std::vector<Range> ranges;
    return ranges;
}

// The shared variable of one declaration.
template <class T, int SITE_NUMBER> struct Shared {
    alignas(128) static inline char bytes[sizeof(T)];
    static inline const bool known = (shared_ranges().push_back({bytes, sizeof(T)}), true);
};
template <class T, int SITE_NUMBER> inline T& shared() {
    (void)Shared<T, SITE_NUMBER>::known;
    return *reinterpret_cast<T*>(Shared<T, SITE_NUMBER>::bytes);
}

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "emulated block (%u, %u, %u): %s\n", block_index.x, block_index.y, block_index.z, what);
    std::abort();
}

asm(R"(
.text
.type emulated_switch,@function
emulated_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
extern "C" void emulated_switch(void** save, void* to) __asm__("emulated_switch");

inline void yield(Wait wait, int site) {
    self->wait = wait;
    self->site = site;
    emulated_switch(&self->stack_pointer, scheduler_pointer);
}

inline void entry() {
    body();
    if (!self->open.empty()) fail("a thread ended with copies that it never committed");
    self->groups.clear();
    yield(ENDED, 0);
    fail("an ended thread was run");
}

inline unsigned lane() { return (self - fibres.data()) & 31; }
inline Warp& warp() { return warps[(self - fibres.data()) >> 5]; }

// Give every lane of the warp the values of all lanes. All lanes must meet at the same line.
template <class T> inline const uint64_t* exchange(T value, int site) {
    static_assert(sizeof(T) <= 8);
    const unsigned turn = ++self->steps & 1;
    uint64_t* slots = warp().slots[turn];
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    slots[lane()] = bits;
    warp().steps[turn][lane()] = self->steps;
    yield(AT_WARP, site);
    return slots;
}

template <class T> inline T as(uint64_t bits) {
    T value;
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}

inline void land(std::vector<Copy>& copies) {
    for (Copy& c : copies) std::memcpy(c.to, c.words, c.n);
    copies.clear();
}

inline bool release() {
    const size_t n = fibres.size();
    bool moved = false;
    size_t live = 0, waiting = 0;
    for (size_t w = 0; w < n; w += 32) {
        const size_t end = w + 32 < n ? w + 32 : n;
        size_t alive = 0, here = 0;
        int site = -1;
        for (size_t i = w; i < end; i++) {
            if (fibres[i].wait == ENDED) continue;
            alive++;
            waiting += fibres[i].wait == AT_BLOCK;
            if (fibres[i].wait != AT_WARP) continue;
            here++;
            if (site >= 0 && site != fibres[i].site) fail("lanes of a warp meet at different lines");
            site = fibres[i].site;
        }
        live += alive;
        if (alive && here == alive) {
            for (size_t i = w; i < end; i++)
                if (fibres[i].wait == AT_WARP) fibres[i].wait = RUNNING;
            moved = true;
        }
    }
    if (live && waiting == live) {
        for (Fibre& f : fibres)
            if (f.wait == AT_BLOCK) f.wait = RUNNING;
        moved = true;
    }
    int met[16] = {};
    for (const Fibre& f : fibres)
        if (f.wait == AT_GROUP) met[f.site]++;
    for (Fibre& f : fibres)
        if (f.wait == AT_GROUP && met[f.site] == group_sizes[f.site]) f.wait = RUNNING, moved = true;
    return moved || !live;
}

inline uint64_t random_word(uint64_t& state) {
    state += 0x9E3779B97F4A7C15ull;
    uint64_t z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

inline void run_block(char* stacks, size_t stack_bytes, uint64_t& order) {
    const size_t n = fibres.size();
    for (const Range& range : shared_ranges()) std::memset(range.begin, 0xff, range.bytes);
    std::memset(dynamic_shared, 0xff, dynamic_bytes);
    for (size_t i = 0; i < n; i++) {
        Fibre& f = fibres[i];
        f.thread = {unsigned(i % block.x), unsigned(i / block.x % block.y), unsigned(i / block.x / block.y)};
        f.wait = RUNNING;
        f.steps = 0;
        void** top = reinterpret_cast<void**>(stacks + (i + 1) * stack_bytes) - 2;
        top[0] = reinterpret_cast<void*>(&entry);
        top[1] = nullptr;
        f.stack_pointer = top - 6;
    }
    std::vector<size_t> turn(n);
    for (size_t i = 0; i < n; i++) turn[i] = i;
    for (size_t left = n; left;) {
        if (order)
            for (size_t i = n - 1; i > 0; i--) std::swap(turn[i], turn[random_word(order) % (i + 1)]);
        for (size_t i : turn) {
            if (fibres[i].wait != RUNNING) continue;
            self = &fibres[i];
            emulated_switch(&scheduler_pointer, self->stack_pointer);
            left -= self->wait == ENDED;
        }
        bool running = false;
        for (const Fibre& f : fibres) running |= f.wait == RUNNING;
        if (left && !release() && !running) fail("threads wait at barriers that the others never reach");
    }
    if (!bulk.empty()) fail("it ended before its copies");
}

template <class... A, size_t... I>
inline void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    static std::tuple<A...> values;
    static void (*function)(A...);
    values = std::tuple<A...>{*reinterpret_cast<std::remove_const_t<A>*>(arguments[I])...};
    function = kernel;
    body = [] { std::apply(function, values); };
}

template <class... A>
inline void launch(void (*kernel)(A...), void** arguments, int n_arguments, const unsigned* sizes, size_t shared,
                   uint64_t order) {
    constexpr size_t STACK = 1 << 16;
    if (n_arguments != int(sizeof...(A))) fail("the kernel takes another number of arguments");
    call(kernel, arguments, std::index_sequence_for<A...>{});
    grid = {sizes[0], sizes[1], sizes[2]};
    block = {sizes[3], sizes[4], sizes[5]};
    const size_t n = size_t(block.x) * block.y * block.z;
    if (n > 1024) fail("a block has at most 1024 threads");
    fibres = std::vector<Fibre>(n);
    warps = std::vector<Warp>((n + 31) / 32);
    static char* stacks = static_cast<char*>(std::aligned_alloc(64, 1024 * STACK));
    std::vector<char> memory(shared + 256);
    dynamic_shared = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 127) & ~uintptr_t(127));
    dynamic_bytes = shared;
    early = order & 1;
    const uint64_t blocks = uint64_t(grid.x) * grid.y * grid.z;
    uint64_t stride = 1, first = 0;
    if (order && blocks > 1) {
        first = random_word(order) % blocks;
        stride = blocks - 1;
    }
    for (uint64_t i = 0; i < blocks; i++) {
        const uint64_t b = (first + i * stride) % blocks;
        block_index = {unsigned(b % grid.x), unsigned(b / grid.x % grid.y), unsigned(b / grid.x / grid.y)};
        run_block(stacks, STACK, order);
    }
}

}  // namespace emulated

#define threadIdx (emulated::self->thread)
#define blockIdx emulated::block_index
#define blockDim emulated::block
#define gridDim emulated::grid
constexpr int warpSize = 32;

#define SITE int site = __builtin_LINE()
static inline void __syncthreads() { emulated::yield(emulated::AT_BLOCK, 0); }
static inline void __syncwarp(unsigned = ~0u, SITE) { emulated::yield(emulated::AT_WARP, site); }
static inline void __threadfence() {}
#define __builtin_assume(what)
static inline void __threadfence_block() {}
static inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
template <class T> inline T __shfl_sync(unsigned, T v, int from, int width = 32, SITE) {
    const int at = emulated::lane();
    return emulated::as<T>(emulated::exchange(v, site)[(at & ~(width - 1)) | (from & (width - 1))]);
}
template <class T> inline T __shfl_xor_sync(unsigned, T v, int other, int = 32, SITE) {
    const int at = emulated::lane();
    return emulated::as<T>(emulated::exchange(v, site)[at ^ other]);
}
template <class T> inline T __shfl_up_sync(unsigned, T v, unsigned n, int = 32, SITE) {
    const int at = emulated::lane();
    return emulated::as<T>(emulated::exchange(v, site)[at >= int(n) ? at - n : at]);
}
template <class T> inline T __shfl_down_sync(unsigned, T v, unsigned n, int = 32, SITE) {
    const int at = emulated::lane();
    return emulated::as<T>(emulated::exchange(v, site)[at + n < 32 ? at + n : at]);
}
static inline unsigned __ballot_sync(unsigned, int p, SITE) {
    const uint64_t* all = emulated::exchange(int(p != 0), site);
    const unsigned* steps = emulated::warp().steps[emulated::self->steps & 1];
    unsigned bits = 0;
    for (int i = 0; i < 32; i++)
        if (steps[i] == emulated::self->steps && all[i]) bits |= 1u << i;
    return bits;
}
static inline int __any_sync(unsigned m, int p, SITE) { return __ballot_sync(m, p, site) != 0; }
static inline int __all_sync(unsigned m, int p, SITE) { return __ballot_sync(m, !p, site) == 0; }
static inline unsigned __reduce_max_sync(unsigned, unsigned v, SITE) {
    const uint64_t* all = emulated::exchange(v, site);
    for (int i = 0; i < 32; i++) v = v > unsigned(all[i]) ? v : unsigned(all[i]);
    return v;
}
static inline unsigned __reduce_min_sync(unsigned, unsigned v, SITE) {
    const uint64_t* all = emulated::exchange(v, site);
    for (int i = 0; i < 32; i++) v = v < unsigned(all[i]) ? v : unsigned(all[i]);
    return v;
}
static inline unsigned __reduce_add_sync(unsigned, unsigned v, SITE) {
    const uint64_t* all = emulated::exchange(v, site);
    v = 0;
    for (int i = 0; i < 32; i++) v += unsigned(all[i]);
    return v;
}
static inline int __reduce_add_sync(unsigned m, int v, SITE) { return int(__reduce_add_sync(m, unsigned(v), site)); }
static inline unsigned __activemask() { return ~0u; }

template <class T> inline T atomicCAS(T* p, T wanted, T v) { T old = *p; if (old == wanted) *p = v; return old; }
template <class T> inline T atomicAdd(T* p, T v) { T old = *p; *p = old + v; return old; }
static inline unsigned atomicInc(unsigned* p, unsigned most) { unsigned old = *p; *p = old >= most ? 0 : old + 1; return old; }
template <class T> inline T atomicMax(T* p, T v) { T old = *p; *p = old > v ? old : v; return old; }
template <class T> inline T atomicMin(T* p, T v) { T old = *p; *p = old < v ? old : v; return old; }
template <class T> inline T atomicExch(T* p, T v) { T old = *p; *p = v; return old; }
template <class T> inline T atomicOr(T* p, T v) { T old = *p; *p = old | v; return old; }
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }
template <class T> inline void __stcg(T* p, T v) { *p = v; }

static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline int __clz(int v) { return v ? __builtin_clz(unsigned(v)) : 32; }
static inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
static inline unsigned __float_as_uint(float v) { return emulated::as<unsigned>(emulated::as<uint32_t>(0) | *reinterpret_cast<uint32_t*>(&v)); }
static inline int __float_as_int(float v) { return int(__float_as_uint(v)); }
static inline float __uint_as_float(unsigned v) { float f; std::memcpy(&f, &v, 4); return f; }
static inline float __int_as_float(int v) { return __uint_as_float(unsigned(v)); }
static inline long long __double_as_longlong(double v) { long long b; std::memcpy(&b, &v, 8); return b; }
static inline double __longlong_as_double(long long v) { double d; std::memcpy(&d, &v, 8); return d; }
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dsub_rn(double a, double b) { return a - b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline int __float2int_rn(float v) { return int(__builtin_rintf(v)); }
static inline float __int2float_rn(int v) { return float(v); }
static inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; i++) c += int(int8_t(a >> 8 * i)) * int(int8_t(b >> 8 * i));
    return c;
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
    return unsigned(((uint64_t(high) << 32) | low) >> (n & 31));
}
// An address of 32 bits: which shared variable (0 for dynamic memory), and where in it.
static inline size_t __cvta_generic_to_shared(const void* p) {
    const char* at = static_cast<const char*>(p);
    const auto& ranges = emulated::shared_ranges();
    for (size_t i = 0; i < ranges.size(); i++)
        if (at >= ranges[i].begin && at < ranges[i].begin + ranges[i].bytes) return (i + 1) << 20 | (at - ranges[i].begin);
    if (at >= emulated::dynamic_shared && at < emulated::dynamic_shared + emulated::dynamic_bytes)
        return at - emulated::dynamic_shared;
    emulated::fail("an address is not in shared memory");
}
template <class T> inline T max(T a, T b) { return a > b ? a : b; }
template <class T> inline T min(T a, T b) { return a < b ? a : b; }
using std::isfinite;
using std::isnan;

// ------------------------------------------------------------------------------------------------------ instructions

namespace emulated {

inline char* shared_pointer(unsigned address) {
    return (address >> 20 ? shared_ranges()[(address >> 20) - 1].begin : dynamic_shared) + (address & 0xfffff);
}

inline void copy_later(unsigned to, const void* from, int n) {
    if (to % n || reinterpret_cast<uintptr_t>(from) % n) fail("an asynchronous copy is not aligned to its size");
    if (early) {
        std::memcpy(shared_pointer(to), from, n);
        return;
    }
    Copy copy{shared_pointer(to), {0, 0}, n};
    std::memcpy(copy.words, from, n);
    self->open.push_back(copy);
}

// c (16 x 8) += a (16 x 4 W) * b (4 W x 8) of int8 over the fragments of a warp, W words a row and register.
template <int WORDS>
inline void multiply(int* d, const unsigned* a, const unsigned* b, const int* c) {
    unsigned all_a[32][4], all_b[32][2];
    for (int i = 0; i < 2 * WORDS; i++) {
        const uint64_t* got = exchange(a[i], 9000 + i);
        for (int l = 0; l < 32; l++) all_a[l][i] = unsigned(got[l]);
    }
    for (int i = 0; i < WORDS; i++) {
        const uint64_t* got = exchange(b[i], 9100 + i);
        for (int l = 0; l < 32; l++) all_b[l][i] = unsigned(got[l]);
    }
    const int g = lane() >> 2, t = lane() & 3;
    for (int i = 0; i < 4; i++) {
        const int row = g + (i >> 1) * 8, column = 2 * t + (i & 1);
        int sum = c[i];
        for (int k = 0; k < 16 * WORDS; k++) {
            const int word = k / 16, at = k % 16;
            const unsigned x = all_a[(row & 7) * 4 + at / 4][2 * word + (row >> 3)], y = all_b[column * 4 + at / 4][word];
            sum += int(int8_t(x >> 8 * (at & 3))) * int(int8_t(y >> 8 * (at & 3)));
        }
        d[i] = sum;
    }
}

}  // namespace emulated

static inline void ptx_dp4a_u32_s32(int& r, unsigned a, unsigned b, int c) {
    for (int i = 0; i < 4; i++) c += int(uint8_t(a >> 8 * i)) * int(int8_t(b >> 8 * i));
    r = c;
}
static inline void ptx_prmt_b32(unsigned& r, unsigned a, unsigned b, unsigned pick) {
    const uint64_t all = uint64_t(b) << 32 | a;
    r = 0;
    for (int i = 0; i < 4; i++) {
        unsigned byte = unsigned(all >> 8 * (pick >> 4 * i & 7)) & 255;
        if (pick >> 4 * i & 8) byte = byte & 128 ? 255 : 0;
        r |= byte << 8 * i;
    }
}
static inline void ptx_cvt_f32_f16(float& r, unsigned short h) { _Float16 v; std::memcpy(&v, &h, 2); r = float(v); }
static inline void ptx_cvt_rn_f16_f32(unsigned short& h, float f) { _Float16 v = _Float16(f); std::memcpy(&h, &v, 2); }
static inline void ptx_cp_async_cg_shared_global(unsigned to, const void* from) { emulated::copy_later(to, from, 16); }
static inline void ptx_cp_async_ca_shared_global(unsigned to, const void* from) { emulated::copy_later(to, from, 4); }
static inline void ptx_bar_sync(int id, int threads) {
    if (id < 1 || id > 15 || threads % 32) emulated::fail("a numbered barrier has a number of 1 to 15 and whole warps");
    emulated::group_sizes[id] = threads;
    emulated::yield(emulated::AT_GROUP, id);
}
static inline void ptx_cp_async_commit_group() {
    emulated::self->groups.push_back(emulated::self->open);
    emulated::self->open.clear();
}
static inline void ptx_cp_async_wait_group(size_t left) {
    auto& groups = emulated::self->groups;
    while (groups.size() > left) {
        emulated::land(groups.front());
        groups.erase(groups.begin());
    }
}
static inline void ptx_mma_sync_aligned_m16n8k32_row_col_s32_s8_s8_s32(
    int& d0, int& d1, int& d2, int& d3, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1,
    int c) {
    const unsigned a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    const int from[4] = {c, c, c, c};
    int to[4];
    emulated::multiply<2>(to, a, b, from);
    d0 = to[0], d1 = to[1], d2 = to[2], d3 = to[3];
}
static inline void ptx_mma_sync_aligned_m16n8k32_row_col_s32_s8_s8_s32(
    int& d0, int& d1, int& d2, int& d3, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    const unsigned a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    const int from[4] = {d0, d1, d2, d3};
    int to[4];
    emulated::multiply<2>(to, a, b, from);
    d0 = to[0], d1 = to[1], d2 = to[2], d3 = to[3];
}
static inline void ptx_mma_sync_aligned_m16n8k16_row_col_s32_s8_s8_s32(int& d0, int& d1, int& d2, int& d3, unsigned a0,
                                                                       unsigned a1, unsigned b0, int c) {
    const unsigned a[2] = {a0, a1}, b[1] = {b0};
    const int from[4] = {c, c, c, c};
    int to[4];
    emulated::multiply<1>(to, a, b, from);
    d0 = to[0], d1 = to[1], d2 = to[2], d3 = to[3];
}
// A barrier in shared memory: arrivals of a phase, those still to come, phases that have ended.
struct Mbarrier { unsigned short all, left; unsigned ended; };
static inline Mbarrier* mbarrier_at(unsigned address) {
    if (address % 8) emulated::fail("a barrier is not at a multiple of 8");
    return reinterpret_cast<Mbarrier*>(emulated::shared_pointer(address));
}
static inline void ptx_mbarrier_init_shared_b64(unsigned address, int arrivals) {
    *mbarrier_at(address) = {(unsigned short)arrivals, (unsigned short)arrivals, 0};
}
static inline void mbarrier_came(unsigned address, int arrivals, long bytes) {
    Mbarrier* b = mbarrier_at(address);
    long& to_come = emulated::bytes_to_come[address];
    b->left -= arrivals, to_come += bytes;
    if (b->left == 0 && to_come == 0) b->left = b->all, b->ended++;
}
static inline void ptx_mbarrier_arrive_shared_b64(unsigned long long&, unsigned address) { mbarrier_came(address, 1, 0); }
static inline void ptx_mbarrier_arrive_expect_tx_shared_b64(unsigned long long&, unsigned address, int bytes) {
    mbarrier_came(address, 1, bytes);
}
static inline void ptx_mbarrier_test_wait_parity_shared_b64(unsigned& done, unsigned address, unsigned parity) {
    emulated::yield(emulated::RUNNING, 0);
    done = (mbarrier_at(address)->ended & 1) != parity;
}
static inline void ptx_fence_mbarrier_init_release_cluster() {}
static inline void ptx_fence_proxy_async_shared__cta() {}
static inline void bulk_land(const emulated::Bulk& copy) {
    std::memcpy(copy.to, copy.from, copy.n);
    mbarrier_came(copy.barrier, 0, -copy.n);
}
static inline void ptx_cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes(unsigned to, const void* from, int n,
                                                                                         unsigned barrier) {
    if (to % 16 || reinterpret_cast<uintptr_t>(from) % 16 || n % 16) emulated::fail("a copy is not aligned to 16 bytes");
    const emulated::Bulk copy{barrier, emulated::shared_pointer(to), from, n};
    if (emulated::early) bulk_land(copy);
    else emulated::bulk.push_back(copy);
}
static inline void ptx_mbarrier_try_wait_parity_shared_b64(unsigned& done, unsigned address, unsigned parity) {
    auto& all = emulated::bulk;
    for (size_t i = 0; i < all.size();) {
        const emulated::Bulk copy = all[i];
        if (copy.barrier != address) { i++; continue; }
        all.erase(all.begin() + i);
        bulk_land(copy);
    }
    ptx_mbarrier_test_wait_parity_shared_b64(done, address, parity);
}
template <class T> inline void ptx_nothing(T&) {}
static inline void ptx_nanosleep_u32(unsigned) {}
static inline void ptx_prefetch_global_L2(const void* p) { (void)*(const volatile char*)p; }
static inline void ptx_mov_u64(unsigned long long& now) {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    now = t.tv_sec * 1000000000ull + t.tv_nsec;
}
static inline void ptx_ld_shared_u32(unsigned& value, unsigned address) {
    std::memcpy(&value, emulated::shared_pointer(address), 4);
}
static inline void ptx_ld_acquire_cta_shared_u32(unsigned& value, unsigned address) {
    emulated::yield(emulated::RUNNING, 0);
    std::memcpy(&value, emulated::shared_pointer(address), 4);
}
static inline void ptx_st_release_cta_shared_u32(unsigned address, unsigned value) {
    std::memcpy(emulated::shared_pointer(address), &value, 4);
}
static inline void ptx_st_shared_v4_f32(unsigned address, float a, float b, float c, float d) {
    if (address % 16) emulated::fail("a store of four words is not aligned");
    const float all[4] = {a, b, c, d};
    std::memcpy(emulated::shared_pointer(address), all, sizeof(all));
}
static inline void ptx_fence_acq_rel_cta() {}
