"""What the host does for windows on a card, for --stats and for benchmarks."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Final, NamedTuple

_LAP: Final = re.compile(r"request: host work ([0-9.]+) us a window over ([0-9]+) windows")


class Lap(NamedTuple):
    """What the host did for a window of one request, and how many such windows there were."""

    us: float
    windows: int

    def __str__(self) -> str:
        return f"request: host work {self.us:.1f} us a window over {self.windows} windows"


def laps(text: str) -> list[Lap]:
    """Of the log of an engine with --stats, one a request, in the order of the requests."""
    return [Lap(float(us), int(windows)) for us, windows in _LAP.findall(text)]


@dataclass(slots=True)
class WindowCost:
    """What the host does between two waits, over windows that were started ahead. Seconds.

    Between two waits lies all that it does: tokens are decided and written as lines, commands are looked for, the
    schedule takes its next step, the window after the next one is started.

    ahead      windows and rounds that were started ahead · dropped: of these, for nothing
    verified   windows with drafts · verifying: what the host did for them beside waiting · replayed: states of slots
               that were taken back behind them
    rounds     windows that decided about their drafts on the card · round_tokens: what they gave
    """

    windows: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    ahead: int = 0
    dropped: int = 0
    verified: int = 0
    verifying: float = 0.0
    replayed: int = 0
    rounds: int = 0
    round_tokens: int = 0
    _left: float = field(default=0.0)
    _told: tuple[int, float] = field(default=(0, 0.0))

    def enter(self, counts: bool) -> None:
        """A wait begins; `counts`: since the last one there was nothing but one window's work."""
        spent = time.perf_counter() - self._left
        if counts and self._left:
            self.windows += 1
            self.seconds += spent
            self.longest = max(self.longest, spent)

    def leave(self) -> None:
        """It is over."""
        self._left = time.perf_counter()

    def interrupt(self) -> None:
        """Something else than windows comes, or nothing for a while: the time until the next wait is no window's."""
        self._left = 0.0

    def lap(self) -> Lap:
        """Since the last lap."""
        windows, seconds = self.windows - self._told[0], self.seconds - self._told[1]
        self._told = self.windows, self.seconds
        return Lap(seconds / windows * 1e6 if windows else 0.0, windows)

    def __str__(self) -> str:
        mean = self.seconds / self.windows if self.windows else 0.0
        said = (
            f"host work {mean * 1e6:.0f} us a window over {self.windows} windows, at most {self.longest * 1e6:.0f} us; "
            f"{self.ahead} windows started ahead, {self.dropped} of them for nothing"
        )
        if self.rounds:
            said += f"; {self.rounds} rounds, {self.round_tokens / self.rounds:.2f} tokens each"
        if not self.verified:
            return said
        each = self.verifying / self.verified
        return (
            f"{said}; {self.verified} windows with drafts, {each * 1e6:.0f} us each, {self.replayed} states taken back"
        )
