"""The model with the state of one sequence: what the solo path computes with.

Errors   Refused for a context that the memory cannot hold; AccountsError from `check`
Cost     `warm` runs two short forwards, so that kernels are loaded (or compiled) before the engine says READY
"""

from __future__ import annotations

import numpy as np

from strata.engine.device.host import HostDevice
from strata.engine.model import Model, Rows
from strata.engine.options import Options, Refused
from strata.engine.pack import Pack
from strata.engine.state.pages import AccountsError
from strata.engine.state.slots import StateTooLarge, require_memory
from strata.kernels.ops import F32, I32, Sampling
from strata.protocol.lines import InfoValue

_SLOT = 0
_WARM_PROMPT = np.array([0, 1], np.int32)


class ModelRunner:
    """`schedule.live.Runner` on a pack. One slot.

    chunk   most tokens of a prompt chunk · where: for the log · costs: a line for --stats
    """

    def __init__(self, pack: Pack, options: Options) -> None:
        device = HostDevice(options.kernels, options.n_threads)
        self.chunk = options.prefill_chunk
        self.where = f"{device.threads} threads"
        self.costs = f"{device.name}, {self.where}"
        self._kernels = device.kernels
        try:
            require_memory(pack.spec, 1, options.max_context, device.memory().free)  # before the weights take theirs
            self._model = Model(pack, device, options.max_context)
            self._state = self._model.new_state(1)
        except StateTooLarge as error:
            raise Refused(f"--max-context {options.max_context}: {error}") from None

    def warm(self) -> None:
        """Load every kernel by computing a prompt of two tokens and a token after it."""
        self.feed(0, _WARM_PROMPT, False)
        logits = self.feed(2, _WARM_PROMPT[:1], True)
        if logits is not None:
            self.sample(logits, _WARM_PROMPT, Sampling(temperature=1.0, penalty_repeat=1.1, seed=1), 3)
        self.reset()

    def info(self) -> dict[str, InfoValue]:
        """What INFO says of the device beside what is always said: nothing."""
        return {}

    def reset(self) -> None:
        self._state.reset(_SLOT)

    def feed(self, begin: int, tokens: I32, want_logits: bool) -> F32 | None:
        rows = Rows.of([(_SLOT, begin, tokens)])
        logits = self._model.forward(rows, self._state, [len(tokens) - 1] if want_logits else [])
        return logits[0] if want_logits else None

    def sample(self, logits: F32, recent: I32, how: Sampling, position: int) -> int:
        return self._kernels.sample(logits, recent, how, position)

    def check(self, n_held: int) -> None:
        self._state.check()
        if self._state.length(_SLOT) != n_held:
            raise AccountsError(f"the state holds {self._state.length(_SLOT)} tokens, the schedule counts {n_held}")
