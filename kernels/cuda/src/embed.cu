// The residual of rows from their embeddings: table rows to look up, and C equal streams.
#include "device.cuh"

// tokens (n,) -> rows (n,)
KERNEL void __launch_bounds__(256) embed_rows(const int* tokens, long long* rows, int n) {
    inputs_ready();
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i < n) rows[i] = tokens[i];
}

// e (n, H) -> x (n, C, H); `quarter` = H / 4
KERNEL void __launch_bounds__(128) embed_streams(const float4* e, float4* x, int quarter, int streams) {
    inputs_ready();
    const int i = blockIdx.x * 128 + threadIdx.x;
    if (i >= quarter) return;
    const long long row = blockIdx.y;
    const float4 v = e[row * quarter + i];
    for (int c = 0; c < streams; c++) x[(row * streams + c) * quarter + i] = v;
}
