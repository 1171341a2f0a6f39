"""What became of the drafts of a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DraftCounts:
    """Draft tokens that the model checked, and those that it said as well; of these, from the text itself; windows."""

    offered: int = 0
    accepted: int = 0
    suffix_offered: int = 0
    suffix_accepted: int = 0
    windows: int = 0

    @property
    def of_text(self) -> tuple[int, int, int]:
        """Accepted and offered drafts from the text, and windows with drafts: fields 18 to 20 of DONE."""
        return self.suffix_accepted, self.suffix_offered, self.windows

    def add(self, offered: int, accepted: int, of_layer: int) -> None:
        """A window with drafts, of which the first `of_layer` came from the draft layer."""
        self.windows += 1
        self.offered += offered
        self.accepted += accepted
        self.suffix_offered += offered - of_layer
        self.suffix_accepted += max(0, accepted - of_layer)
