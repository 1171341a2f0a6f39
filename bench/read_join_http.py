"""`read-join http`: what the server costs. The same answers from the engine alone and through HTTP.

Both engines are started alike, read the same prompts and say the same tokens. Two rates on both sides: of the whole,
all tokens over the time from the first request sent to the last answer's end, reads included; and of decoding, from the
first text of each stream to its last.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from strata.bench.checks import Findings
from strata.bench.http_client import EXACT, Client, Messages, ServerRefused, user
from strata.bench.report import Record
from strata.bench.serve import words
from strata.bench.server_process import engine_argv
from strata.bench.slot_engine import SlotEngine
from strata.bench.slot_model import Request
from strata.server.__main__ import turn_options
from strata.server.chat.events import Content, Reasoning
from strata.server.chat.output import OutputParser
from strata.server.chat.template import Chat, Prompt
from strata.server.chat.vocabulary import Vocabulary

PROMPT = 512
"""Tokens of a prompt at most: words of a vocabulary without words are letters."""
WORDS = 24


@dataclass(frozen=True)
class Said:
    """Answers that came at once: their texts, when each request was sent, and the time of each of its tokens."""

    texts: Sequence[str]
    sent_s: Sequence[float]
    token_s: Sequence[Sequence[float]]
    end_s: float
    n_tokens: int

    @property
    def whole(self) -> float:
        """Tokens per second, reads included."""
        return self.n_tokens / (self.end_s - min(self.sent_s))

    @property
    def decoding(self) -> float:
        """Tokens per second of the streams from the first text of each to its last, added."""
        each = self.n_tokens / len(self.texts) - 1
        return sum(each / (times[-1] - times[0]) for times in self.token_s)

    @property
    def first_s(self) -> float:
        """Until the last of them has said something."""
        return max(times[0] for times in self.token_s) - min(self.sent_s)


def prompt(args: argparse.Namespace, run: int, stream: int) -> Messages:
    """What a stream asks; stream 0 is the one that is alone."""
    return user(words(random.Random(f"{args.seed}/http/{run}/{stream}"), WORDS))


def engine_alone(args: argparse.Namespace) -> dict[int, list[Said]]:
    """Streams -> each run: one on the solo path, and one in each slot. The first run warms up."""
    vocabulary = Vocabulary.load(args.pack)
    chat = Chat(vocabulary)
    argv = [*engine_argv(args), *turn_options(vocabulary), "--serve", "--batch", str(args.slots)]

    def asked(run: int, stream: int) -> Prompt:
        return chat.prompt(prompt(args, run, stream), template_kwargs=EXACT["chat_template_kwargs"])

    with SlotEngine(argv, wants_slots=args.slots) as engine:
        said: dict[int, list[Said]] = {1: [], args.slots: []}
        for run in range(args.repeat + 1):
            prompts = [asked(run, stream) for stream in range(1 + args.slots)]
            one = engine.alone(prompts[0].ids, args.http_tokens)
            requests = []
            for slot in range(args.slots):
                requests.append(engine.admit(slot, prompts[1 + slot].ids, args.http_tokens))
                engine.until_admitted(requests[-1])
            engine.finish(*requests)
            said[1].append(_of_engine(vocabulary, prompts[:1], [one]))
            said[args.slots].append(_of_engine(vocabulary, prompts[1:], requests))
    return said


def _of_engine(vocabulary: Vocabulary, prompts: Sequence[Prompt], requests: Sequence[Request]) -> Said:
    return Said(
        [text_of(vocabulary, p, r.tokens) for p, r in zip(prompts, requests, strict=True)],
        [r.sent_s for r in requests],
        [r.token_s for r in requests],
        max(r.over_s for r in requests),
        sum(len(r.tokens) for r in requests),
    )


def text_of(vocabulary: Vocabulary, asked: Prompt, tokens: Sequence[int]) -> str:
    """What a client sees of an answer."""
    parser = OutputParser(vocabulary, starts_in_reasoning=asked.starts_in_reasoning, repeat_stop_tokens=0)
    events = [event for token in tokens for event in parser.push(token)]
    events += parser.finish("length")
    return "".join(event.text for event in events if isinstance(event, (Content, Reasoning)))


async def through_server(client: Client, args: argparse.Namespace, run: int, n: int) -> Said:
    """n streams at once. Raises ServerRefused for one without text."""
    streams = range(1) if n == 1 else range(1, 1 + n)
    answers = await asyncio.gather(*(client.chat(prompt(args, run, i), args.http_tokens) for i in streams))
    if not all(len(a.times) > 1 for a in answers):
        raise ServerRefused(f"an answer of {args.http_tokens} tokens has no text, or all of it came at once")
    return Said(
        [a.text for a in answers],
        [a.sent_s for a in answers],
        [a.times for a in answers],
        max(a.end_s for a in answers),
        sum(a.completion_tokens for a in answers),
    )


def compare(alone: Sequence[Said], served: Sequence[Said], n: int, findings: Findings) -> None:
    """The figures of n streams. The first run of both warms up; its texts count all the same."""
    pairs = [*zip(alone, served, strict=True)]
    differ = sum(a.texts != b.texts for a, b in pairs)
    findings.that(
        f"http: {n} streams say what the engine alone says", not differ, f"{differ} of {len(pairs)} runs differ"
    )

    def add(work: str, unit: str, values: Sequence[float], target: str = "") -> None:
        findings.records.append(Record.of(f"http: {n} streams {work}", unit, values, target))

    add("through the server", "tok/s", [b.whole for _, b in pairs[1:]])
    add("on the engine alone", "tok/s", [a.whole for a, _ in pairs[1:]])
    add("against the engine alone", "ratio", [b.whole / a.whole for a, b in pairs[1:]], "P12")
    add("against the engine alone, decoding", "ratio", [b.decoding / a.decoding for a, b in pairs[1:]])
    add("until all have begun, through the server", "ms", [b.first_s * 1e3 for _, b in pairs[1:]])
    add("until all have begun, engine alone", "ms", [a.first_s * 1e3 for a, _ in pairs[1:]])
