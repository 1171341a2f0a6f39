"""What the tools that test an engine share: its command line, prompts, and a list of what had to be so.

Prompts  random ids from a seed; exactness does not depend on what a prompt says
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strata.bench.engine import random_ids
from strata.bench.engine_process import EngineFailed, engine_command
from strata.bench.report import Check, Record, Report, pack_facts
from strata.bench.slot_engine import SlotEngine
from strata.bench.slot_model import Request
from strata.protocol import config as configs
from strata.protocol.lines import Gen, ProtocolError, SamplingKeys, decode_command

TURN_TOKEN = 7
"""What begins a turn in these prompts; any token will do, the engine is told."""
TURN_OPTIONS = ("--turn-token", str(TURN_TOKEN))


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--pack", type=Path, help="the GGUF file (the first shard of a split pack)")
    source.add_argument("--config", type=Path, help="strata-<model>.json, which names the engine and its options")
    parser.add_argument("--exe", help="the engine program; default: the strata-engine of this installation")
    parser.add_argument("--device", help="passed to the engine: host or cuda; default: its own choice")
    parser.add_argument(
        "--extra",
        type=shlex.split,
        default=[],
        metavar="OPTIONS",
        help='more options of the engine, in one word: --extra="--max-context 4096 --threads 2"',
    )
    parser.add_argument("--seed", type=int, default=1, help="of the random prompts (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures and checks there too")


@dataclass(frozen=True)
class Launch:
    """How to start an engine."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    pack: Path | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> Launch:
        """From the arguments of `add_engine_arguments`. Raises EngineFailed for a config that cannot be used."""
        more = [*(("--device", args.device) if args.device else ()), *args.extra]
        if args.config is None:
            argv = [*engine_command(args.exe), "--serve", "--pack", str(args.pack), *more]
            return cls(tuple(argv), pack=args.pack)
        try:
            config = configs.load(args.config)
            argv = configs.engine_command(config)
        except configs.ConfigError as error:
            raise EngineFailed(str(error)) from None
        if args.exe:
            argv[0] = args.exe
        return cls((*argv, *more), configs.engine_environment(config, os.environ), config.engine_cwd)

    def start(self, *options: str, wants_slots: int = 0, end_ids: Sequence[int] | None = None) -> SlotEngine:
        """An engine with these options before those of `--extra`, which win."""
        at = 1 + self.argv.index("--serve")
        argv = [*self.argv[:at], *options, *self.argv[at:]]
        return SlotEngine(argv, wants_slots=wants_slots, end_ids=end_ids, env=self.env, cwd=self.cwd)

    def facts(self) -> dict[str, Any] | None:
        return pack_facts(self.pack) if self.pack is not None else None


def keys_of(text: str) -> SamplingKeys:
    """`temperature=0.7 seed=3` as the keys of a request. Raises EngineFailed."""
    try:
        command = decode_command(f"GEN 1 {text} 0")
    except ProtocolError as error:
        raise EngineFailed(f"--keys: {error}") from None
    if not isinstance(command, Gen):
        raise EngineFailed(f"--keys: wants key=value pairs, got {text!r}")
    return command.keys


@dataclass
class Findings:
    """What a tool has found: checks and figures. A failed check is noted, and the tool goes on."""

    checks: list[Check] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    def that(self, name: str, ok: bool, detail: str = "") -> None:
        self.checks.append(Check(name, ok, detail))

    def same(self, name: str, got: Sequence[int], wanted: Sequence[int], note: str = "") -> None:
        """Token by token; the detail names the first that differs."""
        at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
        if list(got) == list(wanted):
            self.that(name, True, f"{len(got)} tokens equal" + (f", {note}" if note else ""))
        else:
            self.that(name, False, f"differs at token {at}: {[*got][at : at + 3]} for {[*wanted][at : at + 3]}; {note}")

    def near(self, name: str, got: int, low: int, high: int | None = None) -> None:
        """A count that must lie in a range; without `high` it must be `low`."""
        high = low if high is None else high
        self.that(name, low <= got <= high, f"{got}, wanted {low}" + (f" to {high}" if high > low else ""))

    def begins(self, name: str, got: Sequence[int], wanted: Sequence[int], note: str = "") -> None:
        """An interrupted answer: what there is of it."""
        self.same(name, got, wanted[: len(got)], note)

    def report(self, tool: str, launch: Launch, flags: dict[str, Any]) -> Report:
        return Report(
            tool=f"strata-bench {tool}", records=self.records, checks=self.checks, flags=flags, pack=launch.facts()
        )


@dataclass(frozen=True)
class Claim:
    """An answer that came about in some way; a cold engine must give the same. `whole` False: it was cut off.

    state   digest of the state that it left, "" when not known
    """

    name: str
    ids: tuple[int, ...]
    keys: SamplingKeys
    tokens: tuple[int, ...]
    whole: bool = True
    state: str = ""


def prove(claims: Sequence[Claim], cold: SlotEngine, findings: Findings) -> None:
    """Reads every prompt from its start in an engine that keeps nothing, and compares."""
    for claim in claims:
        r = cold.alone(claim.ids, max(1, len(claim.tokens)), claim.keys)
        if r.reused:
            findings.that(f"{claim.name}: read cold", False, f"{r.reused} tokens were held")
        findings.same(claim.name, claim.tokens, r.tokens)
        if claim.state:
            state = cold.state_digest()
            findings.that(f"{claim.name}: the state in every bit", state == claim.state, state)


@dataclass(frozen=True)
class Prompts:
    """Prompts of a seed in a vocabulary. A conversation's turns begin with the turn token."""

    vocab: int
    seed: int

    def plain(self, n: int, number: int) -> tuple[int, ...]:
        """n random ids without a turn token."""
        ids = random_ids(n, self.vocab, seed=self.seed * 1000 + number)
        return tuple(token if token != TURN_TOKEN else token + 1 for token in ids)

    def turn(self, n: int, number: int) -> tuple[int, ...]:
        """n ids of which the first begins a turn."""
        return (TURN_TOKEN, *self.plain(n - 1, number))


def gaps(request: Request, begin_s: float, end_s: float) -> list[float]:
    """Seconds between two tokens of a request, for every gap that lies at least partly between these times."""
    return [b - a for a, b in itertools.pairwise(request.token_s) if b > begin_s and a < end_s]
