"""A model with everything in one card's memory: weights, state, windows, a workspace, in this order.

    resident = Resident(pack, device, max_context=32768, n_slots=1)
    resident.model.forward(...)   resident.windows.start(...)

Memory   arenas of just what the model and its state take; the n-gram table in VRAM, or in RAM that the card reads; the
         workspace of the largest prompt chunk that fits
Errors   DeviceError with the flag that helps
Cost     weights come at the speed of a few threads, while the passes that measure the workspace compile the kernels
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from strata.engine.device.arena import ALIGNMENT, MIB, shown
from strata.engine.device.cuda import CudaDevice
from strata.engine.device.meter import Meter
from strata.engine.draft.book import DraftBook
from strata.engine.log import log
from strata.engine.model.card_drafter import CardDrafter
from strata.engine.model.draft import DRAFT_ROWS, DraftLayer, draft_spec
from strata.engine.model.model import Model, bind
from strata.engine.model.rows import Rows
from strata.engine.model.tape import tape_bytes
from strata.engine.model.weights import rope_table
from strata.engine.model.window import Layout, Windows
from strata.engine.pack import DraftPack, Pack
from strata.engine.state.plan import StatePlan
from strata.engine.state.slots import StatePool, estimate_bytes
from strata.kernels.cuda.compile import DeviceError
from strata.kernels.cuda.sample import MAX_RECENT

WINDOW_ROWS: Final = 8
RESERVE: Final = 512 * MIB
"""VRAM that stays free: the driver's share of graphs and kernels, and the desktop."""
TABLE_ROOM: Final = 3 << 30
"""VRAM that must remain for the workspace when `auto` puts the n-gram table into VRAM."""
AUTO_CHUNKS: Final = (8192, 4096, 2048, 1024, 512, 256, 128, 64, 32)
"""Prompt chunks that are tried; the largest that fits wins."""


