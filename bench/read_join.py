"""`strata-bench read-join`: long prompts that join a busy server, through HTTP.

  two_joiners   some streams decode; a long prompt joins, then one of half its length: the streams' longest stop
  followup      a next turn of a long conversation, beside a stream and alone: its first token
  read_alone    a long prompt and nothing else: its first token
  question      a short question soon after a long prompt: the first tokens of both
  http          decoding through the server against the engine alone: one stream, and one in each slot (with --pack)
  soak          clients that ask, go on and leave at random for so many seconds: no error, equal texts, no slot left
                busy, memory that does not grow

Lengths are tokens, reached with random words of a measured length. Exit code 1 when a request fails or something that
had to be so is not.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterable

import aiohttp
from rich.console import Console

from strata.bench import read_join_http, read_join_soak
from strata.bench.checks import Findings
from strata.bench.http_client import Answer, Client, Messages, ServerRefused, connected, user, with_answer
from strata.bench.report import Record, Report, finish, pack_facts
from strata.bench.serve import words
from strata.bench.server_process import Running, add_server_arguments, server_of

TOOL = "read-join"
SCENARIOS = ("two_joiners", "followup", "read_alone", "question", "http", "soak")
P14_TOKENS, P15_TOKENS, P16_TOKENS = 60000, 40000, 27000
"""What counts as the 64K, 45K and 30K of the targets: words are not tokens."""
SAMPLE_WORDS = 200
ANSWER = 32
SHORT_ANSWER = 4
"""An answer of random tokens comes back as text of other tokens, which are read again; a model's own would not be."""
SPARE = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenarios", nargs="+", choices=SCENARIOS, metavar="SCENARIO", help=", ".join(SCENARIOS))
    add_server_arguments(parser)
    add = parser.add_argument
    add("--repeat", type=int, default=1, help="runs of each scenario but the soak (1)")
    add("--long", type=int, default=65536, help="two_joiners: tokens of the longer prompt (65536)")
    add("--apart", type=float, default=2.0, help="two_joiners: seconds between the two (2)")
    add("--streams", type=int, default=4, help="two_joiners: decoding streams (4)")
    add("--stream-tokens", type=int, default=2048, help="tokens of each stream (2048)")
    add("--held", type=int, default=30000, help="followup: tokens of the conversation (30000)")
    add("--read", type=int, default=45000, help="read_alone, question: tokens of the long prompt (45000)")
    add("--delay", type=float, default=1.0, help="question: seconds after the long prompt (1)")
    add("--http-tokens", type=int, default=512, help="http: tokens of each answer (512)")
    add("--clients", type=int, default=16, help="soak: clients (16)")
    add("--seconds", type=float, default=60.0, help="soak: how long (60)")
    add("--leave-share", type=float, default=1 / 3, help="soak: share of the requests that are left (0.33)")
    add("--soak-long", type=int, default=4096, help="soak: tokens of the longest prompt (4096)")
    add("--soak-tokens", type=int, default=48, help="soak: tokens of the longest answer (48)")
    add("--seed", type=int, default=1, help="of prompts and choices (1)")


def run(args: argparse.Namespace, console: Console) -> int:
    counts = (args.repeat, args.streams, args.stream_tokens, args.clients, args.seconds, args.soak_tokens)
    if min(counts) <= 0 or not 0 <= args.leave_share <= 1:
        console.print("every count and time: above 0; --leave-share: 0 to 1")
        return 2
    if args.pack is not None:
        args.extra = ["--max-context", str(context_of(args)), *args.extra]
    findings = Findings()
    alone: dict[int, list[read_join_http.Said]] = {}
    if "http" in args.scenarios:
        if args.pack is None:
            console.print("http: wants --pack, so that the engine can be measured by itself")
            return 2
        console.print("http: the engine alone ..")
        alone = read_join_http.engine_alone(args)
    with server_of(args) as running:
        asyncio.run(_run(args, running, findings, console, alone))
        slots = running.status()["concurrency"]["serving"]
    names = ("repeat", "long", "streams", "held", "read", "clients", "seconds", "leave_share", "soak_long")
    flags = {"scenarios": " ".join(args.scenarios), "slots": slots, **{name: getattr(args, name) for name in names}}
    pack = pack_facts(args.pack) if args.pack else None
    tool = f"strata-bench {TOOL}"
    report = Report(tool=tool, records=findings.records, checks=findings.checks, flags=flags, pack=pack)
    return finish(report, args.json, console)


