// The `picked` best blocks of every row, ascending; equal scores: the lower index. A block of threads a row.
//
// A score is zero or more, so it is ordered as its bits are.
// Shapes   scores (rows, stride); list (rows, picked). Rows whose blocks do not compete are left alone.
#include "cache.cuh"
#include "select.cuh"

struct Bits {
    const u32* bits;
    DEVICE u32 operator()(int i) const { return bits[i]; }
};

struct List {
    int* list;
    DEVICE void operator()(int place, int index) const { list[place] = index; }
};

KERNEL void __launch_bounds__(1024)
    qsa_select(const float* scores, const int* positions, int* list, int stride, int r, int picked) {
    inputs_ready();
    __shared__ SelectMemory memory;
    const long long row = blockIdx.x;
    const int n = competing(positions[row], r, picked);
    if (!n) return;
    list_best(Bits{reinterpret_cast<const u32*>(scores) + row * stride}, n, picked, memory, List{list + row * picked});
}
