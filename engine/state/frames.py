"""Which pages have keys and values in device memory, when it holds fewer than there are: those that came last. Pure.

    frames = Frames(n, n_pages)
    left = frames.enter(page)     # a page comes into use; None, or (page, frame): what has to be copied to RAM first
    frames.leave(page)
    frames.named(tables)          # as kernels read them: a frame, or ~p for page p at home in RAM

A page in RAM stays there: what is read of it are the few blocks that a query selects.

Cost    a pop of a list or the first key of a dict
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from strata.kernels.ops import I32


class Frames:
    """n frames for n_pages pages. place: of each page, its frame, or -1."""

    def __init__(self, n: int, n_pages: int) -> None:
        if not 0 < n < n_pages:
            raise ValueError(f"{n} frames for {n_pages} pages")
        self.n = n
        self.place: I32 = np.full(n_pages, -1, np.int32)
        self._free = list(range(n - 1, -1, -1))
        self._in: dict[int, int] = {}  # by page in the order of coming: frames

    @property
    def used(self) -> int:
        """Frames that hold pages."""
        return len(self._in)

    def enter(self, page: int) -> tuple[int, int] | None:
        """Give a page a frame. The page that leaves it for that, and the frame; None: one was free."""
        left = None
        if not self._free:
            other = next(iter(self._in))
            left = other, self._in[other]
            self.leave(other)
        frame = self._free.pop()
        self._in[page] = frame
        self.place[page] = frame
        return left

    def leave(self, page: int) -> None:
        """A page is in use no longer, or lies in RAM from now on."""
        frame = self._in.pop(page, None)
        if frame is not None:
            self._free.append(frame)
            self.place[page] = -1

    def named(self, tables: npt.NDArray[np.int32]) -> I32:
        """Tables of page numbers, -1 = none, as kernels read them."""
        place = self.place[tables]
        return np.where(tables < 0, np.int32(-1), np.where(place < 0, ~tables, place)).astype(np.int32)

    def faults(self, references: Sequence[int]) -> str | None:
        """What is wrong with the books, given the references of each page."""
        held = sorted(self._in.values())
        if sorted(held + self._free) != list(range(self.n)):
            return f"frames {held} are held and {sorted(self._free)} free, of {self.n}"
        idle = [page for page in self._in if not references[page]]
        wrong = [page for page, frame in enumerate(self.place.tolist()) if frame != self._in.get(page, -1)]
        return f"pages {idle} have frames and no holder, {wrong} others than the books say" if idle or wrong else None
