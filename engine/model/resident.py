"""A model on one card: weights, state, windows, a workspace, in this order. Experts that do not fit lie in RAM.

    resident = Resident(pack, device, max_context=32768, n_slots=1)
    resident.model.forward(...)   resident.windows.start(...)

Memory   arenas of just what the model and its state take; the n-gram table in VRAM, in RAM that the card reads, or in
         its file; the workspace of the largest prompt chunk that fits. Where experts may lie in RAM and not everything
         fits, or fewer of them are wanted in VRAM, engine/experts has them
Errors   DeviceError with the flag that helps
Cost     weights come at the speed of a few threads, while the passes that measure the workspace compile the kernels
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Final

import numpy as np

from strata.engine.device.arena import ALIGNMENT, shown
from strata.engine.device.cuda import CudaDevice, TablePlace
from strata.engine.device.driver import Array
from strata.engine.device.host import ram
from strata.engine.device.meter import Meter
from strata.engine.draft.book import DraftBook
from strata.engine.environment import card_forms
from strata.engine.experts.backing import REMEDY, backed
from strata.engine.experts.choice import AUTO_CHUNKS as AUTO_CHUNKS
from strata.engine.experts.choice import FIXED, RESERVE, CardMemory, choose
from strata.engine.experts.plan import Asked, TierPlan
from strata.engine.experts.store import ExpertStore
from strata.engine.experts.tiering import Tiering
from strata.engine.flags import WINDOW_ROWS
from strata.engine.log import log
from strata.engine.memory.borrow import DRAFT_ROWS as TIER_DRAFT_ROWS
from strata.engine.memory.borrow import draft_beside
from strata.engine.memory.card import STREAM_MIN
from strata.engine.memory.forms import takes_forms
from strata.engine.memory.loan import LoanPlan, Planner
from strata.engine.model.card_drafter import CardDrafter, CardDrafts
from strata.engine.model.draft import DraftLayer
from strata.engine.model.head_loan import HeadLoan
from strata.engine.model.model import Model, bind
from strata.engine.model.prompt_loan import PromptLoan
from strata.engine.model.rows import Rows
from strata.engine.model.slot_loan import SlotLoan
from strata.engine.model.tape import tape_bytes
from strata.engine.model.weights import rope_table
from strata.engine.model.window import Layout, Windows
from strata.engine.pack import ModelSpec, Pack
from strata.engine.state.plan import StatePlan
from strata.engine.state.slots import StatePool
from strata.kernels.cuda.compile import DeviceError
from strata.kernels.cuda.plans import WINDOW_ROWS as KERNEL_ROWS
from strata.kernels.cuda.sample import MAX_RECENT

TABLE_ROOM: Final = 3 << 30
"""VRAM that must remain for the workspace when `auto` puts the n-gram table into VRAM."""
TABLE_PLACES: Final[dict[str, TablePlace]] = {"vram": "vram", "ram": "ram", "mmap": "mmap"}
TABLE_READ: Final[dict[TablePlace, str]] = {
    "vram": "VRAM",
    "ram": "RAM, read over PCIe",
    "mmap": "the mapped file, read by the processor",
}
SMALLER_FILE: Final = "what every token reads lies there: use a smaller file, or --ple-io ram"
SMALLER_STATE: Final = "use a smaller --max-context, or --kv fp16, int8 or q4_0"
NO_DRAFTS: Final = CardDrafts()
MANY_CUTS: Final = 128
"""Rows of a chunk from which the lengths below it are looked at closely."""
WARM_ROWS: Final = 640
"""Rows of a pass whose kernels are loaded at the start: a millisecond or three each, of what lasts tens of them."""


class Resident:
    """`model`, `state` and `windows` on `device`; `chunk`: most rows of a pass; `experts_in_vram`, `expert_bytes`: how
    many and what they take there; `drafter`: the draft layer, None without one; `reserve`: bytes that stay free.

    plan      the slots and checkpoints for so many free bytes; without it `n_slots` and `n_checkpoints`
    table     where the n-gram table goes: vram, ram, mmap, auto
    chunks    prompt chunks to try, largest first; none of them longer than the context
    logits    rows of a pass whose logits are wanted, at most
    drafts    what there is of them
    experts   how many are wanted in VRAM; None: all of them, or it is an error
    kv_resident  tokens of a slot whose keys and values are in VRAM, the others in RAM; 0: all
    loan      what prompts do with the output head's memory; None: nothing · head_moves: a test hook of that
    """

    store: ExpertStore | None
    """Where experts lie that do not all fit; None where they do."""
    loan: HeadLoan | SlotLoan | None
    """What prompts borrow; None where they have all that they need."""

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
        drafts: CardDrafts = NO_DRAFTS,
        experts: Asked | None = None,
        stream_min: int = STREAM_MIN,
        loan: Planner | None = None,
        head_moves: bool = False,
        kv_resident: int = 0,
    ) -> None:
        self.device, self._verify, self.store, self._own_ring = device, drafts.verify, None, 0
        meter = Meter(device.sides)
        _measure_weights(pack, drafts, max_context, meter)
        measure = partial(_measure_state, pack.spec, drafts, max_context, kv, kv_resident, meter)
        measure(n_slots, n_checkpoints)
        self.experts_in_vram, self.expert_bytes = pack.spec.layers * pack.spec.experts, meter.stacks
        self._place_table(meter, table)
        tape = tape_bytes(pack.spec, WINDOW_ROWS, ALIGNMENT) if drafts.verify > 1 else 0
        tiers = None
        if experts is not None:
            more = partial(draft_beside, drafts.spec)
            tiers = self._unless_all_fit(Tiering.of(pack, meter, experts, max_context, stream_min, more), meter, tape)
        if plan is not None:
            room = self._room_for_state(meter) if tiers is None else tiers.room_for_state(self._left(meter))
            planned = plan(max(meter.state, room) - drafts.page_bytes(WINDOW_ROWS, kv))
            n_slots, n_checkpoints, meter.state, meter.far_state = 1 + planned.n_slots, planned.n_checkpoints, 0, 0
            measure(n_slots, n_checkpoints)
        self._require_room(meter)
        left = self.device.memory().free - self._weights(meter) - meter.state - tape
        of_ram = self._free_ram(meter)
        tier_plan, lending = self._plan_experts(tiers, loan, left, of_ram, meter, drafts)
        if tier_plan is None:
            self._choose_forms(meter, left)
        self.loan = None
        if lending is not None:
            self.loan, of_ram = self._lend_head(lending, pack.spec, meter, head_moves), of_ram - meter.head
        self._open_arenas(meter)
        share: Callable[[int], float] = _half
        if tiers is not None and tier_plan is not None:
            tier_plan, cache = self._back(tiers, tier_plan, left, of_ram, tape)
            chunks, reserve = self._open_tiers(tiers, tier_plan, cache, pack.spec)
            share = partial(self._share, tiers, drafts.spec, tier_plan.mixer_rows)
            device.mixer_rows = tier_plan.mixer_rows
        self.reserve = reserve
        self.model = Model(pack, device, max_context)
        self.state = self.model.new_state(n_slots, kv, n_checkpoints, resident=kv_resident)
        self.drafter = self._drafter(drafts, n_slots - 1, kv)
        if drafts.verify > 1:
            device.open_tape(tape)
        self.windows = Windows(self.model, self.state, device, WINDOW_ROWS, self.drafter, drafts.rounds, drafts.ends)
        with self._loading():
            if self.loan is not None and tiers is not None:
                self.chunk = self._fit_loan(self.loan, tiers, logits, drafts)
            else:
                self.chunk = self._fit([n for n in chunks if n <= max_context] or [max_context], logits, reserve, share)

    @property
    def prompt_memory(self) -> tuple[str, int]:
        """Where prompts lie: in memory of their "own", or also in the "head" or in "slots"; bytes of the longest chunk,
        ring and all."""
        if self.loan is None:
            return "own", self.device.workspace_bytes + self._own_ring
        return self.loan.where, self.loan.read_bytes

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Weights come meanwhile, and are there afterwards; what fails leaves nothing open."""
        try:
            self.device.load()
            yield
            self._loaded()
        except BaseException:
            self.device.close()
            raise

    def _unless_all_fit(self, tiers: Tiering, meter: Meter, tape: int) -> Tiering | None:
        """None where all experts fit beside the rest; else they are no part of the weights."""
        if tiers.fit_whole(self.device.memory().free - self._weights(meter) - meter.state - tape):
            return None
        meter.weights -= meter.stacks
        return tiers

    def _loaded(self) -> None:
        """Until the weights are there."""
        self._rehearse(self.layouts(1)[0])
        self.device.driver.synchronize()
        self.device.loaded()
        if self.loan is not None:
            self.loan.loaded()

    def _drafter(self, drafts: CardDrafts, n_slots: int, kv: str) -> CardDrafter | None:
        """The draft layer on the card, following the state; None without one."""
        pages = drafts.pages(n_slots, kv, self.device)
        if drafts.layer is None or pages is None:
            return None
        layer = DraftLayer(drafts.layer, self.device, self.model.rope, self.model.ends)
        drafter = CardDrafter(self.device, layer, DraftBook(self.state, pages), WINDOW_ROWS)
        if self.device.tiers is not None:
            drafter.pass_rows = min(drafter.pass_rows, TIER_DRAFT_ROWS)
        self.state.copied = drafter.copied
        return drafter

    def _place_table(self, meter: Meter, table: str) -> None:
        """Decide where the n-gram table goes."""
        device, memory = self.device, self.device.memory()
        log(f"{device.name}: {shown(memory.free)} of {shown(memory.total)} free")
        everything = meter.weights + meter.table_bytes + meter.state + TABLE_ROOM + RESERVE
        device.table_place = TABLE_PLACES.get(table, "ram" if everything > memory.free else "vram")
        if meter.table_bytes:
            log(f"n-gram table: {shown(meter.table_bytes)} in {TABLE_READ[device.table_place]}")

    def _choose_forms(self, meter: Meter, left: int) -> None:
        """Decide whether weights come in their card forms."""
        self.device.card_forms = takes_forms(meter.forms, left, card_forms(os.environ))
        if self.device.card_forms and meter.forms:
            log(f"weights in forms of the card's own: {shown(meter.forms)} more than in the file")
            meter.weights += meter.forms
            self.expert_bytes += meter.stack_forms

    @staticmethod
    def _plan_experts(
        tiers: Tiering | None, loan: Planner | None, left: int, of_ram: int, meter: Meter, drafts: CardDrafts
    ) -> tuple[TierPlan | None, LoanPlan | None]:
        """What becomes of experts that do not all fit, and what prompts do with the head's memory; None, and said,
        where that gains nothing."""
        if tiers is None:
            if loan is not None:
                log("head alias: all experts lie in VRAM, so the head stays")
            return None, None
        chosen = choose(tiers, CardMemory(left, of_ram, meter.head, drafts.spec), loan)
        for line in chosen.said:
            log(line)
        return chosen.tiers, chosen.head

    def _lend_head(self, plan: LoanPlan, spec: ModelSpec, meter: Meter, moves: bool) -> HeadLoan:
        """Give the head memory of its own, which prompts have a use for."""
        meter.weights -= meter.head
        loan = self.device.lender = HeadLoan(self.device, plan, meter.head, (1, spec.streams, spec.hidden), moves)
        return loan

    def _back(self, tiers: Tiering, planned: TierPlan, left: int, of_ram: int, tape: int) -> tuple[TierPlan, Array]:
        """The expert cache's memory, and the plan that the card has it for. left, of_ram: what was planned in."""
        loan, whole = self.loan if isinstance(self.loan, HeadLoan) else None, planned.placement.cache_bytes
        own = 0 if loan is None else loan.plan.own_bytes

        def again(n_bytes: int) -> TierPlan:
            there = min(self.device.memory().free + own - tape, left - (whole - n_bytes))
            return tiers.plan(there, of_ram, FIXED, alias=loan is not None, at_most=n_bytes)

        def behind(plan: TierPlan) -> int:
            return tiers.behind(plan, lent=loan is not None) + tape

        return backed(self.device, planned, again, None if tiers.given else behind)

    def _open_tiers(
        self, tiers: Tiering, planned: TierPlan, cache: Array, spec: ModelSpec
    ) -> tuple[Sequence[int], int]:
        """Take what experts in two memories need beside the cache. The chunks to try, and what stays free."""
        for line in planned.said[: -1 if isinstance(self.loan, HeadLoan) else None]:
            log(line)
        ring: Array | int
        if planned.borrow is not None:
            self.loan = SlotLoan(self.device, planned.borrow, (1, spec.streams, spec.hidden))
        if self.loan is not None:
            ring = self.loan.ring
        else:
            ring = self.device.account.take(planned.ring_bytes, "the ring of streamed experts", REMEDY)
            self._own_ring = planned.ring_bytes
        helpers = tiers.helpers(self.device, planned.placement)
        staging = None
        if planned.staged_bytes:
            staging = self.device.account.take(planned.staged_bytes, "experts that windows bring over", REMEDY)
        self.store = ExpertStore(self.device, planned.placement, cache, ring, tiers.stream_min, helpers, staging)
        if self.loan is not None:
            self.loan.follow(self.store)
        self.device.tiers = self.store
        self.experts_in_vram, self.expert_bytes = planned.placement.in_cache, planned.placement.cache_bytes
        return planned.chunks, planned.reserve

    @staticmethod
    def _share(tiers: Tiering, drafts: ModelSpec | None, mixer_rows: int, chunk: int) -> float:
        """`share` of `fit`."""
        return tiers.share(chunk, draft_beside(drafts, chunk), mixer_rows)

    def _left(self, meter: Meter) -> int:
        """Free bytes behind weights and reserve."""
        return self.device.memory().free - self._weights(meter) - RESERVE

    def _room_for_state(self, meter: Meter) -> int:
        """What a state may take so that weights, reserve and a workspace have room; one slot is tried in any case."""
        left = self._left(meter)
        return left - min(TABLE_ROOM, left // 4)

    def _free_ram(self, meter: Meter) -> int:
        """RAM that is free behind what lies there in any case."""
        return ram().free - meter.far_state - self._locked_table(meter)

    def _weights(self, meter: Meter) -> int:
        return meter.weights + (meter.table_bytes if self.device.table_place == "vram" else 0)

    def _locked_table(self, meter: Meter) -> int:
        """Bytes of the n-gram table in page-locked RAM."""
        return meter.table_bytes if self.device.table_place == "ram" else 0

    def _require_room(self, meter: Meter) -> None:
        """DeviceError when weights and state do not fit, whatever is planned for the rest."""
        weights = self._weights(meter)
        self.device.account.require(weights, "the weights", SMALLER_FILE)
        self.device.account.require(meter.state, "the state", SMALLER_STATE, beside=weights)
        if meter.far_state > (free := max(0, self._free_ram(meter) + meter.far_state)):
            raise DeviceError(
                f"keys and values in RAM take {shown(meter.far_state)}, {shown(free)} are free; use a smaller "
                "--max-context or --batch, or leave out --kv-resident"
            )
        table, free = self._locked_table(meter), ram().free - meter.far_state
        if table > free:
            raise DeviceError(
                f"the n-gram table takes {shown(table)} of page-locked RAM, {shown(free)} are free; free some, use "
                "--ple-io mmap, which leaves it in the file, or --ple-io vram"
            )
        if meter.far_state:
            log(f"keys and values: pages beside those of --kv-resident in {shown(meter.far_state)} of page-locked RAM")

    def _open_arenas(self, meter: Meter) -> None:
        weights = self._weights(meter)
        self.device.open("weights", weights, SMALLER_FILE)
        self.device.open("state", meter.state, SMALLER_STATE)

    def layouts(self, rows: int) -> tuple[Layout, ...]:
        """Layouts of a decode window of so many sequences without penalties: near the beginning, and anywhere."""
        bound = self.windows.layout(Rows.of([(0, 0, [0])]), 1).bound
        return tuple(dict.fromkeys([Layout(rows, rows, rows, 0, bound), Layout(rows, rows, rows)]))

    def read_layouts(self) -> Iterator[Layout]:
        """Layouts of windows that read a piece of a prompt: whole ones without logits, and any with."""
        for layout in self.layouts(1):
            yield replace(layout, rows=WINDOW_ROWS, wanted=0)
            for rows in range(2, WINDOW_ROWS + 1):
                yield replace(layout, rows=rows)

    def warm(self, most_rows: int = 1, reads: bool = False) -> None:
        """Capture what every request uses, in windows of up to so many sequences; from then on nothing allocates.
        reads: those too that read pieces of a prompt, and its short passes."""
        self.state.reserve(0, 1)
        for rows in range(1, most_rows + 1):
            for layout in self.layouts(rows):
                self.windows.prepare(layout)
        if reads:
            self._warm_reads()
        self._warm_drafts(most_rows)
        self.device.driver.synchronize()
        self.state.reset(0)
        self.device.seal()
        log(f"{shown(self.device.memory().free)} of VRAM stay free")

    def _warm_reads(self) -> None:
        """Capture the windows that read pieces of a prompt, and load the kernels of short passes: the first request of
        a length would wait for each of them."""
        for layout in self.read_layouts():
            self.windows.prepare(layout)
        most = min(self.chunk, WARM_ROWS)
        self.state.reserve(0, most)
        for rows in (*prompt_sizes(most), most):
            if self.loan is not None:
                self.loan.lend(rows)
            self._prompt(rows, 1)
        if self.loan is not None:
            self.loan.over()
            self.loan.before_window()

    def verify_layouts(self, n_slots: int) -> Iterator[Layout]:
        """Layouts of verify windows without penalties: of one sequence, and, where the draft layer follows slots, of up
        to so many, with a draft for any of them."""
        most = n_slots if self.drafter is not None and self.drafter.book.follows(1) else 1
        for layout in self.layouts(1):
            for n in range(1, most + 1):
                for rows in range(n, (self._verify if n == 1 else min(2 * n, WINDOW_ROWS)) + 1):
                    yield Layout(rows, n, rows, 0, layout.bound, verifies=True)

    def _warm_drafts(self, n_slots: int) -> None:
        """Capture the verify windows, and what goes with them."""
        if self._verify < 2:
            return
        replays = set()
        for layout in self.verify_layouts(n_slots):
            self.windows.prepare(layout)
            # A sequence with drafts has two rows at least, and may begin at any but the last.
            most = 0 if layout.rows == layout.segments else 1 if layout.segments == 1 else layout.rows - 1
            for begin in range(most):
                if (layout.rows, begin) not in replays:
                    replays.add((layout.rows, begin))
                    self.windows.rehearse_replay(layout, begin)
        if self.drafter is not None:
            self.drafter.book.place(0, WINDOW_ROWS)
            self.drafter.prepare()
            for layout in self.windows.round_layouts():
                self.windows.prepare(layout)
            self.drafter.book.state.reset(0)

    def _fit(self, chunks: Sequence[int], logits: int, reserve: int, share: Callable[[int], float]) -> int:
        """The largest chunk that there is a workspace for."""
        for chunk in chunks:
            self.state.reserve(0, chunk)
            first = partial(self._first, chunk, min(chunk, logits))
            fits = self.device.fit(first, reserve, share(chunk))
            self.state.reset(0)
            if fits:
                log(f"prompt chunk {chunk}: {shown(self.device.workspace_bytes)} of workspace")
                return chunk
        raise DeviceError(
            f"the workspace of a prompt chunk of {chunks[-1]} does not fit: {shown(self.device.memory().free)} are "
            f"free, {shown(reserve)} of them stay free; use a smaller --max-context or --prefill, or a smaller file"
        )

    def _fit_loan(self, loan: PromptLoan, tiers: Tiering, logits: int, drafts: CardDrafts) -> int:
        """The workspaces of reads that borrow nothing and of those that do; the chunk of these."""

        def short(rows: int) -> None:
            self.state.reserve(0, rows)
            try:
                self._first(rows, min(rows, logits))
            finally:
                self.state.reset(0)

        def long(rows: int) -> None:
            self.state.reserve(0, rows)
            try:
                self.device.driver.precompile(lambda: self._lengths(rows))
                self._prompt(rows, 0)
            finally:
                self.state.reset(0)

        loan.fit_own(short, lambda rows: tiers.share(rows, draft_beside(drafts.spec, rows)))
        return loan.fit_lent(long)

    def _lengths(self, chunk: int) -> None:
        """Prompts that launch every kernel of those up to this one."""
        for rows in (*prompt_sizes(chunk), chunk):
            self._prompt(rows, 0)

    def _first(self, chunk: int, logits: int) -> None:
        """The largest passes, behind the compilation of what they and all windows launch."""
        begun = time.perf_counter()
        n = self.device.driver.precompile(lambda: self._everything(chunk, logits))
        if n:
            log(f"{n} kernels compiled for {self.device.name} in {time.perf_counter() - begun:.1f} s")
        self._largest(chunk, logits)

    def _everything(self, chunk: int, logits: int) -> None:
        """Passes that launch every kernel of windows and of chunks up to this one."""
        self._largest(chunk, logits)
        for rows in prompt_sizes(chunk):
            self._prompt(rows, min(rows, logits))
        bounds = {layout.bound for layout in self.layouts(1)}  # attention is another below its budget
        for rows, bound in product(range(1, WINDOW_ROWS + 1), bounds):
            self.windows.compute(Layout(rows, rows, rows, 0, bound))
            self.windows.compute(Layout(rows, 1, 1, 0, bound))
            verified = {1, max(1, rows // 2)} if self._verify > 1 else ()  # a sequence, and slots with a draft each
            for segments in verified:
                self.windows.compute(Layout(rows, segments, rows, 0, bound, verifies=True))
        for layout in self.windows.round_layouts():
            self.windows.compute(layout)

    def _largest(self, chunk: int, logits: int) -> None:
        """The passes that need the most workspace. A short prompt goes through kernels of windows, which may need more
        than those of a chunk that is hardly longer."""
        self._prompt(chunk, logits)
        if chunk > KERNEL_ROWS:
            self._prompt(KERNEL_ROWS, min(KERNEL_ROWS, logits))
        self.windows.rehearse(Layout(WINDOW_ROWS, WINDOW_ROWS, WINDOW_ROWS, MAX_RECENT))
        if self._verify > 1:
            self.windows.rehearse(Layout(WINDOW_ROWS, 1, WINDOW_ROWS, MAX_RECENT, verifies=True))

    def _prompt(self, chunk: int, logits: int) -> None:
        """A chunk at the beginning of slot 0, what the draft layer does behind it, and the draw of the next token."""
        rows = Rows.of([(0, 0, np.zeros(chunk, np.int32))])
        self.device.expect(None)
        wanted = np.arange(chunk - logits, chunk)
        of_rows, x = self.model.compute(self.state.located(rows).placed(self.device), self.state, wanted)
        if self.drafter is not None:
            n = min(chunk, self.drafter.pass_rows)
            self.drafter.book.place(0, n)
            self.drafter.pass_over(Rows.of([(0, 0, np.zeros(n, np.int32))]), x[:n])
        if of_rows is not None:
            self.windows.compute_draw(of_rows[-1:], Layout(1, 1, 1, MAX_RECENT))

    def _rehearse(self, layout: Layout) -> None:
        self.state.reserve(0, 1)
        self.windows.rehearse(layout)
        self.state.reset(0)


def prompt_sizes(chunk: int) -> Iterator[int]:
    """Rows of prompts below a chunk that launch every kernel which prompts of any length up to it do.

    Between two sizes of a long chunk no other cut of a product is the cheapest (looked up for the full geometry on an
    H200, where steps of a seventh miss some). Short chunks have few cuts, and steps of a factor two. The longest prompt
    that goes through kernels of windows is one of them: it may take more of a workspace than some longer ones do.
    """
    rows = WINDOW_ROWS + 1
    while rows < chunk:
        yield rows
        longer = rows + (max(1, rows // 10) if chunk >= MANY_CUTS else rows)
        if rows < KERNEL_ROWS < min(longer, chunk):
            yield KERNEL_ROWS
        rows = longer


def _measure_weights(pack: Pack, drafts: CardDrafts, max_context: int, meter: Meter) -> None:
    rope = rope_table(pack.spec, max_context, meter)
    embedding, head, _ = bind(pack, meter, rope)
    if drafts.layer is not None:
        DraftLayer(drafts.layer, meter, rope, (embedding, head))


def _measure_state(
    spec: ModelSpec,
    drafts: CardDrafts,
    max_context: int,
    kv: str,
    kv_resident: int,
    meter: Meter,
    slots: int,
    checkpoints: int,
) -> None:
    StatePool(spec, slots, max_context, kv=kv, memory=meter, n_checkpoints=checkpoints, resident=kv_resident)
    drafts.pages(slots - 1, kv, meter)


def _half(chunk: int) -> float:
    """`share` of `fit`, where a pass has room to spare."""
    return 0.5
