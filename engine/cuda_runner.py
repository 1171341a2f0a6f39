"""The model on a card with the state of one sequence: what the solo path computes with there.

Reads    chunks of up to 8,192 rows, the last few tokens as a window
Windows  a token is a captured graph with sampling inside. When its id is asked for, the next window is started on it
         first, so the card does not wait for the host. What the host then decides against (an end token, a stop) leaves
         no trace: a window counts when its token is fed
Errors   Refused before READY, with the flag that helps; DeviceError afterwards
Cost     `costs` says what the host takes for a window
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

from strata.engine.device.arena import MIB
from strata.engine.device.cuda import CudaDevice
from strata.engine.device.driver import Array, Driver
from strata.engine.model import Rows
from strata.engine.model.resident import AUTO_CHUNKS, WINDOW_ROWS, Resident
from strata.engine.model.window import Draw, Ticket
from strata.engine.options import Options, Refused
from strata.engine.pack import Pack
from strata.engine.state.pages import AccountsError, OutOfPages
from strata.kernels.cuda.compile import DeviceError
from strata.kernels.ops import I32, Sampling
from strata.protocol.lines import InfoValue

_SLOT: Final = 0


@dataclass(slots=True)
class WindowCost:
    """What the host does between two waits, over windows that were started ahead. Seconds."""

    windows: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    ahead: int = 0
    dropped: int = 0
    _left: float = field(default=0.0)

    def enter(self, counts: bool) -> None:
        """A wait begins; `counts`: since the last one there was nothing but one window's work."""
        spent = time.perf_counter() - self._left
        if counts and self._left:
            self.windows += 1
            self.seconds += spent
            self.longest = max(self.longest, spent)

    def leave(self) -> None:
        """It is over."""
        self._left = time.perf_counter()

    def __str__(self) -> str:
        mean = self.seconds / self.windows if self.windows else 0.0
        return (
            f"host work {mean * 1e6:.0f} us a window over {self.windows} windows, at most {self.longest * 1e6:.0f} us; "
            f"{self.ahead} windows started ahead, {self.dropped} of them for nothing"
        )


class CudaRunner:
    """`schedule.live.Runner` on a card. One slot. `driver`: tests put a card without hardware here."""

    def __init__(self, pack: Pack, options: Options, driver: Driver | None = None) -> None:
        self.cost = WindowCost()
        self._ticket: Ticket | None = None  # the pass that made the logits, when it was a window
        self._ahead: Ticket | None = None  # the window on top of it that nobody has asked for yet
        self._logits: Array | None = None
        self._draw: Draw | None = None  # how the windows at hand sample
        self._next = -1  # the position whose token would continue them
        self._token = -1  # that token
        chunk = min(options.prefill, options.max_context)
        try:
            self._device = CudaDevice(options.vram_limit_mib, driver)
            self._resident = Resident(
                pack,
                self._device,
                max_context=options.max_context,
                kv=options.kv,
                table=options.ple_io,
                chunks=[chunk] if chunk else AUTO_CHUNKS,
            )
        except DeviceError as error:
            raise Refused(f"--device cuda: {error}") from None
        self.chunk = self._resident.chunk
        self._model = self._resident.model
        self._state = self._resident.state
        self._windows = self._resident.windows

    def warm(self) -> None:
        """Capture what every request uses; from then on nothing allocates."""
        self._resident.warm()

    @property
    def where(self) -> str:
        """For the log."""
        return self._device.name

    @property
    def costs(self) -> str:
        """A line for --stats."""
        return str(self.cost)

    def info(self) -> dict[str, InfoValue]:
        """What INFO says of the card."""
        spec, experts = self._model.spec, self._resident.expert_bytes // MIB
        return {
            "vram_free_mib": self._device.memory().free // MIB,
            "expert_slots": spec.layers * spec.experts,
            "expert_slots_primary": spec.layers * spec.experts,
            "expert_cache_mib": experts,
            "expert_cache_primary_mib": experts,
            "window_rows": WINDOW_ROWS,
            "prefill_chunk": self.chunk,
            "gpu": "_".join(self._device.name.split()),
        }

    # ------------------------------------------------------------------------------------------------------ sequence

    def reset(self) -> None:
        self._forget()
        self._state.reset(_SLOT)

    def feed(self, begin: int, tokens: I32, want_logits: bool) -> Array | None:
        continues = len(tokens) == 1 and begin == self._next and int(tokens[0]) == self._token and want_logits
        if continues and self._ahead is not None:
            self._ticket, self._ahead = self._ahead, None
            self._state.advance(_SLOT, 1)
        else:
            draw = self._draw if continues else None
            self._forget()
            self._draw = draw
            self._compute(Rows.of([(_SLOT, begin, tokens)]), want_logits, waits=not continues)
        self._next = begin + len(tokens)
        if self._ticket is not None:
            self._logits = self._ticket.logits
        return None if self._logits is None else self._logits[0]

    def _compute(self, rows: Rows, want_logits: bool, waits: bool) -> None:
        if len(rows) > WINDOW_ROWS:
            n = len(rows)
            logits = self._model.forward(rows, self._state, [n - 1] if want_logits else [])
            self._logits = logits if want_logits else None
            self._device.driver.synchronize()
            return
        self._model.check(rows, self._state)
        self._state.reserve(_SLOT, len(rows))
        self._ticket = self._windows.start(rows, int(want_logits), self._draw.width if self._draw else 0)
        self._state.advance(_SLOT, len(rows))
        if waits:
            self._ticket.wait()

    def sample(self, logits: Array, recent: I32, how: Sampling, position: int) -> int:
        if self._logits is None or position != self._next:
            raise RuntimeError(f"the logits before position {position} are gone: the last pass ended at {self._next}")
        draw = self._draw
        if self._ticket is not None and draw is not None and draw.holds_for(how, recent, position):
            self._start_ahead(self._ticket, position)
            ticket = self._ticket
        else:
            self._draw = Draw(how, recent, position)
            ticket = self._windows.draw(self._logits, [self._draw])
        self.cost.enter(self._ahead is not None)
        self._token = ticket.wait()[0]
        self.cost.leave()
        if self._token < 0:
            raise RuntimeError(f"the logits of position {position - 1} are not finite")
        return self._token

    def _start_ahead(self, ticket: Ticket, position: int) -> None:
        """The window after this one, where the context has room for it."""
        try:
            self._state.reserve(_SLOT, 1)
        except OutOfPages:
            return
        self._ahead = self._windows.step(ticket, position)
        self.cost.ahead += 1

    def _forget(self) -> None:
        """What has been computed for windows to come means nothing any more."""
        self.cost.dropped += self._ahead is not None
        self._ticket = self._ahead = self._logits = self._draw = None
        self._next = self._token = -1

    def check(self, n_held: int) -> None:
        self._state.check()
        if self._state.length(_SLOT) != n_held:
            raise AccountsError(f"the state holds {self._state.length(_SLOT)} tokens, the schedule counts {n_held}")
