"""`strata-bench batch-test`: the same prompts alone and together in the slots, compared token by token.

Every prompt runs alone first (GEN), then: all at once, one after the other while those before decode, with one slot
cancelled half-way and used again, and with a request that begins alone and moves into a slot when company comes (STOP,
then BGEN with prompt and output). Each set of `--keys` goes through all of it, and a last round mixes them. Exit code 1
when a token differs. The rate is that of all slots while every one of them decodes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from rich.console import Console

from strata.bench.checks import Findings, Launch, Prompts, add_engine_arguments, keys_of
from strata.bench.report import Record, finish
from strata.bench.slot_engine import SlotEngine
from strata.bench.slot_model import Request
from strata.protocol.lines import SamplingKeys

TOOL = "batch-test"
DEFAULT_KEYS = ("", "temperature=0.8 top_p=0.95 min_p=0.02 seed=7")
P3_SLOTS = 8
MIN_NEW = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument("--batch", type=int, default=8, help="slots (8)")
    parser.add_argument("--n", type=int, help="prompts (as many as slots)")
    parser.add_argument("--max-new", type=int, default=150, help="tokens of each answer (150)")
    parser.add_argument("--prompt", type=int, default=48, help="tokens of the shortest prompt (48)")
    parser.add_argument(
        "--keys",
        action="append",
        metavar="KEYS",
        help="keys of the requests, such as 'temperature=0.7 seed=3'; repeat it for several sets; each prompt gets the "
        "next seed (default: greedy, and a seeded set)",
    )
    parser.add_argument("-r", "--runs", type=int, default=1, help="measured runs of all slots at once (1)")


@dataclass(frozen=True)
class Job:
    """A prompt with its keys, and its whole answer when it runs alone."""

    ids: tuple[int, ...]
    keys: SamplingKeys
    wanted: tuple[int, ...]


def run(args: argparse.Namespace, console: Console) -> int:
    n = args.batch if args.n is None else args.n
    if args.batch < 2 or not 2 <= n <= 64 or args.max_new < MIN_NEW or args.prompt < 1 or args.runs < 1:
        console.print(
            f"wants --batch 2 or more, --n 2 to 64, --max-new {MIN_NEW} or more, --prompt and --runs 1 or more"
        )
        return 2
    launch, findings = Launch.of(args), Findings()
    sets = [keys_of(text) for text in (DEFAULT_KEYS if args.keys is None else args.keys)]
    context = args.prompt * 2 + n + args.max_new + 8
    options = ("--batch", str(args.batch), "--max-context", str(max(512, context)), "--eos-ids", "none")
    with launch.start(*options, wants_slots=args.batch) as engine:
        test = BatchTest(engine, findings, args.max_new, console)
        jobs = [test.alone(args, n, keys) for keys in sets]
        for keys, group in zip(sets, jobs, strict=True):
            test.run_set("greedy" if keys.is_greedy else "seeded", group, args.runs if keys.is_greedy else 1)
        if len(jobs) > 1:
            mixed = [jobs[i % len(jobs)][i] for i in range(n)]
            test.compare("mixed keys", mixed, test.serve(mixed))
        flags = {"batch": args.batch, "n": n, "max_new": args.max_new, "device": engine.process.info.get("device")}
    flags |= {"keys": [keys.line().strip() or "greedy" for keys in sets], "extra": " ".join(args.extra)}
    return finish(findings.report(TOOL, launch, flags), args.json, console)


class BatchTest:
    """The rounds of one engine."""

    def __init__(self, engine: SlotEngine, findings: Findings, max_new: int, console: Console) -> None:
        self.engine = engine
        self.findings = findings
        self.max_new = max_new
        self.console = console

    def alone(self, args: argparse.Namespace, n: int, keys: SamplingKeys) -> list[Job]:
        """Every prompt on the solo path; nothing of it is kept (ckpt=0), so that the slots read it again."""
        prompts = Prompts(self.engine.limits.vocab, args.seed)
        jobs, rates = [], []
        for i in range(n):
            own = keys if keys.is_greedy else msgspec.structs.replace(keys, seed=max(keys.seed, 1) + i)
            ids = prompts.plain(args.prompt + i * args.prompt // n, i)
            r = self.engine.alone(ids, self.max_new, msgspec.structs.replace(own, ckpt=False))
            jobs.append(Job(ids, own, tuple(r.tokens)))
            if r.done is not None and r.done.decode_ms > 0:
                rates.append((len(r.tokens) - 1) / r.done.decode_ms * 1e3)
        if keys.is_greedy and rates:
            self.findings.records.append(Record.of("one alone, decode", "tok/s", rates))
        return jobs

    def run_set(self, name: str, jobs: Sequence[Job], runs: int) -> None:
        self.console.print(f"{name}: {len(jobs)} prompts in {self.engine.limits.slots} slots")
        rates, totals = [], []
        for _ in range(runs):
            requests = self.serve(jobs)
            self.compare(f"{name}, all at once", jobs, requests)
            rates += together_rate(requests[: self.engine.limits.slots])
            totals.append(whole_rate(requests))
        slots = self.engine.limits.slots
        target = "P3" if slots == P3_SLOTS and name == "greedy" else ""
        if rates:
            self.findings.records.append(Record.of(f"{slots} slots, {name}, all decoding", "tok/s", rates, target))
        self.findings.records.append(Record.of(f"{len(jobs)} requests, {name}, reads included", "tok/s", totals))
        step = max(1, self.max_new // (2 * len(jobs)))
        staggered = self.serve(jobs, lambda before: before.state == "over" or len(before.tokens) >= step)
        self.compare(f"{name}, staggered", jobs, staggered)
        self.cancel(name, jobs)
        self.promote(name, jobs)

    def serve(self, jobs: Sequence[Job], ready: Callable[[Request], bool] = lambda before: True) -> list[Request]:
        """Admits every job into the first free slot once the one before is `ready`; until all are over."""
        requests: list[Request] = []
        for job in jobs:
            requests.append(self.admit(job, lambda: not requests or ready(requests[-1])))
        self.engine.finish(*requests)
        return requests

    def admit(self, job: Job, ready: Callable[[], bool] = lambda: True) -> Request:
        """Into the first free slot, when nothing is being read."""
        model = self.engine.model
        if not model.at_rest:
            self.engine.until(lambda: model.reading is None and None in model.slots and ready())
        request = self.engine.admit(model.slots.index(None), job.ids, self.max_new, job.keys)
        self.engine.until_admitted(request)
        return request

    def compare(self, name: str, jobs: Sequence[Job], requests: Sequence[Request]) -> None:
        """One check for a round; the first request that differs names it."""
        pairs = list(zip(jobs, requests, strict=True))
        bad = [(i, job, r) for i, (job, r) in enumerate(pairs) if tuple(r.tokens) != job.wanted]
        if not bad:
            self.findings.that(name, True, f"{len(pairs)} answers, {sum(len(r.tokens) for r in requests)} tokens equal")
        for i, job, r in bad:
            self.findings.same(
                f"{name}, prompt {i} in slot {r.slot}", r.tokens, job.wanted, f"{len(bad)} answers differ"
            )

    def cancel(self, name: str, jobs: Sequence[Job]) -> None:
        """One slot is stopped half-way; the others do not notice, and the next request in it neither."""
        engine, some = self.engine, jobs[: self.engine.limits.slots]
        requests = [self.admit(job) for job in some]
        gone = requests[1]
        engine.until_tokens(gone, self.max_new // 2)
        engine.slot_stop(gone.slot or 0)
        engine.finish(gone)
        again = self.admit(some[0])
        engine.finish(*requests, again)
        self.findings.that(f"{name}, a slot was cancelled", gone.finish == "cancel", f"after {len(gone.tokens)} tokens")
        self.findings.begins(f"{name}, the cancelled slot until then", gone.tokens, some[1].wanted)
        rest = [(job, r) for job, r in zip(some, requests, strict=True) if r is not gone] + [(some[0], again)]
        self.compare(f"{name}, beside and after a cancelled slot", *zip(*rest, strict=True))

    def promote(self, name: str, jobs: Sequence[Job]) -> None:
        """A request alone is stopped when company comes and goes on in a slot with what it has said."""
        engine, (job, company) = self.engine, jobs[:2]
        alone = engine.solo(job.ids, self.max_new, job.keys)
        engine.until_tokens(alone, self.max_new // 3)
        engine.stop()
        engine.finish(alone)
        left = self.max_new - len(alone.tokens)
        self.findings.that(f"{name}, a request was stopped", alone.finish == "cancel", f"after {len(alone.tokens)}")
        if alone.finish != "cancel":
            return
        rest = engine.admit(0, (*job.ids, *alone.tokens), left, job.keys)
        engine.until_admitted(rest)
        other = self.admit(company)
        engine.finish(rest, other)
        held = len(job.ids) + len(alone.tokens) - 1
        self.findings.that(f"{name}, promoted without reading again", rest.reused == held, f"{rest.reused} of {held}")
        self.findings.same(f"{name}, promoted from solo", alone.tokens + rest.tokens, job.wanted)
        self.findings.same(f"{name}, beside the promoted one", other.tokens, company.wanted)


def together_rate(requests: Sequence[Request]) -> list[float]:
    """Tokens per second of all of them while every one decodes in its slot; empty when that never was."""
    begin, end = max(r.done_s for r in requests), min(r.over_s for r in requests)
    n = sum(begin < t <= end for r in requests for t in r.token_s)
    return [n / (end - begin)] if end > begin and n else []


def whole_rate(requests: Sequence[Request]) -> float:
    """Tokens per second from the first line sent to the last one over."""
    seconds = max(r.over_s for r in requests) - min(r.sent_s for r in requests)
    return sum(len(r.tokens) for r in requests) / seconds