def context_of(args: argparse.Namespace) -> int:
    """What the scenarios that were asked for need."""
    need = {
        "two_joiners": args.long + args.stream_tokens,
        "followup": args.held + args.stream_tokens,
        "read_alone": args.read,
        "question": args.read,
        "http": args.http_tokens + read_join_http.PROMPT,
        "soak": args.soak_long * 2 + args.soak_tokens * read_join_soak.MOST_TURNS,
    }
    return int(max(need[name] for name in args.scenarios) * 1.1) + 4 * SPARE


async def _run(
    args: argparse.Namespace,
    running: Running,
    findings: Findings,
    console: Console,
    alone: dict[int, list[read_join_http.Said]],
) -> None:
    where = {"api_key": args.api_key, "model": args.model, "timeout_s": args.timeout}
    async with connected(running.url, **where) as client:
        load = ReadJoin(client, running, findings, args, alone)
        await load.learn()
        # `http` first: what others leave in the slots would have to be put away before its answers.
        for name in sorted(args.scenarios, key=lambda name: name != "http"):
            step: Callable[[], Awaitable[None]] = getattr(load, name)
            n_runs = 1 if name in ("http", "soak") else args.repeat
            for i in range(n_runs):
                console.print(f"{name} .." if n_runs == 1 else f"{name}, run {i + 1} ..")
                try:
                    await step()
                except (ServerRefused, aiohttp.ClientError, TimeoutError) as error:
                    findings.that(f"{name}: every request is answered", False, str(error) or type(error).__name__)
        load.figures()


