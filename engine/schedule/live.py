"""What runs next, and the running of it: one request that reads (and, alone, decodes) beside slots that decode.

Units    one prompt chunk, one window, or the end of a request. Commands are looked at between units
Solo     pool slot 0 reads every prompt, and decodes a GEN; the slots stand still while it decodes
Slots    protocol slot s is pool slot 1 + s. A window has a row for every decoding slot; what a row computes does not
         depend on the rows beside it, so a slot says what it would say alone
Effects  computing goes through a `Runner`, who holds which tokens through `Sessions`; when and what is decided in
         `solo.py`, `slots.py`, `turns.py`
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from strata.engine.log import log
from strata.engine.schedule.drafting import Drafts, SlotDrafting, SoloDrafting
from strata.engine.schedule.ports import SOLO, Row, Rules, Runner, Sessions, pool_slot
from strata.engine.schedule.slots import Decoding, Slots
from strata.engine.schedule.solo import Read, Request, Solo
from strata.engine.schedule.turns import Share, Standing, keeps_reading
from strata.engine.state.pages import OutOfPages
from strata.protocol.lines import Admitted, Output, Yielded


def now_ms() -> float:
    return time.perf_counter() * 1e3


@dataclass(slots=True, eq=False)
class _Work:
    """The request being worked on. slot: of its admission, None: solo · asked: its request as it came."""

    solo: Solo
    asked: Request
    slot: int | None
    cuts: frozenset[int]
    drafts: Drafts
    chunks: int = 0
    windows: int = 0
    times: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("read", "windows", "first", "copy"), 0.0))


class Path:
    """Runs requests unit by unit: `start` or `admit` one, then `step` while `busy` or `decoding`."""

    def __init__(self, runner: Runner, sessions: Sessions, rules: Rules, clock: Callable[[], float] = now_ms) -> None:
        self.rules = rules
        self.slots = Slots(
            rules.n_slots,
            end_ids=rules.end_ids,
            max_context=rules.max_context,
            clock=clock,
            drafts=rules.drafts.slots,
        )
        self._solo = SoloDrafting(runner, rules.drafts, rules.end_ids, clock)
        self._drafted = SlotDrafting(runner, rules.drafts, rules.end_ids, self._solo.times, clock)
        self._ahead: list[int] = []  # the slots of the next window, when that has been started
        self._admitted = False  # since the last window
        self._runner = runner
        self._sessions = sessions
        self._clock = clock
        self._share = Share(rules.share)
        self._work: _Work | None = None

    @property
    def busy(self) -> bool:
        """Whether a request is being worked on: a GEN until its DONE, a BGEN until its BADM."""
        return self._work is not None

    @property
    def decoding(self) -> bool:
        """Whether slots decode."""
        return self.slots.any

    @property
    def ahead(self) -> bool:
        """Whether the next window of the slots has been started."""
        return bool(self._ahead) and self._ahead == [one.slot for one in self.slots.decoding]

    # ------------------------------------------------------------------------------------------------------- commands

    def start(self, request: Request) -> list[Output]:
        """Take up a GEN."""
        return self._take_up(request, None)

    def admit(self, slot: int, request: Request) -> list[Output]:
        """Take up a BGEN; the slot must be free."""
        return self._take_up(request, slot)

    def _take_up(self, request: Request, slot: int | None) -> list[Output]:
        if self._work is not None:
            raise RuntimeError("one request is worked on at a time")
        rules, begun = self.rules, self._clock()
        reused = self._sessions.resume(request.prompt)
        cuts = self._sessions.stops(request.prompt, reused, request.pin or 0, request.keep, rules.chunk)
        solo = Solo(
            request if slot is None else replace(request, max_new=1),
            reused=reused,
            chunk=rules.chunk,
            end_ids=rules.end_ids,
            clock=self._clock,
            begun_ms=begun,  # what it continues from may have to be fetched
            cuts=cuts,
            short=rules.short,
            routed=rules.routed,
            in_vram=rules.in_vram,
            hits=rules.hits,
        )
        self._work = _Work(solo, request, slot, frozenset(cuts), self._solo.begin(request.spec_min_p))
        return [solo.begin()]

    def stop_slot(self, slot: int) -> list[Output]:
        """BSTOP: a decoding slot ends here; for any other nothing happens."""
        decoding = next((one for one in self.slots.decoding if one.slot == slot), None)
        if decoding is None:
            return []
        end = self.slots.stop(slot)
        self._release(decoding)
        return [end]

    def give_way(self, slot: int) -> list[Output]:
        """BYIELD: the read ends here and what was read waits in the slot, or the log says why not."""
        work, read = self._work, self._standing()
        reason = keeps_reading(
            slot,
            read,
            n_slots=self.slots.n,
            is_free=self.slots.is_free(slot),
            prompt_cache=self.rules.prompt_cache,
            short_read=self.rules.short_read,
        )
        if work is None or reason is not None:
            log(f"BYIELD {slot} not taken: {reason}")
            return []
        solo = work.solo
        try:
            self._sessions.give_way(pool_slot(slot), work.asked.prompt, solo.n_held)
        except OutOfPages as error:
            log(f"BYIELD {slot} not taken: {error}")
            return []
        log(f"the read gives way at {solo.n_held} of {solo.n_prompt} tokens, which wait in slot {slot}")
        solo.cancel()
        self._work = None
        self._share.forfeit()
        events: list[Output] = [Yielded(slot, solo.n_held), solo.done()]
        return events if work.slot is None else [*events, Admitted(work.slot, False)]

    def _standing(self) -> Standing | None:
        """The read that is under way, if there is one."""
        work = self._work
        if work is None or not work.solo.is_reading:
            return None
        return Standing(work.slot, work.solo.n_prompt - work.solo.n_held, self._chunk)

    @property
    def _chunk(self) -> int:
        """Most tokens of the next chunk."""
        rules = self.rules
        return min(rules.chunk, rules.beside or rules.chunk) if self.slots.any else rules.chunk

    # ---------------------------------------------------------------------------------------------------------- units

    def step(self, stop: bool = False, waits: bool = False) -> list[Output]:
        """One unit of work, or the end of a request. stop: a STOP has come for the request being worked on · waits: a
        line waits for the end of the unit."""
        work = self._work
        if work is None:
            events = self._window(waits)
        elif not stop and work.solo.is_reading and self.slots.any and self._share.is_due:
            events = self._window_between(work)
        else:
            events = self._advance(work, stop)
        if self.rules.verify:
            self._check()
        return events

    def _window(self, waits: bool = False) -> list[Output]:
        """A token for every decoding slot; with drafts more for some, or for some of the slots."""
        decoding = self.slots.decoding
        if not decoding:
            raise RuntimeError("a step without a request")
        rows = [
            Row(pool_slot(one.slot), one.tokens, one.request.sampling, one.request.penalty_last_n) for one in decoding
        ]
        if self._drafted.wants(len(decoding)) and not self.ahead:
            said = self._drafted.window(rows, decoding)
        else:
            said = self._plain_window(rows, decoding, waits)
        self._admitted = False
        events: list[Output] = []
        for one, tokens in said:
            for token in tokens:
                events += self.slots.decided(one.slot, token)
            if self.slots.is_free(one.slot):
                self._release(one)
        return events

    def _plain_window(self, rows: list[Row], decoding: list[Decoding], waits: bool) -> list[tuple[Decoding, list[int]]]:
        """A window without drafts. The next one is started ahead unless a read is likely to come first: behind an
        admission, whose BADM lets the next one in, none is, and it would be computed for nothing."""
        n, begun, steady = len(rows), self._drafted.begin(), self.ahead or not self.rules.ahead
        again = self.rules.ahead and not waits and not self._admitted and not self._drafted.wants(n)
        again = again and (self._work is None or self._share.is_due_again) and all(one.n_left > 1 for one in decoding)
        ids = self._runner.window(rows, again)
        self._ahead = [one.slot for one in decoding] if again else []
        self._drafted.plain(n, begun, steady)
        return [(one, [token]) for one, token in zip(decoding, ids, strict=True)]

    def _window_between(self, work: _Work) -> list[Output]:
        """A window between two chunks."""
        begun = self._clock()
        events = self._window()
        spent = self._clock() - begun
        self._share.spend(spent)
        work.windows += 1
        work.times["windows"] += spent
        return events

    def _release(self, one: Decoding) -> None:
        self._drafted.interrupt()
        self._sessions.release(pool_slot(one.slot), one.held if one.request.keep else None)

    def _advance(self, work: _Work, stop: bool) -> list[Output]:
        """The next unit of the request being worked on."""
        solo = work.solo
        self._drafted.interrupt()
        unit = solo.next_unit(stop, self._chunk)
        events: list[Output] = []
        if isinstance(unit, Read):
            events = self._read(work, unit)
        elif unit is not None:
            self._ahead = []
            row = Row(SOLO, solo.tokens, solo.request.sampling, solo.request.penalty_last_n)
            for token in self._solo.window(work.drafts, row, solo.n_left):
                solo.fed()
                events.append(solo.decided(token))
        if solo.finish is not None:
            self._work = None
            self._share.forfeit()
            events += self._close(work)
        return events

    def _read(self, work: _Work, unit: Read) -> list[Output]:
        """A prompt chunk; with the last one the first token."""
        solo, begun = work.solo, self._clock()
        self._ahead = []
        logits = self._runner.feed(SOLO, unit.begin, solo.tokens[unit.begin : unit.end], unit.last)
        events = solo.read(unit)
        if unit.end in work.cuts:
            self._sessions.reached(solo.request.prompt, unit.end)
        read = self._clock()
        work.chunks += 1
        work.times["read"] += read - begun
        self._share.earn(read - begun)
        if unit.last:
            token = self._runner.sample(logits, solo.recent, solo.request.sampling, solo.n_tokens)
            events.append(solo.decided(token))
            work.times["first"] = self._clock() - read
        return events

    def _close(self, work: _Work) -> list[Output]:
        """A request is over: DONE, and for an admission whether its slot decodes now."""
        solo, slot = work.solo, work.slot
        kept = solo.held if work.asked.keep and not solo.is_reading else None
        if slot is None:
            self._sessions.ended(kept)
            return [solo.done(work.drafts.counts if self.rules.drafts.spec > 1 else None)]
        goes_on = solo.finish == "length" and work.asked.max_new > 1 and self._copy(work, slot)
        if goes_on:
            (first,) = solo.tokens[solo.n_prompt :].tolist()
            self.slots.admit(slot, work.asked, first)
            self._admitted = True
        if not goes_on or kept is None:
            self._sessions.ended(kept)
        if self.rules.trace:
            log(_trace(work))
        return [solo.done(), Admitted(slot, goes_on)]

    def _copy(self, work: _Work, slot: int) -> bool:
        """The state of an admission into its slot; False: there is no room."""
        begun = self._clock()
        try:
            self._sessions.admit(pool_slot(slot), work.solo.held)
        except OutOfPages as error:
            log(f"slot {slot} cannot go on: {error}")
            return False
        work.times["copy"] = self._clock() - begun
        return True

    def _check(self) -> None:
        lengths = [(pool_slot(one.slot), one.n_tokens - 1) for one in self.slots.decoding]
        if self._work is not None:
            lengths.append((SOLO, self._work.solo.n_held))
        self._runner.check(lengths)
        self._sessions.check()


def _trace(work: _Work) -> str:
    solo, times = work.solo, work.times
    return (
        f"admission to slot {work.slot}: {solo.n_prompt} tokens, {solo.reused} reused; read {times['read']:.1f} ms in "
        f"{work.chunks} chunks, {work.windows} windows between them {times['windows']:.1f} ms, first token "
        f"{times['first']:.1f} ms, copy {times['copy']:.1f} ms"
    )
