"""Whether drafts pay: measured, never guessed. Pure: times in, decisions out.

A window with drafts takes longer and may give more tokens. How long a token takes without drafts is measured for all
requests (`PlainTimes`), since a window's time hardly depends on the text. A request with drafts keeps a balance: what
each window gained or lost against its tokens without drafts, in windows without drafts, of which each gives a sequence
a token. When it has lost LOSS, it goes on without, and so do the requests after it; a try comes later, each time after
twice as many windows, until one has paid. So a try costs the time of LOSS windows and the one that passes it, whatever
the texts are like, and however many sequences a window has. The next request takes over what was lost, all of it: many
short answers that lose a little each end drafts as a long one does.

Units    milliseconds of any clock; a `key` tells apart what cannot be compared: how many sequences a window has
"""

from __future__ import annotations

from typing import Final

CALIBRATION: Final = 4
"""Windows without drafts that are measured before anything is compared."""
LOSS: Final = 3.0
"""Windows without drafts, in time, that a try may cost."""
SAVED: Final = 6.0
"""The same that a request may have gained and lose again: drafts that pay have bad stretches."""
CARRIED: Final = 2.0
"""The same that a request may leave to the next one of what it gained: one answer that drafts do not suit does not end
them for many that they do."""
FORGET: Final = 0.4
"""How fast the time of a token without drafts follows what is measured."""
FIRST_REFRESH: Final = 16
REFRESH: Final = 128
"""Windows with drafts behind which some without are measured again: the machine may have become faster or slower. The
first ones come sooner."""
PROBES: Final = 2
"""How many of them, and at most twice as many windows."""
FIRST_REST: Final = 256
MOST_REST: Final = 4096
"""Windows without drafts behind the first try that did not pay, and behind any."""
OUTLIER: Final = 3.0
"""A window of so many times the usual is counted as so many: another program had the machine, a graph was captured."""
FIRST_OUTLIER: Final = 12.0
"""A first window of so many times one without drafts is not counted at all: it loaded something."""


class PlainTimes:
    """How long a token takes without drafts, by key."""

    def __init__(self) -> None:
        self._ms: dict[int, float] = {}
        self._n: dict[int, int] = {}

    def saw(self, key: int, ms: float) -> None:
        """A token without drafts took so long."""
        n, before = self._n.get(key, 0), self._ms.get(key, ms)
        self._n[key] = n + 1
        usual = min(ms, OUTLIER * before)
        # A mean at first, which forgets from the tenth window on. Its very first window may have loaded something.
        weight = 1.0 if n <= 1 else max(1 / n, FORGET)
        self._ms[key] = before + weight * (usual - before) if n else ms

    def of(self, key: int) -> float | None:
        """Milliseconds of a token; None until enough was measured."""
        return self._ms[key] if self.known(key) else None

    def known(self, key: int, more: int = 0) -> bool:
        """Whether enough was measured, or will be after so many tokens more."""
        return self._n.get(key, 0) + more >= CALIBRATION


class Payoff:
    """Of the requests of the solo path, one after another, or of all slots together. `times` may be shared.

    off          whether drafts are off · turned_off: how often they were turned off
    """

    def __init__(self, times: PlainTimes) -> None:
        self._times = times
        self._rest = FIRST_REST
        self._left = 0
        self._refresh = FIRST_REFRESH
        self._since = 0  # windows with drafts since others were measured
        self._probes = 0.0
        self._least: dict[int, float] = {}
        self.balance = 0.0
        self.off = False
        self.turned_off = 0

    def next_request(self) -> None:
        """Another text begins, with what the last one has lost, or with a part of what that has gained."""
        self.balance = min(self.balance, CARRIED)

    def wants(self, key: int) -> bool:
        """Whether the next window has drafts."""
        return not self.off and self._since < self._refresh and self._times.of(key) is not None

    def goes_on(self) -> bool:
        """Whether a window with drafts may have another one behind it, as far as is known before it is over."""
        return not self.off and self._since + 1 < self._refresh

    def follows(self, key: int, steady: bool) -> bool:
        """What `wants` will say behind the next window without drafts, before it is over."""
        rested = self._since < self._refresh or self._probes + _probe(steady) >= PROBES
        return (not self.off or self._left <= 1) and rested and self._times.known(key, int(steady))

    def plain(self, key: int, ms: float, tokens: int, steady: bool = True) -> None:
        """A window without drafts. steady: its time is what such windows take one after another."""
        if steady:
            self._times.saw(key, ms / tokens)
        self._probes += _probe(steady)
        if self._probes >= PROBES and self._since:
            self._since, self._probes, self._refresh = 0, 0.0, min(2 * self._refresh, REFRESH)
        if self.off:
            self._left -= 1
            if self._left <= 0:
                self.off, self.balance, self._least = False, 0.0, {}

    def captured(self) -> None:
        """A window with drafts came whose time says nothing: it has captured its graph."""
        self._since, self._probes = self._since + 1, 0.0

    def drafted(self, key: int, ms: float, tokens: int) -> bool:
        """A window with drafts gave so many tokens to `key` sequences. True: drafts are off from here on. One may come
        behind that, which had been started."""
        plain, first = key * (self._times.of(key) or 0.0), key not in self._least
        least = self._least[key] = min(self._least.get(key, ms), ms)
        self._since, self._probes = self._since + 1, 0.0
        if self.off or not plain or (first and ms > FIRST_OUTLIER * plain):
            return False
        gained = tokens / key - min(ms, OUTLIER * least) / plain
        self.balance = min(self.balance + gained, SAVED)
        if self.balance > -LOSS:
            if self.balance == SAVED:
                self._rest = FIRST_REST
            return False
        self.off, self._left, self._rest = True, self._rest, min(2 * self._rest, MOST_REST)
        self.turned_off += 1
        return True

    def verdict(self, key: int) -> str:
        """Behind a `drafted` that was True, a line for the log: whose drafts they were, what they lost."""
        plain = self._times.of(key) or 0.0
        whose, rest = ("this request", "it goes") if key == 1 else (f"{key} slots", "they go")
        lost = f"they lost {-self.balance * key * plain:.1f} ms against {plain:.2f} ms a token without"
        return f"drafts of {whose} do not pay: {lost}; {rest} on without for a while"


def _probe(steady: bool) -> float:
    """What a window without drafts counts among those that are measured."""
    return 1.0 if steady else 0.5
