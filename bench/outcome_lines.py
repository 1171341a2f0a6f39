"""A pytest plugin: a line of JSON for every test that is over, at once, so that a run may end in any way.

    pytest -p strata.bench.outcome_lines --outcomes FILE

Lines are of `outcomes.Outcome`. Where xdist runs the tests, the process that starts the others writes all of them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from strata.bench.outcomes import TOLD, Outcome


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", metavar="FILE", help="write a line of JSON there for every test that is over")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("outcomes")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Lines(Path(path)))


class Lines:
    """What comes of tests, to a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._under_way: dict[str, Outcome] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a test is over. Of a test whose process broke down xdist says one, of no name that tests have."""
        file, _, name = report.nodeid.partition("::")
        found = self._under_way.pop(report.nodeid, Outcome(file, name, "passed"))
        found = replace(found, seconds=found.seconds + getattr(report, "duration", 0.0))
        if (report.failed and found.kind != "failed") or (report.skipped and found.kind == "passed"):
            found = _unlike(found, report)
        if report.when in ("setup", "call"):
            self._under_way[report.nodeid] = found
        else:
            self._write(found)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(_unlike(Outcome(report.nodeid, "collection", "failed"), report))

    def _write(self, found: Outcome) -> None:
        self._file.write(msgspec.json.encode(found) + b"\n")


def _unlike(found: Outcome, report: Any) -> Outcome:
    """It did not pass: what is said of that, in short and whole."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if isinstance(report.longrepr, tuple):
        said = str(report.longrepr[2])
    else:
        said = str(crash.message) if crash is not None else report.longreprtext.strip().rpartition("\n")[2]
    kind = "failed" if report.failed else "skipped"
    return replace(found, kind=kind, text=f"{found.name}: {said}"[:TOLD], whole=report.longreprtext)
