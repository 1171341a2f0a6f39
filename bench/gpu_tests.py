"""`python -m strata.bench.gpu_tests`: the tests on a card, and their outcome as a report.

    python -m strata.bench.gpu_tests --json FILE [--log FILE] [--workers 8] [--only PATH ...] [--covering]
        [--sanitize [--every N]]

First the tests of the kernels in several processes that share the card, then all others in as many; last, one after the
other, those that ask the driver what is free (marked `whole_card`). --sanitize: the tests of the kernels under
compute-sanitizer's memcheck instead, which runs them a hundred times slower or more: --every N takes each N-th test of
every file, --covering those of tests/kernels/cuda/covering.txt, which launch every kernel, small, with every type. A
file of tests is a check of the report; a record is the seconds of a part, named by what its tests are of.
--log: a line a file with counts and seconds, and the last lines of every failure (outcomes.py).
Exit code 1 when a test failed, or when none ran.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from strata.bench.outcomes import Outcome, checks, counted, failures, held, log_text, outcomes, summary
from strata.bench.report import Check, Record, Report, show

KERNELS = "tests/kernels/cuda"
KERNELS_ABOVE = "tests/kernels"
COVERING = f"{KERNELS}/covering.txt"
REST = ("tests/engine", "tests/server", "tests/bench")
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
SHARED, ALONE = "gpu and not whole_card", "gpu and whole_card"
NONE_FOUND = 5
"""Pytest's exit code when nothing was found: files given by --only need not have tests of every kind."""


@dataclass(frozen=True, slots=True)
class Part:
    """Tests run by one pytest · those of which marks · its words · a program before it · whether it may find none · how
    they run, where that is not as most do."""

    paths: tuple[str, ...]
    marks: str = "gpu"
    words: tuple[str, ...] = ()
    under: tuple[str, ...] = ()
    may_be_empty: bool = False
    how: str = ""

    def run(self) -> Ran:
        """Pytest, and what came of it."""
        with tempfile.TemporaryDirectory() as folder:
            junit, begun = Path(folder) / "junit.xml", time.monotonic()
            words = ["-m", self.marks, f"--junitxml={junit}", *self.words, *self.paths]
            code = subprocess.run([*self.under, *PYTEST, *words], check=False).returncode
            found = list(outcomes(junit)) if junit.exists() else []
        return Ran(self, code, found, time.monotonic() - begun)


@dataclass(frozen=True, slots=True)
class Ran:
    """A part, pytest's exit code, the outcomes of its tests, seconds."""

    part: Part
    code: int
    found: list[Outcome]
    seconds: float

    @property
    def well(self) -> bool:
        return self.code == 0 or (self.code == NONE_FOUND and self.part.may_be_empty)

    @property
    def name(self) -> str:
        """What its tests are of, and how they ran."""
        return (held(self.found) or ", ".join(self.part.paths)) + self.part.how

    @property
    def record(self) -> Record:
        return Record.of(f"{self.name}: {len(self.found)} tests", "s", [self.seconds])

    @property
    def checks(self) -> list[Check]:
        return [Check(f"{self.name}: exit code", self.well, str(self.code)), *checks(self.found, self.part.how)]

    @property
    def lines(self) -> list[str]:
        """For a log."""
        said = counted(self.found) or "no tests"
        return summary(f"{self.name}: {said} in {self.seconds:.1f} s, exit code {self.code}", self.found)


def sampled(paths: Sequence[str], every: int) -> list[str]:
    """Names of the tests on a card: of every file the first and each `every`-th after it."""
    found = subprocess.run(
        [*PYTEST, "-m", "gpu", "-o", "addopts=", "--collect-only", *paths], capture_output=True, text=True, check=False
    ).stdout
    by_file: dict[str, list[str]] = defaultdict(list)
    for line in found.splitlines():
        if "::" in line:
            by_file[line.partition("::")[0]].append(line.strip())
    return [name for names in by_file.values() for name in names[::every]]


def covered(text: str) -> dict[str, list[str]]:
    """Tests of covering.txt, and what they are there for: sources of kernels, `source:type` where these have types."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {f"{KERNELS}/{test}": names.split() for test, _, names in (line.partition(" : ") for line in lines)}


def parts(only: Sequence[str], workers: int, sanitize: bool, every: int = 1, covering: bool = False) -> list[Part]:
    """Raises FileNotFoundError when the sanitizer is not there, or the list of --covering."""
    shared = ("-n", str(workers), "--dist", "loadgroup") if workers > 1 else ()
    if covering:
        only = list(covered(Path(COVERING).read_text()))
    if sanitize:
        program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
        if not program:
            raise FileNotFoundError("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
        under = (program, "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "9")
        paths = tuple(only) or (KERNELS,)
        if every > 1:
            paths = tuple(sampled(paths, every))
        return [Part(paths, words=("-v", *shared), under=under, how=" under memcheck")]
    kernels = [p for p in only if p.startswith(KERNELS_ABOVE)] if only else [KERNELS]
    rest = [p for p in only if not p.startswith(KERNELS_ABOVE)] if only else list(REST)
    some = bool(only)
    found = [
        Part(tuple(kernels), words=shared, may_be_empty=some and not covering),
        Part(tuple(rest), SHARED, shared, may_be_empty=some),
        Part(tuple(rest), ALONE, may_be_empty=some, how=" alone on the card"),
    ]
    return [part for part in found if part.paths]


def log_of(report: Report, ran: Sequence[Ran]) -> str:
    """When, on what, with which flags; then failures and files."""
    flags = ", ".join(f"{name} {value}" for name, value in report.flags.items() if value)
    head = [f"gpu_tests, {report.date}: {report.machine.get('gpu') or 'no card'}", flags]
    failed = [line for each in ran for line in failures(each.found)]
    return log_text(head, ["", *failed] if failed else [], *(each.lines for each in ran))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument("--log", type=Path, metavar="FILE", help="write a line a file of tests and what failed there")
    parser.add_argument("--workers", type=int, default=8, help="processes that share the card (8)")
    parser.add_argument("--sanitize", action="store_true", help="the kernels' tests under compute-sanitizer memcheck")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="with --sanitize: each N-th test (1: all)")
    parser.add_argument(
        "--covering", action="store_true", help="few small tests of the kernels that launch every one, with every type"
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="PATH", help="these files or folders of tests")
    args = parser.parse_args(argv)
    console = Console()
    if args.covering and (args.only or args.every > 1):
        parser.error("--covering is a choice of tests, as --only and --every are: give one of them")
    try:
        todo = parts(args.only, args.workers, args.sanitize, max(1, args.every), args.covering)
    except FileNotFoundError as error:
        console.print(str(error))
        return 2
    ran = [each for each in (part.run() for part in todo) if each.found or not each.well]
    n_tests = sum(len(each.found) for each in ran)
    all_checks = [check for each in ran for check in each.checks] + [Check("tests ran", n_tests > 0, str(n_tests))]
    flags = {name: getattr(args, name) for name in ("workers", "sanitize", "every", "covering", "only")}
    report = Report(tool="gpu_tests", records=[each.record for each in ran], checks=all_checks, flags=flags)
    show(report, console)
    if args.json:
        report.write(args.json)
    if args.log:
        args.log.parent.mkdir(parents=True, exist_ok=True)
        args.log.write_text(log_of(report, ran))
    return int(not all(check.ok for check in all_checks))


if __name__ == "__main__":
    sys.exit(main())
