"""Whose turn it is: the order of the queue, and which read gives way to whom. Pure functions over requests.

Source   docs/scheduling.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .job import Job

MOST_YIELDS = 2  # times that a request gives way
MOST_RETURNS = 2  # times that it goes back to the solo path


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the configuration says."""

    max_queue: int = 0  # requests that wait and were never sent; 0: no limit
    returns_to_solo: bool = True
    short_first: int = 0  # tokens up to which a new prompt goes before longer ones; 0: in order of arrival
    short_after_s: float = 30.0  # a longer one that has waited so long counts as short


def in_order(waiting: Sequence[Job], rules: Rules, now: float) -> list[Job]:
    """The queue in the order in which the lines are given. A request that continues counts as short."""

    def is_long(job: Job) -> bool:
        is_short = job.has_run or len(job.prompt) <= rules.short_first or now - job.arrived >= rules.short_after_s
        return rules.short_first > 0 and not is_short

    return sorted(waiting, key=is_long)  # stable: among equals the order of arrival


def gives_way_to(n_read: int, other: Job) -> bool:
    """Whether a read of `n_read` tokens gives way to `other`: at most half as long."""
    return 2 * other.length <= n_read


def may_give_way(job: Job) -> bool:
    """Whether a request that reads can be asked: twice in its life, once a read, and not with pictures."""
    return job.n_yields < MOST_YIELDS and not job.leg.asked and job.pictures is None
