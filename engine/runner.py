"""The model on the host with the state of all sequences: what the schedule computes with.

Errors   Refused for a context that the memory cannot hold; AccountsError from `check`
Cost     `warm` runs two short forwards, so that kernels are loaded (or compiled) before the engine says READY
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from strata.engine.capacity import state_plan
from strata.engine.device.host import HostDevice
from strata.engine.draft.accept import n_kept
from strata.engine.draft.book import DraftBook
from strata.engine.model import Model, Rows
from strata.engine.model.draft import DraftLayer
from strata.engine.model.drafter import Followed, HostDrafter
from strata.engine.model.tape import Tape
from strata.engine.options import Options
from strata.engine.pack import DraftPack, Pack
from strata.engine.schedule.ports import SOLO, Picked, Round, Row
from strata.engine.schedule.short import NO_SHORT
from strata.engine.state.pages import AccountsError
from strata.engine.state.slots import StatePool
from strata.kernels.ops import F32, I32, Sampling
from strata.protocol.lines import InfoValue

_WARM_PROMPT = np.array([0, 1], np.int32)


class ModelRunner:
    """`schedule.ports.Runner` on a pack.

    chunk, beside   most tokens of a prompt chunk, and of one while slots decode
    n_slots         batch slots; pool slots 1 to n_slots of `state`
    where           for the log · costs: a line for --stats
    drafter         the draft layer, None without one; `draft`: its tensors
    solo_hits       there is no expert cache
    short           no piece of a prompt: a few tokens are a chunk like any other here
    """

    solo_hits: Callable[[], Picked] | None = None
    short = NO_SHORT

    def __init__(self, pack: Pack, options: Options, draft: DraftPack | None = None) -> None:
        device = HostDevice(options.kernels, options.n_threads)
        self.chunk = options.prefill_chunk
        self.beside = min(options.prefill_beside or self.chunk, self.chunk)
        self.where = f"{device.threads} threads"
        self.costs = f"{device.name}, {self.where}"
        self._kernels = device.kernels
        plan = state_plan(options, pack.spec, device.memory().free)  # before the weights take theirs
        self.n_slots = plan.n_slots
        self._model = Model(pack, device, options.max_context)
        self.state: StatePool = self._model.new_state(1 + plan.n_slots, options.kv, plan.n_checkpoints, plan.n_pages)
        self.drafter = None if draft is None else self._drafter(draft, options)

    def _drafter(self, draft: DraftPack, options: Options) -> HostDrafter:
        model, n_slots = self._model, options.draft_slots(self.n_slots)
        layer = DraftLayer(draft, model.device, model.rope, model.ends)
        pages = StatePool(layer.spec, n_slots, options.draft_context, kv=options.kv)
        drafter = HostDrafter(layer, DraftBook(self.state, pages))
        self.state.copied = drafter.copied
        return drafter

    def warm(self) -> None:
        """Load every kernel by computing a prompt of two tokens and a token after it."""
        self.feed(SOLO, 0, _WARM_PROMPT, False)
        logits = self.feed(SOLO, 2, _WARM_PROMPT[:1], True)
        if logits is not None:
            self.sample(logits, _WARM_PROMPT, Sampling(temperature=1.0, penalty_repeat=1.1, seed=1), 3)
        self.state.reset(SOLO)

    def info(self) -> dict[str, InfoValue]:
        """What INFO says of the device beside what is always said: nothing."""
        return {}

    def figures(self) -> dict[str, int]:
        """What INFO counts of experts: nothing, the file holds them."""
        return {}

    def request_begins(self) -> None:
        """RAM is not watched."""

    def request_over(self, reading: bool = False) -> None:
        """Nothing is learned of a request, and nothing lent."""

    def close(self) -> None:
        """Nothing is kept."""

    def feed(self, slot: int, begin: int, tokens: I32, want_logits: bool) -> F32 | None:
        rows = Rows.of([(slot, begin, tokens)])
        logits, x = self._model.read(rows, self.state, [len(tokens) - 1] if want_logits else [])
        if self.drafter is not None:
            self.drafter.read(slot, tokens, x)
        return logits[0] if want_logits else None

    def sample(self, logits: F32, recent: I32, how: Sampling, position: int) -> int:
        return self._kernels.sample(logits, recent, how, position)

    def window(self, rows: Sequence[Row], again: bool, rounds: int = 0) -> list[int]:
        parts = [(row.slot, row.position, row.tokens[-1:]) for row in rows]
        logits = self._model.forward(Rows.of(parts), self.state, range(len(rows)))
        return [self.sample(logits[i], row.recent, row.how, row.position + 1) for i, row in enumerate(rows)]

    # --------------------------------------------------------------------------------------------------------- drafts

    def follows(self, slot: int) -> bool:
        return self.drafter is not None and self.drafter.book.follows(slot)

    def propose(self, row: Row, most: int, min_p: float) -> list[int]:
        if self.drafter is None or not self.follows(row.slot):
            return []
        return self.drafter.propose(row.slot, len(row.tokens), most, min_p)

    def verify(self, rows: Sequence[Row]) -> list[list[int]]:
        state, tape = self.state, Tape(self._model.device)
        before = [state.recurrent.read(row.slot) if row.drafts else None for row in rows]
        fed = replace(Rows.of([(row.slot, row.position, row.fed) for row in rows]), tape=tape)
        logits, x = self._model.read(fed, state, range(len(fed)), count=False)
        said, followed = [], []
        for row, block, (slot, begin, end) in zip(rows, before, fed.segments.tolist(), strict=True):
            ids = [self._said(logits[begin + i], row, i) for i in range(end - begin)]
            n = n_kept(row.drafts, ids)
            if block is not None and begin + n < end:
                state.recurrent.write(slot, block)
                tape.replay(begin, n, np.array([[state.recurrent.name(slot), 0, n]], np.int32), state)
            state.advance(slot, n)
            said.append(ids[:n])
            if self.follows(slot):
                at = row.position + n
                followed.append(Followed(slot, at, x[begin : begin + n], np.array(ids[:n], np.int32)))
        if self.drafter is not None:
            self.drafter.follow(followed)
        return said

    def verify_ahead(self, row: Row) -> None:
        """Nothing runs beside the host."""

    def rounds(self, row: Row) -> int:
        """None: the host decides between two windows anyway."""
        return 0

    def round(self, row: Row, after: int | None) -> Round:
        (said,) = self.verify([row])
        return Round(said, len(row.drafts), None)

    def _said(self, logits: F32, row: Row, i: int) -> int:
        """The token behind the i-th fed one."""
        return self.sample(logits, row.recent_with(i), row.how, row.position + i + 1)

    def check(self, lengths: Sequence[tuple[int, int]]) -> None:
        check_lengths(self.state, lengths)


def check_lengths(state: StatePool, lengths: Sequence[tuple[int, int]]) -> None:
    """AccountsError unless the state's books balance and it holds so many tokens: (pool slot, tokens) each."""
    state.check()
    for slot, n in lengths:
        if state.length(slot) != n:
            raise AccountsError(f"slot {slot} holds {state.length(slot)} tokens, the schedule counts {n}")
