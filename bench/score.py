"""`strata-bench score`: how many held-out problems a pack answers exactly, task by task.

Every prompt is what the server would send: the pack's own chat template, thinking on or off as the problem says. The
answers are greedy and go through the server's output parser; a number, a record, a text, a JSON value, or a call with
its arguments has to be right exactly. `bench/demo_pack/data` writes the problems; none of them is in the demo pack's
training. With slots (--batch) the problems run together, which changes no answer. Exit code 1 when a task stays below
--floor.

Another implementation is judged through files: `--write-prompts` writes a line for each problem, {"task", "ids",
"max_new"}, and `--answers` reads a line for each in the same order, {"tokens"}: greedy ids up to an end token.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec
from rich.console import Console

from strata.bench.checks import Findings, Launch, add_engine_arguments
from strata.bench.demo_pack.data.mixture import SCORED, draw_task
from strata.bench.demo_pack.data.sample import Call, Sample
from strata.bench.demo_pack.judge import Answer, answer_of, fault, is_valid_call
from strata.bench.demo_pack.rendering import prompt_of
from strata.bench.engine_process import EngineFailed
from strata.bench.report import Record, finish
from strata.bench.slot_engine import SlotEngine
from strata.bench.slot_model import Request
from strata.protocol.lines import SamplingKeys
from strata.server.chat.errors import VocabularyError
from strata.server.chat.events import EngineReason
from strata.server.chat.template import Chat, Prompt
from strata.server.chat.vocabulary import Vocabulary

TOOL = "score"
SIZES = (150, 400, 1000, 2000, 3000)
"""Tokens of the conversations of a task that has a length, in turns."""
SPARE_TOKENS = 8
SHOWN = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument(
        "--tasks", nargs="+", choices=SCORED, default=list(SCORED), metavar="TASK", help=f"of {', '.join(SCORED)} (all)"
    )
    parser.add_argument("-n", "--n", type=int, default=40, help="problems of each task (40)")
    parser.add_argument("--batch", type=int, default=0, help="slots (0: one problem at a time)")
    parser.add_argument("--longest", type=int, default=SIZES[-1], help=f"tokens of the longest prompts ({SIZES[-1]})")
    parser.add_argument("--max-new", type=int, default=800, help="tokens of an answer at most (800)")
    parser.add_argument("--floor", type=float, metavar="PERCENT", help="what every task has to reach")
    files = parser.add_mutually_exclusive_group()
    files.add_argument("--write-prompts", type=Path, metavar="FILE", help="write the prompts there and run nothing")
    files.add_argument("--answers", type=Path, metavar="FILE", help="judge these answers to them and run nothing")
    parser.add_argument("--answers-of", metavar="NAME", help="whose answers these are, for the report")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print so many wrong answers of each task")


class Said(NamedTuple):
    """Tokens of one answer. Draft tokens: those that were offered and those kept."""

    tokens: Sequence[int]
    finish: EngineReason
    n_offered: int = 0
    n_accepted: int = 0

    @classmethod
    def of(cls, request: Request) -> Said:
        end = request.slot_done or request.done
        assert end is not None
        reason: EngineReason = "stop" if request.finish == "stop" else "length"
        return cls(request.tokens, reason, end.drafts_offered or 0, end.drafts_accepted or 0)


class Problem(NamedTuple):
    """A held-out sample and its prompt."""

    sample: Sample
    prompt: Prompt


class Result(NamedTuple):
    """fault: why the answer is wrong, "" when it is right."""

    problem: Problem
    said: Said
    answer: Answer
    fault: str


def problems(chat: Chat, tasks: Sequence[str], n: int, longest: int, seed: int) -> Iterator[Problem]:
    """n of each task, the same for the same seed whatever the other tasks are."""
    sizes = [size for size in SIZES if size <= longest] or [longest]
    for task in tasks:
        for i in range(n):
            sample = draw_task(Random(f"score/{seed}/{task}/{i}"), task, "test", sizes[i % len(sizes)])
            yield Problem(sample, prompt_of(chat, sample))


def vocabulary_of(launch: Launch) -> Vocabulary:
    """The vocabulary of the pack that the engine loads. Raises EngineFailed."""
    argv = launch.argv
    flag = next((word for word in ("--pack", "--native") if word in argv[:-1]), None)
    if flag is None:
        raise EngineFailed("the engine's command line names no --pack, so there is no vocabulary to write prompts with")
    path = Path(launch.cwd or ".", argv[argv.index(flag) + 1])
    try:
        return Vocabulary.load(path)
    except VocabularyError as error:
        raise EngineFailed(str(error)) from None


def run(args: argparse.Namespace, console: Console) -> int:
    if args.n < 1 or args.max_new < 1 or args.longest < 100 or not 0 <= args.batch <= 64:
        console.print("wants --n and --max-new 1 or more, --longest 100 or more, --batch 0 to 64")
        return 2
    launch, findings = Launch.of(args), Findings()
    vocabulary = vocabulary_of(launch)
    todo = list(problems(Chat(vocabulary), args.tasks, args.n, args.longest, args.seed))
    longest = max(len(problem.prompt.ids) for problem in todo) + args.max_new + SPARE_TOKENS
    if vocabulary.context_length is not None and longest > vocabulary.context_length:
        raise EngineFailed(
            f"the longest prompt and its answer need {longest} tokens, the pack has a context of "
            f"{vocabulary.context_length}: lower --longest or --max-new"
        )
    if args.write_prompts is not None:
        write_prompts(args.write_prompts, todo, args.max_new)
        console.print(f"written: {len(todo)} prompts")
        return 0
    if args.answers is not None:
        device, said = args.answers_of or "another implementation", read_answers(args.answers, vocabulary, len(todo))
    else:
        options = ("--batch", str(args.batch), "--max-context", str(max(512, longest)))
        with launch.start(*options, wants_slots=args.batch if args.batch > 1 else 0) as engine:
            said = [Said.of(request) for request in answer_all(engine, todo, args.max_new)]
            device = str(engine.process.info.get("device"))
    results = [result_of(vocabulary, *pair) for pair in zip(todo, said, strict=True)]
    for task in args.tasks:
        note_task(findings, task, [r for r in results if r.problem.sample.task == task], args.floor)
        show_wrong(console, [r for r in results if r.problem.sample.task == task and r.fault][: args.show])
    flags = {"n": args.n, "longest": args.longest, "max_new": args.max_new, "batch": args.batch, "seed": args.seed}
    flags |= {"device": device, "extra": " ".join(args.extra)}
    return finish(findings.report(TOOL, launch, flags), args.json, console)


def answer_all(engine: SlotEngine, todo: Sequence[Problem], max_new: int) -> list[Request]:
    """Greedy answers, in slots as far as the engine has them."""
    keys, model = SamplingKeys(ckpt=False), engine.model
    if engine.limits.slots < 2:
        return [engine.alone(problem.prompt.ids, max_new, keys) for problem in todo]
    requests = []
    for problem in todo:
        if not model.at_rest:
            engine.until(lambda: model.reading is None and None in model.slots)
        request = engine.admit(model.slots.index(None), problem.prompt.ids, max_new, keys)
        engine.until_admitted(request)
        requests.append(request)
    engine.finish(*requests)
    return requests


def result_of(vocabulary: Vocabulary, problem: Problem, said: Said) -> Result:
    answer = answer_of(vocabulary, problem.prompt, said.tokens, said.finish)
    assert problem.sample.wants is not None
    return Result(problem, said, answer, fault(problem.sample.wants, answer))


def write_prompts(path: Path, todo: Sequence[Problem], max_new: int) -> None:
    lines = [{"task": p.sample.task, "ids": p.prompt.ids, "max_new": max_new} for p in todo]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def read_answers(path: Path, vocabulary: Vocabulary, n: int) -> list[Said]:
    """The answers of another implementation. Raises EngineFailed for a file that does not hold n of them."""
    try:
        answers = [msgspec.json.decode(line, type=_Answered).tokens for line in path.read_bytes().splitlines()]
    except msgspec.MsgspecError as error:
        raise EngineFailed(f'{path}: a line is not {{"tokens": [..]}}: {error}') from None
    if len(answers) != n:
        raise EngineFailed(f"{path}: {len(answers)} answers for {n} problems; --tasks, --n, --seed, --longest differ?")
    ended = [bool(tokens) and tokens[-1] in vocabulary.end_ids for tokens in answers]
    return [Said(tokens, "stop" if end else "length") for tokens, end in zip(answers, ended, strict=True)]


class _Answered(msgspec.Struct):
    tokens: list[int]


def note_task(findings: Findings, task: str, results: Sequence[Result], floor: float | None) -> None:
    """The figures of a task: how many are right, of the calls how many fit their schema, the answers' length, and of
    the drafts how many were kept."""
    right = sum(not r.fault for r in results)
    percent = 100 * right / len(results)
    findings.records.append(Record.of(f"{task}, right of {len(results)}", "%", [percent]))
    calls = [r for r in results if isinstance(r.problem.sample.wants, Call)]
    if calls:
        valid = sum(is_valid_call(r.problem.sample.tools, r.answer) for r in calls)
        findings.records.append(Record.of(f"{task}, calls that fit the schema", "%", [100 * valid / len(calls)]))
    findings.records.append(Record.of(f"{task}, answer", "tokens", [float(len(r.said.tokens)) for r in results]))
    if offered := sum(r.said.n_offered for r in results):
        kept = 100 * sum(r.said.n_accepted for r in results) / offered
        findings.records.append(Record.of(f"{task}, drafts kept of {offered}", "%", [kept]))
    if floor is not None:
        findings.that(f"{task} reaches the floor", percent >= floor, f"{right} of {len(results)}, wanted {floor:g} %")


def show_wrong(console: Console, results: Sequence[Result]) -> None:
    for r in results:
        question = r.problem.sample.messages[-2]["content"][-SHOWN:]
        console.print(f"{r.problem.sample.task}: {question!r}: {r.fault[:SHOWN]}", markup=False, soft_wrap=True)
