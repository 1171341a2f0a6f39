"""What drafts cost on a card, and that they change nothing: windows that verify a forced continuation.

    python -m strata.bench.drafts_cuda --pack model.gguf [--mtp draft.gguf] [--rows 2 3 4] [--tokens 192] [--json FILE]

First a text is decoded without drafts. Its own tokens are then the drafts of windows of several rows: every one is
right, so the time of a token says what the best drafts could give. Other runs spoil the last draft of each window,
which is what a window costs whose state must be taken back. Before anything is timed both kinds must give the same
tokens and, in the end, the same bytes of state as without drafts, greedy and sampled.
`proposals`: what the draft layer takes for a window's drafts, and how many of its first ones the model says as well.
`rounds`: windows that feed themselves, one started ahead of the other, with the drafts that come: time of each, tokens.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console

from strata.bench.report import Check, Record, Report, finish, pack_facts
from strata.engine.cuda_runner import CudaRunner
from strata.engine.drafts import draft_pack
from strata.engine.flags import WINDOW_ROWS
from strata.engine.options import Options, fitted
from strata.engine.pack import open_pack
from strata.engine.schedule.ports import SOLO, Row
from strata.kernels.ops import Sampling

WARM = 16
HOWS = {"greedy": Sampling(), "sampled": Sampling(temperature=1.0, seed=7)}


class Text:
    """One sequence through the runner: a prompt of random ids, then tokens."""

    def __init__(self, runner: CudaRunner, prompt: np.ndarray, how: Sampling) -> None:
        self._runner = runner
        self._how = how
        runner.state.reset(SOLO)
        logits = None
        for at in range(0, len(prompt), runner.chunk):
            logits = runner.feed(SOLO, at, prompt[at : at + runner.chunk], at + runner.chunk >= len(prompt))
        first = runner.sample(logits, prompt[:0], how, len(prompt))
        self.tokens = [*prompt.tolist(), first]

    def row(self, drafts: tuple[int, ...] = ()) -> Row:
        return Row(SOLO, np.array(self.tokens, np.int32), self._how, 0, drafts)

    def plain(self, n: int) -> list[float]:
        """n windows without drafts -> seconds of each."""
        spent = []
        for _ in range(n):
            row, begun = self.row(), time.perf_counter()
            (token,) = self._runner.window([row], True)
            spent.append(time.perf_counter() - begun)
            self.tokens.append(token)
        return spent

    def verified(self, known: list[int], rows: int, spoil: bool) -> list[float]:
        """Windows of so many rows until all known tokens are said -> seconds of each whole one."""
        spent = []
        while len(self.tokens) < len(known):
            right = known[len(self.tokens) :][: rows - 1]
            drafts = (*right[:-1], another(right[-1])) if spoil and right else tuple(right)
            row, begun = self.row(drafts), time.perf_counter()
            (said,) = self._runner.verify([row])
            if len(drafts) == rows - 1:
                spent.append(time.perf_counter() - begun)
            self.tokens += said
        return spent

    def proposed(self, n: int, most: int) -> tuple[list[float], int, int]:
        """n windows with what the draft layer proposes -> seconds of proposals, first ones offered and said as well."""
        spent, offered, said_too = [], 0, 0
        for _ in range(n):
            row, begun = self.row(), time.perf_counter()
            drafts = self._runner.propose(row, most, 0.0)
            if len(drafts) == most:
                spent.append(time.perf_counter() - begun)
            (said,) = self._runner.verify([row._replace(drafts=tuple(drafts))])
            offered, said_too = offered + bool(drafts), said_too + (len(drafts) > 0 and said[0] == drafts[0])
            self.tokens += said
        return spent, offered, said_too

    def rounds(self, n: int, drafts: int) -> tuple[list[float], int]:
        """n rounds with so many drafts, the next one always under way -> seconds of each but the first, and tokens."""
        spent, said = [], 0
        for i in range(n):
            begun = time.perf_counter()
            one = self._runner.round(self.row(), drafts)
            if i > 1:  # the first is started from here, the second has what that one left
                spent.append(time.perf_counter() - begun)
                said += len(one.tokens)
            self.tokens += one.tokens
        return spent, said


def another(token: int) -> int:
    """A wrong token in place of a right one."""
    return token - 1 if token else 1


def prompt_of(vocab: int, n: int) -> np.ndarray:
    return np.random.default_rng(n).integers(0, vocab, n).astype(np.int32)


def checks(runner: CudaRunner, prompt: np.ndarray, rows: list[int], n: int) -> list[Check]:
    """Right and spoiled drafts in windows of all sizes give the tokens and the state of windows without."""
    found = []
    for name, how in HOWS.items():
        text = Text(runner, prompt, how)
        text.plain(n)
        runner.verify([text.row()])  # so that nothing is ahead, and all but the last token is in the state
        known, state = text.tokens, runner.state.digest(SOLO)
        for size in rows:
            for spoil in (False, True):
                other = Text(runner, prompt, how)
                other.verified(known, size, spoil)
                while runner.state.length(SOLO) < len(known):
                    runner.verify([other.row()])
                same = other.tokens[: len(known)] == known and runner.state.digest(SOLO) == state
                kind = "a wrong last draft" if spoil else "right drafts"
                found.append(Check(f"{name}, windows of {size} rows with {kind}: tokens and state as without", same))
            if runner.rounds(text.row()):
                other = Text(runner, prompt, how)
                while len(other.tokens) + size <= len(known):
                    other.rounds(1, size - 1)
                while len(other.tokens) < len(known):
                    other.tokens += runner.verify([other.row()])[0]
                runner.verify([other.row()])
                same = other.tokens[: len(known)] == known and runner.state.digest(SOLO) == state
                found.append(Check(f"{name}, rounds of {size} rows: tokens and state as without", same))
    return found


def measure(runner: CudaRunner, prompt: np.ndarray, rows: list[int], n: int, console: Console) -> list[Record]:
    text = Text(runner, prompt, HOWS["greedy"])
    text.plain(WARM)
    plain = text.plain(n)
    known, records = text.tokens, [Record.of("window without drafts", "ms", ms(plain))]
    token = float(np.median(plain))
    for size in [1, *rows]:
        for spoil in (False, True)[: 1 + (size > 1)]:
            windows = Text(runner, prompt, HOWS["greedy"]).verified(known, size, spoil)[WARM // size :]
            kept = size - spoil
            kind = "the last one wrong" if spoil else "forced"
            records.append(Record.of(f"window of {size} rows, {kind}", "ms", ms(windows)))
            each = float(np.median(windows)) / kept
            records.append(Record.of(f"window of {size} rows, {kind}: tokens/s against none", "x", [token / each]))
    if runner.drafter is not None:
        for most in sorted({size - 1 for size in rows}):
            spent, offered, said = Text(runner, prompt, HOWS["greedy"]).proposed(n // 2, most)
            records.append(Record.of(f"{most} proposals behind a window", "ms", ms(spent)))
            console.print(f"of {offered} first proposals the model said {said} as well")
        for most in sorted({size - 1 for size in rows}):
            spent, tokens = Text(runner, prompt, HOWS["greedy"]).rounds(n // 2, most)
            records.append(Record.of(f"round of {1 + most} rows", "ms", ms(spent)))
            records.append(Record.of(f"round of {1 + most} rows: tokens", "tokens", [tokens / len(spent)]))
            each = float(np.median(spent)) * len(spent) / tokens
            records.append(Record.of(f"round of {1 + most} rows: tokens/s against none", "x", [token / each]))
    cost = runner.cost
    records.append(Record.of("host work for a window with drafts", "us", [1e6 * cost.verifying / cost.verified]))
    return records


def ms(seconds: list[float]) -> list[float]:
    return [1e3 * each for each in seconds]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--mtp", type=Path, metavar="FILE", help="the draft layer; without it windows have none")
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 3, 4], help="rows of verify windows (2 3 4)")
    parser.add_argument("--depth", type=int, default=512, help="tokens of the prompt (512)")
    parser.add_argument("--tokens", type=int, default=192, help="tokens of a run (192)")
    parser.add_argument("--check", type=int, default=24, help="tokens that are compared first (24)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(argv)
    console = Console()
    if not 2 <= min(args.rows) <= max(args.rows) <= WINDOW_ROWS:
        console.print(f"--rows: 2 to {WINDOW_ROWS}")
        return 2
    pack = open_pack(args.pack)
    context = args.depth + 2 * args.tokens * max(args.rows) + 64
    options = Options(
        pack=str(args.pack), device="cuda", max_context=min(context, pack.spec.context_length), spec=max(args.rows)
    )
    if args.mtp is not None:
        options = msgspec.structs.replace(options, mtp=str(args.mtp))
    options = fitted(options, pack.spec)
    runner = CudaRunner(pack, options, draft_pack(options, pack))
    runner.warm()
    prompt = prompt_of(pack.spec.n_tokens, args.depth)
    found = checks(runner, prompt, args.rows, args.check)
    records = measure(runner, prompt, args.rows, args.tokens, console) if all(each.ok for each in found) else []
    flags = {"card": runner.where, "depth": args.depth, "tokens": args.tokens, "draft_layer": args.mtp is not None}
    report = Report(tool="drafts_cuda", records=records, checks=found, flags=flags, pack=pack_facts(args.pack))
    return finish(report, args.json, console)


if __name__ == "__main__":
    sys.exit(main())
