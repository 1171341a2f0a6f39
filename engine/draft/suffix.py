"""Drafts from the text itself: where its last tokens have come before, what came next there. Pure.

Copied lists, code and JSON repeat themselves; such drafts cost no pass of any model.

Cost    a scan over the tokens, some microseconds for every ten thousand, and some twenty where there are places
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from strata.kernels.ops import I32

LEAST: Final = 3
"""Tokens that must agree. With two, chance agrees too often."""
LONGEST: Final = 16
"""Beyond so many agreeing tokens the latest place wins."""
FEW: Final = 64
"""Places that are compared all at once: five steps of numpy instead of two for every token."""
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
    ends, agreed = _longest(tokens, ends)
    if agreed < LEAST:
        return NOTHING
    first = int(ends[-1]) + 1
    found: list[int] = tokens[first : first + most].tolist()
    while len(found) < most:  # the text repeats itself up to its end: the draft goes on with itself
        found.append(found[first + len(found) - n])
    return Suffix(tuple(found), agreed)


def _longest(tokens: I32, ends: npt.NDArray[np.intp]) -> tuple[npt.NDArray[np.intp], int]:
    """Those of the places whose last tokens agree most with those of the whole, and how many agree, LONGEST at most.
    All of the places agree in one."""
    n, agreed = len(tokens), 1
    while len(ends) > FEW and agreed < LONGEST:
        enough = ends[ends >= agreed]
        longer = enough[tokens[enough - agreed] == tokens[n - 1 - agreed]]
        if not len(longer):
            return ends, agreed
        ends, agreed = longer, agreed + 1
    if not len(ends) or agreed == LONGEST:
        return ends, agreed if len(ends) else 0
    back = np.arange(min(LONGEST, n))
    places = ends[:, None] - back
    same = (places >= 0) & (tokens[places] == tokens[n - 1 - back])
    lengths = np.where(same.all(1), len(back), same.argmin(1))
    agreed = int(lengths.max())
    return ends[lengths == agreed], agreed
