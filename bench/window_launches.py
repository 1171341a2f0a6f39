"""The launches of a window, one by one, to do them again: with overlapping launches or without, all or some.

    launches = Launches.of(lambda: windows.compute(layout))
    launches.overlap(False)                      # from now on, also where the engine captures them again
    launches.queue(without={"hyper_down"})       # inside a capture: all the others

The experts stay those that were picked when the launches were written down: without a kernel the rows would come to
resemble each other and share them.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from strata.engine.device.driver import Driver
from strata.kernels.cuda.arguments import address
from strata.kernels.cuda.kernel import Kernel

REPLAYS = 11
PICKED = {"route": 1, "route_window": 5}
"""Which argument of a kernel takes the picked experts."""
ADVANCES = "window_next"
"""The kernel that moves a window on: left out of replays, which stay at their position."""


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    kernel: Kernel
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arguments: tuple[Any, ...]
    shared: int

    @property
    def label(self) -> str:
        """The kernel, and the rows and columns of a product."""
        struct = self.arguments[0] if self.arguments else None
        if not isinstance(struct, np.ndarray) or not {"matrix", "cols"} <= set(struct.dtype.names or ()):
            return self.kernel.name
        rows = "+".join(str(n) for n in struct["matrix"]["rows"].tolist() if n)
        experts = (
            f" of {int(struct['used'])} experts" if "used" in (struct.dtype.names or ()) and struct["used"] else ""
        )
        return f"{self.kernel.name} {rows} x {int(struct['cols'])}{experts}"


class _Picks:
    """The experts of the last router, in memory where no later launch writes."""

    def __init__(self, earlier: _Picks | None = None) -> None:
        self._all: list[Any] = []
        self._begin = self._end = 0
        self._earlier = earlier

    def hold(self, picked: Any) -> None:
        """What a router has just written, or the same router earlier."""
        self._all.append(picked.copy() if self._earlier is None else self._earlier._all[len(self._all)])
        self._begin, self._end = address(picked), address(picked) + picked.nbytes

    def held(self, argument: Any) -> Any:
        """An argument as it is written down: a struct is copied, and reads the picks where they are held."""
        if not isinstance(argument, np.ndarray):
            return argument
        copy = argument.copy()
        if "ids" in (copy.dtype.names or ()) and self._begin <= copy["ids"] < self._end:
            copy["ids"] = int(copy["ids"]) - self._begin + address(self._all[-1])
        return copy


class Launches:
    """In the order in which they were queued."""

    def __init__(self, launches: list[Launch], picks: _Picks) -> None:
        self._all = launches
        self._picks = picks

    @classmethod
    def of(cls, work: Callable[[], Any]) -> Launches:
        """Do the work and write down what it launches."""
        found: list[Launch] = []
        picks = _Picks()
        real = Kernel.__call__

        def call(kernel: Kernel, grid: Any, block: Any, args: tuple[Any, ...], shared_mem: int = 0) -> None:
            found.append(Launch(kernel, grid, block, tuple(picks.held(a) for a in args), shared_mem))
            real(kernel, grid, block, args, shared_mem)
            if kernel.name in PICKED:
                picks.hold(args[PICKED[kernel.name]])

        with mock.patch.object(Kernel, "__call__", call):
            work()
        return cls(found, picks)

    @classmethod
    def planned(cls, work: Callable[[], Any], done: Launches) -> Launches:
        """What the work would launch if it were done again, perhaps by other kernels: nothing runs, and the experts are
        those of `done`."""
        found: list[Launch] = []
        picks = _Picks(done._picks)

        def call(kernel: Kernel, grid: Any, block: Any, args: tuple[Any, ...], shared_mem: int = 0) -> None:
            found.append(Launch(kernel, grid, block, tuple(picks.held(a) for a in args), shared_mem))
            if kernel.name in PICKED:
                picks.hold(args[PICKED[kernel.name]])

        with mock.patch.object(Kernel, "__call__", call):
            work()
        return cls(found, picks)

    def change(self, how: Callable[[Launch], Launch]) -> None:
        """Each launch is another from now on."""
        self._all = [how(launch) for launch in self._all]

    def __iter__(self) -> Iterator[Launch]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def counts(self) -> dict[str, int]:
        """Launches of each label, in the order of the first."""
        return dict(collections.Counter(launch.label for launch in self._all))

    def overlap(self, on: bool) -> None:
        """Whether these kernels may begin before their predecessors end."""
        for launch in self._all:
            launch.kernel.overlapping = on

    def prefer_shared(self, percent: int) -> None:
        """`Kernel.prefer_shared` of all of them."""
        for launch in self._all:
            launch.kernel.prefer_shared(percent)

    def queue(self, without: Collection[str] = ()) -> None:
        """Queue them again, but those that move the window on, and some labels."""
        for launch in self._all:
            if launch.label not in without and launch.label != ADVANCES:
                launch.kernel(launch.grid, launch.block, launch.arguments, launch.shared)


def microseconds(driver: Driver, launches: Launches) -> float:
    """Median time of a replay of the launches as a graph."""
    import cupy

    graph = driver.capture(launches.queue)
    times = []
    for _ in range(REPLAYS):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        graph.launch()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3)
    return float(np.median(times))
