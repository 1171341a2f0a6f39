// The product of quantised weights with the rows of a window (row_job.cuh; experts also by matrix steps, tile_job.cuh).
//
// Constants: TILED = 1 for tile_job.cuh, those of the job, and blocks that a multiprocessor's registers hold (BESIDE).
#define TRACES_ENTRY
#include "device.cuh"
#include "formats.cuh"
#include "items.cuh"
#include "own_scales.cuh"
#include "quantize.cuh"
#if TILED
#include "tile_job.cuh"
#else
#include "row_job.cuh"
#endif

KERNEL __launch_bounds__(32 * WARPS, BESIDE) void product_row(PARAMETER Arguments a) {
    extern __shared__ __align__(16) u8 shared[];
    trace_entry();
    __shared__ Found found;
    __shared__ u64 barriers[BULK ? WARPS * DEPTH : 1];
    if (a.early) next_may_come();
    Job job(a, shared, barriers);
    const bool picks = has_picks(a);
    if (picks) {
        expect_picks(a);
        table_to_shared(shared + a.at_grid);
        if (a.older) prepare_inputs(a, shared, 0);
        if (!a.early) inputs_ready();
    }
    if (job.warp == 0) job.finder.find(&found);
    else if (picks && !a.older) prepare_inputs(a, shared, 1);
    __syncthreads();
    job.begin(found);
    if (!picks) {
        table_to_shared(shared + a.at_grid);
        if (!a.early) inputs_ready();
        prepare_inputs(a, shared, 0);
        __syncthreads();
    }
    if (!a.early) trace_mark(2);
    job.work(found);
    if (!a.early) trace_mark(3);
    if (a.early) inputs_ready();
    if (Job::JOINS) {
        __syncthreads();
        trace_mark(4);
        join_pairs(a, job.finder, a.beside ? a.beside + Share(a.n * a.matrix[0].rows).begin : 0);
    }
}
