"""An engine without a model whose units take a given time: the real lines, inbox, schedule and books over a clock.

    python -m strata.bench.paced_engine --vocab-of PACK --batch 8 --window-us 1600

Device   windows and chunks are times on a clock. A window that was started ahead begins when the one before it ends, so
         what the host does in between costs nothing until it takes longer than a window
Tokens   each is the time at which its window was over, in steps of STEP_US, as one of STAMPS ids whose texts are
         different words (`stamps`): who reads the text knows how long it has been under way
Flags    those of the engine that it does not know are ignored
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from strata.engine.inbox import Inbox
from strata.engine.schedule.live import Path as Schedule
from strata.engine.schedule.ports import Round, Row, Rules
from strata.engine.serve import Server, Writer
from strata.engine.state.checkpoints import CacheRules
from strata.engine.state.conversations import Conversations
from strata.engine.state.pages import AccountsError
from strata.engine.state.slots import StatePool
from strata.kernels.ops import I32, Sampling
from strata.protocol.lines import Info
from strata.server.chat.vocabulary import Vocabulary

STAMPS: Final = 2039
STEP_US: Final = 50
"""A stamp comes again after 102 ms: no line is under way for so long. A prime number of them, so that no answer repeats
itself after a few windows."""
_PAGE: Final = 64


def stamps(vocabulary: Vocabulary) -> list[int]:
    """Ids for the stamps. Raises ValueError for a vocabulary with too few words."""
    words: dict[bytes, int] = {}
    for token in range(len(vocabulary)):
        data = vocabulary.token_bytes(token)
        if data.isascii() and data.decode().isalnum() and token not in vocabulary.end_ids:
            words.setdefault(data, token)
    if len(words) < STAMPS:
        raise ValueError(f"the vocabulary has {len(words)} different words, {STAMPS} are needed")
    return list(words.values())[:STAMPS]


def stamp_at(seconds: float) -> int:
    """The stamp of a time on the monotonic clock."""
    return int(seconds * 1e6) // STEP_US % STAMPS


@dataclass(frozen=True, slots=True)
class Pace:
    """Times of the pretended device, in seconds."""

    window: float
    chunk: float
    token: float
    """Of a prompt, beside what each chunk costs."""


class ListState:
    """What `Conversations` asks of a state: how many tokens each slot holds."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots, self.n_checkpoints = n_slots, 0
        self.relieve = lambda: False
        self._held = [0] * n_slots

    @property
    def pages(self) -> ListState:
        return self

    def held(self, slot: int) -> int:
        return -(-self._held[slot] // _PAGE)

    def length(self, slot: int) -> int:
        return self._held[slot]

    def advance(self, slot: int, n: int) -> None:
        self._held[slot] += n

    def reset(self, slot: int) -> None:
        self._held[slot] = 0

    drop = reset

    def copy(self, source: int, target: int) -> None:
        self._held[target] = self._held[source]

    def check(self) -> None:
        """Counts are always right."""


class PacedRunner:
    """`schedule.ports.Runner` on a clock: `now` in seconds, `sleep` until so many are over."""

    def __init__(
        self,
        n_slots: int,
        pace: Pace,
        ids: Sequence[int],
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.state = ListState(1 + n_slots)
        self._pace = pace
        self._ids = ids
        self._now = now
        self._sleep = sleep
        self._over = 0.0  # when the device is done with what was asked for
        self._ahead = 0.0  # the same for the window after that; 0: it has not been started

    def feed(self, slot: int, begin: int, tokens: I32, want_logits: bool) -> None:
        self._over = self._behind(self._over, self._pace.chunk + self._pace.token * len(tokens))
        self._ahead = 0.0
        self._sleep_until(self._over)
        self.state.advance(slot, len(tokens))

    def sample(self, logits: object, recent: I32, how: Sampling, position: int) -> int:
        return self._ids[stamp_at(self._now())]

    def window(self, rows: Sequence[Row], again: bool, rounds: int = 0) -> list[int]:
        self._over = self._ahead or self._behind(self._over, self._pace.window)
        self._ahead = self._behind(self._over, self._pace.window) if again else 0.0
        self._sleep_until(self._over)
        for row in rows:
            self.state.advance(row.slot, 1)
        return [self._ids[stamp_at(self._over)]] * len(rows)

    def _behind(self, before: float, seconds: float) -> float:
        """When work that is launched now is over, which begins when the device is free."""
        return max(self._now(), before) + seconds

    def _sleep_until(self, moment: float) -> None:
        if (left := moment - self._now()) > 0:
            self._sleep(left)

    def check(self, lengths: Sequence[tuple[int, int]]) -> None:
        for slot, n in lengths:
            if self.state.length(slot) != n:
                raise AccountsError(f"slot {slot} holds {self.state.length(slot)} tokens, the schedule counts {n}")

    def follows(self, slot: int) -> bool:
        return False

    def propose(self, row: Row, most: int, min_p: float) -> list[int]:
        return []

    def verify(self, rows: Sequence[Row]) -> list[list[int]]:
        raise RuntimeError("no drafts")

    def verify_ahead(self, row: Row) -> None:
        raise RuntimeError("no drafts")

    def rounds(self, row: Row) -> int:
        return 0

    def round(self, row: Row, after: int | None) -> Round:
        raise RuntimeError("no drafts")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="paced_engine", description=__doc__)
    add = parser.add_argument
    add("--vocab-of", type=Path, required=True, metavar="PACK", help="whose tokens are said")
    add("--batch", type=int, default=8, help="slots (8)")
    add("--window-us", type=float, default=1600.0, help="time of a window of any rows (1600)")
    add("--chunk-us", type=float, default=2000.0, help="time of a chunk (2000)")
    add("--token-us", type=float, default=100.0, help="the same for each token of it (100)")
    add("--max-context", type=int, default=65536, help="tokens (65536)")
    return parser.parse_known_args(argv)[0]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    out = os.dup(1)
    os.dup2(2, 1)
    vocabulary = Vocabulary.load(args.vocab_of)
    pace = Pace(args.window_us * 1e-6, args.chunk_us * 1e-6, args.token_us * 1e-6)
    runner = PacedRunner(args.batch, pace, stamps(vocabulary))
    books = Conversations(cast(StatePool, runner.state), args.batch, CacheRules(1, every=0, root=0), None, -1)
    rules = Rules(n_slots=args.batch, chunk=2048, max_context=args.max_context, end_ids=())
    inbox = Inbox(0)
    server = Server(Schedule(runner, books, rules), inbox, Writer(out), vocab=len(vocabulary))
    inbox.start()
    server.greet(Info({"context": args.max_context, "batch_slots": args.batch, "slot_cache": 1, "engine": "paced"}))
    server.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
