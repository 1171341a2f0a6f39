// The product of a token's experts, and that of the expert that every token has, in one launch. Order of summation: ops.py,
// `product`.
//
// Each block has a part of both (row_job.cuh, tile_job.cuh). Gate and up of the shared expert are computed while the kernel before, the
// router, still picks: the inputs are older than it (`older`), and it does not know the result. With DOWN the shared expert's
// outputs of a block are those that the block joins: they stay in its shared memory.
//
// Constants: those of product_row.cu for the experts, and SIDE_TYPE, SIDE_MODE (GATE_UP, or DENSE beside DOWN), SIDE_SPANS,
// SIDE_ITEMS, SIDE_COLUMNS, SIDE_PARTS, SIDE_DEPTH for the shared expert, whose type has no table. `at`: where its part of
// shared memory begins; beside GATE_UP it may lie in the stages, which the experts need later.
#define TRACES_ENTRY
#include "device.cuh"
#include "formats.cuh"
#include "items.cuh"
#include "own_scales.cuh"
#include "quantize.cuh"

namespace picked {
#if TILED
#define FORESEES 0
#include "tile_job.cuh"
#else
#define FORESEES 1  // plans turns of one row before its experts are known
#include "row_job.cuh"
#endif
}

#undef TILED
#undef TYPE
#undef MODE
#undef SPANS
#undef ITEMS
#undef COLUMNS
#undef PARTS
#undef DEPTH
#undef COPIES
#undef HERE
#undef HAS_TABLE
#define TILED 0
#define TYPE SIDE_TYPE
#define MODE SIDE_MODE
#define SPANS SIDE_SPANS
#define ITEMS SIDE_ITEMS
#define COLUMNS SIDE_COLUMNS
#define PARTS SIDE_PARTS
#define DEPTH SIDE_DEPTH
#define COPIES 1
#define HERE (MODE == DENSE)
#define HAS_TABLE 0

namespace shared_by_all {
#include "row_job.cuh"
}

KERNEL __launch_bounds__(32 * WARPS, BESIDE)
    void product_row_beside(PARAMETER picked::Arguments a, PARAMETER shared_by_all::Arguments b, int at) {
    extern __shared__ __align__(16) u8 shared[];
    trace_entry();
    __shared__ picked::Found found;
    __shared__ shared_by_all::Found side_found;
    __shared__ u64 barriers[BULK ? WARPS * picked::Job::AHEAD : 1];
    __shared__ u64 side_barriers[BULK ? WARPS * shared_by_all::Job::AHEAD : 1];
    picked::Job job(a, shared, barriers);
    shared_by_all::Job side(b, shared + at, side_barriers);
    if (picked::Job::JOINS) {
        if (job.warp == 0) job.finder.find(&found);
        if (job.warp == 1) side.finder.find(&side_found);
        __syncthreads();
        side.begin(side_found);
        job.begin(found);
        picked::table_to_shared(shared + a.at_grid);
        inputs_ready();
        const int first = WARPS - picked::clamp(2 * WARPS / (a.used + 1), 1, WARPS / 2);  // a read of either takes a while
        if (job.warp >= first) shared_by_all::prepare_inputs(b, side.shared, first);
        else picked::prepare_inputs(a, shared, 0, first);
        __syncthreads();
        trace_mark(2);
        side.work(side_found);
        trace_mark(3);
        job.work(found);
        trace_mark(4);
        __syncthreads();
        trace_mark(5);
        picked::join_pairs(a, job.finder, side.finder.y);
        trace_mark(6);
    } else {
        picked::expect_picks(a);
        if (side.warp == 0) side.finder.find(&side_found);
        else shared_by_all::prepare_inputs(b, side.shared, 1);
#if FORESEES
        if (a.n == 1 && side.warp == 1) job.finder.expect_pairs(&found);
#endif
        __syncthreads();
        side.begin(side_found);
        picked::table_to_shared(shared + a.at_grid);
        picked::prepare_inputs(a, shared, 0);
        side.work(side_found);
#if FORESEES
        bool begun = job.foresees(a, found);
        if (begun) job.plan(found, 0);
#else
        const bool begun = false;
#endif
        __syncthreads();
        picked::runs_may_write();  // where the shared expert's part was
        inputs_ready();
#if FORESEES
        begun = begun && job.begin_foreseen();
#endif
        if (!begun) {
            if (job.warp == 0) job.finder.find(&found);
            trace_mark(7);
            __syncthreads();
            job.begin(found);
        }
        trace_mark(8);
        job.work(found);
        trace_mark(4);
    }
}
