"""`strata-bench early-close-test`: what a client that goes away leaves behind: nothing.

A client closes its connection in the middle of a streamed answer, or while its prompt is read; the next request comes
at once. Its text must be the one that it has when it runs by itself: not a token of the other's. Four ways: nobody else
is there, another answer runs beside it (whose text must not change either), the prompt is still being read, and several
clients go away together. At the end every slot must be idle.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Awaitable, Callable

import aiohttp
from rich.console import Console

from strata.bench.checks import Findings
from strata.bench.http_client import Answer, Client, Messages, ServerRefused, connected, user
from strata.bench.report import Record, Report, finish
from strata.bench.serve import words
from strata.bench.server_process import add_server_arguments, server_of

TOOL = "early-close-test"
PROBE_WORDS, LONG_WORDS = 12, 300
IDLE_S = 60.0
"""Within this the slots of clients that went away must be free: at most one prompt chunk and one window."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each way (8)")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens of the answers that are compared (32)")
    parser.add_argument("--long", type=int, default=400, help="tokens that the client asks for that goes away (400)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (1)")


def run(args: argparse.Namespace, console: Console) -> int:
    if min(args.rounds, args.max_tokens, args.long) < 1:
        console.print("--rounds, --max-tokens and --long: at least 1 each")
        return 2
    findings = Findings()
    with server_of(args) as running:
        asyncio.run(_run(args, running.url, findings, console))
        slots = running.status()["concurrency"]["serving"]
    flags = {"rounds": args.rounds, "max_tokens": args.max_tokens, "long": args.long, "slots": slots}
    report = Report(tool=f"strata-bench {TOOL}", records=findings.records, checks=findings.checks, flags=flags)
    return finish(report, args.json, console)


async def _run(args: argparse.Namespace, url: str, findings: Findings, console: Console) -> None:
    where = {"api_key": args.api_key, "model": args.model, "timeout_s": args.timeout}
    async with connected(url, **where) as client:
        test = EarlyCloseTest(client, findings, args)
        await test.learn()
        for step in (test.alone, test.beside, test.while_reading, test.together):
            console.print(f"{step.__name__.replace('_', ' ')} ..")
            await test.guarded(step)
        await test.idle()


class EarlyCloseTest:
    """The ways, over one connection pool."""

    def __init__(self, client: Client, findings: Findings, args: argparse.Namespace) -> None:
        self.client = client
        self.findings = findings
        self.args = args
        rng = random.Random(args.seed)
        self.probe = user(words(rng, PROBE_WORDS))
        self.company = user(words(rng, PROBE_WORDS))
        self.leaver = user(words(rng, PROBE_WORDS))
        self.long = [user(words(rng, LONG_WORDS)) for _ in range(args.rounds)]
        self.waits: list[float] = []

    async def ask(self, messages: Messages, max_tokens: int | None = None) -> Answer:
        return await self.client.chat(messages, max_tokens or self.args.max_tokens)

    async def leave(self, messages: Messages, pieces: int) -> Answer:
        return await self.client.chat_and_leave(messages, self.args.long, pieces=pieces)

    async def learn(self) -> None:
        """What the requests say that are compared, each by itself, twice."""
        self.probe_text = (await self.ask(self.probe)).text
        self.company_text = (await self.ask(self.company, self.args.long)).text
        again = (await self.ask(self.probe)).text
        self.findings.that("the same request says the same again", again == self.probe_text, f"{len(again)} characters")

    async def guarded(self, step: Callable[[], Awaitable[None]]) -> None:
        """A way that fails is a failed check, and the next one runs."""
        name = step.__name__.replace("_", " ")
        try:
            await step()
        except (ServerRefused, aiohttp.ClientError, TimeoutError) as error:
            self.findings.that(f"{name}: every request is answered", False, str(error) or type(error).__name__)

    async def compare(self, name: str) -> None:
        """The probe once more; a check is noted when its text is another."""
        began = time.monotonic()
        answer = await self.ask(self.probe)
        self.waits.append((time.monotonic() - began) * 1e3)
        if answer.text != self.probe_text:
            self.findings.that(name, False, f"{answer.text[:60]!r} for {self.probe_text[:60]!r}")

    async def alone(self) -> None:
        left = 0
        for i in range(self.args.rounds):
            left += not (await self.leave(self.leaver, 1 + i % 4)).whole
            await self.compare(f"alone, round {i}: the next request has its own text")
        self.done("alone", left)

    async def beside(self) -> None:
        left, same = 0, 0
        for i in range(self.args.rounds):
            company = asyncio.create_task(self.ask(self.company, self.args.long))
            left += not (await self.leave(self.leaver, 1 + i % 4)).whole
            await self.compare(f"beside, round {i}: the next request has its own text")
            same += (await company).text == self.company_text
        self.findings.that(
            "beside: the other answer does not change", same == self.args.rounds, f"{same} of {self.args.rounds}"
        )
        self.done("beside", left)

    async def while_reading(self) -> None:
        """The client goes away before its first token."""
        left = 0
        for i, messages in enumerate(self.long):
            reader = asyncio.create_task(self.leave(messages, 10**6))
            await asyncio.sleep(0.002 * (i + 1))
            left += reader.cancel()
            await asyncio.wait([reader])
            await self.compare(f"while reading, round {i}: the next request has its own text")
        self.done("while reading", left)

    async def together(self) -> None:
        left = 0
        for i in range(self.args.rounds):
            leavers = [self.leave(self.leaver if k % 2 else self.company, 1 + k) for k in range(4)]
            answers, _ = await asyncio.gather(asyncio.gather(*leavers), self.compare(f"together, round {i}: own text"))
            left += sum(not answer.whole for answer in answers)
            await self.compare(f"together, round {i}: the next request has its own text")
        self.done("together", left)

    def done(self, name: str, left: int) -> None:
        """One check for a way: no round of it failed, and clients did go away."""
        failed = any(check.name.startswith(name) and not check.ok for check in self.findings.checks)
        self.findings.that(f"{name}: {self.args.rounds} rounds", not failed and left > 0, f"{left} clients left early")

    async def idle(self) -> None:
        """Every slot is free soon after the last client went away."""
        deadline = time.monotonic() + IDLE_S
        busy, running = 1, 1
        while (busy or running) and time.monotonic() < deadline:
            busy = sum(slot["is_processing"] for slot in await self.client.get("/slots"))
            live = (await self.client.get("/metrics"))["live"]
            running = live["running"] + live["waiting"]
            await asyncio.sleep(0.05)
        self.findings.that("no slot is left busy", not busy and not running, f"{busy} busy, {running} requests open")
        if self.waits:
            self.findings.records.append(Record.of("the next request, whole", "ms", self.waits))
