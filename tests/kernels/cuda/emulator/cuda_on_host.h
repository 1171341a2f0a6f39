// CUDA on one host thread: what a .cu file needs to be compiled as C++ and run without a card.
//
// Asynchronous copies land when they are waited for, not before; with an odd order at once, since a card may do either.
// A copy that was never committed ends the program. Threads, barriers and shared memory: fibres.h.
//
// The instructions that sources write as `asm` become calls of the functions `ptx_...` at the end (emulator.py).
#pragma once
#include <time.h>

#include "fibres.h"

extern "C" {  // <math.h> of C++ reads the library's
double exp(double);
double fma(double, double, double);
double sqrt(double);
float fabsf(float);
float fmaf(float, float, float);
float fmaxf(float, float);
float fminf(float, float);
float rintf(float);
float sqrtf(float);
}

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
    const unsigned* steps = emulated::self->warp->steps[emulated::self->steps & 1];
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
static inline float __uint_as_float(unsigned v) { float f; memcpy(&f, &v, 4); return f; }
static inline float __int_as_float(int v) { return __uint_as_float(unsigned(v)); }
static inline long long __double_as_longlong(double v) { long long b; memcpy(&b, &v, 8); return b; }
static inline double __longlong_as_double(long long v) { double d; memcpy(&d, &v, 8); return d; }
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
typedef char Bytes __attribute__((vector_size(16)));
typedef short Shorts __attribute__((vector_size(16)));
typedef int Ints __attribute__((vector_size(16)));
constexpr Bytes NO_BYTES = {};
// The low 8 bytes as numbers of 16 bits.
static inline Shorts widened(Bytes v) { return Shorts(__builtin_ia32_punpcklbw128(NO_BYTES, v)) >> 8; }
static inline Shorts widened_unsigned(Bytes v) { return Shorts(__builtin_ia32_punpcklbw128(v, NO_BYTES)); }
static inline int __dp4a(int a, int b, int c) {
    const Ints sums = __builtin_ia32_pmaddwd128(widened(Bytes(Ints{a})), widened(Bytes(Ints{b})));
    return c + sums[0] + sums[1];
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
    return unsigned(((uint64_t(high) << 32) | low) >> (n & 31));
}
// An address of 32 bits: which shared variable (0 for dynamic memory), and where in it.
static inline size_t __cvta_generic_to_shared(const void* p) {
    const char* at = static_cast<const char*>(p);
    for (int i = 0; i < emulated::n_shared; i++) {
        const emulated::Range& range = emulated::shared_ranges[i];
        if (at >= range.begin && at < range.begin + range.bytes) return size_t(i + 1) << 20 | (at - range.begin);
    }
    if (at >= emulated::dynamic_shared && at < emulated::dynamic_shared + emulated::dynamic_bytes)
        return at - emulated::dynamic_shared;
    emulated::fail("an address is not in shared memory");
}
template <class T> inline T max(T a, T b) { return a > b ? a : b; }
template <class T> inline T min(T a, T b) { return a < b ? a : b; }
inline bool isfinite(float v) { return __builtin_isfinite(v); }
inline bool isfinite(double v) { return __builtin_isfinite(v); }
inline bool isnan(float v) { return __builtin_isnan(v); }
inline bool isnan(double v) { return __builtin_isnan(v); }

// ------------------------------------------------------------------------------------------------------ instructions

