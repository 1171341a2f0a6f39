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
        self._kept: OrderedDict[str, array[int]] = OrderedDict()
        self.n_bytes = 0

    def get(self, text: str) -> array[int] | None:
        """The ids, which must not be changed; None when they are not kept."""
        with self._lock:
            ids = self._kept.get(text)
            if ids is not None:
                self._kept.move_to_end(text)
            return ids

    def put(self, text: str, ids: array[int]) -> None:
        if len(text) < LEAST_CHARS or _size(text, ids) > self._limit:
            return
        with self._lock:
            if text in self._kept:
                return
            self._kept[text] = ids
            self.n_bytes += _size(text, ids)
            while self.n_bytes > self._limit:
                self.n_bytes -= _size(*self._kept.popitem(last=False))


def _size(text: str, ids: array[int]) -> int:
    return sys.getsizeof(text) + ids.itemsize * len(ids) + _ENTRY_BYTES
