"""The model on the host with the state of all sequences: what the schedule computes with.

Errors   Refused for a context that the memory cannot hold; AccountsError from `check`
Cost     `warm` runs two short forwards, so that kernels are loaded (or compiled) before the engine says READY
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strata.engine.capacity import state_plan
from strata.engine.device.host import HostDevice
from strata.engine.model import Model, Rows
from strata.engine.options import Options
from strata.engine.pack import Pack
from strata.engine.schedule.ports import SOLO, Row
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
    """

    def __init__(self, pack: Pack, options: Options) -> None:
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

    def feed(self, slot: int, begin: int, tokens: I32, want_logits: bool) -> F32 | None:
        rows = Rows.of([(slot, begin, tokens)])
        logits = self._model.forward(rows, self.state, [len(tokens) - 1] if want_logits else [])
        return logits[0] if want_logits else None

    def sample(self, logits: F32, recent: I32, how: Sampling, position: int) -> int:
        return self._kernels.sample(logits, recent, how, position)

    def window(self, rows: Sequence[Row], again: bool) -> list[int]:
        parts = [(row.slot, row.position, row.tokens[-1:]) for row in rows]
        logits = self._model.forward(Rows.of(parts), self.state, range(len(rows)))
        return [self.sample(logits[i], row.recent, row.how, row.position + 1) for i, row in enumerate(rows)]

    def check(self, lengths: Sequence[tuple[int, int]]) -> None:
        check_lengths(self.state, lengths)


def check_lengths(state: StatePool, lengths: Sequence[tuple[int, int]]) -> None:
    """AccountsError unless the state's books balance and it holds so many tokens: (pool slot, tokens) each."""
    state.check()
    for slot, n in lengths:
        if state.length(slot) != n:
            raise AccountsError(f"slot {slot} holds {state.length(slot)} tokens, the schedule counts {n}")
