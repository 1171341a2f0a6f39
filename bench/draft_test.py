"""`strata-bench draft-test`: the same prompts with drafts and without give the same texts; what drafts are good for.

    strata-bench draft-test --pack model.gguf --drafts="--mtp model-mtp.gguf --spec 4" [-n 20] [--batch 4]

Held-out problems of the demo pack, task by task, are answered greedily and sampled: by an engine without drafts, by one
with them, and in slots (--batch 0: not in slots; --only slots: not alone). Every text must be the same, token by token.
Then, per task, how many drafts the model said as well, how many tokens a window with drafts gave, and how many times
faster the answers came than without: of each answer the median of --repeats times, and of a task the sum of these; in
slots, the time of all prompts, as often: the first time too, which pays for what an engine has not done at its start.
There prompts are part of the time, which the draft layer reads too: what they take is told beside it. An engine tells
milliseconds of an answer to a tenth: answers of a few tokens want a larger -n.

Exit code 1 when a text differs, or a task, or the slots are slower than --floor times the engine without drafts.
"""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import msgspec
from rich.console import Console

from strata.bench.checks import Findings, Launch, add_engine_arguments
from strata.bench.demo_pack.data.mixture import SCORED
from strata.bench.report import Record, finish
from strata.bench.score import SIZES, SPARE_TOKENS, Problem, problems, vocabulary_of
from strata.bench.slot_engine import SlotEngine
from strata.bench.slot_model import Request
from strata.protocol.lines import Done, SamplingKeys
from strata.server.chat.template import Chat

