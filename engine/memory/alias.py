"""`--prefill-head-alias`: prompt buffers lie in the output head's memory while a prompt is read. When it is refused.

What lies where is in loan.py, whether it gains anything in engine/experts/choice.py. The engine and `--plan` refuse the
same command lines: those of the published table that apply. It also asks for a profile and for slots to borrow; here
the head alone is lent, so both may be missing.

Errors   Refused of `require_alias`; `refusal` is its text
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from strata.engine.options import Options, Refused

FLAG: Final = "--prefill-head-alias"


@dataclass(frozen=True, slots=True)
class AliasConditions:
    """What decides whether the head's memory can be lent. The defaults are those of a command line without options.

    cards, stages   of the model · helpers: caches on other cards, or a peer device
    head            whether there is a native output head
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


def refused(options: Options, head: bool, mtp: bool) -> str | None:
    """Why the head's memory is to be lent and cannot be. head: the model has one of its own · mtp: a draft layer is
    asked for."""
    given = AliasConditions(
        serve=options.serve,
        batch=options.batch,
        short_read=options.short_read,
        expert_cache=options.expert_cache,
        mtp=mtp,
        head=head,
    )
    return refusal(given) if options.prefill_head_alias else None


def require_alias(options: Options, head: bool) -> None:
    """Raises Refused with that reason."""
    reason = refused(options, head, options.mtp is not None)
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
    )
    return next((f"{FLAG}: {reason}" for applies, reason in rules if applies), None)