namespace emulated {

inline char* shared_pointer(unsigned address) {
    return (address >> 20 ? shared_ranges[(address >> 20) - 1].begin : dynamic_shared) + (address & 0xfffff);
}

inline void copy_later(unsigned to, const void* from, int n) {
    if (to % n || reinterpret_cast<uintptr_t>(from) % n) fail("an asynchronous copy is not aligned to its size");
    if (early) {
        memcpy(shared_pointer(to), from, n);
        return;
    }
    Copy copy{shared_pointer(to), {0, 0}, n};
    memcpy(copy.words, from, n);
    self->copies.add() = copy;
    self->open++;
}

// Sums of products of 16 int8 each, four of them to a sum.
inline Ints products(Bytes x, Bytes y) {
    const Shorts high_x = Shorts(__builtin_ia32_punpckhbw128(NO_BYTES, x)) >> 8;
    const Shorts high_y = Shorts(__builtin_ia32_punpckhbw128(NO_BYTES, y)) >> 8;
    return __builtin_ia32_pmaddwd128(widened(x), widened(y)) + __builtin_ia32_pmaddwd128(high_x, high_y);
}

// c (16 x 8) += a (16 x 4 W) * b (4 W x 8) of int8 over the fragments of a warp, W words a row and register.
template <int WORDS>
inline void multiply(int* d, const unsigned* a, const unsigned* b, const int* c) {
    const unsigned turn = ++self->steps & 1, l = lane();
    unsigned(*pieces)[32] = self->warp->pieces[turn];
    for (int i = 0; i < 2 * WORDS; i++) pieces[i][l] = a[i];
    for (int i = 0; i < WORDS; i++) pieces[4 + i][l] = b[i];
    yield(AT_WARP, 9000);
    const unsigned g = l >> 2, t = l & 3;
    for (unsigned i = 0; i < 4; i++) {
        Ints sums = {c[i]};
        for (int w = 0; w < WORDS; w++) {
            const unsigned* row = pieces[2 * w + (i >> 1)] + 4 * g;
            const unsigned* column = pieces[4 + w] + 4 * (2 * t + (i & 1));
            sums += products(*reinterpret_cast<const Bytes*>(row), *reinterpret_cast<const Bytes*>(column));
        }
        d[i] = sums[0] + sums[1] + sums[2] + sums[3];
    }
}

}  // namespace emulated

