"""What every bench tool writes: summaries of repeated runs, one record each, as a table and as JSON.

Units    rates in tokens per second, times in ms; a summary is the median with minimum and maximum
Format   {"tool", "date", "machine", "pack", "flags", "records": [{"target", "work", "unit", "median", "min", "max",
         "runs", "peer", "limit"}], "checks": [{"name", "ok", "detail"}]}; a peer is {"name", "median"} with "min",
         "max" and "runs" of the same run, or "source"; `docs/performance.md` is made from such files, no figure is
         typed by hand
"""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import re
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

HEADER_HASH_BYTES = 1 << 20
FOLDERS = re.compile(r"(?<![\w./])/(?:[^\s/'\"]+/)+")
"""Of an absolute path, all before its last name."""


def machine() -> dict[str, Any]:
    """Processor, usable cores, RAM and system; no host name, no path."""
    cpu = platform.processor() or platform.machine()
    flags: set[str] = set()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                cpu = value.strip()
            elif name.strip() == "flags":
                flags = set(value.split())
                break
    vector = [f for f in ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8") if f in flags]
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = {
        "cpu": cpu,
        "vector": vector,
        "cores": len(os.sched_getaffinity(0)),
        "ram_gib": round(ram / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    gpus = _gpus()
    return facts | {"gpu": gpus} if gpus else facts


def _gpus() -> str:
    """Name and driver of the cards, as nvidia-smi says them; "" without one."""
    if not shutil.which("nvidia-smi"):
        return ""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return "; ".join(done.stdout.split("\n")).strip("; ") if done.returncode == 0 else ""


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class Summary(msgspec.Struct, frozen=True):
    """Median, least and largest of the runs."""

    median: float
    min: float
    max: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Raises ValueError without values."""
        if not values:
            raise ValueError("no runs to summarise")
        return cls(statistics.median(values), min(values), max(values), len(values))


class Limit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a kernel's launches must do: bytes of memory, multiply-adds, and the least microseconds of them; None where
    that is not known."""

    launches: int
    bytes: float = 0.0
    macs: float = 0.0
    us: float | None = None


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One measured figure. `target`: its name in the list of targets ("" when it has none); `limit`: of a kernel's time
    in us."""

    work: str
    unit: str
    median: float
    min: float
    max: float
    runs: int
    target: str = ""
    peer: dict[str, Any] | None = None
    limit: Limit | None = None

    @classmethod
    def of(cls, work: str, unit: str, values: Sequence[float], target: str = "") -> Record:
        s = Summary.of(values)
        return cls(work=work, unit=unit, median=s.median, min=s.min, max=s.max, runs=s.runs, target=target)


class Check(msgspec.Struct, frozen=True):
    """Something that had to be so."""

    name: str
    ok: bool
    detail: str = ""


class Report(msgspec.Struct, kw_only=True):
    """A run of a bench tool."""

    tool: str
    records: list[Record]
    flags: dict[str, Any]
    checks: list[Check] = []
    pack: dict[str, Any] | None = None
    date: str = msgspec.field(default_factory=now)
    machine: dict[str, Any] = msgspec.field(default_factory=machine)

    def write(self, path: Path) -> None:
        """Writes the JSON whole or not at all. Of files that flags or checks name, their names: folders are a machine's
        own."""
        temporary = path.with_name(path.name + ".tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = {name: _named(value) for name, value in self.flags.items()}
        checks = [msgspec.structs.replace(check, detail=_named(check.detail)) for check in self.checks]
        kept = msgspec.structs.replace(self, flags=flags, checks=checks)
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=2) + b"\n")
        temporary.replace(path)


def _named(value: Any) -> Any:
    """Text, or a list of it, with files named without their folders."""
    if isinstance(value, str):
        return FOLDERS.sub("", value)
    return [_named(each) for each in value] if isinstance(value, list) else value


def pack_facts(path: Path) -> dict[str, Any]:
    """Name, bytes and SHA-256 of the first MiB (metadata and tensor list) of a pack."""
    with path.open("rb") as f:
        head = f.read(HEADER_HASH_BYTES)
    return {"name": path.name, "bytes": path.stat().st_size, "head_sha256": hashlib.sha256(head).hexdigest()}


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0..1) of the values lie, interpolated. Raises ValueError without values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def show(report: Report, console: Console) -> None:
    """The records as a table; a peer's figure gets its ratio."""
    table = Table(title=f"{report.tool}: {report.machine['cpu']}, {report.machine['cores']} cores")
    for name in ("work", "median", "min", "max", "unit", "runs"):
        table.add_column(name, justify="left" if name in ("work", "unit") else "right")
    peers = any(r.peer for r in report.records)
    limits = any(r.limit for r in report.records)
    for name in (["peer", "ratio"] if peers else []) + (["limit", "%"] if limits else []):
        table.add_column(name, justify="right")
    for r in report.records:
        row = [r.work, f"{r.median:.2f}", f"{r.min:.2f}", f"{r.max:.2f}", r.unit, str(r.runs)]
        if peers:
            median = r.peer["median"] if r.peer else None
            row += [f"{median:.2f}" if median else "", f"{r.median / median:.2f}" if median else ""]
        if limits:
            us = r.limit.us if r.limit else None
            row += [f"{us:.2f}" if us else "", f"{100 * us / r.median:.0f}" if us and r.median else ""]
        table.add_row(*row)
    console.print(table)


def finish(report: Report, path: Path | None, console: Console) -> int:
    """Shows figures and checks, writes the JSON when a path is given. -> exit code: 0 when all that had to be so is."""
    for check in report.checks:
        mark = "ok    " if check.ok else "FAILED"
        console.print(
            f"{mark} {check.name}" + (f": {check.detail}" if check.detail else ""), markup=False, soft_wrap=True
        )
    if report.records:
        show(report, console)
    if path is not None:
        report.write(path)
        console.print(f"written: {path}")
    return 0 if all(check.ok for check in report.checks) else 1
