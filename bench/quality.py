"""`strata-bench quality`: what a K/V format and a budget of sparse attention cost in quality.

    strata-bench quality --pack demo/strata-demo-q4_0.gguf --device cuda --kv fp32 int8 --budget 512 128 --json FILE

For every setting the answers' perplexity over held-out conversations (each answer read behind its right beginning),
and the share of held-out problems that are answered exactly, as `strata-bench score` has them. A budget is the tokens
that a row attends to; one other than the pack's is written into a copy of the pack, which is gone afterwards. The page
docs/quality.md is made from such files: `strata-bench page`.

A host engine keeps K/V as fp32, so other formats want a card.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

import numpy as np
from rich.console import Console

from strata.bench import score
from strata.bench.checks import Findings, Launch
from strata.bench.demo_pack.data.mixture import SCORED, draw
from strata.bench.demo_pack.rendering import Rendered, Renderer
from strata.bench.engine_process import EngineFailed, engine_command
from strata.bench.report import Record, finish
from strata.engine.device.host import HostDevice
from strata.engine.model import Model, Rows
from strata.engine.pack import open_pack
from strata.engine.state.slots import StatePool
from strata.kernels.kv import KV
from strata.kernels.ops import F32
from strata.server.chat.template import Chat

TOOL: Final = "quality"
BUDGET_KEY: Final = "qwen4exp.attention.indexer.top_k"
CHUNK: Final = 512
"""Rows whose logits are there at once."""
_U32: Final = 4
"""The code of a 32-bit number in a GGUF file."""


class Setting(NamedTuple):
    """kv: as `--kv` names it. budget: tokens a row attends to."""

    kv: str
    budget: int

    def __str__(self) -> str:
        return f"K/V {self.kv}, budget {self.budget}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pack", type=Path, required=True, help="the GGUF file, in one piece")
    parser.add_argument("--device", choices=("host", "cuda"), default="host", help="where it runs (host)")
    parser.add_argument("--exe", help="the engine program; default: the strata-engine of this installation")
    parser.add_argument("--kv", nargs="+", choices=tuple(KV), default=["fp32"], help="K/V formats (fp32)")
    parser.add_argument("--budget", nargs="*", type=int, default=[], metavar="TOKENS", help="besides the pack's own")
    parser.add_argument("--conversations", type=int, default=60, help="of the perplexity (60)")
    parser.add_argument("--tasks", nargs="*", choices=SCORED, default=list(SCORED), metavar="TASK", help="scored (all)")
    parser.add_argument("-n", "--n", type=int, default=20, help="problems of each task (20)")
    parser.add_argument("--batch", type=int, default=8, help="slots that answer problems together (8)")
    parser.add_argument("--longest", type=int, default=score.SIZES[-1], help=f"tokens ({score.SIZES[-1]})")
    parser.add_argument("--max-new", type=int, default=800, help="tokens of an answer at most (800)")
    parser.add_argument("--seed", type=int, default=1, help="of the conversations (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")


def run(args: argparse.Namespace, console: Console) -> int:
    if args.device == "host" and set(args.kv) != {"fp32"}:
        console.print("a host engine keeps K/V as fp32: other --kv want --device cuda")
        return 2
    if args.conversations < 1 or args.n < 1 or any(budget < 1 for budget in args.budget):
        console.print("wants --conversations, --n and every --budget 1 or more")
        return 2
    own = open_pack(args.pack).spec.index_budget
    findings = Findings()
    todo = list(conversations(args.conversations, args.longest, args.seed))
    for budget in dict.fromkeys([own, *args.budget]):
        with pack_with_budget(args.pack, own, budget) as pack:
            for setting in (Setting(kv, budget) for kv in args.kv):
                console.print(f"{setting} ...")
                findings.records += perplexities(pack, args.device, setting, todo, own)
                findings.records += scores(pack, args, setting)
    flags = {"device": args.device, "conversations": args.conversations, "n": args.n, "longest": args.longest}
    launch = Launch((), pack=args.pack)
    return finish(findings.report(TOOL, launch, flags | {"own_budget": own, "seed": args.seed}), args.json, console)


def conversations(n: int, longest: int, seed: int) -> Iterator[Rendered]:
    """Held-out conversations of all tasks and lengths, the same for the same seed."""
    renderer = Renderer()
    sizes = [size for size in score.SIZES if size <= longest] or [longest]
    for i in range(n):
        yield renderer.render(draw(Random(f"quality/{seed}/{i}"), "test", sizes[i % len(sizes)]))


@contextmanager
def pack_with_budget(path: Path, own: int, budget: int) -> Iterator[Path]:
    """A pack whose rows attend to `budget` tokens: the file itself, or a copy for as long as the context lasts."""
    if budget == own:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        shutil.copyfile(path, copy)
        head = BUDGET_KEY.encode() + struct.pack("<I", _U32)
        with copy.open("r+b") as file:
            at = file.read(1 << 20).find(head)
            if at < 0:
                raise EngineFailed(f"{path}: has no {BUDGET_KEY} as a 32-bit number, so its budget cannot be changed")
            file.seek(at + len(head))
            file.write(struct.pack("<I", budget))
        yield copy


Reader = Callable[[Sequence[int]], F32]
"""Logits (n, vocabulary) of a sequence of n tokens."""


@contextmanager
def reader(pack: Path, device: str, kv: str, context: int) -> Iterator[Reader]:
    """Reads one sequence after another."""
    if device == "host":
        model = Model(open_pack(pack), HostDevice("cpu", len(os.sched_getaffinity(0))), context)
        yield lambda ids: _read(model, model.new_state(1), ids, np.asarray)
        return
    from strata.engine.device.cuda import CudaDevice  # here: it wants CuPy
    from strata.engine.model.resident import Resident

    with closing(CudaDevice()) as card:
        resident = Resident(open_pack(pack), card, max_context=context, kv=kv, chunks=[CHUNK], logits=CHUNK)
        yield lambda ids: _read(resident.model, resident.state, ids, card.read)


def _read(model: Model, state: StatePool, ids: Sequence[int], to_host: Callable[..., F32]) -> F32:
    state.reset(0)
    parts = []
    for begin in range(0, len(ids), CHUNK):
        rows = Rows.of([(0, begin, np.asarray(ids[begin : begin + CHUNK], np.int32))])
        parts.append(np.array(to_host(model.forward(rows, state, range(len(rows))))))
    return np.concatenate(parts)


def losses(logits: F32, sample: Rendered) -> F32:
    """Cross-entropy, in nats, of every token of the answers."""
    at = np.flatnonzero(np.asarray(sample.mask[1:]))
    wide = logits[at].astype(np.float64)
    wide -= wide.max(1, keepdims=True)
    right = np.asarray(sample.ids)[at + 1]
    found: F32 = np.log(np.exp(wide).sum(1)) - wide[np.arange(len(at)), right]
    return found


def matrix(records: Sequence[Record]) -> list[str]:
    """A table in Markdown: a row a setting, a column a figure."""
    rows: dict[str, dict[str, str]] = {}
    for record in records:
        setting, _, name = record.work.partition(": ")
        rows.setdefault(setting, {})[name + (f", {record.unit}" if record.unit else "")] = f"{record.median:.4g}"
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    head = [f"| setting | {' | '.join(columns)} |", "|" + " --- |" * (1 + len(columns))]
    return head + [f"| {name} | {' | '.join(row.get(c, '') for c in columns)} |" for name, row in rows.items()]


def perplexities(pack: Path, device: str, setting: Setting, todo: Sequence[Rendered], length: int) -> list[Record]:
    """Of all conversations, and of those of more than `length` tokens."""
    context = max(len(sample.ids) for sample in todo) + 1
    with reader(pack, device, setting.kv, context) as read:
        found = [losses(read(sample.ids), sample) for sample in todo]
    long = [each for each, sample in zip(found, todo, strict=True) if len(sample.ids) > length]
    records = []
    for name, group in (("perplexity", found), (f"perplexity, longer than {length}", long)):
        if group:
            records.append(Record.of(f"{setting}: {name}", "", [math.exp(float(np.concatenate(group).mean()))]))
    return records


def scores(pack: Path, args: argparse.Namespace, setting: Setting) -> list[Record]:
    """The share of right answers of each task."""
    if not args.tasks:
        return []
    argv = (*engine_command(args.exe), "--serve", "--pack", str(pack), "--device", args.device, "--kv", setting.kv)
    launch = Launch(tuple(argv), pack=pack)
    vocabulary = score.vocabulary_of(launch)
    todo = list(score.problems(Chat(vocabulary), args.tasks, args.n, args.longest, args.seed))
    context = max(len(problem.prompt.ids) for problem in todo) + args.max_new + score.SPARE_TOKENS
    options = ("--batch", str(args.batch), "--max-context", str(context))
    with launch.start(*options, wants_slots=args.batch if args.batch > 1 else 0) as engine:
        said = [score.Said.of(request) for request in score.answer_all(engine, todo, args.max_new)]
    results = [score.result_of(vocabulary, *pair) for pair in zip(todo, said, strict=True)]
    records = []
    for task in args.tasks:
        faults = [bool(r.fault) for r in results if r.problem.sample.task == task]
        records.append(Record.of(f"{setting}: {task}", "%", [100 * (1 - sum(faults) / len(faults))]))
    return records
