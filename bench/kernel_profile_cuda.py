"""`python -m strata.bench.kernel_profile_cuda --pack model.gguf [--json FILE]`: a token and a prompt, kernel by kernel.

Windows of one and of eight rows, a window of one row behind a long prompt, and a prompt: of each kernel (of products by
shape and type) launches, its own time as CUPTI records it while launches follow each other in turn, what it must read,
write and multiply, and what part of its time the card needs for that. Gaps between kernels are a row, so rows add up
to the whole; beside it what the same launches take when they overlap, as the engine has them. The recorder is
PyTorch's, which is no dependency of the project and has to be there.

The limits are measured first (ceilings.py); what bytes and multiply-adds are: kernel_limits.py.

Errors   exit code 1 where launches in turn overlapped, or the recorder lost some three times in a row; 2 without the
         recorder, or where the pack cannot be opened
Cost     some 90 s on an H200 with a pack of 62 GB, a third of them to load it
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from strata.bench import ceilings
from strata.bench.ceilings import Ceilings
from strata.bench.kernel_limits import Limits, Pass
from strata.bench.kernel_profile import Incomplete, Span, Taken, grouped, in_turn, table, taken
from strata.bench.report import Check, Record, Report, finish, pack_facts
from strata.bench.window_launches import ADVANCES, Launches, microseconds
from strata.bench.windows_cuda import CHECKED_DEPTH, WARM_STEPS, Decode, launches_of
from strata.engine.device.cuda import CudaDevice
from strata.engine.model import Rows
from strata.engine.model.resident import AUTO_CHUNKS, Resident
from strata.engine.pack import Pack, PackError, open_pack

RECORDER = "torch"
RUNS = 5
TRIES = 3
PROMPT_RUNS = 3
WINDOWS = ((1, CHECKED_DEPTH), (8, CHECKED_DEPTH), (1, 32_000))
"""Rows, and tokens before each."""


@dataclass(frozen=True, slots=True)
class Case:
    """A pass. run: does it again with launches in turn; overlapping: its time with launches that overlap, in us."""

    work: str
    launches: Launches
    run: Callable[[], None]
    rows: Pass
    overlapping: list[float]
    runs: int


def recorded(work: Callable[[], None]) -> list[Span]:
    """What the card did for it."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorder:
        work()
        torch.cuda.synchronize()
    own = [event for event in recorder.events() if event.device_type.name == "CUDA"]
    return [Span(e.name, float(e.time_range.start), float(e.time_range.end)) for e in own]


def windows(resident: Resident, longest: int) -> Iterator[Case]:
    """Windows of sequences of tokens drawn at random. longest: tokens that a slot has room for."""
    driver = resident.device.driver
    for n, wanted in WINDOWS:
        depth = min(wanted, longest - WARM_STEPS)
        decode = Decode(resident, n, depth)
        launches = launches_of(resident, decode)
        overlapping = [microseconds(driver, launches) for _ in range(RUNS)]
        launches.overlap(False)
        graph = driver.capture(launches.queue)
        work = f"window of {n}" + (f" @ {depth}" if depth > CHECKED_DEPTH else "")
        yield Case(work, launches, graph.launch, Pass.window(n, decode.position), overlapping, RUNS)
        launches.overlap(True)


def prompt(resident: Resident, n: int) -> Iterator[Case]:
    """A chunk from the beginning, with the logits of its last row."""
    ids = np.random.default_rng(n).integers(32, resident.model.spec.vocab, n).astype(np.int32)

    def read() -> None:
        resident.state.reset(0)
        resident.model.forward(Rows.of([(0, 0, ids)]), resident.state, [n - 1])

    launches = Launches.of(read)
    overlapping = [timed(read) for _ in range(PROMPT_RUNS)]
    launches.overlap(False)
    yield Case(f"prompt of {n}", launches, read, Pass.prompt(n), overlapping, PROMPT_RUNS)
    launches.overlap(True)


def cases(resident: Resident, longest: int, n: int) -> Iterator[Case]:
    """All of them, one after another in the same memory: a case is over when the next one is made."""
    yield from windows(resident, longest)
    if n:
        yield from prompt(resident, min(n, resident.chunk))


def timed(work: Callable[[], None]) -> float:
    """Microseconds on the card."""
    import cupy

    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(begin, end)) * 1e3


def profiled(case: Case, pack: Pack, limits: Ceilings, console: Console) -> tuple[list[Record], Check]:
    """The table of a case. Raises Incomplete when the recorder loses launches each time."""
    known = Limits.of(pack, limits, case.rows)
    launches = [launch for launch in case.launches if launch.label != ADVANCES]
    labels = [known.label(launch) for launch in launches]
    kernels = [launch.kernel.name for launch in launches]
    case.run()
    runs: list[Taken] = []
    for _ in range(case.runs):
        runs.append(_complete(case.run, list(zip(kernels, labels, strict=True)), console))
    of_label = {label: known.limit([launches[i] for i in at]) for label, at in grouped(labels).items()}
    wrong = in_turn(runs)
    check = Check(f"{case.work}: launches in turn do not overlap", not wrong, wrong)
    return table(case.work, runs, of_label, case.overlapping), check


def _complete(run: Callable[[], None], labelled: list[tuple[str, str]], console: Console) -> Taken:
    for _ in range(TRIES - 1):
        try:
            return taken(labelled, recorded(run))
        except Incomplete as error:
            console.print(f"recorded again: {error}")
    return taken(labelled, recorded(run))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kernel_profile_cuda", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pack", type=Path, required=True, help="the GGUF file")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of the prompt, 0: none (8192)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(argv)
    console = Console(width=160)
    if args.prompt < 0:
        parser.error("--prompt: 0 or more tokens")
    if find_spec(RECORDER) is None:
        console.print(f"{RECORDER} is not installed: its profiler records kernels here; windows_cuda needs none")
        return 2
    try:
        pack = open_pack(args.pack)
    except (OSError, PackError) as error:
        console.print(str(error), markup=False)
        return 2
    limits = ceilings.measured(console)
    records = ceilings.records(limits)
    checks: list[Check] = []
    device = CudaDevice()
    longest = min(pack.spec.context_length, max(args.prompt, *(depth for _, depth in WINDOWS)) + 4 * WARM_STEPS)
    chunks = [n for n in AUTO_CHUNKS if n <= (args.prompt or AUTO_CHUNKS[0])] or [args.prompt]
    resident = Resident(pack, device, max_context=longest, n_slots=max(n for n, _ in WINDOWS), chunks=chunks)
    flags: dict[str, Any] = {"card": device.name, "prompt": args.prompt, "chunk": resident.chunk}
    made = partial(cases, resident, longest, args.prompt)
    overlapping = {case.work: case.overlapping for case in made()}  # before the recorder comes, which may stay
    for case in made():
        try:
            found, check = profiled(replace(case, overlapping=overlapping[case.work]), pack, limits, console)
        except Incomplete as error:
            found, check = [], Check(f"{case.work}: every launch is recorded", False, str(error))
        records += found
        checks.append(check)
        if args.json:  # what there is, should the rest fail
            _report(args.pack, records, checks, flags).write(args.json)
    return finish(_report(args.pack, records, checks, flags), args.json, console)


def _report(pack: Path, records: list[Record], checks: list[Check], flags: dict[str, Any]) -> Report:
    return Report(tool="kernel_profile_cuda", records=records, checks=checks, flags=flags, pack=pack_facts(pack))


if __name__ == "__main__":
    sys.exit(main())
