"""Whether bytes on a card are what they were. Plain counterpart: reference/fingerprint.py.

Errors   ValueError naming the argument, the wanted and the given
Cost     the bytes are read once
"""

from __future__ import annotations

from typing import Final

import numpy as np

from strata.kernels.check import check, require
from strata.kernels.cuda.arguments import address
from strata.kernels.cuda.launch import I64, launch
from strata.kernels.cuda.workspace import DeviceArray

_THREADS: Final = 256
_WORD: Final = 8
_WORDS_OF_A_THREAD: Final = 16
_MOST_BLOCKS: Final = 2048


def fingerprint(data: DeviceArray, total: DeviceArray) -> None:
    """total += the fingerprint of data; data uint8 (n,) at a multiple of 8, total uint64 (1,)."""
    n = check(data=(data, "n", np.uint8), total=(total, "1", np.uint64))["n"]
    require(address(data) % _WORD == 0, f"data must begin at a multiple of {_WORD}, got {address(data)}")
    blocks = min(_MOST_BLOCKS, -(-n // (_THREADS * _WORD * _WORDS_OF_A_THREAD)))
    launch("fingerprint.cu", "fingerprint", (blocks,), (_THREADS,), data, total, I64(n))
