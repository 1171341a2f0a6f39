"""`--prefill-head-alias`: the output head's memory holds prompt buffers while a prompt is read.

exchange   the cache is sized with the head's bytes counted as free, so it has more slots; while a prompt is read the
           head is gone, and it comes back into the reserve before the first window
in place   the reserve is smaller than the head, which could then not come back: the head keeps its memory, prompt
           buffers lie in it during a read, and its weights are copied in again. Nothing is freed

`refusal` says why the option cannot be used at all; `plan` how it is used, or why it gains nothing here.

The engine itself lends in place and without slots: loan.py says what lies where, engine/model/head_loan.py does it.

Units    bytes, tokens
Errors   Refused of `require_alias`; elsewhere a refusal is a text
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from strata.engine.memory.cache import Slots
from strata.engine.memory.prompt import Price, PromptLayout, hybrid
from strata.engine.options import Options, Refused

FLAG: Final = "--prefill-head-alias"
CANDIDATES: Final = (2048, 1536, 1024, 512)
KEPT_SLOTS: Final = 1
"""Slots that are not lent: the first."""
TRIAL_TRIES: Final = 6


@dataclass(frozen=True, slots=True)
class AliasConditions:
    """What decides whether the head's memory can be lent. The defaults are those of a command line without options.

    cards, stages   of the model · helpers: caches on other cards, or a peer device
    head            whether there is a native output head
    profile         whether the hot experts are known
    """

    serve: bool = False
    cards: int = 1
    stages: int = 1
    helpers: bool = False
    batch: int = 0
    pipeline_windows: int = 0
    short_read: int = 64
    expert_cache: int = 0
    mtp: bool = False
    head: bool = True
    borrow: bool = True
    profile: bool = False


def require_alias(options: Options, head: bool) -> None:
    """Raises Refused with the reason and the remedy when the head's memory is to be lent and cannot be. head: the model
    has one of its own. The engine lends the head alone and no slots, so it asks for no profile."""
    given = AliasConditions(
        serve=options.serve,
        batch=options.batch,
        short_read=options.short_read,
        expert_cache=options.expert_cache,
        mtp=options.mtp is not None,
        head=head,
        profile=True,
    )
    reason = refusal(given) if options.prefill_head_alias else None
    if reason is not None:
        raise Refused(reason)


def refusal(given: AliasConditions) -> str | None:
    """Why the head's memory cannot be lent, with the remedy; None when it can."""
    rules = (
        (
            not given.serve,
            "needs --serve: head and prompt buffers change places between a request's read and its decode; add --serve",
        ),
        (
            given.cards > 1 or given.stages > 1 or given.helpers,
            "works on one card: with several the head and the prompt buffers may lie on different ones; leave out "
            "--layer-split, --peer-device and --expert-cache-device",
        ),
        (
            given.batch >= 2,
            f"excludes --batch {given.batch}: slots decode while a prompt is read and need the head; leave it out",
        ),
        (
            given.pipeline_windows > 0,
            f"excludes --pipeline-windows {given.pipeline_windows}: windows in flight hold the head; leave it out",
        ),
        (
            given.short_read > 0,
            f"excludes --short-read {given.short_read}: short reads run through decode windows, without the exchange; "
            "add --short-read 0",
        ),
        (
            given.expert_cache > 1,
            f"excludes --expert-cache {given.expert_cache}: the plan sizes the cache itself; use auto or 1",
        ),
        (not given.mtp, "needs --mtp: the draft layer keeps a copy of the head's rows that it drafts with; add --mtp"),
        (
            not given.head,
            "needs a native output head: this file has none of a size of its own to unload; leave the option out",
        ),
        (
            not given.borrow,
            "excludes --no-prefill-borrow: what the head's memory does not hold lies in borrowed slots; leave that out",
        ),
        (
            not given.profile and given.expert_cache != 1,
            "needs --expert-profile: only with a known order are the last slots the coldest; name one, or use "
            "--expert-cache 1",
        ),
    )
    return next((f"{FLAG}: {reason}" for applies, reason in rules if applies), None)


def exchanges(head: int, reserve: int) -> bool:
    """Whether the head can come back into the reserve."""
    return reserve >= head


def alias_layout(slots: Slots, free: int, head: int, price: Price, most: int, exchange: bool) -> PromptLayout:
    """The prompt's buffers while a prompt is read. free: beside the cache, with the head gone when it is exchanged.
    chunk 0: no candidate fits, and the head stays."""
    return hybrid(slots, KEPT_SLOTS, free, price, CANDIDATES, most, 0 if exchange else head)


def trial_shrink(head: int, free: int, largest: int) -> int:
    """Slots to give up so that the head comes back into what is free, 0 when it does."""
    return max(0, -(-(head - free) // largest))
