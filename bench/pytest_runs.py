"""Processes of pytest beside each other: what came of their tests, what they said, and an end to all that they started.

    with Stop(seconds) as stop:
        ended = run_beside([(program before it, words), ...], stop)

A process that breaks down, or is stopped, keeps the outcomes of the tests that were over (outcome_lines.py).

Errors   none of the tests; OSError when a program is not there
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from strata.bench.outcomes import Outcome, outcomes

PYTEST: Final = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_LOOK_S: Final = 0.1
_GRACE_S: Final = 2.0
"""A process that is stopped has so long to leave by itself."""


class Stop:
    """Whether runs are to end before their tests are over, and why: a signal came, or the time is over.

    A signal that comes once more, as `timeout` sends it, changes nothing.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds if seconds else float("inf")
        self._signal = ""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        self._before = {number: signal.signal(number, self._came) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _came(self, number: int, _: FrameType | None) -> None:
        self._signal = self._signal or signal.Signals(number).name

    @property
    def why(self) -> str:
        """ "": go on."""
        return self._signal or (f"{self._seconds:g} s are over" if time.monotonic() > self._end else "")


@dataclass(frozen=True, slots=True)
class Ended:
    """A process: its exit code, below 0 the signal that ended it · what came of its tests · all that it said."""

    code: int
    found: list[Outcome]
    said: str


class _Run:
    """A process and its files."""

    def __init__(self, words: Sequence[str], under: Sequence[str], name: Path) -> None:
        self._lines, self._said = name.with_suffix(".jsonl"), name.with_suffix(".txt")
        more = ("-p", "strata.bench.outcome_lines", f"--outcomes={self._lines}")
        with self._said.open("wb") as out:
            self._process = subprocess.Popen(
                [*under, *PYTEST, *more, *words], stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._shown = 0

    @property
    def over(self) -> bool:
        return self._process.poll() is not None

    def show(self) -> None:
        """What it has said since."""
        with self._said.open("rb") as said:
            said.seek(self._shown)
            new = said.read()
        self._shown += len(new)
        sys.stdout.write(new.decode(errors="replace"))
        sys.stdout.flush()

    def signal(self, number: int) -> None:
        """To it and to all that it has started, also where it has left these behind."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def wait(self, seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(seconds, 0))

    def ended(self) -> Ended:
        found = list(outcomes(self._lines)) if self._lines.exists() else []
        return Ended(self._process.wait(), found, self._said.read_text(errors="replace"))


def run_beside(each: Sequence[tuple[Sequence[str], Sequence[str]]], stop: Stop) -> list[Ended]:
    """Pytest with each of these words, all at once, each behind the words of a program; what it says goes to stdout."""
    with tempfile.TemporaryDirectory() as folder:
        runs: list[_Run] = []
        try:
            for i, (under, words) in enumerate(each):
                runs.append(_Run(words, under, Path(folder) / str(i)))
            while not all(run.over for run in runs) and not stop.why:
                time.sleep(_LOOK_S)
                for run in runs:
                    run.show()
        finally:
            _end(runs)
        return [run.ended() for run in runs]


def _end(runs: Sequence[_Run]) -> None:
    """Nothing of them goes on."""
    for run in runs:
        if not run.over:
            run.signal(signal.SIGTERM)
    until = time.monotonic() + _GRACE_S
    for run in runs:
        run.wait(until - time.monotonic())
        run.signal(signal.SIGKILL)
        run.show()
