"""Random lives of conversations: accounts balance after every step, and a slot holds the state of its tokens."""

from __future__ import annotations

import os
import shutil
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from strata.engine.device.host import HostMemory
from strata.engine.state.checkpoints import CacheRules, is_prefix
from strata.engine.state.conversations import SOLO, Conversations
from strata.engine.state.disk import ParkingDisk
from strata.engine.state.pages import OutOfPages
from strata.engine.state.parked_file import Figures
from strata.engine.state.parking import Parking, ParkingRules
from strata.engine.state.slots import StatePool, pages_of
from strata.kernels.ops import PAGE

CONTEXT = 3 * PAGE
TURN = 7
SLOTS = 2
FINGERPRINT = b"m" * 32


class TwoSided(HostMemory):
    sides = 2


class Lives(RuleBasedStateMachine):
    """What a schedule may do. `spec` is set by the test. A token's state is a hash of all tokens before it."""

    spec = None

    @initialize(
        sides=st.sampled_from([1, 2]),
        rules=st.sampled_from([CacheRules(0), CacheRules(1, 0, 0), CacheRules(3, 40, 30), CacheRules(5, 0, 20)]),
        n_checkpoints=st.integers(0, 5),
        scarce=st.booleans(),
        parking=st.sampled_from(["none", "ram", "small ram", "disk", "both"]),
    )
    def begin(self, sides, rules, n_checkpoints, scarce, parking):
        self.folder = Path(tempfile.mkdtemp())
        self.rules, self.parking_kind = rules, parking
        self.sizes = (sides, n_checkpoints, pages_of(1 + SLOTS, CONTEXT, n_checkpoints) - 3 * scarce)
        self.free_ram = 1 << 40
        self.said: list[np.ndarray] = []
        self.start()

    @property
    def scarce(self) -> bool:
        """Whether the pool has fewer pages than every slot may need at once."""
        return self.sizes[2] < pages_of(1 + SLOTS, CONTEXT, self.sizes[1])

    def start(self) -> None:
        sides, n_checkpoints, n_pages = self.sizes
        memory = HostMemory() if sides == 1 else TwoSided()
        self.state = StatePool(self.spec, 1 + SLOTS, CONTEXT, n_pages, memory=memory, n_checkpoints=n_checkpoints)
        self.books = Conversations(self.state, SLOTS, self.rules, self.parking(), TURN, verify=True)
        self.solo = False
        self.decoding: dict[int, np.ndarray] = {}

    def parking(self) -> Parking | None:
        kind = self.parking_kind
        if kind == "none":
            return None
        one = self.state.image_bytes(100, 2)
        budget = {"ram": 1 << 30, "small ram": 3 * one, "disk": 0, "both": 2 * one}[kind]
        disk = None
        if kind in ("disk", "both"):
            figures = Figures(self.state.pages.page_bytes, self.state.recurrent.n_bytes)
            disk = ParkingDisk(self.folder, 6 * one, FINGERPRINT, figures)
        return Parking(ParkingRules(budget, min_free=100), lambda: self.free_ram, disk)

    def teardown(self) -> None:
        if hasattr(self, "books"):
            self.books.close()
            shutil.rmtree(self.folder)

    # ------------------------------------------------------------------------------------------- what passes write

    def mark(self, tokens: np.ndarray) -> int:
        """What the state is after these tokens: never 0, which is the state of none."""
        return 1 + zlib.crc32(tokens.tobytes()) % 250

    def write(self, slot: int, before: np.ndarray, tokens: np.ndarray) -> bool:
        """A forward pass. False: there was no room, which only a scarce pool may say."""
        try:
            self.state.reserve(slot, len(tokens))
        except OutOfPages:
            assert self.scarce
            return False
        whole = np.r_[before, tokens].astype(np.int32)
        for n in range(len(before), len(whole)):
            page = self.state.pages.tables[slot, n // PAGE]
            for array in self.state.pages.arrays:
                array[page][n % PAGE * array.shape[1] // PAGE] = self.mark(whole[: n + 1])
        self.state.recurrent.advance(slot)
        block = np.full(self.state.recurrent.n_bytes, self.mark(whole), np.uint8)
        self.state.recurrent.write(slot, block)
        self.state.recurrent.advance(slot)
        self.state.advance(slot, len(tokens))
        return True

    def matches(self, slot: int, tokens: np.ndarray) -> None:
        assert self.state.length(slot) == len(tokens)
        if not len(tokens):
            return
        assert (self.state.recurrent.read(slot) == self.mark(tokens)).all()
        table = self.state.pages.tables[slot]
        first = self.state.pages.layers[0].k
        for n in range(len(tokens)):
            assert (first[table[n // PAGE], n % PAGE] == self.mark(tokens[: n + 1])).all(), n

    # ----------------------------------------------------------------------------------------------------- requests

    def a_prompt(self, data) -> np.ndarray:
        """Something new, or a continuation or a rewind of what was said before."""
        begin = np.empty(0, np.int32)
        if self.said and data.draw(st.integers(0, 4)):
            begin = data.draw(st.sampled_from(self.said))
            cut = data.draw(st.sampled_from([0, 0, 0, 3, 20, 50]))
            begin = begin[: max(0, len(begin) - cut)]
        new = np.random.default_rng(data.draw(st.integers(0, 5))).integers(0, 12, data.draw(st.integers(1, 70)))
        return np.r_[begin, new].astype(np.int32)[: CONTEXT - 8]

    def remember(self, tokens: np.ndarray) -> None:
        self.said = [*self.said[-7:], tokens]

    @rule(data=st.data(), pin=st.integers(0, 60), keep=st.integers(0, 4))
    def talk(self, data, pin, keep):
        """A request, with slots that decode or end between its chunks."""
        prompt, keep = self.a_prompt(data), keep > 0
        idle = [self.books.tokens(s) for s in (1, 2) if self.books.status(s) in ("CACHED", "PARTIAL")]
        held = [t for t in (self.books.live, *idle) if 0 < len(t) < len(prompt) and is_prefix(t, prompt)]
        begin = self.books.resume(prompt)
        self.solo = True
        assert begin < len(prompt) and (self.rules.reuse or not begin)
        assert self.scarce or begin >= max(map(len, held), default=0) or not self.rules.reuse
        self.matches(SOLO, prompt[:begin])
        stops = self.books.stops(prompt, begin, pin, keep)
        assert all(begin < a < len(prompt) for a in stops) and sorted(set(stops)) == [*stops]
        end = len(prompt) if data.draw(st.integers(0, 4)) else data.draw(st.integers(begin, len(prompt)))
        while begin < end:
            step = min([begin + data.draw(st.integers(1, 80)), end, *(a for a in stops if a > begin)])
            if not self.write(SOLO, prompt[:begin], prompt[begin:step]):
                self.over(None)
                return
            begin = step
            if begin in stops:
                self.books.reached(prompt, begin)
            if self.decoding and not data.draw(st.integers(0, 3)):
                self.decode(data, 1)
        self.finish(data, prompt, begin, keep)

    def over(self, tokens: np.ndarray | None) -> None:
        self.books.ended(tokens)
        self.solo = False

    def finish(self, data, prompt: np.ndarray, n_read: int, keep: bool) -> None:
        """The request ends, goes on in a slot, or gives way to another."""
        free = [slot for slot in range(1, 1 + SLOTS) if slot not in self.decoding]
        slot = data.draw(st.sampled_from(free)) if free else 0
        whole = n_read == len(prompt)
        ends = ["end", "end", *["admit"] * (3 * (whole and slot > 0)), *["yield"] * (slot > 0 and n_read > 0)]
        how = data.draw(st.sampled_from(ends))
        if how == "end":
            self.remember(prompt)
            self.over(prompt if whole and keep else None)
            return
        self.solo = False
        try:
            if how == "yield" and self.rules.reuse:
                self.books.give_way(slot, prompt, n_read)
                self.matches(slot, prompt[:n_read])
            elif how == "admit":
                self.books.admit(slot, prompt)
                self.decoding[slot] = prompt
            if how == "yield" or not keep:
                self.books.ended(None)
        except OutOfPages:
            assert self.scarce
            self.books.ended(None)

    @precondition(lambda self: self.decoding)
    @rule(data=st.data(), n=st.integers(1, 9))
    def decode(self, data, n):
        slot = data.draw(st.sampled_from(sorted(self.decoding)))
        tokens = self.decoding[slot]
        new = np.random.default_rng(len(tokens)).integers(0, 12, n).astype(np.int32)
        if len(tokens) + n <= CONTEXT and self.write(slot, tokens, new):
            self.decoding[slot] = np.r_[tokens, new]

    @precondition(lambda self: self.decoding)
    @rule(data=st.data(), keep=st.integers(0, 4))
    def release(self, data, keep):
        slot = data.draw(st.sampled_from(sorted(self.decoding)))
        tokens = self.decoding.pop(slot)
        self.matches(slot, tokens)
        self.books.release(slot, tokens if keep else None)
        self.remember(tokens)

    # ------------------------------------------------------------------------------------------------ around them

    @rule(short=st.integers(0, 3))
    def other_programs(self, short):
        self.free_ram = 1 << 40 if short else 0

    @precondition(lambda self: not self.decoding)
    @rule(now=st.integers(0, 2))
    def restart(self, now):
        if not now:
            self.books.close()
            self.start()

    @rule(data=st.data(), now=st.integers(0, 2))
    def a_bit_of_what_is_parked_changes(self, data, now):
        parking = self.books._parking
        if not now and parking is not None and parking._parked:
            image = data.draw(st.sampled_from(parking._parked)).image
            body = data.draw(st.sampled_from([image.pages, image.block]))
            body[data.draw(st.integers(0, len(body) - 1))] ^= 1

    @rule(data=st.data(), now=st.integers(0, 2))
    def a_bit_of_a_file_changes(self, data, now):
        if now or self.books._parking is None or self.books._parking.disk is None:
            return
        self.books._parking.close()
        files = sorted(self.folder.glob("*.parked"))
        if files:
            path = data.draw(st.sampled_from(files))
            used, changed = path.stat().st_mtime_ns, bytearray(path.read_bytes())
            changed[data.draw(st.integers(0, len(changed) - 1))] ^= 16
            path.write_bytes(changed)
            os.utime(path, ns=(used, used))

    @invariant()
    def what_is_held_is_what_it_should_be(self):
        if not hasattr(self, "books"):
            return
        self.books.check()
        if self.books._parking is not None:
            self.books._parking.close()  # so that a run can be repeated
        for slot, tokens in self.decoding.items():
            self.matches(slot, tokens)
        for slot in range(1, 1 + SLOTS):
            if self.books.status(slot) in ("CACHED", "PARTIAL"):
                self.matches(slot, self.books.tokens(slot))
        self.matches(SOLO, self.books.live)
        for place, checkpoint in self.books._checkpoints.items():
            self.matches(place, checkpoint.tokens)


def test_accounts_balance_and_states_are_right_through_any_life(spec):
    Lives.spec = spec
    run_state_machine_as_test(
        Lives,
        settings=settings(
            max_examples=60,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.soak
def test_accounts_balance_and_states_are_right_through_many_lives(spec):
    Lives.spec = spec
    run_state_machine_as_test(
        Lives,
        settings=settings(
            max_examples=5000, stateful_step_count=100, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
