"""The tables of the grid types as CUDA source: what `formats.cuh` looks codes up in.

table(name)    uint32 (entries, 1 or 2): four or eight codes an entry, lowest byte first. Codes of IQ2 and IQ3 are
               positive (the signs are separate); those of IQ1 are 8 * grid + 1 with 128 added (formats.cuh says why)
source(name)   the C++ text of the table, only HAS_TABLE 0 for a type without one

Source   the grids of `kernels.reference.quant`
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from strata.kernels.reference.quant import grid

GRID_OF = {name: name for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S")} | {"IQ1_M": "IQ1_S"}
"""Types with a table, and the grid that it is made of."""


@cache
def table(name: str) -> npt.NDArray[np.uint32]:
    """The table of a grid type."""
    codes = grid(GRID_OF[name])
    if GRID_OF[name] == "IQ1_S":
        codes = codes * np.int8(8) + np.int8(1)
        words = (codes.view(np.uint8) ^ np.uint8(128)).view("<u4")
    else:
        words = np.ascontiguousarray(codes).view("<u4")
    return words.astype(np.uint32)


def source(name: str) -> str:
    """`__device__ const u32 table_words[]`, and HAS_TABLE."""
    if name not in GRID_OF:
        return "#define HAS_TABLE 0\n"
    words = table(name).reshape(-1)
    lines = (", ".join(f"0x{w:08X}u" for w in words[i : i + 12]) for i in range(0, len(words), 12))
    return (
        f"#define HAS_TABLE 1\n__device__ const __align__(8) unsigned int table_words[{len(words)}] = {{\n"
        + ",\n".join(lines)
        + "};\n"
    )
