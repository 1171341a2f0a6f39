"""Launching kernels by source and name, on the current stream.

    launch("norm.cu", "rms_norm", grid, block, x, w, y, n, eps)
    launch("gdn_scan.cu", "gdn_scan", grid, block, ..., HEAD_SIZE=128)

Arguments are arrays (their address is passed), None (a null pointer) and numbers: an int is an int32 of the kernel, a
float a float32, and NumPy's are what they are; keywords are the constants that the source is compiled with. Grids with
a size of 0 are not launched. Kernels are compiled when first asked for and kept.

Errors   those of the compiler, naming the source
Cost     some microseconds of host time a launch; nothing when a graph is replayed
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from strata.kernels.cuda import compile

I32: Final = np.int32
I64: Final = np.int64
F32: Final = np.float32

Sizes = tuple[int, ...]


def launch(
    source: str, name: str, grid: Sizes, block: Sizes, *arguments: Any, shared: int = 0, **constants: int | str
) -> None:
    """Queue the kernel `name` of src/`source`. `shared`: bytes of dynamic shared memory."""
    if 0 in grid:
        return
    kernel = compile.load_kernel(source, name, **constants)
    kernel(grid, block, arguments, shared_mem=shared)
