"""`python -m strata.bench.gpu_tests`: the tests on a card, and their outcome as a report.

    python -m strata.bench.gpu_tests --json FILE [--log FILE] [--workers 8] [--only PATH ...] [--covering]
        [--sanitize [--every N]] [--seconds N]

First the tests of the kernels in several processes that share the card, then all others in as many; last, one after the
other, those that ask the driver what is free (marked `whole_card`). --sanitize: the tests of the kernels under
compute-sanitizer's memcheck instead, which runs them a hundred times slower or more: --every N takes each N-th test of
every file, --covering those of tests/kernels/cuda/covering.txt, which launch every kernel, small, with every type;
each process has a share of them and a sanitizer of its own. A file of tests is a check of the report; a record is the
seconds of a part, named by what its tests are of. --log: a line a file with counts and seconds, the last lines of every
failure (outcomes.py), and of what a process said that failed elsewhere than in a test. When --seconds are over, or
SIGINT or SIGTERM comes, the report has the tests that were over.
Exit code 1 when a test failed, when none ran, or when not all did.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from strata.bench.outcomes import Outcome, checks, counted, failures, held, log_text, summary, told
from strata.bench.pytest_runs import PYTEST, Ended, Stop, run_beside
from strata.bench.report import Check, Record, Report, show

KERNELS = "tests/kernels/cuda"
KERNELS_ABOVE = "tests/kernels"
COVERING = f"{KERNELS}/covering.txt"
REST = ("tests/engine", "tests/server", "tests/bench")
PROGRAM, PACKAGES = "strata-engine", ("openai", "anthropic", "pytest_asyncio", "hypothesis")
"""What tests beside those of kernels start, beside this Python, and import: half of them fail in an instant without."""
SHARED, ALONE = "gpu and not whole_card", "gpu and whole_card"
TESTS_FAILED, NONE_FOUND = 1, 5
"""Pytest's exit codes: the report says which failed, and files given by --only need not have tests of every kind."""
PORT, PORTS = 49152, 16
"""Where sanitizers and what they watch find each other: their default, and how many ports each has to itself. One takes
ten at most; with 15 processes to watch it ended by SIGSEGV before their first test (H200, 2026-11-30)."""


@dataclass(frozen=True, slots=True)
class Part:
    """Tests run together · those of which marks · words for pytest · a program before it, "{port}" for a port of its
    own · processes, each with a share of the paths · whether it may find none · how they run, where that is not as most
    do · the list they are of."""

    paths: tuple[str, ...]
    marks: str = "gpu"
    words: tuple[str, ...] = ()
    under: tuple[str, ...] = ()
    processes: int = 1
    may_be_empty: bool = False
    how: str = ""
    of: str = ""

    def run(self, stop: Stop) -> Ran:
        """Pytest, and what came of it."""
        begun, n = time.monotonic(), max(1, min(self.processes, len(self.paths)))
        shares = [("-m", self.marks, *self.words, *self.paths[i::n]) for i in range(n)]
        ports = [str(PORT + i * PORTS) for i in range(n)]
        under = [[word.replace("{port}", port) for word in self.under] for port in ports]
        ended = run_beside(list(zip(under, shares, strict=True)), stop)
        return Ran(self, ended, time.monotonic() - begun, stop.why)


@dataclass(frozen=True, slots=True)
class Ran:
    """A part, its processes, seconds, and why it was stopped."""

    part: Part
    ended: list[Ended]
    seconds: float
    stopped: str = ""

    @property
    def found(self) -> list[Outcome]:
        return [outcome for each in self.ended for outcome in each.found]

    @property
    def well(self) -> bool:
        none = {0, NONE_FOUND} if self.part.may_be_empty else {0}
        return not self.stopped and all(each.code in none for each in self.ended)

    @property
    def codes(self) -> str:
        """Exit codes of its processes: "0", "-11 (SIGSEGV)", "0, 9"."""
        codes = sorted({each.code for each in self.ended})
        said = ", ".join(f"{code} ({signal.Signals(-code).name})" if code < 0 else str(code) for code in codes)
        return said + (f", stopped: {self.stopped}" if self.stopped else "")

    @property
    def name(self) -> str:
        """What its tests are of, and how they ran."""
        return (held(self.found) or _folders(self.part.paths)) + self.part.how

    @property
    def record(self) -> Record:
        return Record.of(f"{self.name}: {len(self.found)} tests{self.part.of}", "s", [self.seconds])

    @property
    def checks(self) -> list[Check]:
        return [Check(f"{self.name}: exit code", self.well, self.codes), *checks(self.found, self.part.how)]

    @property
    def unexplained(self) -> list[str]:
        """What those of its processes said that failed, but not in a test."""
        well = {0, NONE_FOUND} if self.part.may_be_empty else {0}
        lines = []
        for each in self.ended:
            explained = each.code == TESTS_FAILED and any(outcome.kind == "failed" for outcome in each.found)
            if each.code not in well and not explained and not self.stopped:
                lines += [f"{self.name}: exit code {each.code}", *(f"    {line}" for line in told(each.said))]
        return lines

    @property
    def lines(self) -> list[str]:
        """For a log."""
        said = counted(self.found) or "no tests"
        return summary(f"{self.name}: {said} in {self.seconds:.1f} s, exit code {self.codes}", self.found)


