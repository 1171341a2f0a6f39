"""Drafts from the text itself: where its last tokens have come before, what came next there. Pure.

Copied lists, code and JSON repeat themselves; such drafts cost no pass of any model.

Cost    a scan over the tokens, some microseconds for every ten thousand
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from strata.kernels.ops import I32

LEAST: Final = 3
"""Tokens that must agree. With two, chance agrees too often."""
LONGEST: Final = 16
"""Beyond so many agreeing tokens the latest place wins."""
WINDOW: Final = 1 << 16
"""Newest tokens that are looked at: bounds the time of a scan."""


class Suffix(NamedTuple):
    """Draft tokens, and how many tokens before them agreed (0: there is no draft)."""

    tokens: tuple[int, ...]
    agreed: int


NOTHING: Final = Suffix((), 0)


def suffix_draft(tokens: I32, most: int) -> Suffix:
    """`most` tokens after int32 (n,), or none: what followed the earlier place where most of the last tokens agree.

    At least LEAST agree, more than LONGEST are not told apart; of equals the latest place is taken.
    """
    tokens = tokens[-WINDOW:]
    n = len(tokens)
    if most < 1 or n <= LEAST:
        return NOTHING
    ends = np.flatnonzero(tokens[: n - 1] == tokens[n - 1])
    agreed = 1
    while agreed < LONGEST:
        enough = ends[ends >= agreed]
        longer = enough[tokens[enough - agreed] == tokens[n - 1 - agreed]]
        if not len(longer):
            break
        ends, agreed = longer, agreed + 1
    if agreed < LEAST or not len(ends):
        return NOTHING
    first = int(ends[-1]) + 1
    found: list[int] = tokens[first : first + most].tolist()
    while len(found) < most:  # the text repeats itself up to its end: the draft goes on with itself
        found.append(found[first + len(found) - n])
    return Suffix(tuple(found), agreed)
