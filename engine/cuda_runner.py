"""The model on a card with the state of all sequences: what the schedule computes with there.

Reads    chunks of up to 8,192 rows; short pieces as windows, where those are quicker
Windows  one captured graph for all rows, with sampling inside. Before the ids of one are waited for, the next is
         started on them, so the card does not wait for the host. Where the host then decides against it (a sequence has
         ended, another has come, a prompt is read first) it leaves no trace: a window counts when it is asked for
Errors   Refused before READY, with the flag that helps; DeviceError afterwards
Cost     `costs` says what the host takes for a window
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from strata.engine import environment
from strata.engine.capacity import state_plan
from strata.engine.card_rounds import CardRounds
from strata.engine.device.arena import MIB, shown
from strata.engine.device.cuda import CudaDevice
from strata.engine.device.driver import Array, Driver
from strata.engine.draft.accept import n_kept
from strata.engine.experts.adapt import AdaptRules
from strata.engine.experts.choice import auto_chunks
from strata.engine.experts.learned import Keeping
from strata.engine.experts.plan import asked_of
from strata.engine.experts.tier import Tier
from strata.engine.flags import AUTO_BESIDE, WINDOW_ROWS
from strata.engine.log import log
from strata.engine.memory.command import keeping_of, profile_of, switches
from strata.engine.memory.loan import Planner, plan_loan
from strata.engine.model import Rows
from strata.engine.model.card_drafter import CardDrafts
from strata.engine.model.head_loan import HeadLoan
from strata.engine.model.resident import Resident
from strata.engine.model.slot_loan import SlotLoan
from strata.engine.model.window import Draw, Ticket, penalises
from strata.engine.options import Options, Refused
from strata.engine.pack import DraftPack, Pack
from strata.engine.runner import check_lengths
from strata.engine.schedule.ports import SOLO, Picked, Round, Row
from strata.engine.schedule.short import NO_SHORT, ReadTimes, ShortReads
from strata.engine.state.pages import OutOfPages
from strata.engine.window_cost import WindowCost
from strata.kernels.cuda.compile import DeviceError
from strata.kernels.ops import I32, PAGE, Sampling
from strata.protocol.lines import InfoValue

LOW: Final = 256 * MIB
"""Free VRAM below which the log warns: the driver and the desktop need some."""
SCARCE: Final = 1024 * MIB
"""The same where a request begins."""
_TIMED: Final = 2
"""Times that a read is timed at the start, behind a first one that loads its kernels; the quickest counts."""
_NOTHING = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class _Batch:
    """The rows that the card's buffers describe: whose next tokens they are, how these were sampled, by which draws."""

    slots: list[int]
    draws: list[Draw]
    width: int
    positions: list[int]
    ids: list[int] = field(default_factory=list)

    def goes_on_with(self, rows: Sequence[Row]) -> bool:
        """Whether the rows are the same sequences, each with the token that was sampled, and sampled alike."""
        return (
            [row.slot for row in rows] == self.slots
            and [row.position for row in rows] == self.positions
            and [int(row.tokens[-1]) for row in rows] == self.ids
            and all(map(_holds, self.draws, rows))
        )


class _Verifying(NamedTuple):
    """A verify window that was started: its rows, as the card has them, and where it lands."""

    rows: Sequence[Row]
    fed: Rows
    ticket: Ticket

    def is_of(self, rows: Sequence[Row]) -> bool:
        """Whether it is what these rows want. Of one row without penalties, which `verify_ahead` has started."""
        (mine, *_), (row, *more) = self.rows, rows
        same = (row.slot, row.position, row.drafts) == (mine.slot, mine.position, mine.drafts)
        return not more and same and row.tokens[-1] == mine.tokens[-1] and row.how is mine.how


def _recent(row: Row) -> I32:
    return row.recent if penalises(row.how) else _NOTHING


def _holds(draw: Draw, row: Row) -> bool:
    plain = draw.how is row.how and not row.last_n  # what most rows are, and cheap to see
    return plain or draw.holds_for(row.how, _recent(row), row.position + 1)


def _draw(row: Row) -> Draw:
    """How the card samples from the row's newest token on: its list has the ids before that token, which a window adds
    when it feeds it."""
    before = row.tokens[max(0, row.position - row.last_n) : row.position] if penalises(row.how) else _NOTHING
    return Draw(row.how, before, row.position, row.last_n)


def _draw_behind(row: Row, i: int) -> Draw:
    """How the token behind the i-th fed one is sampled."""
    return Draw(row.how, row.recent_with(i) if penalises(row.how) else _NOTHING, row.position + i + 1, row.last_n)


