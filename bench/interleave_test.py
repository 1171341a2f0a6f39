"""`strata-bench interleave-test`: long prompts read beside decoding slots, and conversations that move about.

  beside      a long prompt is read while two slots decode
  gives way   a long read lets a short prompt pass (BYIELD) and goes on from where it was; from a slot and from solo
  next turn   a conversation goes on in its slot: from all it holds, and from its turn checkpoint when the client has
              dropped the answer's thinking
  returns     a request left alone leaves its slot and goes on alone

Every answer is then compared, token by token, with that of an engine without any cache. Exit code 1 when one differs,
or when something was read again that was held. Measured: the longest gap between two tokens of a decoding slot while
the long prompt is read, and the first token of the short one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from rich.console import Console

from strata.bench.checks import (
    TURN_OPTIONS,
    Claim,
    Findings,
    Launch,
    Prompts,
    add_engine_arguments,
    gaps,
    keys_of,
    prove,
)
from strata.bench.report import Record, finish
from strata.bench.slot_engine import SlotEngine
from strata.bench.slot_model import Request
from strata.protocol.lines import SamplingKeys

TOOL = "interleave-test"
STEPS = ("beside", "gives_way", "solo_gives_way", "next_turn", "returns")
P14_TOKENS, P15_TOKENS, P16_TOKENS = 65536, 45000, 30000
"""A read of at least so many tokens is what the target speaks of."""
SHORT = 24
SHORT_READ = 64
"""The engine's own --short-read: what is left of a read may go through windows, in shorter steps."""
CONTEXT_SPARE = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument("--batch", type=int, default=3, help="slots, at least 3 (3)")
    parser.add_argument("--long", type=int, default=16384, help="tokens of the long prompt, at least 4 chunks (16384)")
    parser.add_argument("--chunk", type=int, help="tokens of a prompt chunk; default: the engine's own choice")
    parser.add_argument("--stream", type=int, default=2000, help="most tokens of a decoding slot's answer (2000)")
    parser.add_argument("--max-new", type=int, default=64, help="tokens of every other answer (64)")
    parser.add_argument("--only", nargs="*", choices=STEPS, default=STEPS, help=f"some of {', '.join(STEPS)} (all)")
    parser.add_argument("--keys", default="", help="keys of the requests (greedy)")
    parser.add_argument("-r", "--runs", type=int, default=1, help="measured reads beside decoding slots (1)")


def run(args: argparse.Namespace, console: Console) -> int:
    if args.batch < 3 or min(args.long, args.stream, args.runs) < 1 or args.max_new < 8:
        console.print("wants --batch 3 and up, --max-new 8 and up, --long, --stream and --runs 1 and up")
        return 2
    launch, findings, keys = Launch.of(args), Findings(), keys_of(args.keys)
    context = args.long + 2 * args.max_new + args.stream + CONTEXT_SPARE
    chunk = ("--prefill", str(args.chunk)) if args.chunk else ()
    plain = ("--max-context", str(context), "--eos-ids", "none", *chunk)
    with launch.start(*plain, *TURN_OPTIONS, "--batch", str(args.batch), wants_slots=args.batch) as engine:
        if args.long < 4 * engine.limits.chunk:
            console.print(f"--long {args.long}: wants 4 chunks of {engine.limits.chunk}; a longer one, or --chunk")
            return 2
        test = InterleaveTest(engine, findings, args, keys)
        for step in args.only:
            console.print(f"{step} ..")
            getattr(test, step)()
    with launch.start(*plain, "--prompt-cache", "0") as cold:
        console.print(f"{len(test.claims)} answers again, cold ..")
        prove(test.claims, cold, findings)
    flags = {"batch": args.batch, "long": args.long, "chunk": engine.limits.chunk, "max_new": args.max_new}
    flags |= {"device": engine.process.info.get("device"), "keys": args.keys, "extra": " ".join(args.extra)}
    return finish(findings.report(TOOL, launch, flags), args.json, console)


