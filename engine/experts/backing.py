"""Memory for the expert cache: as planned, or as much as the card really gives.

Between a plan and its memory other programs take some, and a driver may back a piece by paging out another. So a size
that is refused is planned again at three quarters, and a cache that nobody gave a size is written once and shrinks
where less is free behind it than what comes there needs. A smaller cache is another placement, so `again` plans it.

Units    bytes
Errors   DeviceError: the card refuses every size, or what is left holds no prompt
Cost     the cache's bytes through the card's memory, once a try
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from strata.engine.device.arena import Account, shown
from strata.engine.device.driver import Array, Driver
from strata.engine.experts.plan import TierPlan
from strata.engine.log import log
from strata.engine.memory.cache import REFUSAL_TRIES, after_refusal, shrink_after_fill
from strata.kernels.cuda.compile import DeviceError

REMEDY = "use a smaller --expert-cache"


class Card(Protocol):
    """What memory comes from."""

    driver: Driver
    account: Account


def backed(
    card: Card, plan: TierPlan, again: Callable[[int], TierPlan], behind: Callable[[TierPlan], int] | None
) -> tuple[TierPlan, Array]:
    """The plan in force, and its cache: uint8 of zeros. again: the plan with a cache of so many bytes at most · behind:
    what is taken behind the cache or stays free; None: the cache keeps the size that was asked for, if it is there."""
    refused = shrunk = 0
    while True:
        n_bytes = plan.placement.cache_bytes
        largest = max(size.n_bytes for size in plan.placement.sizes)
        try:
            cache = card.account.take(n_bytes, "the expert cache", REMEDY)
        except DeviceError as error:
            refused, less = refused + 1, after_refusal(n_bytes, largest)
            if refused == REFUSAL_TRIES or not less:
                raise
            log(f"expert cache: {error}; {shown(less)} are tried")
        else:
            card.driver.zero(cache)
            card.driver.synchronize()
            free, wanted = card.account.memory().free, 0 if behind is None else behind(plan)
            surplus = shrink_after_fill(free, wanted, n_bytes, shrunk)
            if not surplus:
                return plan, cache
            shrunk, less = shrunk + 1, (n_bytes - surplus) // largest * largest
            log(
                f"expert cache: behind {shown(n_bytes)} that were written {shown(free)} are free, {shown(wanted)} are "
                f"needed; {shown(less)} are tried"
            )
            del cache
            card.account.give(n_bytes)
        plan = again(less)
