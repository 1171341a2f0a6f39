"""`python -m strata.bench.profile_cuda`: where the time of a decoded token and of a prompt goes on a card, by kernel.

For whole runs of the engine, also where experts stream; kernel_profile_cuda has kernels beside their limits.

The engine's own runner decodes (windows as graphs) and reads a prompt while CUPTI records every kernel; the recorder is
PyTorch's, which is no dependency of the project and has to be there. A record is the sum over one token, or over one
prompt, of one kernel; `runs` counts its launches. Copies count as kernels and run beside them, so the sum may be more
than `from the first to the last`. Where a prompt streams experts, "the link rests" says for how long nothing came from
RAM, and which kernels ran meanwhile.
"""

from __future__ import annotations

import argparse
import bisect
import collections
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console

from strata.bench.kernel_profile import Span, merged
from strata.bench.kernel_profile_cuda import recorded
from strata.bench.report import Record, Report, pack_facts, show
from strata.engine.cuda_runner import CudaRunner
from strata.engine.drafts import draft_pack
from strata.engine.options import fitted, parse
from strata.engine.pack import open_pack
from strata.engine.schedule.ports import SOLO, Row
from strata.kernels.ops import Sampling

_NOTHING = np.empty(0, np.int32)
SHOWN = 24
LINK_SHOWN = 8
COPY = "HtoD"
"""In the recorder's names of copies from RAM."""


class Sequence:
    """Greedy text of random prompts through the runner."""

    def __init__(self, runner: CudaRunner, vocab: int) -> None:
        self._runner = runner
        self._vocab = vocab

    def run(self, prompt: int, generate: int) -> None:
        """Read `prompt` random ids, then decode `generate` tokens."""
        runner, greedy = self._runner, Sampling()
        tokens = np.empty(prompt + generate, np.int32)
        tokens[:prompt] = np.random.default_rng(prompt).integers(32, self._vocab, prompt)
        runner.state.reset(SOLO)
        for at in range(0, prompt, runner.chunk):
            part = tokens[at : min(at + runner.chunk, prompt)]
            logits = runner.feed(SOLO, at, part, at + len(part) == prompt)
        for n in range(prompt, prompt + generate):
            if n == prompt:
                tokens[n] = runner.sample(logits, _NOTHING, greedy, n)
            else:
                (tokens[n],) = runner.window([Row(SOLO, tokens[:n], greedy, 0)], True)


def kernels(work: Callable[[], None], name: str, per: int) -> list[Record]:
    """One record per kernel of `work`, microseconds divided by `per`, the longest first; the first is their sum."""
    work()
    own = [Span(span.name, span.begin / per, span.end / per) for span in recorded(work)]
    times: dict[str, list[float]] = collections.defaultdict(list)
    for span in own:
        times[span.name].append(span.end - span.begin)
    total = sum(sum(t) for t in times.values())
    whole = max(span.end for span in own) - min(span.begin for span in own)
    out = [Record.of(f"{name}: all kernels", "us", [total])]
    out.append(Record.of(f"{name}: from the first to the last", "us", [whole]))
    for kernel, t in sorted(times.items(), key=lambda item: -sum(item[1]))[:SHOWN]:
        us = sum(t)
        launches = round(len(t) / per)
        work_name = f"{name}: {kernel}, {launches} launches, {100 * us / total:.1f} %"
        out.append(Record(work=work_name, unit="us", median=us, min=us, max=us, runs=len(t)))
    return out + link_rests(own, name)


def link_rests(spans: list[Span], name: str) -> list[Record]:
    """How long nothing came from RAM between the first copy and the last, and what ran meanwhile; nothing where no
    large part of the time is copies."""
    copies = merged([span for span in spans if COPY in span.name])
    busy = sum(end - begin for begin, end in copies)
    if not spans or busy < (max(s.end for s in spans) - min(s.begin for s in spans)) / 4:
        return []
    rests = [(a[1], b[0]) for a, b in itertools.pairwise(copies)]
    work = sorted((span for span in spans if COPY not in span.name), key=lambda span: span.begin)
    during: dict[str, float] = collections.defaultdict(float)
    for span in work:
        during[span.name] += overlap(span, rests)
    idle = sum(b - a for a, b in rests) - sum(overlap(Span("", *each), rests) for each in merged(work))
    during["nothing at all"] = max(0.0, idle)
    out = [Record.of(f"{name}: the link brings", "us", [busy])]
    out.append(Record.of(f"{name}: the link rests", "us", [sum(b - a for a, b in rests)]))
    for kernel, us in sorted(during.items(), key=lambda item: -item[1])[:LINK_SHOWN]:
        out.append(Record.of(f"{name}: the link rests beside {kernel}", "us", [us]))
    return out


def overlap(span: Span, rests: list[tuple[float, float]]) -> float:
    """How much of a span lies in the rests, which are in order."""
    first = max(0, bisect.bisect_left(rests, (span.begin, span.begin)) - 1)
    total = 0.0
    for begin, end in itertools.takewhile(lambda rest: rest[0] < span.end, rests[first:]):
        total += max(0.0, min(end, span.end) - max(begin, span.begin))
    return total


def main() -> int:
    parser = argparse.ArgumentParser(prog="profile_cuda", description=__doc__)
    parser.add_argument("--pack", type=Path, required=True, help="the GGUF file")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of the prompt (8192)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens decoded (64)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="everything after it is for the engine")
    args = parser.parse_args()
    pack = open_pack(args.pack)
    context = str(args.prompt + args.tokens + 64)
    argv = ["--serve", "--pack", str(args.pack), "--device", "cuda", "--max-context", context, *args.extra]
    options = fitted(parse(argv), pack.spec)
    runner = CudaRunner(pack, options, draft_pack(options, pack))
    runner.warm()
    sequence = Sequence(runner, pack.spec.vocab)
    records = kernels(lambda: sequence.run(3, args.tokens), "decode, a token", args.tokens)
    records += kernels(lambda: sequence.run(args.prompt, 0), f"prompt of {args.prompt}", 1)
    flags = {"tokens": args.tokens, "prompt": args.prompt, "chunk": runner.chunk, "extra": args.extra}
    report = Report(tool="profile_cuda", records=records, flags=flags, pack=pack_facts(args.pack))
    show(report, Console())
    if args.json:
        report.write(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
