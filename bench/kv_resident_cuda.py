"""What keys and values in RAM cost on a card, and that they change nothing: one text with and without --kv-resident.

    python -m strata.bench.kv_resident_cuda --pack model.gguf [--resident 20480] [--depth 65536] [--json FILE]

A prompt of random ids is read in chunks, then tokens are sampled, greedy, in windows that are started ahead. With
RESIDENT tokens in VRAM the same tokens must come, and the same bytes of state. Chunk and window are timed at the end of
the prompt, where most of what attention may select is far away.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from strata.bench.report import Check, Record, Report, finish, pack_facts
from strata.engine.cuda_runner import CudaRunner
from strata.engine.device.driver import Driver
from strata.engine.options import Options, fitted
from strata.engine.pack import Pack, open_pack
from strata.engine.schedule.ports import SOLO, Row
from strata.kernels.ops import Sampling

WARM = 8


@dataclass(frozen=True, slots=True)
class Run:
    """tokens and digest of the state after them · chunks, windows: seconds · far: pages in RAM · free: VRAM, bytes."""

    tokens: list[int]
    digest: str
    chunks: list[float]
    windows: list[float]
    far: int
    free: int


def run(runner: CudaRunner, prompt: np.ndarray, n: int, last: int) -> Run:
    """Read the prompt, sample n tokens. last: chunks at the end of it that are timed."""
    state, how, spent = runner.state, Sampling(), []
    state.reset(SOLO)
    logits = None
    for at in range(0, len(prompt), runner.chunk):
        begun = time.perf_counter()
        logits = runner.feed(SOLO, at, prompt[at : at + runner.chunk], at + runner.chunk >= len(prompt))
        spent.append(time.perf_counter() - begun)
    tokens, windows = [*prompt.tolist(), runner.sample(logits, prompt[:0], how, len(prompt))], []
    for i in range(n):
        begun = time.perf_counter()
        tokens += runner.window([Row(SOLO, np.array(tokens, np.int32), how, 0)], i < n - 1)
        windows.append(time.perf_counter() - begun)
    whole = [each for i, each in enumerate(spent) if (i + 1) * runner.chunk <= len(prompt)]
    far, free = state.pages.n_far, int(runner.info()["vram_free_mib"]) << 20
    return Run(tokens[len(prompt) :], state.digest(SOLO), whole[-last:], windows[WARM:], far, free)


def made(pack: Pack, resident: int, args: argparse.Namespace, driver: Driver | None = None) -> CudaRunner:
    options = Options(
        pack=str(args.pack), device="cuda", max_context=args.context, kv=args.kv, kv_resident=resident,
        prefill=args.chunk, prompt_cache=0,
    )  # fmt: skip
    runner = CudaRunner(pack, fitted(options, pack.spec), driver=driver)
    runner.warm()
    return runner


def records(runs: dict[int, Run]) -> list[Record]:
    found = []
    for resident, each in runs.items():
        kind = f"{resident} resident" if resident else "all in VRAM"
        found.append(Record.of(f"chunk, {kind}", "ms", [1e3 * s for s in each.chunks]))
        found.append(Record.of(f"window, {kind}", "ms", [1e3 * s for s in each.windows]))
        found.append(Record.of(f"VRAM that stays free, {kind}", "MiB", [each.free / (1 << 20)]))
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--resident", type=int, default=20480, help="tokens that stay in VRAM (20480)")
    parser.add_argument("--context", type=int, default=131072, help="(131072)")
    parser.add_argument("--depth", type=int, default=65536, help="tokens of the prompt (65536)")
    parser.add_argument("--chunk", type=int, default=8192, help="of a read (8192)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens that are sampled (64)")
    parser.add_argument("--kv", default="int8", help="format of keys and values (int8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(argv)
    console, pack = Console(), open_pack(args.pack)
    prompt = np.random.default_rng(args.depth).integers(0, pack.spec.n_tokens, args.depth).astype(np.int32)
    runs: dict[int, Run] = {}
    for resident in (0, args.resident):
        runner = made(pack, resident, args)
        runs[resident] = run(runner, prompt, args.tokens, 2)
        card = runner.where
        del runner
        gc.collect()
    before, streamed = runs.values()
    found = [
        Check("tokens are the same", streamed.tokens == before.tokens),
        Check("states are the same", streamed.digest == before.digest),
        Check("pages are in RAM", streamed.far > 0 == before.far, f"{streamed.far} pages"),
    ]
    flags = {name: getattr(args, name) for name in ("resident", "context", "depth", "chunk", "tokens", "kv")}
    report = Report(
        tool="kv_resident_cuda", records=records(runs), checks=found, flags={"card": card, **flags},
        pack=pack_facts(args.pack),
    )  # fmt: skip
    return finish(report, args.json, console)


if __name__ == "__main__":
    sys.exit(main())
