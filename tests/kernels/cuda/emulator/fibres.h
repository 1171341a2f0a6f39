// The threads of a block as fibres of one host thread: their turns, their barriers, their shared memory.
//
// Every thread has its own stack. A fibre runs until it meets a barrier (of its warp or of the block), then the next one
// that can run does, in an order that can be shuffled: a missing barrier shows as a result that depends on the order.
// Blocks run one after another, in an order that can be shuffled too. Shared memory is filled with NaN before each
// block. A barrier that can never be met and a shuffle met at different lines end the program.
//
// No header of the C++ library is read: some hundred kernels include this one, and those were most of each compile.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

extern "C" {  // <stdlib.h> of C++ reads the library's
[[noreturn]] void abort();
void* aligned_alloc(size_t, size_t);
void* realloc(void*, size_t);
void free(void*);
}

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };

namespace emulated {

constexpr int MOST_THREADS = 1024;
constexpr size_t STACK = (1 << 16) + 13 * 64;  // not a power of two: the tops of stacks would share few cache lines

enum Wait { RUNNING, AT_WARP, AT_BLOCK, AT_GROUP, ENDED };

// A list that grows and keeps its memory.
template <class T> struct Pile {
    T* items;
    int n, room;
    T& add() {
        if (n == room) items = static_cast<T*>(realloc(items, (room = 2 * room + 8) * sizeof(T)));
        return items[n++];
    }
    void drop(int first, int count) {
        n -= count;
        for (int i = first; i < n; i++) items[i] = items[i + count];
    }
};

struct Copy { void* to; uint64_t words[2]; int n; };

struct alignas(16) Warp {
    unsigned pieces[2][6][32];  // of matrices
    uint64_t slots[2][32];
    unsigned steps[2][32];
    int alive, waiting, site;
};

struct Fibre {
    void* stack_pointer;
    uint3 thread;
    Wait wait;
    int group;
    unsigned steps, lane;
    Warp* warp;
    Pile<Copy> copies;  // committed ones, then `open` others
    Pile<int> groups;   // committed copies of each group
    int open;
};

inline dim3 grid, block;
inline uint3 block_index;
inline Fibre* self;
inline Fibre fibres[MOST_THREADS];
inline Warp warps[MOST_THREADS / 32];
inline void* scheduler_pointer;
inline void (*body)();
inline char* dynamic_shared;
inline size_t dynamic_bytes, dynamic_room;
inline bool early;  // asynchronous copies land at once

inline Fibre* turn[MOST_THREADS];             // those that run in this round
inline int n_turn, at;
inline uint64_t ready[MOST_THREADS / 64];     // a bit a fibre: those that run in the next one
inline Warp* met[MOST_THREADS / 32];          // warps all of whose lanes wait
inline int n_met;
inline int live, at_block;
inline int group_sizes[16], at_group[16];     // threads that a numbered barrier waits for, that wait

struct Bulk { unsigned barrier; char* to; const void* from; int n; };
inline Pile<Bulk> bulk;  // copies that a barrier tells the end of
struct Coming { unsigned barrier; long bytes; };
inline Pile<Coming> coming;
inline long& bytes_to_come(unsigned barrier) {
    for (int i = 0; i < coming.n; i++)
        if (coming.items[i].barrier == barrier) return coming.items[i].bytes;
    return (coming.add() = {barrier, 0}).bytes;
}

struct Range { char* begin; size_t bytes; };
inline Range shared_ranges[64];
inline int n_shared;
[[noreturn]] inline void fail(const char* what) {
    fprintf(stderr, "emulated block (%u, %u, %u): %s\n", block_index.x, block_index.y, block_index.z, what);
    abort();
}
inline bool know(char* begin, size_t bytes) {
    if (n_shared == 64) fail("more than 64 shared variables");
    shared_ranges[n_shared++] = {begin, bytes};
    return true;
}

// The shared variable of one declaration.
template <class T, int SITE_NUMBER> struct Shared {
    alignas(128) static inline char bytes[sizeof(T)];
    static inline const bool known = know(bytes, sizeof(T));
};
template <class T, int SITE_NUMBER> inline T& shared() {
    (void)Shared<T, SITE_NUMBER>::known;
    return *reinterpret_cast<T*>(Shared<T, SITE_NUMBER>::bytes);
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
    popq %rcx
    jmpq *%rcx
)");
extern "C" void emulated_switch(void** save, void* to) __asm__("emulated_switch");

inline void set_ready(Fibre& f) {
    f.wait = RUNNING;
    ready[(&f - fibres) >> 6] |= uint64_t(1) << ((&f - fibres) & 63);
}

// Wait, and let the next fibre of this round run.
__attribute__((noinline)) inline void yield(Wait wait, int site) {
    Fibre& f = *self;
    Warp& w = *f.warp;
    f.wait = wait;
    if (wait == AT_WARP) {
        if (w.waiting && w.site != site) fail("lanes of a warp meet at different lines");
        w.site = site;
        if (++w.waiting == w.alive) met[n_met++] = &w;
    } else if (wait == AT_BLOCK) {
        at_block++;
    } else if (wait == AT_GROUP) {
        f.group = site;
        at_group[site]++;
    } else if (wait == ENDED) {
        live--;
        if (--w.alive == w.waiting && w.waiting) met[n_met++] = &w;
    } else {
        set_ready(f);
    }
    void* to = scheduler_pointer;
    if (++at < n_turn) {
        self = turn[at];
        to = self->stack_pointer;
    }
    emulated_switch(&f.stack_pointer, to);
}

inline void entry() {
    body();
    if (self->open) fail("a thread ended with copies that it never committed");
    yield(ENDED, 0);
    fail("an ended thread was run");
}

inline unsigned lane() { return self->lane; }

// Give every lane of the warp the values of all lanes. All lanes must meet at the same line.
template <class T> inline const uint64_t* exchange(T value, int site) {
    static_assert(sizeof(T) <= 8);
    const unsigned turn = ++self->steps & 1;
    Warp& w = *self->warp;
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    w.slots[turn][lane()] = bits;
    w.steps[turn][lane()] = self->steps;
    yield(AT_WARP, site);
    return w.slots[turn];
}

template <class T> inline T as(uint64_t bits) {
    T value;
    memcpy(&value, &bits, sizeof(T));
    return value;
}

inline uint64_t random_word(uint64_t& state) {
    state += 0x9E3779B97F4A7C15ull;
    uint64_t z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

// Set those ready that have met at barriers.
inline void release(int n) {
    for (int i = 0; i < n_met; i++) {
        Fibre* first = fibres + (met[i] - warps) * 32;
        for (Fibre* f = first; f < first + 32 && f < fibres + n; f++)
            if (f->wait == AT_WARP) set_ready(*f);
        met[i]->waiting = 0;
    }
    n_met = 0;
    if (at_block && at_block == live) {
        for (Fibre* f = fibres; f < fibres + n; f++)
            if (f->wait == AT_BLOCK) set_ready(*f);
        at_block = 0;
    }
    for (int g = 1; g < 16; g++) {
        if (!at_group[g] || at_group[g] != group_sizes[g]) continue;
        for (Fibre* f = fibres; f < fibres + n; f++)
            if (f->wait == AT_GROUP && f->group == g) set_ready(*f);
        at_group[g] = 0;
    }
}

// The fibres of the next round, shuffled unless `order` is 0.
inline void take_turns(int n, uint64_t& order) {
    n_turn = at = 0;
    for (int i = 0; i < n; i += 64) {
        for (uint64_t word = ready[i >> 6]; word; word &= word - 1) turn[n_turn++] = fibres + i + __builtin_ctzll(word);
        ready[i >> 6] = 0;
    }
    if (!order) return;
    for (int i = n_turn - 1; i > 0; i--) {
        const int j = (random_word(order) >> 32) * (i + 1) >> 32;
        Fibre* other = turn[i];
        turn[i] = turn[j];
        turn[j] = other;
    }
}

inline void run_block(char* stacks, int n, uint64_t& order) {
    for (int i = 0; i < n_shared; i++) memset(shared_ranges[i].begin, 0xff, shared_ranges[i].bytes);
    memset(dynamic_shared, 0xff, dynamic_bytes);
    for (int w = 0; w < n; w += 32) warps[w >> 5].alive = n - w < 32 ? n - w : 32, warps[w >> 5].waiting = 0;
    for (int i = 0; i < n; i++) {
        Fibre& f = fibres[i];
        f.thread = {i % block.x, i / block.x % block.y, i / block.x / block.y};
        f.steps = 0;
        f.copies.n = f.groups.n = f.open = 0;
        void** top = reinterpret_cast<void**>(stacks + (i + 1) * STACK) - 2;
        top[0] = reinterpret_cast<void*>(&entry);
        top[1] = nullptr;
        f.stack_pointer = top - 6;
        set_ready(f);
    }
    live = n, at_block = coming.n = 0;
    memset(at_group, 0, sizeof(at_group));
    for (;;) {
        take_turns(n, order);
        if (!n_turn) break;
        self = turn[0];
        emulated_switch(&scheduler_pointer, self->stack_pointer);
        release(n);
    }
    if (live) fail("threads wait at barriers that the others never reach");
    if (bulk.n) fail("it ended before its copies");
}

template <size_t... I> struct Indices {};

template <class... A> struct Call {
    static inline void** arguments;
    static inline void (*kernel)(A...);
    template <size_t... I> static void with(Indices<I...>) { kernel(*reinterpret_cast<A*>(arguments[I])...); }
    static void run() { with(Indices<__integer_pack(sizeof...(A))...>()); }
};

// `stacks`: memory for MOST_THREADS of STACK bytes, at a multiple of 64.
template <class... A>
inline void launch(void (*kernel)(A...), void** arguments, int n_arguments, const unsigned* sizes, size_t shared,
                   uint64_t order, char* stacks) {
    if (n_arguments != int(sizeof...(A))) fail("the kernel takes another number of arguments");
    Call<A...>::arguments = arguments;
    Call<A...>::kernel = kernel;
    body = Call<A...>::run;
    grid = {sizes[0], sizes[1], sizes[2]};
    block = {sizes[3], sizes[4], sizes[5]};
    const size_t n = size_t(block.x) * block.y * block.z;
    if (n > MOST_THREADS) fail("a block has at most 1024 threads");
    for (size_t i = 0; i < n; i++) fibres[i].warp = warps + i / 32, fibres[i].lane = i % 32;
    if (shared > dynamic_room || !dynamic_shared) {
        free(dynamic_shared);
        dynamic_room = (shared | 1023) + 1;
        dynamic_shared = static_cast<char*>(aligned_alloc(128, dynamic_room));
    }
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
        run_block(stacks, int(n), order);
    }
}

}  // namespace emulated
