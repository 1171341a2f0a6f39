"""What the scheduler wants done, and what a request hears."""

from __future__ import annotations

from dataclasses import dataclass

from strata.protocol.lines import Command, Done, Progress, Resume, Reused, Token

from .job import Job


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of a request that did not get its DONE."""

    status: int
    message: str


Event = Resume | Progress | Reused | Token | Done | Failed
"""A request hears RESUME and PP of its own prompt, its tokens, and one Done or Failed, whatever legs it has."""


@dataclass(frozen=True, slots=True)
class StartEngine:
    pass


@dataclass(frozen=True, slots=True)
class Send:
    command: Command


@dataclass(frozen=True, slots=True)
class Settle:
    """Call `settled` after `seconds`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Deliver:
    job: Job
    event: Event


@dataclass(frozen=True, slots=True)
class Ended:
    """The job left the scheduler; always its last effect. `end` is None when it never reached the engine."""

    job: Job
    end: Done | Failed | None


@dataclass(frozen=True, slots=True)
class Note:
    """A decision, for the log."""

    job: Job
    text: str


Effect = StartEngine | Send | Settle | Deliver | Ended | Note
