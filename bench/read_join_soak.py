"""`read-join soak`: many clients over few slots, for minutes.

A client asks short questions, sends long prompts, goes on with its conversation, or goes away in the middle, at random.
Greedy answers are a function of the prompt, so every text is compared with the one that the same prompt had before: a
token of another request would show. Memory is that of the last quarter against the second one.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import aiohttp

from strata.bench.checks import Findings
from strata.bench.http_client import Answer, Client, Messages, ServerRefused, user, with_answer
from strata.bench.report import Record, percentile
from strata.bench.serve import words
from strata.bench.server_process import Running

QUESTIONS, LONG_PROMPTS = 24, 6
MOST_TURNS = 3
SAMPLE_S = 1.0
IDLE_S = 120.0
FEWEST_SAMPLES = 12
GROWTH_SHARE, GROWTH_MIB = 0.05, 48.0
"""What the last quarter may lie above the second one."""


@dataclass
class Seen:
    """What the clients have seen."""

    answers: list[Answer] = field(default_factory=list)
    left: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    texts: dict[str, str] = field(default_factory=dict)
    compared: int = 0
    differed: list[str] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)

    def compare(self, messages: Messages, answer: Answer) -> None:
        """The text against the one before; of a client that left, as far as it goes."""
        key = hashlib.sha256(json.dumps(messages).encode()).hexdigest()
        known = self.texts.get(key, "")
        n = min(len(known), len(answer.text))
        self.compared += known != ""
        if known[:n] != answer.text[:n]:
            self.differed.append(f"{answer.text[:40]!r} for {known[:40]!r}")
        if len(answer.text) > len(known):
            self.texts[key] = answer.text


async def soak(
    client: Client,
    running: Running,
    args: argparse.Namespace,
    findings: Findings,
    prompt: Callable[[int], list[dict[str, str]]],
) -> None:
    rng = random.Random(args.seed)
    openings = [user(words(rng, rng.randrange(3, 30))) for _ in range(QUESTIONS)]
    openings += [prompt(args.soak_long * (i + 1) // LONG_PROMPTS) for i in range(LONG_PROMPTS)]
    seen, began = Seen(), time.monotonic()
    end = began + args.seconds
    watch = asyncio.create_task(_watch(running, seen, end))
    clients = (_client(client, args, openings, seen, end, number) for number in range(args.clients))
    await asyncio.gather(*clients)
    await watch
    busy, open_requests = await _until_idle(client)
    _judge(args, seen, findings, time.monotonic() - began)
    findings.that("soak: no slot is left busy", not busy and not open_requests, f"{busy} busy, {open_requests} open")


async def _client(
    client: Client, args: argparse.Namespace, openings: list[list[dict[str, str]]], seen: Seen, end: float, number: int
) -> None:
    """Conversations of one to three turns until the time is over."""
    rng = random.Random(f"{args.seed}/{number}")
    while time.monotonic() < end:
        messages: Messages = rng.choice(openings)
        for turn in range(rng.randrange(1, MOST_TURNS + 1)):
            try:
                answer = await _ask(client, args, rng, messages)
            except (ServerRefused, aiohttp.ClientError) as error:
                seen.failures[str(error) or type(error).__name__] += 1
                await asyncio.sleep(0.1)
                break
            except TimeoutError:
                seen.failures[f"no answer within {args.timeout:g} s"] += 1
                break
            if answer is None or not answer.whole:
                seen.left += 1
                if answer is not None:
                    seen.compare(messages, answer)
                break
            seen.answers.append(answer)
            seen.compare(messages, answer)
            messages = with_answer(messages, answer.text, f"And then, {turn}?")


async def _ask(client: Client, args: argparse.Namespace, rng: random.Random, messages: Messages) -> Answer | None:
    """One request; the answer is not whole when the client left in it, None when it left before its first token."""
    if rng.random() >= args.leave_share:
        return await client.chat(messages, args.soak_tokens)
    if rng.random() < 0.5:
        return await client.chat_and_leave(messages, args.soak_tokens, pieces=rng.randrange(1, 6))
    try:
        async with asyncio.timeout(rng.random() * 0.5):
            return await client.chat(messages, args.soak_tokens)
    except TimeoutError:
        return None


async def _watch(running: Running, seen: Seen, end: float) -> None:
    """Memory of both processes, once a second."""
    while time.monotonic() < end:
        memory = await asyncio.to_thread(running.memory_mib)
        if memory is not None:
            seen.memory.append(memory)
        await asyncio.sleep(min(SAMPLE_S, max(0.0, end - time.monotonic())))


async def _until_idle(client: Client) -> tuple[int, int]:
    """Slots that are busy and requests that are open when nothing should be any more."""
    deadline = time.monotonic() + IDLE_S
    while True:
        busy = sum(slot["is_processing"] for slot in await client.get("/slots"))
        live = (await client.get("/metrics"))["live"]
        still_open = live["running"] + live["waiting"]
        if (not busy and not still_open) or time.monotonic() > deadline:
            return busy, still_open
        await asyncio.sleep(0.1)


def _judge(args: argparse.Namespace, seen: Seen, findings: Findings, seconds: float) -> None:
    n = len(seen.answers)
    failed = ", ".join(f"{count} x {reason}" for reason, count in seen.failures.most_common(3))
    findings.that("soak: no request failed", not seen.failures and n > 0, failed or f"{n} answered, {seen.left} left")
    detail = "; ".join(seen.differed[:2]) or f"{seen.compared} compared, {len(seen.texts)} prompts"
    findings.that("soak: every text is its prompt's own", not seen.differed and seen.compared > 0, detail)
    if not args.leave_share or seen.left:
        findings.that("soak: clients left", True, f"{seen.left} of {n + seen.left}")
    else:
        findings.that("soak: clients left", False, "none did")
    for i, name in enumerate(("server", "engine")):
        values = [sample[i] for sample in seen.memory]
        if len(values) >= FEWEST_SAMPLES:
            flat_from, flat_to = quarters(values)
            allowed = flat_from + max(GROWTH_MIB, GROWTH_SHARE * flat_from)
            findings.that(
                f"soak: memory of the {name} is flat", flat_to <= allowed, f"{flat_from:.0f} to {flat_to:.0f} MiB"
            )
            findings.records.append(Record.of(f"soak: memory of the {name}", "MiB", values))
    if not n:
        return
    clients = f"{args.clients} clients, {seconds:.0f} s"
    findings.records.append(Record.of(f"soak: answers, {clients}", "1/s", [n / seconds]))
    tokens = sum(a.completion_tokens for a in seen.answers)
    findings.records.append(Record.of(f"soak: tokens, {clients}", "tok/s", [tokens / seconds]))
    first = [a.ttft * 1e3 for a in seen.answers]
    for share in (0.5, 0.9, 0.99):
        r = Record.of(f"soak: first token, p{share * 100:.0f}", "ms", first)
        r.median = percentile(first, share)
        findings.records.append(r)
    longest = [max(a.gaps, default=0.0) * 1e3 for a in seen.answers]
    findings.records.append(Record.of("soak: longest gap of an answer", "ms", longest))


def quarters(values: list[float]) -> tuple[float, float]:
    """Medians of the second and of the last quarter."""
    n = len(values) // 4
    return median(values[n : 2 * n]), median(values[-n:])
