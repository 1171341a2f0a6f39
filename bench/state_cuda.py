"""Copies of a sequence's state on a card: to a slot, to a checkpoint, to RAM and back. No weights are needed.

    python -m strata.bench.state_cuda [--lengths 2048 32768 131072] [--kv fp16] [--runs 5] [--device cuda] [--json FILE]

The geometry is that of Qwen3.8-Flash-Next: 36 delta net layers, 12 attention layers. First of all, copies and restored
images are compared with what they were taken of, byte for byte. `host ms` is what the caller waits for; for copies on
the card the whole is until the card is done.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console

from strata.bench.report import Check, Record, Report, show
from strata.engine.device.base import StateMemory
from strata.engine.device.cuda import CudaDevice
from strata.engine.device.host import HostDevice
from strata.engine.device.meter import Meter
from strata.engine.pack import ModelSpec
from strata.engine.pack.spec import PleSpec
from strata.engine.state.parked import capture
from strata.engine.state.slots import StatePool
from strata.kernels.ops import PAGE

SPEC = ModelSpec(
    hidden=2560,
    layers=48,
    streams=4,
    rank=320,
    heads=24,
    kv_heads=2,
    head_dim=256,
    rope_dims=64,
    rope_base=1e7,
    rope_sections=(),
    index_heads=4,
    index_dim=128,
    index_budget=2048,
    recurrent=tuple(i % 4 != 3 for i in range(48)),
    ratios=tuple(4 * (i % 4 == 3) for i in range(48)),
    gdn_key_heads=16,
    gdn_value_heads=48,
    gdn_head_dim=128,
    gdn_kernel=4,
    experts=512,
    experts_used=10,
    expert_width=640,
    shared_width=640,
    ple=PleSpec(1, 3, 1, 64, 4, 0, (1, 1, 1), (0, 0), (1, 1), 1),
    eps=1e-6,
    context_length=262144,
    vocab=248320,
    n_tokens=248320,
    end_tokens=(),
    warnings=(),
)
"""Only what sizes the state is that of the model."""
SOURCE, SLOT, CHECKPOINT = 0, 1, 2


class Bench:
    """A state with two slots and a checkpoint."""

    def __init__(self, device: str, context: int, kv: str) -> None:
        self.memory: StateMemory = HostDevice("cpu", 1)
        self.wait: Callable[[], None] = lambda: None
        if device == "cuda":
            meter, card = Meter(2), CudaDevice()
            StatePool(SPEC, 2, context, kv=kv, memory=meter, n_checkpoints=1)
            card.open("state", meter.state, "use shorter --lengths")
            self.memory, self.wait = card, card.driver.synchronize
        self.state = StatePool(SPEC, 2, context, kv=kv, memory=self.memory, n_checkpoints=1)

    def fill(self, n: int) -> None:
        """Slot 0 holds n tokens; its recurrent block and the pages' ends are random."""
        state, rng = self.state, np.random.default_rng(n)
        for slot in range(3):
            state.drop(slot)
        state.reserve(SOURCE, n)
        state.advance(SOURCE, n)
        state.recurrent.write(SOURCE, rng.integers(0, 100, state.recurrent.n_bytes, np.uint8))
        for array in state.pages.arrays:
            for page in state.pages.tables[SOURCE, : min(4, n // PAGE + 1)]:
                self.memory.upload(array[int(page)], rng.integers(0, 100, array[0].nbytes, np.uint8))

    def check(self, n: int) -> Check:
        """Copy, image and restored image are equal to the source."""
        self.fill(n)
        state, seen = self.state, []
        state.copy(SOURCE, CHECKPOINT)
        state.copy(CHECKPOINT, SLOT)
        seen.append(state.state_bytes(SLOT))
        image = state.image(SLOT)
        state.reset(SLOT)
        state.restore(SLOT, image)
        seen.append(state.state_bytes(SLOT))
        same = all(each == state.state_bytes(SOURCE) for each in seen)
        return Check(name=f"copies and images of {n} tokens are equal to their source", ok=same)

    def times(self, work: Callable[[], object], runs: int) -> tuple[list[float], list[float]]:
        """ms until `work` returns, and until the device is done."""
        host, whole = [], []
        for _ in range(runs + 1):
            self.wait()
            begun = time.perf_counter()
            work()
            host.append((time.perf_counter() - begun) * 1e3)
            self.wait()
            whole.append((time.perf_counter() - begun) * 1e3)
        return host[1:], whole[1:]


def measure(bench: Bench, n: int, runs: int) -> list[Record]:
    """One length."""
    bench.fill(n)
    state, tokens = bench.state, np.zeros(n, np.int32)
    records = []
    copies: dict[str, Callable[[], object]] = {
        "slot to checkpoint": lambda: state.copy(SOURCE, CHECKPOINT),
        "checkpoint to slot": lambda: state.copy(CHECKPOINT, SLOT),
    }
    for name, work in copies.items():
        host, whole = bench.times(work, runs)
        records.append(Record.of(f"{n} tokens: {name}", "ms", whole))
        records.append(Record.of(f"{n} tokens: {name}, host", "ms", host))
    parked = capture(state, SOURCE, tokens, {})
    gib = parked.n_bytes / 2**30
    images: dict[str, Callable[[], object]] = {
        "to RAM": lambda: state.image(SOURCE),
        "to RAM with its sums": lambda: capture(state, SOURCE, tokens, {}),
        "compared with its sums": lambda: parked.is_intact,
        "from RAM": lambda: parked.restore(state, SLOT, n),
    }
    for name, work in images.items():
        _, whole = bench.times(work, runs)
        records.append(Record.of(f"{n} tokens: {name}, {gib:.2f} GiB", "ms", whole))
    return records


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 32768, 131072], help="tokens of a sequence")
    parser.add_argument("--kv", default="fp16", help="format of keys and values (fp16)")
    parser.add_argument("--runs", type=int, default=5, help="runs of each case (5)")
    parser.add_argument("--device", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(argv)
    lengths = [n + PAGE // 2 for n in args.lengths]  # an unfinished page is the dearer case
    bench = Bench(args.device, max(lengths), args.kv)
    checks = [bench.check(lengths[0])]
    records = [record for n in lengths for record in measure(bench, n, args.runs)]
    flags = {"kv": args.kv, "device": args.device}
    report = Report(tool="state_cuda", records=records, flags=flags, checks=checks)
    show(report, Console(width=140))
    if args.json:
        report.write(args.json)
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
