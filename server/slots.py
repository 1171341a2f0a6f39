"""The server's picture of the engine's slots: who is in them, what they hold, and which one a prompt goes to.

What a slot holds is a guess that costs nothing when it is wrong: the engine looks for the longest prefix itself. Only
the accounts (idle, reserved, admitting, busy) must be right.

Order    groups are contiguous in the engine; slots are taken in turn from each group, so that neighbours in time decode
         in different groups of a pipeline
Cost     a choice compares the prompt with what each free slot holds: a few copies of at most 1 MiB
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from .job import Job

LEAST_SHARED = 1  # tokens that prompt and slot must share before a slot counts as holding its conversation
LEAST_SHARED_GROUPS = 512  # with several groups, where an unlucky place costs more than reading a few tokens


class Use(enum.StrEnum):
    IDLE = "idle"
    RESERVED = "reserved"  # keeps the part that was read of a request which gave way, or will
    ADMITTING = "admitting"
    BUSY = "busy"


@dataclass(slots=True)
class Slot:
    index: int
    group: int
    place: int  # in the order in which empty slots are taken
    use: Use = Use.IDLE
    job: Job | None = None  # None exactly when idle
    held: array[int] = field(default_factory=lambda: array("i"))
    n_turn: int = 0  # length of the prefix at which it has a checkpoint, 0: none
    last_used: int = 0


class Choice(NamedTuple):
    slot: Slot
    why: str


class SlotTable:
    """`n_slots` 0: the engine has none. `keeps`: an ended slot holds its conversation."""

    def __init__(self, n_slots: int = 0, n_groups: int = 1, keeps: bool = False, turn_token: int | None = None) -> None:
        groups = n_groups if n_groups > 0 and n_slots % n_groups == 0 else 1
        size = n_slots // groups
        self.slots = [Slot(i, group=i // size, place=i % size * groups + i // size) for i in range(n_slots)]
        self._has_groups = groups > 1
        self._keeps = keeps
        self._turn_token = turn_token
        self._uses = 0

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def n_free(self) -> int:
        return sum(slot.use is Use.IDLE for slot in self.slots)

    @property
    def n_busy(self) -> int:
        """Slots that an admission or a running request has."""
        return sum(slot.use in (Use.ADMITTING, Use.BUSY) for slot in self.slots)

    def is_only(self, job: Job) -> bool:
        """Whether nobody else has a slot to be admitted to or to run in."""
        return all(slot.job is job or slot.use not in (Use.ADMITTING, Use.BUSY) for slot in self.slots)

    def job_in(self, index: int) -> Job | None:
        """Who decodes in a slot."""
        slot = self.slots[index] if 0 <= index < len(self.slots) else None
        return slot.job if slot is not None and slot.use is Use.BUSY else None

    def take(self, index: int, job: Job, use: Use) -> None:
        slot = self.slots[index]
        assert use is not Use.IDLE and slot.job in (None, job), "a slot has one owner"
        self._uses += 1
        slot.use, slot.job, slot.last_used, job.slot = use, job, self._uses, index

    def free(self, job: Job) -> None:
        """Give back the slot of `job`, if it has one; what it holds stays."""
        if job.slot is not None:
            slot = self.slots[job.slot]
            slot.use, slot.job, job.slot = Use.IDLE, None, None

    def left_by(self, job: Job, *, is_usable: bool = True) -> None:
        """The stay of `job` is over: its slot holds prompt and output but for the last token."""
        assert job.slot is not None
        slot = self.slots[job.slot]
        if is_usable and self._keeps and job.keys.ckpt and job.pictures is None:
            slot.held = (job.prompt + job.output)[:-1]
            slot.n_turn = _last(self._turn_token, job.prompt)
        else:
            slot.held, slot.n_turn = array("i"), 0
        self.free(job)

    def keeps_part(self, job: Job, ids: array[int]) -> None:
        """A read gave way: `ids` wait in the slot of `job`."""
        assert job.slot is not None
        self.take(job.slot, job, Use.RESERVED)
        self.slots[job.slot].held, self.slots[job.slot].n_turn = ids, 0

    def choose(self, prompt: array[int]) -> Choice | None:
        """The slot for a prompt: its conversation's, else an empty one, else the one used longest ago."""
        free = sorted((slot for slot in self.slots if slot.use is Use.IDLE), key=lambda slot: slot.place)
        if not free:
            return None
        least = LEAST_SHARED_GROUPS if self._has_groups else LEAST_SHARED
        shared = {slot.index: common_prefix(prompt, slot.held) for slot in free}

        def longest(fits: Callable[[Slot], int]) -> Slot | None:
            best = max(free, key=fits)
            return best if fits(best) >= least else None

        def whole(slot: Slot) -> int:
            n = len(slot.held)
            return n if n < len(prompt) and shared[slot.index] == n else 0

        def to_turn(slot: Slot) -> int:
            common = shared[slot.index]
            return slot.n_turn if slot.n_turn <= min(common, len(prompt) - 1) and 2 * common > len(slot.held) else 0

        if slot := longest(whole):
            return Choice(slot, f"it holds {len(slot.held)} tokens of the prompt")
        if slot := longest(to_turn):
            return Choice(slot, f"its checkpoint at {slot.n_turn} is in the prompt")
        crowd = [0] * (max(slot.group for slot in self.slots) + 1)
        for slot in self.slots:
            crowd[slot.group] += self._has_groups and slot.use is not Use.IDLE
        slot = min(free, key=lambda slot: (crowd[slot.group], bool(slot.held), slot.last_used, slot.place))
        return Choice(slot, "it was used longest ago" if slot.held else "it is empty")


def common_prefix(a: array[int], b: array[int]) -> int:
    """Leading tokens that are equal."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low + 1 < high:  # equal up to `low`, not up to `high`
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _last(token: int | None, ids: array[int]) -> int:
    """The position of the last `token`, 0 when there is none."""
    if token is None or token not in ids:
        return 0
    return len(ids) - 1 - ids[::-1].index(token)
