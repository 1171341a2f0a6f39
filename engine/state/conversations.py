"""Which slot holds which tokens, and where a read may start: the one owner of that.

Slots    pool slot 0 is the solo path: it reads every prompt, and what it holds afterwards is the live session. Pool
         slots 1 to n_slots are the batch: EMPTY, CACHED (an ended conversation), PARTIAL (a read that gave way),
         DECODING. The checkpoints of the state come after them
Reuse    the state is recurrent and cannot be cut back, so what is continued is a whole prefix of the prompt, and at
         least one prompt token is left to read. The longest wins: live session, checkpoints, idle slots, parked
         conversations. What would be lost when the live session or an idle slot is overwritten is parked first
Pages    are short? Checkpoints go first, then idle slots, then an idle live session: never a running request
Errors   AccountsError for a caller that is wrong about a slot; OutOfPages from `admit` and `give_way`
Cost     looking for a prefix compares tokens; what is continued is copied on the device (the live session is not)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from strata.engine.log import log
from strata.engine.state.checkpoints import CacheRules, Checkpoint, Kind, due, is_prefix, victim
from strata.engine.state.pages import AccountsError, OutOfPages
from strata.engine.state.parked import Mark, Parked
from strata.engine.state.parking import Parking
from strata.engine.state.slots import StatePool
from strata.kernels.ops import I32

SOLO: Final = 0
"""The pool slot that reads."""
NOTHING: Final = np.empty(0, np.int32)
Status = Literal["EMPTY", "CACHED", "PARTIAL", "DECODING"]


@dataclass(slots=True)
class BatchSlot:
    """tokens: what the state of an idle slot holds, what a decoding one began with; turn: its turn checkpoint."""

    status: Status = "EMPTY"
    tokens: I32 = field(default_factory=lambda: NOTHING)
    used: int = 0
    turn: int | None = None

    @property
    def idle(self) -> bool:
        """Whether it holds something that nobody works on."""
        return self.status in ("CACHED", "PARTIAL")


class Conversations:
    """The conversations in a state with 1 + n_slots slots. `verify`: `check` after every change."""

    def __init__(
        self,
        state: StatePool,
        n_slots: int,
        rules: CacheRules,
        parking: Parking | None,
        turn_token: int,
        verify: bool = False,
        log_states: bool = False,
    ) -> None:
        """parking: None, or `rules` without reuse: nothing is parked. log_states: say the digest of each state that a
        request leaves."""
        if state.n_slots != 1 + n_slots:
            raise ValueError(f"{n_slots} batch slots need a state of {1 + n_slots} slots, it has {state.n_slots}")
        self._state = state
        self._rules = rules
        self._parking = parking if rules.reuse else None
        self._turn_token = turn_token
        self._verify = verify
        self._log_states = log_states
        self._solo_busy = False
        self._live: I32 = NOTHING
        self._slots = {slot: BatchSlot() for slot in range(1, 1 + n_slots)}
        self._checkpoints: dict[int, Checkpoint] = {}
        self._places = range(state.n_slots, state.n_slots + state.n_checkpoints)
        self._due: dict[int, Kind] = {}
        self._spared: tuple[int, ...] = ()
        self._now = 0
        state.relieve = self._relieve

    # ------------------------------------------------------------------------------------------------------ solo path

    @property
    def live(self) -> I32:
        """The tokens of the live session; none while the solo path works."""
        return self._live

    def status(self, slot: int) -> Status:
        return self._slots[slot].status

    def tokens(self, slot: int) -> I32:
        """What an idle batch slot holds."""
        return self._slots[slot].tokens

    @property
    def n_checkpoints(self) -> int:
        return len(self._checkpoints)

    def resume(self, prompt: I32) -> int:
        """Pool slot 0 now holds so many leading tokens of the prompt, at most all but one; 0: it is reset."""
        if self._solo_busy:
            raise AccountsError("the solo path already works on a request")
        source, n = self._longest(prompt) if self._rules.reuse else (None, 0)
        length, parked = self._fetch(prompt, n)
        if parked is not None or source != SOLO:
            self._save(SOLO, self._live, spared=parked)
            self._live = NOTHING
        self._solo_busy = True
        reused = len(self._live)
        if parked is not None:
            reused = self._restore(parked, length)
        elif source != SOLO:
            reused = self._continue(source)
        self._live = NOTHING
        self._changed()
        return reused

    def _longest(self, prompt: I32) -> tuple[int | None, int]:
        """The pool slot that holds the longest prefix; of equal ones the live session, then checkpoints."""
        held = [(SOLO, self._live)]
        held += [(place, checkpoint.tokens) for place, checkpoint in self._checkpoints.items()]
        held += [(slot, each.tokens) for slot, each in self._slots.items() if each.idle]
        best, most = None, 0
        for slot, tokens in held:
            if most < len(tokens) < len(prompt) and is_prefix(tokens, prompt):
                best, most = slot, len(tokens)
        return best, most

    def _continue(self, source: int | None) -> int:
        """Copy what a checkpoint or an idle slot holds to the solo path; None: it begins anew."""
        if source is None:
            self._state.reset(SOLO)
            return 0
        self._touch(source)
        try:
            self._copy(source, SOLO)
        except OutOfPages as error:
            log(f"a prompt is read from its start: {error}")
            self._state.reset(SOLO)
            return 0
        return self._state.length(SOLO)

    def stops(self, prompt: I32, begin: int, pin: int = 0, keep: bool = True, chunk: int = 0) -> tuple[int, ...]:
        """Positions in (begin, n) where the read, of `chunk` tokens at a time, must end one and say `reached`. A pin
        that cannot be is said."""
        if pin and not self._rules.pins(pin, len(prompt)):
            log(f"pin={pin} of {len(prompt)} tokens is ignored: it needs --prompt-cache 3 and two tokens behind it")
        elif pin and keep:
            for checkpoint in self._checkpoints.values():
                if len(checkpoint.tokens) == pin and is_prefix(checkpoint.tokens, prompt):
                    checkpoint.again("pin", self._tick())
        self._due = due(self._rules, self._turn_token, prompt, begin, pin, keep, chunk) if self._places else {}
        return tuple(self._due)

    def reached(self, prompt: I32, position: int) -> None:
        """The read has come to one of its stops: take the checkpoint."""
        kind = self._due.pop(position, None)
        if kind is None or self._state.length(SOLO) != position:
            raise AccountsError(
                f"no checkpoint is due at {position}, the state holds {self._state.length(SOLO)} tokens"
            )
        tokens = prompt[:position].copy()
        same = next((c for c in self._checkpoints.values() if np.array_equal(c.tokens, tokens)), None)
        if same is not None:
            same.again(kind, self._tick())
            return
        place = self._free_place()
        try:
            self._copy(SOLO, place)
        except OutOfPages as error:
            log(f"no checkpoint at {position}: {error}")
        else:
            self._checkpoints[place] = Checkpoint(tokens, kind, self._tick())
        self._changed()

    def ended(self, tokens: I32 | None) -> None:
        """The solo path is over; pool slot 0 holds exactly these tokens. None: nothing that can be continued."""
        self._solo_busy = False
        self._due = {}
        self._tell(SOLO, tokens)
        if tokens is None or not len(tokens) or not self._rules.reuse:
            self._live = NOTHING
            self._state.drop(SOLO)
        else:
            self._live = tokens.copy()
        self._changed()

    # ---------------------------------------------------------------------------------------------------------- batch

    def admit(self, slot: int, tokens: I32) -> None:
        """Pool slot 0, which holds `tokens`, is copied into the slot, which decodes from now on; the solo path is over
        as after `ended(tokens)`. OutOfPages: the slot is empty, the solo path not over."""
        self._fill(slot, tokens, "DECODING")
        self.ended(tokens)

    def give_way(self, slot: int, prompt: I32, q: int) -> None:
        """The q prompt tokens that were read are kept in the slot; the solo path is over as after `ended(None)`.
        OutOfPages: the slot is empty, the solo path not over."""
        self._fill(slot, prompt[:q], "PARTIAL")
        self.ended(None)

    def release(self, slot: int, tokens: I32 | None) -> None:
        """The slot's request is over. It holds exactly these tokens; None: nothing that can be continued."""
        held = self._slots[slot]
        if held.status != "DECODING":
            raise AccountsError(f"slot {slot} is {held.status}, not DECODING")
        self._tell(slot, tokens)
        if tokens is None or not self._rules.reuse:
            self._empty(slot)
        else:
            held.status, held.tokens, held.used = "CACHED", tokens.copy(), self._tick()
        self._changed()

    def _fill(self, slot: int, tokens: I32, status: Status) -> None:
        if self._slots[slot].status == "DECODING" or self._state.length(SOLO) != len(tokens):
            raise AccountsError(
                f"slot {slot} is {self._slots[slot].status}, to get {len(tokens)} tokens of "
                f"{self._state.length(SOLO)} in the solo path"
            )
        if self._slots[slot].idle and not is_prefix(self._slots[slot].tokens, tokens):
            self._save(slot, self._slots[slot].tokens)
        self._empty(slot)
        self._copy(SOLO, slot)
        turns = [
            (len(c.tokens), place)
            for place, c in self._checkpoints.items()
            if c.kind != "periodic" and is_prefix(c.tokens, tokens)
        ]
        self._slots[slot] = BatchSlot(status, tokens.copy(), self._tick(), max(turns)[1] if turns else None)

    def _tell(self, slot: int, tokens: I32 | None) -> None:
        if self._log_states and tokens is not None:
            log(f"state: pool slot {slot}, {len(tokens)} tokens, digest {self._state.digest(slot)}")

    def _empty(self, slot: int) -> None:
        self._state.drop(slot)
        self._slots[slot] = BatchSlot()

    # -------------------------------------------------------------------------------------------------------- parking

    def _fetch(self, prompt: I32, n: int) -> tuple[int, Parked | None]:
        """What is parked and continues more than n tokens of the prompt, and how many."""
        while self._parking is not None and (found := self._parking.find(prompt, n)) is not None:
            if (parked := self._parking.fetch(found)) is not None:
                return found.length, parked
        return 0, None

    def _restore(self, parked: Parked, length: int) -> int:
        """Put a parked conversation into the solo path, and its checkpoints back. -> tokens that it holds now."""
        try:
            parked.restore(self._state, SOLO, length)
        except OutOfPages as error:
            log(f"a prompt is read from its start: {error}")
            self._state.reset(SOLO)
            return 0
        for mark in parked.marks:
            if mark.position <= length:
                self._restore_mark(mark, parked.tokens[: mark.position])
        return length

    def _restore_mark(self, mark: Mark, tokens: I32) -> None:
        """A checkpoint of a parked conversation; others go for it only when many prompts will begin with it."""
        free = len(self._checkpoints) < len(self._places)
        if any(np.array_equal(c.tokens, tokens) for c in self._checkpoints.values()):
            return
        if not (free or (self._places and mark.kind in ("root", "pin"))):
            return
        place = self._free_place()
        self._spared = (SOLO, place)
        try:
            self._state.branch(SOLO, place, mark.position, mark.block)
            self._checkpoints[place] = Checkpoint(tokens.copy(), mark.kind, self._tick())
        except OutOfPages as error:
            log(f"no checkpoint at {mark.position}: {error}")
        finally:
            self._spared = ()

    def _save(self, slot: int, tokens: I32, spared: Parked | None = None) -> None:
        """Park what is about to be lost from a slot, unless another one goes on with it, or the parked one `spared`,
        which takes its place."""
        others = [each.tokens for other, each in self._slots.items() if other != slot]
        if slot != SOLO:
            others.append(self._live)
        if spared is not None:
            others.append(spared.tokens)
        if self._parking is not None and len(tokens) and not any(is_prefix(tokens, other) for other in others):
            self._parking.park(self._state, slot, tokens, self._checkpoints, spared)

    def close(self) -> None:
        """Park on disk what idle slots and the live session hold, for the next start. The engine is leaving."""
        if self._parking is None or self._parking.disk is None:
            return
        if not self._solo_busy:
            self._save(SOLO, self._live)
        for slot, each in self._slots.items():
            if each.idle:
                self._save(slot, each.tokens)
        self._parking.close()

    def counts(self) -> dict[str, int]:
        """Figures for the log."""
        return {"checkpoints": len(self._checkpoints), **self.parking_counts()}

    def parking_counts(self) -> dict[str, int]:
        """What was parked and what came of it; nothing when nothing is parked."""
        return {} if self._parking is None else self._parking.figures()

    # ---------------------------------------------------------------------------------------------------------- space

    def _copy(self, source: int, target: int) -> None:
        self._spared = (source, target)
        try:
            self._state.copy(source, target)
        finally:
            self._spared = ()

    def _free_place(self) -> int:
        """A place for a checkpoint, of the least worthy one if it must be."""
        free = next((place for place in self._places if place not in self._checkpoints), None)
        return self._drop_one() if free is None else free

    def _drop_one(self) -> int:
        """Drop the checkpoint that goes next. -> its place, -1 when there is none."""
        of_slots = [each.turn for each in self._slots.values() if each.turn is not None]
        place = victim(self._checkpoints, of_slots, self._spared)
        if place is None:
            return -1
        self._drop_checkpoint(place)
        return place

    def _drop_checkpoint(self, place: int) -> None:
        del self._checkpoints[place]
        self._state.drop(place)
        for each in self._slots.values():
            if each.turn == place:
                each.turn = None

    def _relieve(self) -> bool:
        """Pages are short: free some."""
        if self._drop_one() >= 0:
            return True
        idle = [slot for slot, each in self._slots.items() if each.idle and slot not in self._spared]
        if idle:
            self._empty(min(idle, key=lambda slot: self._slots[slot].used))
        elif len(self._live) and not self._solo_busy and SOLO not in self._spared:
            self._live = NOTHING
            self._state.drop(SOLO)
        else:
            return False
        return True

    def _touch(self, slot: int) -> None:
        held = self._slots.get(slot) or self._checkpoints[slot]
        held.used = self._tick()

    def _tick(self) -> int:
        self._now += 1
        return self._now

    def _changed(self) -> None:
        if self._verify:
            self.check()

    def check(self) -> None:
        """AccountsError unless slots, checkpoints, pages and lengths balance."""
        self._state.check()
        if self._parking is not None:
            self._parking.check()
        held = {slot: len(each.tokens) for slot, each in self._slots.items() if each.status != "DECODING"}
        held |= dict.fromkeys(self._places, 0)
        held |= {place: len(checkpoint.tokens) for place, checkpoint in self._checkpoints.items()}
        if not self._solo_busy:
            held[SOLO] = len(self._live)
        for slot, n in held.items():
            if self._state.length(slot) != n or (not n and self._state.pages.held(slot)):
                raise AccountsError(
                    f"slot {slot} should hold {n} tokens, its state has {self._state.length(slot)} "
                    f"in {self._state.pages.held(slot)} pages"
                )
        for slot, each in self._slots.items():
            if each.status == "DECODING" and self._state.length(slot) < len(each.tokens):
                raise AccountsError(f"slot {slot} began with {len(each.tokens)} tokens and has fewer now")
            if each.turn is not None and each.turn not in self._checkpoints:
                raise AccountsError(f"slot {slot} names checkpoint {each.turn}, which is gone")
