"""Which rows of a verify window stay: the token that was known, and the drafts that the model chose as well."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def n_kept(drafts: Sequence[int], ids: Sequence[int]) -> int:
    """Rows that stay, 1 to 1 + len(drafts). ids[i]: what the model says behind row i; row 0 is the known token.

    The drafts of the rows that stay are ids[0], ids[1], ..; the last id that counts is ids[n - 1], fed by no row.
    """
    if len(ids) != 1 + len(drafts):
        raise ValueError(f"{1 + len(drafts)} rows have as many ids, got {len(ids)}")
    for i, draft in enumerate(drafts):
        if draft != ids[i]:
            return 1 + i
    return 1 + len(drafts)


def before_end(tokens: Sequence[int], end_ids: Collection[int]) -> tuple[int, ...]:
    """The tokens up to the first end token, which is left out."""
    at = next((i for i, token in enumerate(tokens) if token in end_ids), len(tokens))
    return tuple(tokens[:at])