class CudaRunner:
    """`schedule.ports.Runner` on a card. `driver`, `loan`: tests put a card without hardware here, and a plan that its
    small head has something to add to.

    chunk, beside   most tokens of a prompt chunk, and of one while slots decode
    n_slots         batch slots; pool slots 1 to n_slots of `state`
    short           pieces of a prompt that are read through windows, once `warm` has timed both ways
    """

    short = NO_SHORT

    def __init__(
        self,
        pack: Pack,
        options: Options,
        draft: DraftPack | None = None,
        driver: Driver | None = None,
        loan: Planner = plan_loan,
    ) -> None:
        self.cost = WindowCost()
        self._stats = options.stats
        self._short_read = options.short_read
        self._batch: _Batch | None = None
        self._reading: Ticket | None = None  # the last window of a read
        self._ahead: Ticket | None = None  # the window after the last one, started before it was asked for
        self._verifying: _Verifying | None = None  # the same, of a window with drafts from the text
        self._logits: Array | None = None  # of the last read
        self._end = -1  # the position behind it
        self._slot = -1  # its slot
        self._solo_hits = Picked()
        chunk = min(options.prefill, options.max_context)
        profile = profile_of(pack, options)
        try:
            self._device = CudaDevice(options.vram_limit_mib, driver)
            self._resident = Resident(
                pack,
                self._device,
                max_context=options.max_context,
                plan=lambda free: state_plan(options, pack.spec, free, self._device.sides),
                kv=options.kv,
                kv_resident=options.resident,
                table=options.ple_io,
                chunks=[chunk] if chunk else auto_chunks(options.max_context),
                drafts=CardDrafts(
                    min(max(options.spec, 1 + options.lookup), WINDOW_ROWS),
                    draft,
                    options.draft_slots,
                    options.draft_context,
                    options.mtp_max,
                    tuple(options.eos_ids or ()),
                ),
                experts=asked_of(options, switches(os.environ), profile),
                loan=loan if options.prefill_head_alias else None,
                head_moves=environment.is_on(os.environ.get(environment.HEAD_MOVES)),
            )
            self._tier = self._new_tier(options, keeping_of(options, profile))
        except DeviceError as error:
            raise Refused(f"--device cuda: {error}") from None
        self.chunk = self._resident.chunk
        self.beside = min(options.prefill_beside or AUTO_BESIDE, self.chunk)
        self.state = self._resident.state
        self.n_slots = self.state.n_slots - 1
        self._model = self._resident.model
        self._windows = self._resident.windows
        self._loan = self._resident.loan
        self.drafter = self._resident.drafter
        of_card = self._windows.rounds
        self._rounds = None if of_card is None else CardRounds(self._model, of_card, self._windows, self.state)

    def warm(self) -> None:
        """Capture what every request uses; from then on nothing allocates."""
        self._resident.warm(max(1, self.n_slots), reads=self._short_read > 0)
        if self._short_read:
            self.short = self._time_reads()
        if (free := self._device.memory().free) < LOW:
            log(f"LOW: {shown(free)} of VRAM are free with everything loaded; a larger --vram-reserve-mib leaves more")
        if self._tier is not None:
            self._tier.begin()

    def _time_reads(self) -> ShortReads:
        """Which pieces of a prompt are read through windows: as long as these are quicker on this card. Where experts
        lie in the file, all: to time both ways would read most of it."""
        most, rng = min(self._short_read, self.chunk), np.random.default_rng(0)
        store = self._resident.store
        if store is not None and store.reads_file:
            log(f"short reads: up to {most} tokens through windows; nothing was timed, as experts lie in the file")
            return ShortReads(most, WINDOW_ROWS)
        tokens = rng.integers(0, self._model.spec.vocab, max(most, WINDOW_ROWS), np.int32)

        def ms(n: int) -> float:
            found = [self._timed_read(tokens[:n]) for _ in range(1 + _TIMED)]
            return 1e3 * min(found[1:])

        passes = [(n, ms(n)) for n in sorted({min(2 * WINDOW_ROWS, most), most}) if n > WINDOW_ROWS]
        times = ReadTimes(ms(1), ms(WINDOW_ROWS), WINDOW_ROWS, passes)
        short = times.short(most)
        log(f"short reads: up to {short.most} tokens through windows; {times}")
        return short

    def _timed_read(self, tokens: I32) -> float:
        """Seconds of a read from the beginning of the solo path, which is empty again afterwards."""
        self._device.driver.synchronize()
        begun = time.perf_counter()
        self.feed(SOLO, 0, tokens, False)
        self._device.driver.synchronize()
        spent = time.perf_counter() - begun
        self._forget()
        self.state.reset(SOLO)
        if self._loan is not None:
            self._loan.over()
        return spent

    def _new_tier(self, options: Options, keeping: Keeping | None) -> Tier | None:
        """What follows the experts; None where all lie in VRAM."""
        store = self._resident.store
        if store is None:
            if keeping is not None:
                log("--expert-profile-save: all experts lie in VRAM, so their use is not counted and no order is kept")
            return None
        rules = AdaptRules(options.adapt_every, options.adapt_swaps, options.adapt_decay, options.adapt_min_gain)
        loan = self._resident.loan
        lending = loan.lending if isinstance(loan, SlotLoan) else None
        try:
            return Tier(self._device.driver, store, rules, keeping, lending)
        except BaseException:
            self._device.close()  # else threads go on that compute experts
            raise

    @property
    def where(self) -> str:
        """For the log."""
        return self._device.name

    @property
    def solo_hits(self) -> Callable[[], Picked] | None:
        """Experts that the decode windows of the solo slot have found in the cache so far; None: all lie in VRAM."""
        store = self._resident.store
        if store is None:
            return None
        helpers = store.helpers
        return lambda: self._solo_hits if helpers is None else Picked(*self._solo_hits[:2], *helpers.filed)

    @property
    def costs(self) -> str:
        """A line for --stats."""
        tier = "" if self._tier is None else f"; {self._tier}"
        return f"{self.cost}{tier}"

    def figures(self) -> dict[str, int]:
        """What INFO counts of experts and of loans of the head; nothing where there are none."""
        loads = {"head_loads": self._loan.loads} if isinstance(self._loan, HeadLoan) else {}
        return loads if self._tier is None else {**loads, **self._tier.figures()}

    def request_begins(self) -> None:
        """Say when little memory is free: other programs may have taken some since the start."""
        if (free := self._device.memory().free) < SCARCE:
            log(f"request: {free // MIB} MiB of VRAM are free, less than {SCARCE // MIB}")

    def request_over(self, reading: bool = False) -> None:
        """The last line of a request is out. reading: a prompt of another one is being read."""
        if self._loan is not None and not reading:
            self._loan.over()
        if self._tier is not None:
            self._tier.request_over()
        if self._stats:
            log(f"stats: {self.cost.lap()}")

    def close(self) -> None:
        """The engine leaves, with nothing under way."""
        if self._tier is not None:
            self._tier.close()

    def info(self) -> dict[str, InfoValue]:
        """What INFO says of the card."""
        slots, experts = self._resident.experts_in_vram, self._resident.expert_bytes // MIB
        store, (where, prompts) = self._resident.store, self._resident.prompt_memory
        return {
            "vram_free_mib": self._device.memory().free // MIB,
            "vram_reserve_mib": self._resident.reserve // MIB,
            "prefill_memory": where,
            "prefill_mib": prompts // MIB,
            "expert_slots": slots,
            "expert_slots_primary": slots,
            "expert_cache_mib": experts,
            "expert_cache_primary_mib": experts,
            "expert_pairs": self._resident.model.spec.layers * self._resident.model.spec.experts,
            "arena_mib": 0 if store is None else store.placement.locked_bytes // MIB,
            "head_alias": int(isinstance(self._loan, HeadLoan)),
            "head_lent_mib": self._loan.plan.lent_bytes // MIB if isinstance(self._loan, HeadLoan) else 0,
            "pcie_frac": 0.0 if store is None else 1.0 if store.helpers is None else round(store.helpers.share, 3),
            "window_rows": WINDOW_ROWS,
            "prefill_chunk": self.chunk,
            "gpu": "_".join(self._device.name.split()),
        }

    # ---------------------------------------------------------------------------------------------------------- reads

    def feed(self, slot: int, begin: int, tokens: I32, want_logits: bool) -> Array | None:
        self._forget()
        rows = Rows.of([(slot, begin, tokens)])
        logits = self._compute(rows, tokens, want_logits)
        if want_logits and self._loan is not None:
            self._loan.over()
        self._slot, self._end = slot, begin + len(tokens)
        self._logits = logits if want_logits else None
        return None if self._logits is None else self._logits[0]

    def _compute(self, rows: Rows, tokens: I32, want_logits: bool) -> Array | None:
        if len(rows) > WINDOW_ROWS:
            if self._resident.store is not None:  # a whole chunk that is not the last: another follows
                self._resident.store.goes_on(len(rows) == self.chunk and not want_logits)
            loan = self._loan if self._loan is not None and self._loan.lend(len(rows)) else None
            logits, x = self._model.read(rows, self.state, [len(rows) - 1] if want_logits and loan is None else [])
            if self.drafter is not None:
                self.drafter.read(int(rows.slots[0]), tokens, x)
            if loan is not None and want_logits:
                logits = loan.logits(self._model, x[-1:])
            self._device.driver.synchronize()
            self._device.check()
            return logits
        whole = len(rows) == WINDOW_ROWS  # few layouts serve all reads: those of fewer rows always make logits
        ticket = self._started(rows, int(want_logits or not whole), 0)
        if self.drafter is not None:
            self.drafter.read(int(rows.slots[0]), tokens, ticket.x)
        before, self._reading = self._reading, ticket
        if want_logits:
            ticket.wait()
        elif before is not None:  # the card has the next window before this one has ended
            before.wait()
        self._device.check()
        if self._tier is not None:
            self._tier.check()
        return ticket.logits

    def sample(self, logits: Array, recent: I32, how: Sampling, position: int) -> int:
        if self._logits is None or position != self._end:
            raise RuntimeError(f"the logits before position {position} are gone: the last read ended at {self._end}")
        draw = Draw(how, recent if penalises(how) else _NOTHING, position)
        ids = self._windows.draw(self._logits, [draw]).wait()
        self._batch = _Batch([self._slot], [draw], draw.width, [position], ids)
        return self._decided(ids)[0]

    # -------------------------------------------------------------------------------------------------------- windows

    def window(self, rows: Sequence[Row], again: bool, rounds: int = 0) -> list[int]:
        batch = self._batch
        if batch is None or not batch.goes_on_with(rows):
            self._forget()
            draws = [_draw(row) for row in rows]
            width = self._windows.sample_with(draws)
            batch = self._batch = _Batch([row.slot for row in rows], draws, width, [])
        ticket, self._ahead = self._ahead, None
        if ticket is None or ticket.layout.leaves:
            self.cost.dropped += ticket is not None
            parts = [(row.slot, row.position, row.tokens[-1:]) for row in rows]
            ticket = self._started(Rows.of(parts), len(rows), batch.width)
        else:
            for slot in batch.slots:
                self.state.advance(slot, 1)
        batch.positions = [row.position + 1 for row in rows]
        if again:
            self._start_ahead(ticket, batch, rounds)
        self.cost.enter(self._ahead is not None)
        batch.ids = ticket.wait()
        self.cost.leave()
        self._window_over(ticket, batch.slots)
        return self._decided(batch.ids)

    def _started(self, rows: Rows, wanted: int, width: int) -> Ticket:
        """A window from the host, which counts."""
        self._take_back()
        self._model.check(rows, self.state)
        lengths = [(slot, end - begin) for slot, begin, end in rows.segments.tolist()]
        self.state.reserve_all(lengths)
        ticket = self._windows.start(rows, wanted, width)
        for slot, n in lengths:
            self.state.advance(slot, n)
        return ticket

    def _start_ahead(self, ticket: Ticket, batch: _Batch, rounds: int) -> None:
        """The window after this one, where the context has room for it; rounds: a round of the one sequence, and drafts
        of the next one."""
        if rounds and self._rounds is not None:
            self._ahead = self._rounds.behind_window(batch.slots[0], batch.positions[0], batch.draws[0], rounds)
            self.cost.ahead += self._ahead is not None
            return
        if max(batch.positions) >= self.state.max_context:
            return
        begins_page = [(slot, 1) for slot, at in zip(batch.slots, batch.positions, strict=True) if not at % PAGE]
        try:
            if begins_page:
                self.state.reserve_all(begins_page)
        except OutOfPages:
            return
        self._ahead = self._windows.step(ticket, max(batch.positions))
        self.cost.ahead += 1

    # --------------------------------------------------------------------------------------------------------- drafts

    def follows(self, slot: int) -> bool:
        return self.drafter is not None and self.drafter.book.follows(slot)

    def propose(self, row: Row, most: int, min_p: float) -> list[int]:
        if self.drafter is None or not self.follows(row.slot):
            return []
        return self.drafter.propose(row.slot, len(row.tokens), most, min_p)

    def verify(self, rows: Sequence[Row]) -> list[list[int]]:
        begun = time.perf_counter()
        started, self._verifying = self._verifying, None
        if started is None or not started.is_of(rows):
            self.cost.dropped += started is not None
            started = self._start_verify(rows)
        fed, ticket = started.fed, started.ticket
        waited = time.perf_counter()
        ids, said = ticket.wait(), []
        self._window_over(ticket, [int(slot) for slot in fed.slots])
        self.cost.verifying -= time.perf_counter() - waited
        for row, (slot, begin, end) in zip(rows, fed.segments.tolist(), strict=True):
            own = ids[begin:end]
            n = n_kept(row.drafts, own)
            if min(own[:n]) < 0:
                raise RuntimeError(f"the logits of slot {slot} before {row.position + n} are not finite")
            if begin + n < end:
                self._windows.replay(ticket, slot, begin, n)
                self.cost.replayed += 1
            self.state.advance(slot, n)
            if self.drafter is not None:
                drafts, likely = ticket.drafts()
                last = begin + n - 1
                self.drafter.kept(slot, last, n, row.position + n + 1, drafts[last], likely[last])
            said.append(own[:n])
        self.cost.verified += 1
        self.cost.verifying += time.perf_counter() - begun
        return said

    def verify_ahead(self, row: Row) -> None:
        self._forget()
        self._verifying = self._start_verify([row])
        self.cost.ahead += 1

    def _start_verify(self, rows: Sequence[Row]) -> _Verifying:
        self._forget()
        self._take_back()
        fed = Rows.of([(row.slot, row.position, row.fed) for row in rows])
        self._model.check(fed, self.state)
        self.state.reserve_all([(slot, end - begin) for slot, begin, end in fed.segments.tolist()])
        draws = [_draw_behind(row, i) for row in rows for i in range(1 + len(row.drafts))]
        return _Verifying(rows, fed, self._windows.verify(fed, draws))

    def rounds(self, row: Row) -> int:
        return 0 if self._rounds is None else self._rounds.most(row)

    def round(self, row: Row, after: int | None) -> Round:
        batch, ticket, rounds = self._batch, self._ahead, self._rounds
        if rounds is None:
            raise RuntimeError("there are no rounds without a draft layer")
        if batch is None or ticket is None or not ticket.layout.leaves or not batch.goes_on_with([row]):
            self._forget()
            self._take_back()
            batch = _Batch([row.slot], [_draw(row)], 0, [])
            ticket = rounds.begin(row, batch.draws[0], after)
            if ticket is None:
                return Round(self.verify([row])[0], len(row.drafts), None)
        self._batch = batch
        self._ahead = None if after is None else rounds.behind_round(ticket, row, after)
        self.cost.ahead += self._ahead is not None
        self.cost.enter(self._ahead is not None)
        ticket.wait()
        self.cost.leave()
        self._window_over(ticket, [row.slot] * ticket.layout.rows)
        said = rounds.over(ticket, row)
        batch.positions, batch.ids = [row.position + len(said)], said[-1:]
        self.cost.rounds += 1
        self.cost.round_tokens += len(said)
        ahead = self._ahead.layout.rows - 1 if self._ahead is not None and self._ahead.layout.leaves else None
        return Round(said, ticket.layout.rows - 1, ahead)

    def _take_back(self) -> None:
        """A window comes: what it needs may be lent."""
        if self._loan is not None:
            self._loan.before_window()

    def _window_over(self, ticket: Ticket, slots: Sequence[int]) -> None:
        """Where its experts lay, and where they lie from now on. slots: of the window's rows."""
        self._device.check()
        hits, helped = ticket.hits(), ticket.helped()
        if hits is not None and helped is not None:
            own = [i for i, slot in enumerate(slots) if slot == SOLO]
            before = self._solo_hits
            self._solo_hits = Picked(
                before.hits + sum(hits[i] for i in own), before.helped + sum(helped[i] for i in own)
            )
        if self._tier is not None:
            self._tier.window()

    def _decided(self, ids: list[int]) -> list[int]:
        batch = self._batch
        if batch is not None and min(ids) < 0:
            at = ids.index(min(ids))
            raise RuntimeError(f"the logits of slot {batch.slots[at]} before {batch.positions[at]} are not finite")
        return ids

    def _forget(self) -> None:
        """What has been computed for windows to come means nothing any more."""
        self.cost.dropped += (self._ahead is not None) + (self._verifying is not None)
        self.cost.interrupt()
        self._batch = self._ahead = self._verifying = self._logits = None
        self._slot = self._end = -1

    def check(self, lengths: Sequence[tuple[int, int]]) -> None:
        check_lengths(self.state, lengths)
        if isinstance(self._loan, SlotLoan):
            self._loan.check()