TOOL: Final = "draft-test"
KEYS: Final = {"greedy": SamplingKeys(ckpt=False), "sampled": SamplingKeys(ckpt=False, temperature=0.8)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument(
        "--drafts",
        type=shlex.split,
        default=["--mtp", "--spec", "4"],
        metavar="OPTIONS",
        help='options of the engine with drafts, in one word (--drafts="--mtp --spec 4")',
    )
    parser.add_argument("--tasks", nargs="+", choices=SCORED, default=list(SCORED), metavar="TASK", help="(all)")
    parser.add_argument("-n", "--n", type=int, default=12, help="prompts of each task (12)")
    parser.add_argument("--repeats", type=int, default=3, help="times that all prompts are answered (3)")
    parser.add_argument("--batch", type=int, default=4, help="slots of the runs in slots, 2 to 8; 0: no such runs (4)")
    parser.add_argument("--only", choices=("alone", "slots"), help="run these only (both, --batch 0: alone)")
    parser.add_argument("--longest", type=int, default=SIZES[-1], help=f"tokens of the longest prompts ({SIZES[-1]})")
    parser.add_argument("--max-new", type=int, default=200, help="tokens of an answer at most (200)")
    parser.add_argument("--floor", type=float, default=0.0, metavar="X", help="least speed of a task or slots")


@dataclass(frozen=True)
class Run:
    """The answers of an engine: to all prompts in their order, one or several times. seconds: each of these took."""

    answers: list[Request]
    device: str
    seconds: list[float]

    def of(self, places: Sequence[int], n: int) -> list[list[Done]]:
        """The ends of some of n prompts, solo: of each prompt as often as it was answered."""
        ends = [[answer.done for answer in self.answers[i::n]] for i in places]
        return [[end for end in of if isinstance(end, Done)] for of in ends]

    @property
    def read_ms(self) -> list[float]:
        """What reading the prompts took, each time."""
        n = len(self.answers) // len(self.seconds)
        ms = [0.0 if answer.done is None else answer.done.prompt_ms for answer in self.answers]
        return [sum(ms[i * n : (i + 1) * n]) for i in range(len(self.seconds))]


def run(args: argparse.Namespace, console: Console) -> int:
    if (reason := refusal(args)) is not None:
        console.print(reason)
        return 2
    launch, findings = Launch.of(args), Findings()
    todo = list(problems(Chat(vocabulary_of(launch)), args.tasks, args.n, args.longest, args.seed))
    context = max(512, max(len(problem.prompt.ids) for problem in todo) + args.max_new + SPARE_TOKENS)
    slots = args.batch if args.only != "alone" else 0
    devices: set[str] = set()
    for name, keys in KEYS.items():

        def ask(*options: str, keys: SamplingKeys = keys) -> Run:
            found = answers(launch, ("--max-context", str(context), *options), todo, keys, args)
            devices.add(found.device)
            return found

        plain = None
        if args.only != "slots":
            plain, withal = ask(), ask(*args.drafts)
            compare(findings, f"{name}, alone", todo, withal, plain)
            for task in args.tasks:
                places = [i for i, problem in enumerate(todo) if problem.sample.task == task]
                of_task, without = (each.of(places, len(todo)) for each in (withal, plain))
                note(findings, f"{task}, {name}", of_task, without, args.floor)
        if slots:
            of_slots, by_slots = ("--batch", str(slots)), f"{name}, {slots} slots"
            bare, drafted = ask(*of_slots), ask(*args.drafts, "--batch-mtp", *of_slots)
            compare(findings, by_slots, todo, drafted, plain or bare)
            note_slots(findings, by_slots, drafted, bare, args.floor)
    flags = {
        "n": args.n,
        "repeats": args.repeats,
        "batch": slots,
        "max_new": args.max_new,
        "drafts": " ".join(Path(w).name for w in args.drafts),
    }
    flags |= {"device": " ".join(sorted(devices)), "extra": " ".join(args.extra)}
    return finish(findings.report(TOOL, launch, flags), args.json, console)


def refusal(args: argparse.Namespace) -> str | None:
    """What is wrong with the arguments."""
    if min(args.n, args.repeats) < 1 or args.max_new < 2 or args.longest < 100:
        return "wants --n and --repeats 1 or more, --max-new 2 or more, --longest 100 or more"
    if args.batch not in (0, *range(2, 9)):
        return f"--batch: wants 2 to 8 slots, or 0 for no runs in slots, got {args.batch}"
    if args.only == "slots" and not args.batch:
        return "--only slots wants some: --batch 2 to 8"
    return None


def answers(
    launch: Launch, options: Sequence[str], todo: Sequence[Problem], keys: SamplingKeys, args: argparse.Namespace
) -> Run:
    """All prompts through a new engine, --repeats times: in slots where it has some, else one by one.

    Every prompt has a seed of its own.
    """
    asked, found, seconds = list(enumerate(todo, 1)), list[Request](), list[float]()
    with launch.start(*options) as engine:
        for _ in range(args.repeats):
            begun = time.monotonic()
            if engine.limits.slots < 2:
                now = [engine.alone(p.prompt.ids, args.max_new, seeded(keys, seed)) for seed, p in asked]
            else:
                now = list(in_slots(engine, asked, keys, args.max_new))
                engine.finish(*now)
            seconds.append(time.monotonic() - begun)
            found += now
        return Run(found, str(engine.process.info.get("device")), seconds)


def in_slots(
    engine: SlotEngine, asked: Sequence[tuple[int, Problem]], keys: SamplingKeys, max_new: int
) -> Iterator[Request]:
    model = engine.model
    for seed, problem in asked:
        if not model.at_rest:
            engine.until(lambda: model.reading is None and None in model.slots)
        request = engine.admit(model.slots.index(None), problem.prompt.ids, max_new, seeded(keys, seed))
        engine.until_admitted(request)
        yield request


def seeded(keys: SamplingKeys, seed: int) -> SamplingKeys:
    return msgspec.structs.replace(keys, seed=seed)


def compare(findings: Findings, name: str, todo: Sequence[Problem], got: Run, wanted: Run) -> None:
    """One check for all prompts; the detail names the first that differs."""
    n = len(todo)
    differ = [
        i
        for i, answer in enumerate(got.answers)
        if any(list(answer.tokens) != list(each.tokens) for each in wanted.answers[i % n :: n])
    ]
    detail = f"{n} prompts, {sum(len(answer.tokens) for answer in wanted.answers[:n])} tokens"
    if differ:
        detail = f"{len(differ)} of {len(got.answers)} answers differ, the first of them to prompt {differ[0] % n}"
    findings.that(f"{name}: the texts without drafts", not differ, detail)


def note_slots(findings: Findings, name: str, withal: Run, without: Run, floor: float) -> None:
    """The figures of all prompts together, in slots: of each time."""
    ends = [answer.slot_done for answer in withal.answers if answer.slot_done is not None]
    offered, accepted = (sum(end.drafts_offered or 0 for end in ends), sum(end.drafts_accepted or 0 for end in ends))
    if offered:
        findings.records.append(Record.of(f"{name}, drafts kept of {offered}", "%", [100 * accepted / offered]))
    faster = [old / new for old, new in zip(without.seconds, withal.seconds, strict=True)]
    findings.records.append(Record.of(f"{name}, speed against none", "x", faster))
    reads = [old / new for old, new in zip(without.read_ms, withal.read_ms, strict=True) if new > 0]
    if reads:
        findings.records.append(Record.of(f"{name}, reads against none", "x", reads))
    if floor:
        findings.that(f"{name}: at least {floor:g} times as fast", median(faster) >= floor, f"{median(faster):.2f}")


def note(
    findings: Findings, name: str, withal: Sequence[Sequence[Done]], without: Sequence[Sequence[Done]], floor: float
) -> None:
    """The figures of a task, solo: of each prompt the ends of all its answers."""
    ends = [end for of in withal for end in of]
    offered, accepted = sum(end.drafts_offered for end in ends), sum(end.drafts_accepted for end in ends)
    windows = sum(end.chain.windows for end in ends if end.chain is not None)
    if offered:
        findings.records.append(Record.of(f"{name}, drafts kept of {offered}", "%", [100 * accepted / offered]))
    if windows:
        findings.records.append(
            Record.of(f"{name}, tokens of a window with drafts", "tokens", [1 + accepted / windows])
        )
    ms = [sum(median(end.decode_ms for end in of) for of in each) for each in (withal, without)]
    if min(ms) > 0:
        faster = ms[1] / ms[0]
        findings.records.append(Record.of(f"{name}, speed against none", "x", [faster]))
        if floor:
            findings.that(f"{name}: at least {floor:g} times as fast", faster >= floor, f"{faster:.2f}")
