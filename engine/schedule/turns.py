"""Whose turn it is while a prompt is read beside decoding slots, and when a read gives way. Pure.

Pieces   one prompt chunk, then the slots decode for a share of the time that it took, at least one window
Source   docs/protocol.md; Y1 to Y7 are the conditions of a BYIELD in its order
"""

from __future__ import annotations

from dataclasses import dataclass


class Share:
    """The time that decoding slots have between two chunks of a read.

    share   of the time of a chunk; 0: none
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._left_ms = 0.0
        self._window_ms = 0.0
        self._owes_window = False

    @property
    def is_due(self) -> bool:
        """Whether the slots have a window before the next chunk."""
        return self._owes_window or self._left_ms > 0

    @property
    def is_due_again(self) -> bool:
        """Whether another window will follow the next one, if that takes as long as the last."""
        return self._left_ms > self._window_ms

    def earn(self, chunk_ms: float) -> None:
        """A chunk has been read. What was left of the one before is forfeit."""
        self._left_ms = self._share * chunk_ms
        self._owes_window = self._share > 0

    def spend(self, window_ms: float) -> None:
        """The slots have had a window."""
        self._left_ms -= window_ms
        self._window_ms = window_ms
        self._owes_window = False

    def forfeit(self) -> None:
        """The read is over."""
        self._left_ms, self._owes_window = 0.0, False


@dataclass(frozen=True, slots=True)
class Standing:
    """A read at a chunk boundary, as a BYIELD finds it.

    own      the slot of an admission, None for a solo request
    left     prompt tokens still to be read
    chunk    most tokens of the next chunk
    """

    own: int | None
    left: int
    chunk: int


def keeps_reading(
    slot: int, read: Standing | None, *, n_slots: int, is_free: bool, prompt_cache: bool, short_read: int
) -> str | None:
    """Why a BYIELD for `slot` is not taken, or None when the read gives way.

    read: None when no prompt is being read · is_free: the slot is there and does not decode
    """
    if read is None:
        return "no prompt is being read"
    if not is_free:
        return f"slot {slot} decodes" if 0 <= slot < n_slots else f"there are {n_slots} slots"
    if read.own is not None and read.own != slot:
        return f"the prompt is read for slot {read.own}"
    if not prompt_cache:
        return "--prompt-cache is 0"
    least = max(read.chunk, short_read)
    if read.left <= least:
        return f"{read.left} tokens are left to read, not more than {least}"
    return None