class ReadJoin:
    """The scenarios on one server."""

    def __init__(
        self,
        client: Client,
        running: Running,
        findings: Findings,
        args: argparse.Namespace,
        alone: dict[int, list[read_join_http.Said]],
    ) -> None:
        self.client = client
        self.running = running
        self.findings = findings
        self.args = args
        self.alone = alone
        self.tokens_per_word = 1.0
        self._rng = random.Random(args.seed)
        self._values: dict[tuple[str, str, str], list[float]] = {}

    async def learn(self) -> None:
        """How many tokens a word is."""
        answer = await self.ask(user(words(self._rng, SAMPLE_WORDS)), 1)
        self.tokens_per_word = answer.prompt_tokens / SAMPLE_WORDS

    def prompt(self, n_tokens: int) -> list[dict[str, str]]:
        """One that nobody has sent before."""
        return user(words(self._rng, max(1, int(n_tokens / self.tokens_per_word))))

    async def ask(self, messages: Messages, max_tokens: int, answer: Answer | None = None) -> Answer:
        return await self.client.chat(messages, max_tokens, answer=answer)

    def note(self, work: str, unit: str, value: float, target: str = "") -> None:
        self._values.setdefault((work, unit, target), []).append(value)

    def figures(self) -> None:
        """The runs of each figure as one record."""
        for (work, unit, target), values in self._values.items():
            self.findings.records.append(Record.of(work, unit, values, target))

    async def streams(self, n: int) -> list[tuple[Answer, asyncio.Task[Answer]]]:
        """n requests that decode."""
        out = []
        for _ in range(n):
            answer = Answer()
            task = asyncio.create_task(self.ask(self.prompt(32), self.args.stream_tokens, answer))
            while len(answer.times) < 2 and not task.done():  # noqa: ASYNC110 - filled by the task
                await asyncio.sleep(0.005)
            out.append((answer, task))
        return out

    async def leave(self, streams: Iterable[tuple[Answer, asyncio.Task[Answer]]]) -> None:
        """Their clients go away; one that failed before fails this."""
        for _, task in streams:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*(task for _, task in streams), return_exceptions=True)

    async def two_joiners(self) -> None:
        args, n = self.args, self.args.long
        streams = await self.streams(args.streams)
        first = asyncio.create_task(self.ask(self.prompt(n), ANSWER))
        await asyncio.sleep(args.apart)
        second = await self.ask(self.prompt(n // 2), ANSWER)
        answers = [await first, second]
        begin, end = answers[0].sent_s, max(a.sent_s + a.ttft for a in answers)
        await asyncio.sleep(0.2)
        await self.leave(streams)
        stops, said = [0.0], 0
        for answer, _ in streams:
            times = [t for t in answer.times if t <= end] + [end]
            stops += [b - max(a, begin) for a, b in itertools.pairwise(times) if b > begin]
            said += sum(begin < t <= end for t in answer.times)
        target = "P14" if n >= P14_TOKENS else ""
        self.note(
            f"longest stop of {args.streams} streams, {n} and {n // 2} tokens join", "ms", max(stops) * 1e3, target
        )
        self.note("the streams meanwhile, pieces of text", "1/s", said / (end - begin))
        for name, answer in zip(("longer", "shorter"), answers, strict=True):
            self.note(f"first token of the {name} joiner", "ms", answer.ttft * 1e3)
        self.findings.that("two_joiners: the streams went on", said > 0, f"{said} pieces in {end - begin:.2f} s")

    async def followup(self) -> None:
        await self._followup("alone")
        streams = await self.streams(1)
        await self._followup("beside a stream")
        await self.leave(streams)

    async def _followup(self, name: str) -> None:
        messages = self.prompt(self.args.held)
        first = await self.ask(messages, SHORT_ANSWER)
        second = await self.ask(with_answer(messages, first.text, "And then?"), ANSWER)
        target = "P16" if second.cached_tokens >= P16_TOKENS else ""
        self.note(f"next turn {name}, {self.args.held} tokens held: first token", "ms", second.ttft * 1e3, target)
        enough = second.cached_tokens > first.prompt_tokens * 0.9
        detail = f"{second.cached_tokens} of {second.prompt_tokens} tokens"
        self.findings.that(f"followup {name}: the conversation was not read again", enough, detail)

    async def read_alone(self) -> None:
        answer = await self.ask(self.prompt(self.args.read), ANSWER)
        self.note(f"{self.args.read} tokens read alone: first token", "ms", answer.ttft * 1e3)

    async def question(self) -> None:
        """Sent while the long prompt is read, whatever is left of it when the machine is fast."""
        args = self.args
        long = asyncio.create_task(self.ask(self.prompt(args.read), ANSWER))
        await asyncio.sleep(args.delay)
        short = await self.ask(self.prompt(16), ANSWER)
        answer = await long
        target = "P15" if args.read >= P15_TOKENS else ""
        self.note(f"a question {args.delay:g} s into {args.read} tokens: first token", "ms", short.ttft * 1e3, target)
        self.note("the same, share of the long one's time", "ratio", short.ttft / answer.ttft)
        self.note(f"{args.read} tokens with a question inside: first token", "ms", answer.ttft * 1e3)
        began, ended = short.sent_s - answer.sent_s, answer.ttft
        inside = began < ended
        passed = short.sent_s + short.ttft < answer.sent_s + answer.ttft
        detail = (
            f"sent after {began:.2f} s, answered after {began + short.ttft:.2f} s, the long one after {ended:.2f} s"
        )
        self.findings.that("question: it does not wait for the long prompt", inside and passed, detail)

    async def http(self) -> None:
        served: dict[int, list[read_join_http.Said]] = {n: [] for n in self.alone}
        for run in range(self.args.repeat + 1):  # as on the engine alone: the first one warms up
            for n, answers in served.items():
                answers.append(await read_join_http.through_server(self.client, self.args, run, n))
        for n, answers in served.items():
            read_join_http.compare(self.alone[n], answers, n, self.findings)

    async def soak(self) -> None:
        await read_join_soak.soak(self.client, self.running, self.args, self.findings, self.prompt)
