"""`read-join http`: what the server costs. The same answers from the engine alone and through HTTP.

A rate is all tokens of the streams over the time from the first request sent to the last answer's end, reads included,
on both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import random

from strata.bench.checks import Prompts
from strata.bench.http_client import Client, user
from strata.bench.serve import words
from strata.bench.server_process import engine_argv
from strata.bench.slot_engine import SlotEngine

PROMPT = 48
WORDS = 24


def engine_alone(args: argparse.Namespace) -> dict[int, list[float]]:
    """Streams -> tokens per second of each run: one on the solo path, and one in each slot."""
    argv = [*engine_argv(args), "--serve", "--batch", str(args.slots)]
    with SlotEngine(argv, wants_slots=args.slots) as engine:
        prompts = Prompts(engine.limits.vocab, args.seed)
        rates: dict[int, list[float]] = {1: [], args.slots: []}
        for run in range(args.repeat + 1):
            one = engine.alone(prompts.plain(PROMPT, run * 100), args.http_tokens)
            requests = []
            for slot in range(args.slots):
                ids = prompts.plain(PROMPT, run * 100 + 1 + slot)
                requests.append(engine.admit(slot, ids, args.http_tokens))
                engine.until_admitted(requests[-1])
            engine.finish(*requests)
            if run:  # the first one warms up
                rates[1].append(len(one.tokens) / (one.over_s - one.sent_s))
                seconds = max(r.over_s for r in requests) - requests[0].sent_s
                rates[args.slots].append(sum(len(r.tokens) for r in requests) / seconds)
    return rates


async def through_server(client: Client, args: argparse.Namespace, n: int) -> float:
    """Tokens per second of n streams at once."""
    rng = random.Random()
    ask = [client.chat(user(words(rng, WORDS)), args.http_tokens) for _ in range(n)]
    answers = await asyncio.gather(*ask)
    seconds = max(a.end_s for a in answers) - min(a.sent_s for a in answers)
    return sum(a.completion_tokens for a in answers) / seconds
