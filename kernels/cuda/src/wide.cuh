// What prompt_wide.cu multiplies, and how it lies in memory and in shared memory: weights (prompt_wide_weights.cu) and inputs
// (prompt_wide_inputs.cu) as halves, which have every int8, in steps of 64 columns.
//
// A step's halves lie in octets of rows: octet r / 8 has 1,024 bytes, 128 for each eight columns, 16 a row. That is what the
// matrix steps of four warps read without meeting a bank twice. Within a span of 32 the columns are in the order of the
// int8: half k of the span, then 4 t + e of the byte e of lane t's word (product_prompt.cu).
#pragma once

enum {
    WIDE_STEP = 64,
    WIDE_OCTET = 1024,         // bytes of eight rows of a step
    WIDE_ROWS = 128,           // of a tile of weights
    WIDE_COLUMNS = 192,        // activation rows of a tile
    WIDE_INPUTS = WIDE_COLUMNS * WIDE_STEP * 2,
    WIDE_FETCHED = WIDE_INPUTS + WIDE_COLUMNS * (WIDE_STEP / 32) * 4  // with the scales of two spans
};

// Four int8 as halves, in their order.
DEVICE uint2 halves(u32 bytes) {
    const u32 above = bytes ^ 0x80808080, thousand = 0x64646464;  // 1,024 + 128 + each, a half whose last bits they are
    u32 low, high;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(low) : "r"(permute(above, thousand, 0x4140)), "r"(0x64806480));
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(high) : "r"(permute(above, thousand, 0x4342)), "r"(0x64806480));
    return make_uint2(low, high);
}
