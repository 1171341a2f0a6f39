"""The bytes that a kernel of a window must read or write, and so the least time it can take.

A product's are those of its matrices, as the label of its launch tells them (window_launches.py); of experts, those of
as many different experts as rows pick. Of other kernels: the tensors and the state that they are about. Activations
are left out: they stay in the second cache. None for a kernel that is not bound by bytes, or not known here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from strata.engine.pack import Pack
from strata.engine.pack.spec import ModelSpec

PRODUCT: Final = re.compile(r"^[a-z_]+ ([0-9+]+) x ([0-9]+)(?: of ([0-9]+) experts)?$")
TENSORS: Final = {
    "hyper_down": r"hc_ffn_down\.weight$",
    "hyper_window": r"hc_ffn_up\.weight$",
    "route_window": r"ffn_gate_inp\.weight$",
}
"""Kernel -> the tensors that one launch reads, those of a layer."""
READ_BYTES: Final = 1 << 30


def read_rate() -> float:
    """GB/s at which a copy on the card reads and writes together, measured now."""
    import cupy

    a, b = cupy.zeros(READ_BYTES, cupy.uint8), cupy.empty(READ_BYTES, cupy.uint8)
    times = []
    for _ in range(5):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        cupy.copyto(b, a)
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e-3)
    del a, b
    cupy.get_default_memory_pool().free_all_blocks()
    return 2 * READ_BYTES / min(times[1:]) / 1e9


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the windows of `n` sequences of a model. matrices: bytes of a row by (rows, columns) of a layer's matrices;
    gb_s: what the card's memory gives."""

    spec: ModelSpec
    tensors: Mapping[str, int]
    matrices: Mapping[tuple[int, int], int]
    n: int
    gb_s: float

    @classmethod
    def of(cls, pack: Pack, n: int, gb_s: float) -> Limits:
        matrices: dict[tuple[int, int], int] = {}
        for name in pack:
            tensor = pack[name]
            if len(tensor.shape) > 1:
                cols = int(tensor.shape[-1])
                matrices.setdefault((int(tensor.shape[-2]), cols), tensor.type.row_bytes(cols))
        sizes = {name: pack[name].data.nbytes for name in pack}
        return cls(pack.spec, sizes, matrices, n, gb_s)

    def n_bytes(self, label: str) -> int | None:
        """Of one launch."""
        if found := PRODUCT.match(label):
            return self._product([int(r) for r in found[1].split("+")], int(found[2]), int(found[3] or 0))
        if label in TENSORS:
            return next((n for name, n in self.tensors.items() if re.search(TENSORS[label], name)), None)
        if label == "gdn_window":
            s = self.spec
            return 2 * 4 * self.n * s.gdn_value_heads * s.gdn_head_dim * s.gdn_head_dim
        return None

    def _product(self, rows: list[int], cols: int, used: int) -> int | None:
        each = [self.matrices.get((r, cols)) for r in rows]
        if None in each:
            return None
        total = sum(r * b for r, b in zip(rows, each, strict=True) if b is not None)
        if not used:
            return total
        distinct = self.spec.experts * (1 - (1 - used / self.spec.experts) ** self.n)  # picks as if drawn
        gate_and_up = 2 if cols == self.spec.hidden else 1
        return round(total * distinct * gate_and_up)

    def share(self, label: str, us: float) -> str:
        """What part of a launch's time its bytes need; "" where that is not known."""
        n_bytes = self.n_bytes(label)
        return f", {n_bytes / self.gb_s / 1e3 / us:.0%} of it its bytes" if n_bytes and us > 0 else ""
