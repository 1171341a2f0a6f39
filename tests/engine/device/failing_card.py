"""An emulated card that has no memory left when it is asked for the n-th time: arrays, page-locked RAM, graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from strata.kernels.cuda.compile import DeviceError

WORD = "injected"


class FailingDriver:
    """`driver` but for the requests in [first, last], counted from 1. asked: what was wanted so far, in order."""

    def __init__(self, driver: Any, first: int = 0, last: int = 0) -> None:
        self._driver = driver
        self.first, self.last = first, last
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if self.first <= len(self.asked) <= self.last:
            raise DeviceError(f"no memory for {what} number {len(self.asked)} ({WORD})")

    def allocate(self, n_bytes: int) -> Any:
        self._ask("an array")
        return self._driver.allocate(n_bytes)

    def pinned(self, n_bytes: int) -> Any:
        self._ask("locked RAM")
        return self._driver.pinned(n_bytes)

    def capture(self, work: Callable[[], None]) -> Any:
        self._ask("a graph")
        return self._driver.capture(work)
