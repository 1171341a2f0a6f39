"""`strata-bench parking-test`: a conversation goes on from wherever its state was kept, as if it had been read again.

The same conversation of `--turns` turns runs four times, its state kept in another place between the turns:

  slot        in its batch slot
  checkpoint  another prompt has taken the live session, nothing is parked: the turn checkpoint is left
  RAM         the same with parked conversations
  disk        the same, and the engine is ended and started between the turns

Then a fresh engine without any cache reads every prompt from its start: same tokens, and the same state bytes after the
last turn. Last, files with a changed byte, a cut-off file and a foreign one are offered to a new engine: it must read
the prompt instead, and leave the files. Exit code 1 when anything differs, or was read again although it was kept.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console

from strata.bench.checks import (
    TURN_OPTIONS,
    Claim,
    Findings,
    Launch,
    Prompts,
    add_engine_arguments,
    keys_of,
    prove,
)
from strata.bench.report import Record, finish
from strata.bench.slot_engine import SlotEngine
from strata.bench.slot_model import Request
from strata.protocol.lines import SamplingKeys

TOOL = "parking-test"
ARMS = ("slot", "checkpoint", "ram", "disk", "damaged")
TURN, OTHER = 9, 40
"""Tokens of a user's turn, and of the prompt that takes the live session."""
Ask = Callable[[SlotEngine, tuple[int, ...]], tuple[Request, str]]
"""Sends a prompt. -> the finished request, the digest of the state it left."""
FLIPS = (0.0, 0.5, 1.0)
"""Where in a file a byte is changed, as a share of its length."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument("--first", type=int, default=2000, help="tokens of the first prompt (2000)")
    parser.add_argument("--turns", type=int, default=4, help="turns of the conversation (4)")
    parser.add_argument("--max-new", type=int, default=32, help="tokens of each answer (32)")
    parser.add_argument("--keys", default="", help="keys of the requests (greedy)")
    parser.add_argument("--only", nargs="*", choices=ARMS, default=ARMS, help=f"some of {', '.join(ARMS)} (all)")
    parser.add_argument(
        "--cache-mib", type=int, default=2048, help="RAM and disk for parked conversations, each (2048)"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    if args.turns < 2 or min(args.first, args.max_new, args.cache_mib) < 1:
        console.print("wants --turns 2 and up, --first, --max-new and --cache-mib 1 and up")
        return 2
    launch, findings = Launch.of(args), Findings()
    with tempfile.TemporaryDirectory(prefix="strata-parking-") as folder:
        test = ParkingTest(launch, findings, args, Path(folder))
        for arm in args.only:
            console.print(f"{arm} ..")
            getattr(test, arm)()
    with launch.start(*test.plain, "--prompt-cache", "0") as cold:
        console.print(f"{len(test.claims)} answers again, cold ..")
        prove(test.claims, cold, findings)
        device = cold.process.info.get("device")
    test.figures()
    flags = {"first": args.first, "turns": args.turns, "max_new": args.max_new, "device": device}
    flags |= {"only": " ".join(args.only), "keys": args.keys, "extra": " ".join(args.extra)}
    return finish(findings.report(TOOL, launch, flags), args.json, console)


class ParkingTest:
    """The arms. Each starts its own engines, one at a time."""

    def __init__(self, launch: Launch, findings: Findings, args: argparse.Namespace, folder: Path) -> None:
        context = args.first + args.turns * (args.max_new + TURN) + args.max_new + 16
        self.plain = ("--max-context", str(max(512, context)), "--eos-ids", "none", "--log-states", *TURN_OPTIONS)
        mib = str(args.cache_mib)
        self.in_ram = ("--conversation-cache-mib", mib, "--conversation-cache-min-free-mib", "64")
        self.launch = launch
        self.findings = findings
        self.args = args
        self.folder = folder
        self.keys = keys_of(args.keys)
        self.claims: list[Claim] = []
        self.first_token: dict[str, list[float]] = {}
        self._others = 0

    def on_disk(self, folder: Path) -> tuple[str, ...]:
        disk = ("--conversation-cache-disk-mib", str(self.args.cache_mib), "--conversation-cache-dir", str(folder))
        return (*self.in_ram, *disk)

    def slot(self) -> None:
        with self.launch.start(*self.plain, "--batch", "2", wants_slots=2) as engine:
            self.converse("slot", engine, self.ask_in_slot)

    def checkpoint(self) -> None:
        with self.launch.start(*self.plain) as engine:
            self.converse("checkpoint", engine, self.ask_and_displace, at=lambda r: len(r.ids) - TURN)

    def ram(self) -> None:
        with self.launch.start(*self.plain, *self.in_ram) as engine:
            self.converse("RAM", engine, self.ask_and_displace)

    def disk(self) -> None:
        """Every turn in an engine of its own."""
        folder = self.folder / "disk"
        folder.mkdir()
        last: Request | None = None
        for number in range(self.args.turns):
            with self.launch.start(*self.plain, *self.on_disk(folder)) as engine:
                last = self.turn("disk", engine, number, last, self.ask_and_displace)

    def damaged(self) -> None:
        """A conversation is on disk; its file is changed in one place each time, and the next turn comes."""
        whole = self.folder / "whole"
        whole.mkdir()
        with self.launch.start(*self.plain, *self.on_disk(whole)) as engine:
            first, _ = self.ask_and_displace(engine, self.opening(engine))
        files = [path for path in whole.rglob("*") if path.is_file() and path.stat().st_size > 0]
        self.findings.that("damaged: the conversation is on disk", bool(files), f"{len(files)} files")
        if not files:
            return
        self._offer("left as it was", whole, lambda data: data, first, len(first.held))
        for share in FLIPS:
            self._offer(f"a byte changed at {share:.0%}", whole, partial(flipped, share=share), first, 0)
        self._offer("cut off", whole, lambda data: data[: len(data) * 2 // 3], first, 0)
        self._offer("foreign", whole, lambda data: b"no conversation at all\n" * 50, first, 0)

    def _offer(self, name: str, whole: Path, change: Callable[[bytes], bytes], first: Request, reused: int) -> None:
        """The next turn in a new engine whose folder has changed copies of the files."""
        folder = self.folder / "copy"
        shutil.copytree(whole, folder)
        files = {path: change(path.read_bytes()) for path in folder.rglob("*") if path.is_file()}
        for path, data in files.items():
            path.write_bytes(data)
        with self.launch.start(*self.plain, *self.on_disk(folder)) as engine:
            r = engine.alone(self.following(engine, first, 1), self.args.max_new, self.keys)
            state = engine.state_digest()
        self.findings.near(f"damaged, {name}: tokens reused", r.reused, reused)
        if not reused:  # else the longer conversation has taken its place
            kept = all(path.exists() and path.read_bytes() == data for path, data in files.items())
            self.findings.that(f"damaged, {name}: the files are left alone", kept, f"{len(files)} files")
        self.claims.append(Claim(f"damaged, {name}", r.ids, r.keys, tuple(r.tokens), state=state))
        shutil.rmtree(folder)

    # a conversation

    def converse(self, name: str, engine: SlotEngine, ask: Ask, at: Callable[[Request], int] | None = None) -> None:
        last: Request | None = None
        for number in range(self.args.turns):
            last = self.turn(name, engine, number, last, ask, at)

    def turn(
        self,
        name: str,
        engine: SlotEngine,
        number: int,
        before: Request | None,
        ask: Ask,
        at: Callable[[Request], int] | None = None,
    ) -> Request:
        """One turn. It must go on where the one before ended, or `at` a position of that one."""
        ids = self.opening(engine) if before is None else self.following(engine, before, number)
        r, state = ask(engine, ids)
        if before is not None:
            self.findings.near(f"{name}, turn {number + 1}: reused", r.reused, at(before) if at else len(before.held))
            self.first_token.setdefault(name, []).append((r.token_s[0] - r.sent_s) * 1e3)
        self.claims.append(Claim(f"{name}, turn {number + 1}", r.ids, r.keys, tuple(r.tokens), state=state))
        return r

    def opening(self, engine: SlotEngine) -> tuple[int, ...]:
        prompts = Prompts(engine.limits.vocab, self.args.seed)
        return prompts.plain(self.args.first, 0) + prompts.turn(TURN, 1)

    def following(self, engine: SlotEngine, before: Request, number: int) -> tuple[int, ...]:
        """The prompt of the next turn: all that was said, and the user's new turn."""
        return (*before.ids, *before.tokens, *Prompts(engine.limits.vocab, self.args.seed).turn(TURN, 1 + number))

    def ask_in_slot(self, engine: SlotEngine, ids: tuple[int, ...]) -> tuple[Request, str]:
        r = engine.in_slot(0, ids, self.args.max_new, self.keys)
        return r, engine.state_digest()

    def ask_and_displace(self, engine: SlotEngine, ids: tuple[int, ...]) -> tuple[Request, str]:
        """A turn on the solo path, after which another prompt takes its place."""
        r = engine.alone(ids, self.args.max_new, self.keys)
        state = engine.state_digest()
        self._others += 1
        other = Prompts(engine.limits.vocab, self.args.seed + 1).plain(OTHER, self._others)
        engine.alone(other, 2, SamplingKeys(ckpt=False))
        return r, state

    def figures(self) -> None:
        n = self.args.first
        for name, values in self.first_token.items():
            self.findings.records.append(
                Record.of(f"first token of a next turn after {n} and more, {name}", "ms", values)
            )


def flipped(data: bytes, share: float) -> bytes:
    """With one bit changed, so far into it."""
    at = min(int(len(data) * share), len(data) - 1)
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
