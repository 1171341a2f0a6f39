"""A draft vocabulary: the tokens that the draft layer may propose, so that it reads a part of the output matrix only.

File     text, a token id a line; what follows a # is a comment. `strata-bench draft-vocab` makes one from a corpus
Errors   ValueError in one line: what is wrong, and where
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from strata.kernels.ops import I32

MOST_BYTES: Final = 64 << 20
LEAST: Final = 16
"""Tokens below which a draft is a matter of luck."""


def read_vocabulary(path: Path | str, vocab: int) -> I32:
    """The ids of a file in ascending order, int32 (n,). They are below `vocab`, each is there once."""
    with Path(path).open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{path} is larger than {MOST_BYTES >> 20} MiB")
    found = set()
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        word = line.partition("#")[0].strip()
        if not word:
            continue
        if not (word.isascii() and word.isdigit() and len(word) <= 10) or int(word) >= vocab:
            raise ValueError(f"{path}, line {number}: wants a token id from 0 to {vocab - 1}")
        found.add(int(word))
    if len(found) < min(LEAST, vocab):
        raise ValueError(f"{path} has {len(found)} tokens, a draft vocabulary has at least {min(LEAST, vocab)}")
    return np.array(sorted(found), np.int32)