static inline void ptx_dp4a_u32_s32(int& r, unsigned a, unsigned b, int c) {
    const Ints sums = __builtin_ia32_pmaddwd128(widened_unsigned(Bytes(Ints{int(a)})), widened(Bytes(Ints{int(b)})));
    r = c + sums[0] + sums[1];
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
static inline void ptx_cvt_f32_f16(float& r, unsigned short h) { _Float16 v; memcpy(&v, &h, 2); r = float(v); }
static inline void ptx_sub_rn_f16x2(unsigned& r, unsigned a, unsigned b) {
    _Float16 x[2], y[2];
    memcpy(x, &a, 4), memcpy(y, &b, 4);
    for (int i = 0; i < 2; i++) x[i] = _Float16(float(x[i]) - float(y[i]));
    memcpy(&r, x, 4);
}
static inline void ptx_cvt_rn_f16_f32(unsigned short& h, float f) { _Float16 v = _Float16(f); memcpy(&h, &v, 2); }
static inline void ptx_rcp_approx_ftz_f32(float& r, float b) { r = 1.0f / b; }
static inline void ptx_cp_async_cg_shared_global(unsigned to, const void* from) { emulated::copy_later(to, from, 16); }
static inline void ptx_cp_async_ca_shared_global(unsigned to, const void* from) { emulated::copy_later(to, from, 4); }
static inline void ptx_bar_sync(int id, int threads) {
    if (id < 1 || id > 15 || threads % 32) emulated::fail("a numbered barrier has a number of 1 to 15 and whole warps");
    emulated::group_sizes[id] = threads;
    emulated::yield(emulated::AT_GROUP, id);
}
static inline void ptx_bar_arrive(int id, int threads) {
    emulated::group_sizes[id] = threads;
    emulated::at_group[id]++;
}
static inline void ptx_cp_async_commit_group() {
    emulated::self->groups.add() = emulated::self->open;
    emulated::self->open = 0;
}
static inline void ptx_cp_async_wait_group(size_t left) {
    auto& groups = emulated::self->groups;
    auto& copies = emulated::self->copies;
    const int n = groups.n > int(left) ? groups.n - int(left) : 0;
    int landed = 0;
    for (int i = 0; i < n; i++) landed += groups.items[i];
    for (int i = 0; i < landed; i++) memcpy(copies.items[i].to, copies.items[i].words, copies.items[i].n);
    copies.drop(0, landed);
    groups.drop(0, n);
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
static inline void ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned& r0, unsigned& r1, unsigned& r2, unsigned& r3,
                                                                unsigned row, SITE) {
    const uint64_t* rows = emulated::exchange(row, site);
    const int at = emulated::lane();
    unsigned* to[4] = {&r0, &r1, &r2, &r3};
    for (int i = 0; i < 4; i++) {
        const unsigned address = unsigned(rows[8 * i + at / 4]);
        if (address % 16) emulated::fail("a row of a matrix is not at a multiple of 16");
        memcpy(to[i], emulated::shared_pointer(address) + at % 4 * 4, 4);
    }
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
    long& to_come = emulated::bytes_to_come(address);
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
    memcpy(copy.to, copy.from, copy.n);
    mbarrier_came(copy.barrier, 0, -copy.n);
}
static inline void ptx_cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes(unsigned to, const void* from, int n,
                                                                                         unsigned barrier) {
    if (to % 16 || reinterpret_cast<uintptr_t>(from) % 16 || n % 16) emulated::fail("a copy is not aligned to 16 bytes");
    const emulated::Bulk copy{barrier, emulated::shared_pointer(to), from, n};
    if (emulated::early) bulk_land(copy);
    else emulated::bulk.add() = copy;
}
static inline void ptx_mbarrier_try_wait_parity_shared_b64(unsigned& done, unsigned address, unsigned parity) {
    auto& all = emulated::bulk;
    for (int i = 0; i < all.n;) {
        const emulated::Bulk copy = all.items[i];
        if (copy.barrier != address) { i++; continue; }
        all.drop(i, 1);
        bulk_land(copy);
    }
    ptx_mbarrier_test_wait_parity_shared_b64(done, address, parity);
}
template <class... T> inline void ptx_nothing(T&...) {}
static inline void ptx_nanosleep_u32(unsigned) {}
static inline void ptx_prefetch_global_L2(const void* p) { (void)*(const volatile char*)p; }
static inline void ptx_mov_u32(unsigned& multiprocessor) { multiprocessor = blockIdx.x; }
static inline void ptx_mov_u64(unsigned long long& now) {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    now = t.tv_sec * 1000000000ull + t.tv_nsec;
}
static inline void ptx_ld_shared_u32(unsigned& value, unsigned address) {
    memcpy(&value, emulated::shared_pointer(address), 4);
}
static inline void ptx_ld_acquire_cta_shared_u32(unsigned& value, unsigned address) {
    emulated::yield(emulated::RUNNING, 0);
    memcpy(&value, emulated::shared_pointer(address), 4);
}
static inline void ptx_st_release_cta_shared_u32(unsigned address, unsigned value) {
    memcpy(emulated::shared_pointer(address), &value, 4);
}
template <class... T> inline void load_words(unsigned address, T&... to) {
    if (address % (4 * sizeof...(to))) emulated::fail("a load of several words is not aligned");
    const char* from = emulated::shared_pointer(address);
    ((memcpy(&to, from, 4), from += 4), ...);
}
static inline void ptx_ld_shared_v4_f32(float& a, float& b, float& c, float& d, unsigned address) {
    load_words(address, a, b, c, d);
}
static inline void ptx_ld_shared_v2_f32(float& a, float& b, unsigned address) { load_words(address, a, b); }
static inline void ptx_st_shared_v4_f32(unsigned address, float a, float b, float c, float d) {
    if (address % 16) emulated::fail("a store of four words is not aligned");
    const float all[4] = {a, b, c, d};
    memcpy(emulated::shared_pointer(address), all, sizeof(all));
}
static inline void ptx_fence_acq_rel_cta() {}

// What begins with a predicate of one lane: an arrival, one that says how many bytes will come, a copy of them.
static inline void ptx_setp_ne_b32(unsigned barrier, int lane) {
    unsigned long long state;
    if (lane) ptx_mbarrier_arrive_shared_b64(state, barrier);
}
static inline void ptx_setp_ne_b32(unsigned barrier, unsigned bytes, int lane) {
    unsigned long long state;
    if (lane) ptx_mbarrier_arrive_expect_tx_shared_b64(state, barrier, int(bytes));
}
static inline void ptx_setp_ne_b32(unsigned to, const void* from, unsigned n, unsigned barrier, int lane) {
    if (lane) ptx_cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes(to, from, int(n), barrier);
}

// Matrix steps of four warps: a thread has its own sums of each, made when they are waited for; until then they are NaN.
namespace emulated {

constexpr int STEP_SUMS = 32;
struct Step { float* c[STEP_SUMS]; unsigned a, b; bool adds; };
struct Steps { Pile<Step> under_way; Pile<int> groups; int open; };
inline Steps steps_of[MOST_THREADS];
inline Steps& own_steps() { return steps_of[self - fibres]; }

typedef float Eight __attribute__((vector_size(32)));
// Eight halves of a row of an operand: octets of rows lie 1,024 bytes apart, eights of columns 128, rows 16.
inline Eight halves_of(unsigned operand, int row, int eight) {
    const unsigned at = ((operand & 0x3fff) << 4) + row / 8 * 1024 + eight * 128 + row % 8 * 16;
    return __builtin_ia32_vcvtph2ps256(*reinterpret_cast<const Shorts*>(shared_pointer(at)));
}

inline void make(const Step& s) {
    const int first = self->thread.x / 32 % 4 * 16, g = lane() >> 2, t = lane() & 3;
    for (int i = 0; i < STEP_SUMS; i++) {
        const int row = first + g + (i & 2) * 4, column = i / 4 * 8 + 2 * t + (i & 1);
        const Eight both = halves_of(s.a, row, 0) * halves_of(s.b, column, 0) + halves_of(s.a, row, 1) * halves_of(s.b, column, 1);
        float sum = s.adds ? *s.c[i] : 0.0f;
        for (int k = 0; k < 8; k++) sum += both[k];
        *s.c[i] = sum;
    }
}

}  // namespace emulated

template <class... T>
inline void begin_step(unsigned a, unsigned b, int adds, T&... c) {
    static_assert(sizeof...(c) == emulated::STEP_SUMS);
    emulated::Step step{{&c...}, a, b, adds != 0};
    if (!adds) ((c = __builtin_nanf("")), ...);
    emulated::own_steps().under_way.add() = step;
    emulated::own_steps().open++;
}
#define FLOATS4(n) float &n##0, float &n##1, float &n##2, float &n##3
#define NAMES4(n) n##0, n##1, n##2, n##3
static inline void ptx_setp_ne_b32(FLOATS4(a), FLOATS4(b), FLOATS4(c), FLOATS4(d), FLOATS4(e), FLOATS4(f), FLOATS4(g),
                                   FLOATS4(h), unsigned x, unsigned y, int adds) {
    begin_step(x, y, adds, NAMES4(a), NAMES4(b), NAMES4(c), NAMES4(d), NAMES4(e), NAMES4(f), NAMES4(g), NAMES4(h));
}
static inline void ptx_wgmma_fence_sync_aligned() {}
static inline void ptx_wgmma_commit_group_sync_aligned() {
    emulated::own_steps().groups.add() = emulated::own_steps().open;
    emulated::own_steps().open = 0;
}
static inline void ptx_wgmma_wait_group_sync_aligned(int left) {
    emulated::Steps& own = emulated::own_steps();
    const int n = own.groups.n > left ? own.groups.n - left : 0;
    int made = 0;
    for (int i = 0; i < n; i++) made += own.groups.items[i];
    for (int i = 0; i < made; i++) emulated::make(own.under_way.items[i]);
    own.under_way.drop(0, made);
    own.groups.drop(0, n);
}