def _folders(paths: Sequence[str]) -> str:
    """Files and folders as they are given; of tests by name their folder."""
    return ", ".join(sorted({KERNELS if "::" in path else path for path in paths}))


def sampled(paths: Sequence[str], every: int = 1) -> list[str]:
    """Names of the tests on a card: of every file the first and each `every`-th after it. Raises LookupError with what
    pytest said when there is none."""
    words = ("-m", "gpu", "-o", "addopts=--import-mode=importlib", "--collect-only", *paths)
    done = subprocess.run([*PYTEST, *words], capture_output=True, text=True, check=False)
    by_file: dict[str, list[str]] = defaultdict(list)
    for line in done.stdout.splitlines():
        if "::" in line and not line.startswith("ERROR"):
            by_file[line.partition("::")[0]].append(line.strip())
    if done.returncode or not by_file:
        raise LookupError("\n".join(("pytest finds no tests to sample:", *told(done.stdout + done.stderr))))
    return [name for names in by_file.values() for name in names[::every]]


def covered(text: str) -> dict[str, list[str]]:
    """Tests of covering.txt, and what they are there for: sources of kernels, `source:type` where these have types."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {f"{KERNELS}/{test}": names.split() for test, _, names in (line.partition(" : ") for line in lines)}


def lacking() -> list[str]:
    """Of PROGRAM and PACKAGES what is not installed."""
    program = [] if Path(sys.executable).with_name(PROGRAM).exists() else [PROGRAM]
    return program + [name for name in PACKAGES if find_spec(name) is None]


def parts(only: Sequence[str], workers: int, sanitize: bool, every: int = 1, covering: bool = False) -> list[Part]:
    """Raises FileNotFoundError when the sanitizer is not there, the list of --covering, or what tests want; LookupError
    when there is nothing to sample."""
    shared = ("-n", str(workers), "--dist", "loadgroup") if workers > 1 else ()
    of = f" of {Path(COVERING).name}" if covering else ""
    if covering:
        only = list(covered(Path(COVERING).read_text()))
    if sanitize:
        program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
        if not program:
            raise FileNotFoundError("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
        watch = ("--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "9")
        under = (program, *watch, "--port", "{port}", "--max-connections", str(PORTS))
        paths = tuple(sampled(tuple(only) or (KERNELS,), every))
        return [Part(paths, under=under, processes=workers, how=" under memcheck", of=of)]
    kernels = [p for p in only if p.startswith(KERNELS_ABOVE)] if only else [KERNELS]
    rest = [p for p in only if not p.startswith(KERNELS_ABOVE)] if only else list(REST)
    if rest and (absent := lacking()):
        install = f"{sys.executable} -m pip install -e '.[test]'"
        raise FileNotFoundError(f"not installed: {', '.join(absent)}, which {', '.join(rest)} want: {install}")
    some = bool(only)
    found = [
        Part(tuple(kernels), words=shared, may_be_empty=some and not covering, of=of),
        Part(tuple(rest), SHARED, shared, may_be_empty=some),
        Part(tuple(rest), ALONE, may_be_empty=some, how=" alone on the card"),
    ]
    return [part for part in found if part.paths]


def run_parts(todo: Sequence[Part], stop: Stop) -> list[Ran]:
    """One after the other until there is a reason to stop; those without tests only where there should be some. What
    failed elsewhere than in a test goes to stderr."""
    ran: list[Ran] = []
    for part in todo:
        if stop.why and ran:
            break
        each = part.run(stop)
        if each.found or not each.well:
            ran.append(each)
            for line in each.unexplained:
                print(line, file=sys.stderr)
    return ran


def report_of(ran: Sequence[Ran], flags: dict[str, object]) -> Report:
    n_tests = sum(len(each.found) for each in ran)
    made = [check for each in ran for check in each.checks] + [Check("tests ran", n_tests > 0, str(n_tests))]
    return Report(tool="gpu_tests", records=[each.record for each in ran], checks=made, flags=flags)


def log_of(report: Report, ran: Sequence[Ran]) -> str:
    """When, on what, with which flags; then failures and files."""
    flags = ", ".join(f"{name} {value}" for name, value in report.flags.items() if value)
    head = [f"gpu_tests, {report.date}: {report.machine.get('gpu') or 'no card'}", flags]
    failed = [line for each in ran for line in (*each.unexplained, *failures(each.found))]
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
    parser.add_argument(
        "--seconds", type=float, default=0, metavar="N", help="stop then, and report what ran (0: never)"
    )
    args = parser.parse_args(argv)
    console = Console()
    if args.covering and (args.only or args.every > 1):
        parser.error("--covering is a choice of tests, as --only and --every are: give one of them")
    try:
        todo = parts(args.only, args.workers, args.sanitize, max(1, args.every), args.covering)
    except (FileNotFoundError, LookupError) as error:
        print(error, file=sys.stderr)
        if args.log:
            _write(args.log, f"{error}\n")
        return 2
    with Stop(args.seconds) as stop:
        ran = run_parts(todo, stop)
        flags = {name: getattr(args, name) for name in ("workers", "sanitize", "every", "covering", "only")}
        report = report_of(ran, flags)
        show(report, console)
        if args.json:
            report.write(args.json)
        if args.log:
            _write(args.log, log_of(report, ran))
    return int(not all(check.ok for check in report.checks))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
