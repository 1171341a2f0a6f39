"""Rows: what a forward pass computes. Row i is token `tokens[i]` at `positions[i]` of slot `slots[i]`.

A segment is a run of consecutive tokens of one slot: a prompt chunk, or one row of a decode window. The model never
knows which.

Errors   ValueError naming the slot and what is wrong, before anything is computed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from strata.engine.device.base import MAX_ROWS, Device
from strata.engine.model.tape import Tape
from strata.kernels.ops import I32

Tokens = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """tokens, positions, slots (n,) and segments (s, 3) of slot, begin, end: all int32, made by `Rows.of`.

    tape: where the pass leaves what a replay needs; None: nowhere
    """

    tokens: I32
    positions: I32
    slots: I32
    segments: I32
    tape: Tape | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def placed(self, device: Device) -> Rows:
        """The same rows where the device's kernels read them."""
        tokens, positions, slots, segments = device.place(
            [self.tokens, self.positions, self.slots, self.segments.reshape(-1)]
        )
        return Rows(tokens, positions, slots, segments.reshape(-1, 3), self.tape)

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
