"""Ids of texts that were encoded lately: the turns of a conversation come again with every request of it.

A text is a stretch of a prompt without special tokens; its ids do not depend on what stands around it, so what is kept
is what encoding it again would give.

Bounds    KEPT_BYTES of texts and ids, those used longest ago go first; a text that alone is larger is not kept
Threads   any
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import OrderedDict
from typing import Final

KEPT_BYTES: Final = 32 << 20
"""Sixteen conversations of 262,144 tokens: about a MiB of text and one of ids each."""
LEAST_CHARS: Final = 32
"""A shorter text is encoded in less time than it takes to look after it."""
_ENTRY_BYTES: Final = 256


class KeptIds:
    """Text -> ids."""

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[array[int], int]] = OrderedDict()  # with what each was counted as
        self.n_bytes = 0

    def get(self, text: str) -> array[int] | None:
        """The ids, which must not be changed; None when they are not kept."""
        with self._lock:
            found = self._kept.get(text)
            if found is None:
                return None
            self._kept.move_to_end(text)
            return found[0]

    def put(self, text: str, ids: array[int]) -> None:
        # Counted once: a text grows by its UTF-8 form when a library has asked for that.
        size = sys.getsizeof(text) + ids.itemsize * len(ids) + _ENTRY_BYTES
        if len(text) < LEAST_CHARS or size > self._limit:
            return
        with self._lock:
            if text in self._kept:
                return
            self._kept[text] = ids, size
            self.n_bytes += size
            while self.n_bytes > self._limit:
                _, (_, gone) = self._kept.popitem(last=False)
                self.n_bytes -= gone
