"""Outcomes of tests, as outcome_lines.py writes them: checks of a report, and a log that says what failed.

A log has the last lines of every failure, then a line a file with counts and seconds, no more than LINES in all. Names
of folders are those of the repository; of other files the name alone is kept.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from strata.bench.report import FOLDERS, Check

TOLD: Final = 300
"""Characters of a failure in a report."""
TEXTS: Final = 4
"""Failures of a file in a report."""
LINES: Final = 200
TAIL: Final = 8
"""Last lines of a failure in a log."""
WIDTH: Final = 160
"""Characters of a line of a failure."""
SAID: Final = 20
"""Lines of what a process said."""
OF_NOTE: Final = ("=========", "Fatal Python error")
"""What lines of compute-sanitizer hold, and of an interpreter that breaks down."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one test: its file · name · passed, failed or skipped · what it said, in short and whole · seconds."""

    file: str
    name: str
    kind: str
    text: str = ""
    whole: str = ""
    seconds: float = 0.0

    @property
    def folder(self) -> str:
        """What it is a test of: the folder below tests/, or its file."""
        parts = PurePosixPath(self.file).parts
        return parts[1] if len(parts) > 2 and parts[0] == "tests" else self.file


def outcomes(lines: Path) -> Iterator[Outcome]:
    """Of a file. What is no whole line was being written when its process ended."""
    for line in lines.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield msgspec.json.decode(line, type=Outcome)


def told(said: str) -> list[str]:
    """Of what a process said: its first lines of note, then its last others, without folders of the machine."""
    lines = [line.rstrip()[:WIDTH] for line in said.splitlines() if line.strip()]
    of_note = [line for line in lines if any(mark in line for mark in OF_NOTE)]
    others = [line for line in lines if not any(mark in line for mark in OF_NOTE)]
    return [FOLDERS.sub("", line) for line in (*of_note[:SAID], *others[-SAID:])]


def held(found: Sequence[Outcome]) -> str:
    """What these are tests of: "bench, engine"."""
    return ", ".join(sorted({outcome.folder for outcome in found}))


def counted(found: Sequence[Outcome]) -> str:
    """ "1 failed, 2 passed" """
    return ", ".join(f"{n} {kind}" for kind, n in sorted(Counter(outcome.kind for outcome in found).items()))


def by_file(found: Sequence[Outcome]) -> list[tuple[str, list[Outcome]]]:
    files: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in found:
        files[outcome.file].append(outcome)
    return sorted(files.items())


def checks(found: Sequence[Outcome], how: str = "") -> list[Check]:
    """One a file."""
    made = []
    for file, mine in by_file(found):
        texts = "".join(f"; {text}" for text in [outcome.text for outcome in mine if outcome.text][:TEXTS])
        failed = any(outcome.kind == "failed" for outcome in mine)
        made.append(Check(f"{file}{how}", not failed, f"{counted(mine)}{texts}"))
    return made


def summary(title: str, found: Sequence[Outcome]) -> list[str]:
    """Lines of a part for a log: its title, then a line a file."""
    width = max((len(outcome.file) for outcome in found), default=0)
    lines = [
        f"  {file:{width}}  {sum(outcome.seconds for outcome in mine):8.2f} s  {counted(mine)}"
        for file, mine in by_file(found)
    ]
    return ["", title, *lines]


def failures(found: Sequence[Outcome]) -> list[str]:
    """The last lines of every failure, without folders of the machine."""
    lines = []
    for outcome in found:
        if outcome.kind == "failed":
            said = [line for line in outcome.whole.splitlines() if line.strip()][-TAIL:]
            lines += [f"FAILED {outcome.file}::{outcome.name}", *(f"    {line[:WIDTH]}" for line in said)]
    return [FOLDERS.sub("", line) for line in lines]


def log_text(*parts: Sequence[str]) -> str:
    """A log of these lines in turn; those beyond LINES are counted, not kept."""
    lines = [line for part in parts for line in part]
    left = len(lines) - LINES
    kept = [*lines[: LINES - 1], f"and {left + 1} lines more"] if left > 0 else lines
    return "\n".join(kept).rstrip() + "\n"
