"""Launching kernels by source file and name, on the current stream.

    launch("norm.cu", "rms_norm", grid, block, x, w, y, I32(n), F32(eps))

Arguments are arrays (their address is passed), None (a null pointer) and NumPy scalars of the kernel's own types.
Grids with a size of 0 are not launched. Kernels are compiled when first asked for and kept.

Errors   those of the compiler, naming the file
Cost     some microseconds of host time a launch; nothing when a graph is replayed
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np

from strata.kernels.cuda.compile import load_kernel

I32: Final = np.int32
I64: Final = np.int64
F32: Final = np.float32

_NULL: Final = np.uint64(0)
_STATIC_SHARED: Final = 48 << 10
"""Bytes of shared memory that a block gets without asking."""

Sizes = tuple[int, ...]


@cache
def _kernel(source: str, name: str) -> Callable[..., None]:
    return load_kernel(source, name)


def launch(source: str, name: str, grid: Sizes, block: Sizes, *arguments: Any, shared: int = 0) -> None:
    """Queue the kernel `name` of src/`source`. `shared`: bytes of dynamic shared memory."""
    if 0 in grid:
        return
    kernel: Any = _kernel(source, name)
    if shared > _STATIC_SHARED and kernel.max_dynamic_shared_size_bytes < shared:
        kernel.max_dynamic_shared_size_bytes = shared
    kernel(grid, block, tuple(_NULL if a is None else a for a in arguments), shared_mem=shared)
