"""The host as a device: which kernels compute, on how many threads, and how much memory there is.

Units    bytes
Errors   ValueError for an unknown backend or a thread count below 1
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Final, Literal, cast

from strata.kernels.ops import Kernels

BACKENDS: Final = ("cpu", "reference")
MEMINFO: Final = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Memory:
    """RAM of the machine: all of it, and what can be had without pushing anything out."""

    total: int
    free: int


class HostDevice:
    """The processor with its RAM. `kernels` is the backend module; its threads are bounded here, once."""

    def __init__(self, kernels: Literal["cpu", "reference"] = "cpu", threads: int = 1) -> None:
        if kernels not in BACKENDS:
            raise ValueError(f"kernels must be one of {', '.join(BACKENDS)}, got {kernels!r}")
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        self.name = f"host ({kernels})"
        self.threads = threads
        self.kernels = cast(Kernels, import_module(f"strata.kernels.{kernels}"))
        self.kernels.set_threads(threads)

    def memory(self) -> Memory:
        """What the kernel says now; on a system without /proc/meminfo, what the C library says."""
        return read_meminfo(MEMINFO) or _from_sysconf()


def read_meminfo(path: Path) -> Memory | None:
    """MemTotal and MemAvailable of a meminfo file, None when there is no such file or it lacks them."""
    if not path.is_file():
        return None
    fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    if not {"MemTotal", "MemAvailable"} <= fields.keys():
        return None
    total, free = (int(fields[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    return Memory(total, free)


def _from_sysconf() -> Memory:
    page, total = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    free = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else total
    return Memory(total * page, free * page)
