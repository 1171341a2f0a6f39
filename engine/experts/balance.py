"""How many of a window's missing experts the card reads itself, and how many the processor computes meanwhile, by who
waited for whom. Pure.

Where the card finds the answer there as often as it waits for it, both take the same time. So the share of the card
grows while it waits more often, and shrinks while it waits less: by a few 256ths at a time, as layers differ and other
programs come and go. A card that reads everything asks for nothing, and hears nothing; then a little is tried again
from time to time.

Units    256ths of the missing experts
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PARTS: Final = 256
LEAST_REQUESTS: Final = 256
"""Of one correction: some windows, of as many layers each."""
STEP: Final = 24
"""What a card that always waits, or never, would get in two corrections."""
SILENT: Final = 256
"""Looks without a request before the processor is tried again."""
TRIED: Final = PARTS - PARTS // 8
"""With at least eight missing experts in a layer, one of them."""


@dataclass(slots=True)
class Balance:
    """parts: of the card, 0 to PARTS."""

    parts: int
    _requests: int = 0
    _waits: int = 0
    _silent: int = 0

    def look(self, requests: int, waits: int) -> int:
        """How many requests there have been since the last look, and for how many answers the card waited -> parts."""
        self._requests += requests
        self._waits += waits
        self._silent = 0 if requests else self._silent + 1
        if self._silent >= SILENT and self.parts > TRIED:
            self.parts, self._silent = TRIED, 0
        if self._requests >= LEAST_REQUESTS:
            move = round(STEP * (self._waits / self._requests - 0.5))
            self.parts = min(max(self.parts + move, 0), PARTS)
            self._requests = self._waits = 0
        return self.parts