class Resident:
    """`model`, `state` and `windows` on `device`; `chunk`: most rows of a pass; `expert_bytes`: of all experts;
    `drafter`: the draft layer, None without one.

    plan      the slots and checkpoints for so many free bytes; without it `n_slots` and `n_checkpoints`
    table     where the n-gram table goes: vram, ram, auto
    chunks    prompt chunks to try, largest first; none of them longer than the context
    logits    rows of a pass whose logits are wanted, at most
    verify    rows of a verify window at most, 1: there are none
    draft     the draft layer · draft_slots: pool slots that it follows with so many batch slots · draft_context: rows
    """

    def __init__(
        self,
        pack: Pack,
        device: CudaDevice,
        *,
        max_context: int,
        n_slots: int = 1,
        n_checkpoints: int = 0,
        plan: Callable[[int], StatePlan] | None = None,
        kv: str = "fp32",
        table: str = "auto",
        chunks: Sequence[int] = AUTO_CHUNKS,
        logits: int = 1,
        reserve: int = RESERVE,
        verify: int = 1,
        draft: DraftPack | None = None,
        draft_slots: Callable[[int], int] = lambda n: 1 + n,
        draft_context: int = 0,
    ) -> None:
        self.device = device
        self._verify = verify
        meter = Meter(device.sides)
        rope = rope_table(pack.spec, max_context, meter)
        embedding, head, _ = bind(pack, meter, rope)
        if draft is not None:
            DraftLayer(draft, meter, rope, (embedding, head))
        draft_context = draft_context or max_context
        drafts = None if draft is None else draft_spec(pack.spec, draft.spec.ratio)

        def measure(slots: int, checkpoints: int) -> None:
            StatePool(pack.spec, slots, max_context, kv=kv, memory=meter, n_checkpoints=checkpoints)
            if drafts is not None:
                StatePool(drafts, draft_slots(slots - 1), draft_context, kv=kv, memory=meter)

        measure(n_slots, n_checkpoints)
        self.expert_bytes = meter.experts
        self._place_table(meter, table)
        if plan is not None:
            of_drafts = 0 if drafts is None else estimate_bytes(drafts, draft_slots(WINDOW_ROWS), draft_context, kv=kv)
            planned = plan(self._room_for_state(meter) - of_drafts)
            n_slots, n_checkpoints, meter.state = 1 + planned.n_slots, planned.n_checkpoints, 0
            measure(n_slots, n_checkpoints)
        self._open_arenas(meter)
        self.model = Model(pack, device, max_context)
        self.state = self.model.new_state(n_slots, kv, n_checkpoints)
        self.drafter: CardDrafter | None = None
        if draft is not None:
            layer = DraftLayer(draft, device, self.model.rope, self.model.ends)
            pages = StatePool(layer.spec, draft_slots(n_slots - 1), draft_context, kv=kv, memory=device)
            self.drafter = CardDrafter(device, layer, DraftBook(self.state, pages), WINDOW_ROWS)
            self.state.copied = self.drafter.copied
        if verify > 1:
            device.open_tape(tape_bytes(pack.spec, WINDOW_ROWS, ALIGNMENT))
        self.windows = Windows(self.model, self.state, device, WINDOW_ROWS, self.drafter)
        device.load()
        try:
            self.chunk = self._fit([n for n in chunks if n <= max_context] or [max_context], logits, reserve)
            self._rehearse(self.layouts(1)[0])
            device.driver.synchronize()
            device.loaded()
        except BaseException:
            device.close()
            raise

    def _place_table(self, meter: Meter, table: str) -> None:
        """Decide where the n-gram table goes."""
        device, memory = self.device, self.device.memory()
        log(f"{device.name}: {shown(memory.free)} of {shown(memory.total)} free")
        everything = meter.weights + meter.table_bytes + meter.state + TABLE_ROOM + RESERVE
        device.table_in_ram = table == "ram" or (table == "auto" and everything > memory.free)
        if meter.table_bytes:
            where = "RAM, read over PCIe" if device.table_in_ram else "VRAM"
            log(f"n-gram table: {shown(meter.table_bytes)} in {where}")

    def _room_for_state(self, meter: Meter) -> int:
        """What a state may take so that weights, reserve and a workspace have room. One slot is tried in any case."""
        left = self.device.memory().free - self._weights(meter) - RESERVE
        return max(meter.state, left - min(TABLE_ROOM, left // 4))

    def _weights(self, meter: Meter) -> int:
        return meter.weights + (0 if self.device.table_in_ram else meter.table_bytes)

    def _open_arenas(self, meter: Meter) -> None:
        weights = self._weights(meter)
        self.device.open("weights", weights, "this engine needs all of them there: use a smaller file, or --ple-io ram")
        self.device.open("state", meter.state, "use a smaller --max-context, or --kv fp16, int8 or q4_0")

    def layouts(self, rows: int) -> tuple[Layout, ...]:
        """Layouts of a decode window of so many sequences without penalties: near the beginning, and anywhere."""
        bound = self.windows.layout(Rows.of([(0, 0, [0])]), 1).bound
        return tuple(dict.fromkeys([Layout(rows, rows, rows, 0, bound), Layout(rows, rows, rows)]))

    def warm(self, most_rows: int = 1) -> None:
        """Capture what every request uses, in windows of up to so many sequences; from then on nothing allocates."""
        self.state.reserve(0, 1)
        for rows in range(1, most_rows + 1):
            for layout in self.layouts(rows):
                self.windows.prepare(layout)
        self._warm_drafts()
        self.device.driver.synchronize()
        self.state.reset(0)
        self.device.seal()
        log(f"{shown(self.device.memory().free)} of VRAM stay free")

    def _warm_drafts(self) -> None:
        """Capture the verify windows of one sequence, and what goes with them."""
        if self._verify < 2:
            return
        for rows in range(1, self._verify + 1):
            for layout in self.layouts(1):
                verifies = Layout(rows, 1, rows, 0, layout.bound, verifies=True)
                self.windows.prepare(verifies)
            for n in range(1, rows):
                self.windows.rehearse_replay(verifies, n)
        if self.drafter is not None:
            self.drafter.book.place(0, WINDOW_ROWS)
            self.drafter.prepare()
            self.drafter.book.state.reset(0)

    def _fit(self, chunks: Sequence[int], logits: int, reserve: int) -> int:
        """The largest chunk that there is a workspace for."""
        for chunk in chunks:
            self.state.reserve(0, chunk)
            fits = self.device.fit(lambda n=chunk: self._first(n, min(n, logits)), reserve)  # type: ignore[misc]
            self.state.reset(0)
            if fits:
                log(f"prompt chunk {chunk}: {shown(self.device.workspace_bytes)} of workspace")
                return chunk
        raise DeviceError(
            f"the workspace of a prompt chunk of {chunks[-1]} does not fit: {shown(self.device.memory().free)} are "
            f"free, {shown(reserve)} of them stay free; use a smaller --max-context or --prefill, or a smaller file"
        )

    def _first(self, chunk: int, logits: int) -> None:
        """The largest passes, behind the compilation of what they and all windows launch."""
        begun = time.perf_counter()
        n = self.device.driver.precompile(lambda: self._everything(chunk, logits))
        if n:
            log(f"{n} kernels compiled for {self.device.name} in {time.perf_counter() - begun:.1f} s")
        self._largest(chunk, logits)

    def _everything(self, chunk: int, logits: int) -> None:
        """Passes that launch every kernel of chunks like this one and of windows."""
        self._largest(chunk, logits)
        for rows in range(1, WINDOW_ROWS + 1):
            self.windows.compute(Layout(rows, rows, rows))
            self.windows.compute(Layout(rows, 1, 1))
            if self._verify > 1:
                self.windows.compute(Layout(rows, 1, rows, verifies=True))

    def _largest(self, chunk: int, logits: int) -> None:
        """The passes that need the most workspace."""
        rows = Rows.of([(0, 0, np.zeros(chunk, np.int32))])
        self.device.expect(None)
        wanted = np.arange(chunk - logits, chunk)
        _, x = self.model.compute(self.state.located(rows).placed(self.device), self.state, wanted)
        if self.drafter is not None:
            n = min(chunk, DRAFT_ROWS, self.drafter.book.most)
            self.drafter.book.place(0, n)
            self.drafter.pass_over(Rows.of([(0, 0, np.zeros(n, np.int32))]), x[:n])
        self.windows.rehearse(Layout(WINDOW_ROWS, WINDOW_ROWS, WINDOW_ROWS, MAX_RECENT))
        if self._verify > 1:
            self.windows.rehearse(Layout(WINDOW_ROWS, 1, WINDOW_ROWS, MAX_RECENT, verifies=True))

    def _rehearse(self, layout: Layout) -> None:
        self.state.reserve(0, 1)
        self.windows.rehearse(layout)
        self.state.reset(0)
