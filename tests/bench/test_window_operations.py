"""The bench of a window's kernels without a card: every case reaches its launches, in every way to cut them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strata.bench import window_operations
from strata.bench.kernels_cuda import Bench
from strata.kernels.cuda import card, compile
from strata.kernels.cuda.backend import CudaKernels
from strata.kernels.cuda.product_variants import CARDS
from strata.kernels.cuda.workspace import ALIGNMENT, Workspace

MEMORY = 1 << 26


class Host:
    """NumPy in the place of CuPy; all numbers are zero."""

    class random:
        @staticmethod
        def standard_normal(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
            return np.zeros(shape, dtype)

        @staticmethod
        def randint(_low: int, _high: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
            return np.zeros(shape, dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


class Operations:
    """As operations_cuda.Operations, on the host."""

    def __init__(self) -> None:
        self.cp = Host()
        memory = np.zeros(MEMORY + ALIGNMENT, np.uint8)
        begin = -memory.ctypes.data % ALIGNMENT
        self.bench = Bench.__new__(Bench)
        self.bench.cp, self.bench.rng = self.cp, np.random.default_rng(0)
        self.bench.workspace = Workspace(memory[begin : begin + MEMORY])
        self.kernels = CudaKernels(self.bench.workspace)

    def f(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        return np.zeros(shape, np.float32)

    def ints(self, values: Any) -> np.ndarray:
        return np.asarray(values, np.int32)


def test_every_case_of_the_bench_launches_something_and_has_partners_to_compare(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(card, "card", lambda: CARDS[90])
    monkeypatch.setattr(window_operations, "LAYERS", 1)
    ops, groups, labels = Operations(), {}, set()
    for section in ("floats", "delta", "attention", "ends"):
        for case in getattr(window_operations, section)(ops):
            with compile.collecting() as jobs, case.patched(), ops.bench.workspace.scratch():
                case.calls[0]()
            assert jobs, case.label
            assert case.label not in labels
            labels.add(case.label)
            groups.setdefault(case.group, []).append(case.label)
    assert all(len(cases) > 1 for group, cases in groups.items() if group)
