"""`python -m strata.bench.gpu_tests`: the tests on a card, and their outcome as a report.

    python -m strata.bench.gpu_tests --json FILE [--workers 8] [--only PATH ...] [--sanitize [--every N]]

First the tests of the kernels in several processes that share the card, then all others in as many; last, one after the
other, those that ask the driver what is free (marked `whole_card`). --sanitize: the tests of the kernels under
compute-sanitizer's memcheck instead, which runs them a hundred times slower or more: --every N takes each N-th test of
every file. A file of tests is a check of the report; a record is the seconds of a part.
Exit code 1 when a test failed, or when none ran.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from strata.bench.report import Check, Record, Report, show

KERNELS = "tests/kernels/cuda"
REST = ("tests/engine", "tests/server", "tests/bench")
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
SHARED, ALONE = "gpu and not whole_card", "gpu and whole_card"
NONE_FOUND = 5
"""Pytest's exit code when nothing was found: files given by --only need not have tests of every kind."""
TOLD = 300
"""Characters of a failure in the report."""


@dataclass(frozen=True, slots=True)
class Part:
    """Tests run by one pytest · those of which marks · its words · a program before it · whether it may find none."""

    name: str
    paths: tuple[str, ...]
    marks: str = "gpu"
    words: tuple[str, ...] = ()
    under: tuple[str, ...] = ()
    may_be_empty: bool = False

    def run(self, log: Path) -> int:
        """Pytest's exit code; the results lie in `log`."""
        words = ["-m", self.marks, f"--junitxml={log}", *self.words, *self.paths]
        return subprocess.run([*self.under, *PYTEST, *words], check=False).returncode


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


def parts(only: Sequence[str], workers: int, sanitize: bool, every: int = 1) -> list[Part]:
    """Raises FileNotFoundError when the sanitizer is not there."""
    shared = ("-n", str(workers), "--dist", "loadgroup") if workers > 1 else ()
    if sanitize:
        program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
        if not program:
            raise FileNotFoundError("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
        under = (program, "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "9")
        paths = tuple(only) or (KERNELS,)
        if every > 1:
            paths = tuple(sampled(paths, every))
        return [Part("kernels under memcheck", paths, words=("-v", *shared), under=under)]
    kernels = [p for p in only if p.startswith(KERNELS)] if only else [KERNELS]
    rest = [p for p in only if not p.startswith(KERNELS)] if only else list(REST)
    some = bool(only)
    found = [
        Part("kernels", tuple(kernels), words=shared, may_be_empty=some),
        Part("engine, server and tools", tuple(rest), SHARED, shared, may_be_empty=some),
        Part("what is free on the card", tuple(rest), ALONE, may_be_empty=some),
    ]
    return [part for part in found if part.paths]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one test: its file · passed, failed or skipped · what it said."""

    file: str
    kind: str
    text: str = ""


def outcomes(log: Path) -> Iterator[Outcome]:
    """Of a JUnit file as pytest writes it."""
    for case in ElementTree.parse(log).getroot().iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        for child, kind in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
            found = case.find(child)
            if found is not None:
                yield Outcome(file, kind, f"{case.get('name')}: {found.get('message', '')}"[:TOLD])
                break
        else:
            yield Outcome(file, "passed")


def checks(name: str, found: Sequence[Outcome]) -> list[Check]:
    """One a file."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    texts: dict[str, list[str]] = defaultdict(list)
    for outcome in found:
        counts[outcome.file][outcome.kind] += 1
        if outcome.text:
            texts[outcome.file].append(outcome.text)
    return [
        Check(
            f"{name}: {file}",
            not count["failed"],
            ", ".join(f"{n} {kind}" for kind, n in sorted(count.items())) + "".join(f"; {t}" for t in texts[file][:4]),
        )
        for file, count in sorted(counts.items())
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument("--workers", type=int, default=8, help="processes that share the card (8)")
    parser.add_argument("--sanitize", action="store_true", help="the kernels' tests under compute-sanitizer memcheck")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="with --sanitize: each N-th test (1: all)")
    parser.add_argument("--only", nargs="*", default=[], metavar="PATH", help="these files or folders of tests")
    args = parser.parse_args(argv)
    console, records, all_checks, failed, ran = Console(), [], [], False, 0
    try:
        todo = parts(args.only, args.workers, args.sanitize, max(1, args.every))
    except FileNotFoundError as error:
        console.print(str(error))
        return 2
    for part in todo:
        with tempfile.TemporaryDirectory() as folder:
            log, begun = Path(folder) / "junit.xml", time.monotonic()
            code = part.run(log)
            found = list(outcomes(log)) if log.exists() else []
        well = code == 0 or (code == NONE_FOUND and part.may_be_empty)
        failed |= not well
        ran += len(found)
        records.append(Record.of(f"{part.name}: {len(found)} tests", "s", [time.monotonic() - begun]))
        all_checks += [Check(f"{part.name}: exit code", well, str(code)), *checks(part.name, found)]
    all_checks.append(Check("tests ran", ran > 0, str(ran)))
    flags = {"workers": args.workers, "sanitize": args.sanitize, "every": args.every, "only": args.only}
    report = Report(tool="gpu_tests", records=records, checks=all_checks, flags=flags)
    show(report, console)
    if args.json:
        report.write(args.json)
    return int(failed or not ran)


if __name__ == "__main__":
    sys.exit(main())
