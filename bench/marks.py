"""Targets and peers' figures of a report, as asked for on the command line: the same flags for every tool.

    add_arguments(parser)             # --target, --peer, --peer-name, --peer-source
    report = marked(report, args)

`--target "P8=tg 128, 25%*"` gives P8 to all figures of such a work: the whole name of one, a pattern with `*`, or the
words that names begin with. `--peer P8=60` puts a peer's figure beside those of a target, or of works; it was not
measured in this run, so `--peer-source` says where it is from.

Errors   a name that no figure has is a failed check, behind all that was measured
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import isfinite
from typing import Any

import msgspec

from strata.bench.report import Check, Record, Report


@dataclass(frozen=True, slots=True)
class Target:
    """name: in the list of targets · work: of its figures."""

    name: str
    work: str

    def __str__(self) -> str:
        return f"--target {self.name}={self.work}"


@dataclass(frozen=True, slots=True)
class Peer:
    """of: a target or a work · figure: in the unit of our own."""

    of: str
    figure: float

    def __str__(self) -> str:
        return f"--peer {self.of}={self.figure:g}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        type=target,
        action="extend",
        nargs="*",
        default=[],
        metavar="NAME=WORK",
        help="the target of a figure: 'P1=tg 128', 'P8=tg 128, 25%%*' (docs/performance.md lists them)",
    )
    parser.add_argument(
        "--peer",
        type=peer,
        action="extend",
        nargs="*",
        default=[],
        metavar="OF=FIGURE",
        help="a peer's figure for a target or a work, in its unit: 'P7=15.2', 'tg 128, 100%%*=101.6'",
    )
    parser.add_argument("--peer-name", default="llama.cpp", metavar="NAME", help="whose figures these are (llama.cpp)")
    parser.add_argument("--peer-source", default="", metavar="TEXT", help="where they are from")


def target(text: str) -> Target:
    """Raises ArgumentTypeError unless both parts are there."""
    name, _, work = text.partition("=")
    if not (name and work):
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=WORK, such as 'P1=tg 128'")
    return Target(name, work)


def peer(text: str) -> Peer:
    """Raises ArgumentTypeError unless it ends in a number above 0."""
    of, _, number = text.rpartition("=")
    try:
        figure = float(number)
    except ValueError:
        figure = 0.0
    if not of or not isfinite(figure) or figure <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no OF=FIGURE above 0, such as 'P7=15.2'")
    return Peer(of, figure)


def marked(report: Report, args: argparse.Namespace) -> Report:
    """The same figures with what was asked for; what was there stays where nothing else is asked. A failed check for
    each name that no figure has."""
    records, missed = list(report.records), []
    for wanted in args.target:
        records, n = _changed(records, works(wanted.work, records), target=wanted.name)
        missed += [] if n else [wanted]
    for other in args.peer:
        of = {i for i, record in enumerate(records) if record.target == other.of} or works(other.of, records)
        of = {i for i in of if not (records[i].peer or {}).get("runs")}  # one of the same run stays
        found: dict[str, Any] = {"name": args.peer_name, "median": other.figure}
        found |= {"source": args.peer_source} if args.peer_source else {}
        records, n = _changed(records, of, peer=found)
        missed += [] if n else [other]
    checks = [*report.checks, *(Check(f"{each} names a figure of this run", False) for each in missed)]
    return msgspec.structs.replace(report, records=records, checks=checks)


def works(what: str, records: Sequence[Record]) -> set[int]:
    """The figures of a work: with this name or pattern, or, where there is none, those whose names begin so."""
    found = {i for i, record in enumerate(records) if fnmatchcase(record.work, what)}
    return found or {i for i, record in enumerate(records) if record.work.startswith(f"{what} ")}


def _changed(records: Iterable[Record], which: set[int], **values: Any) -> tuple[list[Record], int]:
    return [msgspec.structs.replace(r, **values) if i in which else r for i, r in enumerate(records)], len(which)
