"""What the card gives to a kernel that does nothing else: bytes of its memory, matrix steps, multiply-adds.

    ceilings = measured(console)           # some 15 s on a card
    records(ceilings); from_records(...)   # as a report keeps them

Matrix steps are those of int8 whose sums are scaled and added in the written order, with all operands in registers
(prompt_products_cuda, "ceiling"); multiply-adds a loop of nothing else (prompt_kernels_cuda, "peak").

Errors   KeyError naming the record that a report lacks
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from rich.console import Console

from strata.bench.report import Record
from strata.kernels.formats import TensorType

GROUPS: Final = (16, 32)
MEMORY: Final = "ceiling: memory, reading"
FLOATS: Final = "ceiling: float32 multiply-adds"
STEPS: Final = "ceiling: int8 steps, groups of {}"


class Work(NamedTuple):
    """Bytes, multiply-adds, and the microseconds of these at their ceilings."""

    n_bytes: float = 0.0
    macs: float = 0.0
    macs_us: float = 0.0

    def plus(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    @staticmethod
    def total(works: Iterable[Work]) -> Work:
        out = Work()
        for work in works:
            out = out.plus(work)
        return out


@dataclass(frozen=True, slots=True)
class Ceilings:
    """gb_s: reading memory; steps: 10^12 multiply-adds a second of matrix steps, by the values of a weight's scale
    group (16, 32); floats: the same of float32."""

    gb_s: float
    steps: Mapping[int, float]
    floats: float

    def of(self, kind: TensorType) -> float:
        """10^12 multiply-adds a second with weights of this type."""
        return self.floats if kind.is_float else self.steps[16 if kind.group <= 16 else 32]

    def product(self, kind: TensorType, macs: float) -> Work:
        return Work(0.0, macs, macs / self.of(kind) / 1e6)

    def float32(self, macs: float) -> Work:
        return Work(0.0, macs, macs / self.floats / 1e6)

    def us(self, work: Work) -> float:
        """The least time: of its bytes, or of its multiply-adds."""
        return max(work.n_bytes / self.gb_s / 1e3, work.macs_us)


def records(ceilings: Ceilings) -> list[Record]:
    out = [Record.of(MEMORY, "GB/s", [ceilings.gb_s])]
    out += [Record.of(STEPS.format(group), "TMAC/s", [ceilings.steps[group]]) for group in GROUPS]
    return [*out, Record.of(FLOATS, "TMAC/s", [ceilings.floats])]


def from_records(found: Iterable[Record]) -> Ceilings:
    """As `records` wrote them."""
    by_name = {r.work: r.median for r in found}
    steps = {group: by_name[STEPS.format(group)] for group in GROUPS}
    return Ceilings(by_name[MEMORY], steps, by_name[FLOATS])


def measured(console: Console) -> Ceilings:
    """On this card, now. Takes 5 GiB of its memory, and gives them back."""
    import cupy

    found = _measured(console)
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    return found


def _measured(console: Console) -> Ceilings:
    from strata.bench.kernels_cuda import Bench
    from strata.bench.operations_cuda import Operations
    from strata.bench.prompt_kernels_cuda import peak
    from strata.bench.prompt_products_cuda import Products, ceilings

    bench = Bench(console)
    with bench.stream:
        products = Products(bench)
        ceilings(products)
        peak(Operations(bench), (0,))
    return Ceilings(bench.peak, dict(products.ceiling), bench.records[-1].median)
