"""`read-join http`: what the server costs. The same answers from the engine alone and through HTTP.

A rate is all tokens of the streams over the time from the first request sent to the last answer's end, reads included,
on both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import random

from strata.bench.http_client import Client, Messages, user
from strata.bench.serve import words
from strata.bench.server_process import engine_argv
from strata.bench.slot_engine import SlotEngine
from strata.server.chat.template import Chat
from strata.server.chat.vocabulary import Vocabulary

PROMPT = 512
"""Tokens of a prompt at most: words of a vocabulary without words are letters."""
WORDS = 24


def prompt(args: argparse.Namespace, run: int, stream: int) -> Messages:
    """What a stream asks; stream 0 is the one that is alone."""
    return user(words(random.Random(f"{args.seed}/http/{run}/{stream}"), WORDS))


def engine_alone(args: argparse.Namespace) -> dict[int, list[float]]:
    """Streams -> tokens per second of each run: one on the solo path, and one in each slot."""
    argv = [*engine_argv(args), "--serve", "--batch", str(args.slots)]
    chat = Chat(Vocabulary.load(args.pack))

    def ids(run: int, stream: int) -> list[int]:
        return chat.prompt(prompt(args, run, stream)).ids

    with SlotEngine(argv, wants_slots=args.slots) as engine:
        rates: dict[int, list[float]] = {1: [], args.slots: []}
        for run in range(args.repeat + 1):
            one = engine.alone(ids(run, 0), args.http_tokens)
            requests = []
            for slot in range(args.slots):
                requests.append(engine.admit(slot, ids(run, 1 + slot), args.http_tokens))
                engine.until_admitted(requests[-1])
            engine.finish(*requests)
            if run:  # the first one warms up
                rates[1].append(len(one.tokens) / (one.over_s - one.sent_s))
                seconds = max(r.over_s for r in requests) - requests[0].sent_s
                rates[args.slots].append(sum(len(r.tokens) for r in requests) / seconds)
    return rates


async def through_server(client: Client, args: argparse.Namespace, run: int, n: int) -> float:
    """Tokens per second of n streams at once."""
    streams = range(1) if n == 1 else range(1, 1 + n)
    answers = await asyncio.gather(*(client.chat(prompt(args, run, i), args.http_tokens) for i in streams))
    seconds = max(a.end_s for a in answers) - min(a.sent_s for a in answers)
    return sum(a.completion_tokens for a in answers) / seconds