class InterleaveTest:
    """The steps of one engine. Slots 0 and 1 decode, slot 2 takes the long prompts."""

    def __init__(self, engine: SlotEngine, findings: Findings, args: argparse.Namespace, keys: SamplingKeys) -> None:
        self.engine = engine
        self.findings = findings
        self.args = args
        self.keys = keys
        self.prompts = Prompts(engine.limits.vocab, args.seed)
        self.claims: list[Claim] = []
        self._number = 0

    def prompt(self, n: int) -> tuple[int, ...]:
        self._number += 1
        return self.prompts.plain(n, self._number)

    def claim(self, name: str, *legs: Request) -> None:
        """What the legs of a request said together; the last one may have been stopped."""
        tokens = tuple(token for leg in legs for token in leg.tokens)
        self.claims.append(Claim(name, legs[0].ids, legs[0].keys, tokens, legs[-1].finish != "cancel"))

    def streams(self, n: int) -> list[Request]:
        """n slots that decode for long."""
        out = []
        for slot in range(n):
            out.append(self.engine.admit(slot, self.prompt(SHORT + slot), self.args.stream, self.keys))
            self.engine.until_admitted(out[-1])
        for r in out:
            self.engine.until_tokens(r, 4)
        return out

    def end(self, streams: Sequence[Request]) -> None:
        for r in streams:
            if r.state != "over":
                self.engine.slot_stop(r.slot or 0)
        self.engine.finish(*streams)

    def beside(self) -> None:
        longest, rates, reads = [], [], []
        for i in range(self.args.runs):
            streams = self.streams(2)
            read = self.engine.admit(2, self.prompt(self.args.long), self.args.max_new, self.keys)
            self.engine.until_admitted(read)
            self.engine.finish(read)
            self.end(streams)
            begin, end = read.sent_s, min(read.done_s, *(r.over_s for r in streams))
            said = [sum(begin < t <= end for t in r.token_s) for r in streams]
            detail = f"{said[0]} and {said[1]} tokens in {end - begin:.2f} s"
            self.findings.that(f"beside {i}: the slots decoded while the prompt was read", min(said) > 1, detail)
            longest.append(max((max(gaps(r, begin, end), default=0.0) for r in streams), default=0.0) * 1e3)
            rates.append(sum(said) / (end - begin))
            reads.append((read.token_s[0] - read.sent_s) * 1e3)
            self.claim(f"beside {i}: the long prompt", read)
            for r in streams:
                self.claim(f"beside {i}: the answer in slot {r.slot}", r)
        n = self.args.long
        target = "P14" if n >= P14_TOKENS else ""
        self.record(f"longest gap of 2 slots while {n} tokens are read", "ms", longest, target)
        self.record(f"2 slots while {n} tokens are read", "tok/s", rates)
        self.record(f"first token of {n} beside 2 slots", "ms", reads)

    def gives_way(self) -> None:
        """The read of slot 2 lets a short prompt into slot 1 while slot 0 decodes."""
        engine, streams = self.engine, self.streams(1)
        ids = self.prompt(self.args.long)
        first = engine.admit(2, ids, self.args.max_new, self.keys)
        engine.until(lambda: len(first.progress) > 0)
        asked = time.monotonic()
        engine.give_way(2)
        engine.finish(first)
        short = engine.admit(1, self.prompt(SHORT), self.args.max_new, self.keys)
        engine.until_admitted(short)
        wait = short.token_s[0] - asked
        again = engine.admit(2, ids, self.args.max_new, self.keys)
        engine.finish(short, again)
        self.end(streams)
        self._gave_way("gives way", first, again)
        self.claim("gives way: the long prompt", again)
        self.claim("gives way: the short prompt", short)
        self.claim("gives way: the answer beside", *streams)
        target = "P15" if self.args.long >= P15_TOKENS else ""
        self.record(f"first token of a short prompt behind {self.args.long} tokens", "ms", [wait * 1e3], target)

    def solo_gives_way(self) -> None:
        """The same from the solo path: what is read waits in slot 0."""
        engine, ids = self.engine, self.prompt(self.args.long)
        first = engine.solo(ids, self.args.max_new, self.keys)
        engine.until(lambda: len(first.progress) > 0)
        engine.give_way(0)
        engine.finish(first)
        short = engine.admit(1, self.prompt(SHORT), self.args.max_new, self.keys)
        engine.until_admitted(short)
        again = engine.admit(0, ids, self.args.max_new, self.keys)
        engine.finish(short, again)
        self._gave_way("solo gives way", first, again)
        self.claim("solo gives way: the long prompt", again)
        self.claim("solo gives way: the short prompt", short)

    def _gave_way(self, name: str, first: Request, again: Request) -> None:
        held = first.gave_way.tokens if first.gave_way else 0
        self.findings.that(f"{name}: the read gave way", 0 < held < len(first.ids), f"at {held} of {len(first.ids)}")
        self.findings.near(f"{name}: it goes on from there", again.reused, held)
        step = first.progress[0].position - first.reused  # beside decoding slots shorter than a chunk alone
        whole = [p for p in again.progress if len(again.ids) - p.position >= SHORT_READ]
        cuts = [(p.position - first.reused) % step for p in whole]
        self.findings.that(f"{name}: with the same chunks", not any(cuts), f"{len(cuts)} borders")

    def next_turn(self) -> None:
        """A conversation of a long prompt: its next turn with the whole answer, and one without its thinking."""
        engine, new = self.engine, self.args.max_new
        half = self.prompt(self.args.long // 2)
        first = engine.in_slot(0, half + self.prompts.turn(5, 1), new, self.keys)
        second = engine.in_slot(0, (*first.ids, *first.tokens, *self.prompts.turn(7, 2)), new, self.keys)
        self.findings.near("next turn: continues all that its slot holds", second.reused, len(first.held))
        kept = len(first.ids) + len(first.tokens) + 2
        third = engine.in_slot(0, (*second.ids[:kept], *self.prompts.turn(9, 3)), new, self.keys)
        at = len(first.ids) + len(first.tokens)  # the last turn of the second prompt begins here
        self.findings.near("next turn: without the thinking, from the turn checkpoint", third.reused, at, kept)
        for name, r in (("first", first), ("all it holds", second), ("turn checkpoint", third)):
            self.claim(f"next turn: {name}", r)
        target = "P16" if second.reused >= P16_TOKENS else ""
        for name, r in (("all", second), ("its turn checkpoint", third)):
            work = f"first token of a next turn in its slot, {r.reused} held, from {name}"
            self.record(work, "ms", [(r.token_s[0] - r.sent_s) * 1e3], target)

    def returns(self) -> None:
        """Two slots; one ends, and the other goes back to the solo path."""
        engine, new = self.engine, self.args.max_new
        company = engine.admit(1, self.prompt(SHORT), new // 4, self.keys)
        engine.until_admitted(company)
        stays = engine.admit(0, self.prompt(SHORT), self.args.stream, self.keys)  # still under way when it is stopped
        engine.finish(company)
        engine.slot_stop(0)
        engine.finish(stays)
        self.findings.that("returns: the slot was stopped", stays.finish == "cancel", f"after {len(stays.tokens)}")
        rest = engine.alone((*stays.ids, *stays.tokens), new, self.keys)
        self.findings.near("returns: nothing is read again", rest.reused, len(stays.held))
        follow = engine.alone((*rest.ids, *rest.tokens, *self.prompt(3)), new, self.keys)
        self.findings.near("returns: the solo path holds the rest", follow.reused, len(rest.held))
        self.claim("returns: both legs together", stays, rest)
        self.claim("returns: the next turn", follow)

    def record(self, work: str, unit: str, values: Sequence[float], target: str = "") -> None:
        self.findings.records.append(Record.of(work, unit, values, target))
