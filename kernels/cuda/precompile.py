"""Kernels compiled by several processes at once: the compiler works on one source at a time in each.

    with compile.collecting() as jobs:
        forward_pass()                      # launches nothing, and notes what it would launch
    n = compile_missing(jobs, arch)         # those without machine code on disk; how many there were

A worker is `python -m strata.kernels.cuda.precompile ARCH` with the jobs on its input.

Errors   none: what a worker did not compile is compiled when it is first launched, and says then why it cannot be; a
         worker's complaint is in the log
Cost     a start with nothing missing hashes the sources, a millisecond each; else a worker's share of the sources, a
         second or two each, and two seconds for the workers to come up
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Collection
from typing import Any, Final

from strata.kernels.cuda.compile import OPTIONS, Constants, architecture, source_text
from strata.kernels.cuda.machine_code import machine_code, place

log = logging.getLogger(__name__)

MOST_WORKERS: Final = 8
"""A worker takes some 300 MB of RAM."""

Job = tuple[str, tuple[tuple[str, int | str], ...]]
"""A source and its constants."""


def missing(nvrtc: Any, jobs: Collection[Job], arch: int) -> list[Job]:
    """Jobs without machine code on disk, each once."""
    places = {}
    for source, constants in jobs:
        text = source_text(source, **dict(constants))
        places[place(nvrtc, text, architecture(source, arch), OPTIONS)] = source, constants
    return [job for path, job in places.items() if not path.exists()]


def compile_missing(jobs: Collection[Job], arch: int) -> int:
    """Compile what is missing for sm_<arch>. Returns how many there were."""
    import cupy as cp

    todo = missing(cp.cuda.nvrtc, jobs, arch)
    n_workers = min(MOST_WORKERS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2, len(todo))
    if n_workers > 1:
        _work([todo[i::n_workers] for i in range(n_workers)], arch)
    return len(todo)


def _work(shares: list[list[Job]], arch: int) -> None:
    """A worker for each share, until all have ended."""
    command = [sys.executable, "-m", "strata.kernels.cuda.precompile", str(arch)]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in shares
    ]
    for worker, share in zip(workers, shares, strict=True):
        assert worker.stdin is not None
        worker.stdin.write(json.dumps(share))
        worker.stdin.close()
        worker.stdin = None  # `communicate` must not look at it again
    for worker in workers:
        _, complaint = worker.communicate()
        if worker.returncode:
            log.warning("a compiling process ended with %d: %s", worker.returncode, complaint.strip()[-300:])


def main() -> None:
    """Compile the jobs on the input."""
    import cupy as cp

    arch, jobs = int(sys.argv[1]), json.load(sys.stdin)
    for source, constants in jobs:
        given: Constants = dict(constants)
        machine_code(cp.cuda.nvrtc, source_text(source, **given), architecture(source, arch), OPTIONS)


if __name__ == "__main__":
    main()
