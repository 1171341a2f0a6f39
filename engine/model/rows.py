"""Rows: what a forward pass computes. Row i is token `tokens[i]` at `positions[i]` of slot `slots[i]`.

A segment is a run of consecutive tokens of one slot: a prompt chunk, or one row of a decode window. The model never
knows which.

Errors   ValueError naming the slot and what is wrong, before anything is computed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from strata.engine.device.base import MAX_ROWS, Device
from strata.engine.model.tape import Tape
from strata.kernels.ops import I32

Tokens = Sequence[int] | npt.NDArray[np.integer]
RUN_GRID: Final = 64
"""Runs of rows begin at multiples of it, so their arrays are as aligned as whole ones; none is as short as a window."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """tokens, positions, slots (n,) and segments (s, 3) of slot, begin, end: all int32, made by `Rows.of`.

    tape: where the pass leaves what a replay needs; None: nowhere
    runs: of placed rows, the parts that mixers of tokens take one after the other, with the rows of each; empty: all at
    once
    """

    tokens: I32
    positions: I32
    slots: I32
    segments: I32
    tape: Tape | None = None
    runs: tuple[tuple[slice, Rows], ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def placed(self, device: Device) -> Rows:
        """The same rows where the device's kernels read them."""
        cut = cuts(len(self), device.mixer_rows)
        parts = [part_of(self.segments, *edges) for edges in pairwise(cut)] if len(cut) > 2 else []
        tokens, positions, slots, segments, *of_parts = device.place(
            [self.tokens, self.positions, self.slots, *(each.reshape(-1) for each in (self.segments, *parts))]
        )
        runs = []
        for (begin, end), part in zip(pairwise(cut), of_parts, strict=False):
            run = slice(begin, end)
            runs.append((run, Rows(tokens[run], positions[run], slots[run], part.reshape(-1, 3))))
        return Rows(tokens, positions, slots, segments.reshape(-1, 3), self.tape, tuple(runs))

    @classmethod
    def of(cls, parts: Sequence[tuple[int, int, Tokens]]) -> Rows:
        """Rows of (slot, position of the first token, tokens) parts, one per slot, in the order given."""
        begins = np.cumsum([0, *(len(tokens) for _, _, tokens in parts)])
        n = int(begins[-1])
        if not 0 < n <= MAX_ROWS:
            raise ValueError(f"a forward pass takes 1 to {MAX_ROWS} rows, got {n}; cut the prompt into chunks")
        tokens, positions, slots = (np.empty(n, np.int32) for _ in range(3))
        for (slot, start, ids), begin in zip(parts, begins.tolist(), strict=False):
            if slot < 0 or start < 0 or not len(ids):
                raise ValueError(f"slot {slot}: {len(ids)} tokens at position {start}")
            end = begin + len(ids)
            tokens[begin:end] = ids
            positions[begin:end] = np.arange(start, start + len(ids))
            slots[begin:end] = slot
        owners = [slot for slot, _, _ in parts]
        if len(set(owners)) != len(owners):
            raise ValueError(f"a slot has one part in a forward pass, got slots {owners}")
        return cls(tokens, positions, slots, np.array([owners, begins[:-1], begins[1:]], np.int32).T.copy())


def cuts(n: int, most: int) -> list[int]:
    """Where runs of n rows begin and the last one ends: alike in length, and of at most `most` rows, a multiple of
    RUN_GRID; 0: one of all."""
    if not most or n <= most:
        return [0, n]
    steps, runs = -(-n // RUN_GRID), -(-n // most)
    edges = [RUN_GRID * (steps * i // runs) for i in range(runs)]
    return [*edges, n]


def part_of(segments: I32, begin: int, end: int) -> I32:
    """The segments of rows [begin, end), counted from `begin`. A slot that has rows before them is gone on with where
    these have left it, which is the other row that its name in a segment says (`Recurrent.name`)."""
    part = segments[(segments[:, 1] < end) & (segments[:, 2] > begin)].copy()
    goes_on = part[:, 1] < begin
    part[goes_on, 0] = (part[goes_on, 0] & 0xFFFF) ^ (part[goes_on, 0] >> 16)
    part[:, 1:] = np.clip(part[:, 1:], begin, end) - begin
    return part
