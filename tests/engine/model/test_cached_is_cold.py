"""Cached = cold: a conversation continued in its slot, from a checkpoint, from RAM or from a file has the logits and
the state of one that is read from its start, bit for bit. The real model, on the host and on a card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from strata.engine.device.cuda import CudaDevice
from strata.engine.device.host import HostDevice
from strata.engine.model import Model, Rows
from strata.engine.model.resident import Resident
from strata.engine.state.checkpoints import CacheRules
from strata.engine.state.conversations import SOLO, Conversations
from strata.engine.state.disk import ParkingDisk
from strata.engine.state.fingerprint import fingerprint
from strata.engine.state.parked_file import Figures
from strata.engine.state.parking import Parking, ParkingRules
from strata.engine.state.slots import StatePool

TURN = 900
SLOTS, CHECKPOINTS, ROOM = 2, 3, 1 << 40
WAYS = ("slot", "live", "checkpoint", "parked", "file")


class Machine:
    """A model with its books: what a schedule makes of them, without the schedule.

    read      logits of the last of these tokens, which continue the slot
    restart   the same engine started again: only files are left
    """

    def __init__(self, model: Model, state: StatePool, chunk: int, parking: Parking | None = None) -> None:
        self.model, self.state, self.chunk = model, state, chunk
        rules = CacheRules(CHECKPOINTS, every=0, root=0)
        self.books = Conversations(state, SLOTS, rules, parking, TURN, verify=True)

    def read(self, slot: int, tokens: np.ndarray) -> np.ndarray:
        for begin in range(0, len(tokens), self.chunk):
            part = tokens[begin : begin + self.chunk]
            rows = Rows.of([(slot, self.state.length(slot), part)])
            logits = self.model.forward(rows, self.state, [len(part) - 1])
        return self.model.device.read(logits)[0] if isinstance(self.model.device, CudaDevice) else logits[0]

    def prompt(self, prompt: np.ndarray) -> tuple[int, np.ndarray]:
        """Read a prompt where it can be continued. -> tokens reused, logits of the last token."""
        reused = begin = self.books.resume(prompt)
        for position in self.books.stops(prompt, begin):
            self.read(SOLO, prompt[begin:position])
            begin = position
            self.books.reached(prompt, position)
        return reused, self.read(SOLO, prompt[begin:])


def cold(model: Model, tokens: np.ndarray) -> tuple[np.ndarray, bytes]:
    """Logits and state of the tokens read at once, by the host."""
    state = model.new_state(1)
    return model.forward(Rows.of([(0, 0, tokens)]), state, [len(tokens) - 1])[0], state.state_bytes(0)


def answer(machine: Machine, slot: int, logits: np.ndarray, n: int) -> np.ndarray:
    """n tokens by the argmax; the state holds all but the last, as after a request."""
    ids = []
    for _ in range(n):
        ids.append(int(logits.argmax()))
        if len(ids) < n:
            logits = machine.read(slot, np.array(ids[-1:], np.int32))
    return np.array(ids, np.int32)


def question(n: int, seed: int) -> np.ndarray:
    return np.r_[TURN, np.random.default_rng(seed).integers(0, 890, n - 1)].astype(np.int32)


def take_turns(start: Callable[[], Machine], host: Model, ways: tuple[str, ...], sizes) -> None:
    """A conversation of several turns, each continued in its way from the one before; every turn is compared with a
    cold read."""
    first, later, n_answer = sizes
    machine = start()
    prompt = np.r_[question(first, 1), question(5, 2)]
    expected = 0
    for turn, way in enumerate((*ways, "live")):
        reused, logits = machine.prompt(prompt)
        assert reused == expected, turn
        wanted, state = cold(host, prompt)
        np.testing.assert_array_equal(logits, wanted)
        assert machine.state.state_bytes(SOLO) == state
        slot = 1 if way == "slot" else SOLO
        if way == "slot":
            machine.books.admit(slot, prompt)
        said = answer(machine, slot, logits, n_answer)
        held = np.r_[prompt, said[:-1]]
        expected = len(held)
        if way == "slot":
            machine.books.release(slot, held)
            machine.books.ended(None)
        else:
            machine.books.ended(held)
        if way == "parked":
            machine.prompt(question(3, 70 + turn))
            machine.books.ended(None)
        elif way == "file":
            machine.books.close()
            machine = start()
        if way == "checkpoint":  # the client sends the answer without what it thought
            expected = len(prompt) - 5
            prompt = np.r_[prompt[:-5], question(later, 10 + turn), question(5, 20 + turn)]
        else:
            prompt = np.r_[prompt, said, question(later, 10 + turn), question(5, 20 + turn)]
    machine.books.check()


def starting(new_state: Callable[[], tuple[Model, StatePool]], pack, folder: Path, chunk: int, on_disk: bool):
    """-> what starts an engine: all that it finds of the one before are its files."""
    own = fingerprint(pack, "fp32", "exact")

    def start() -> Machine:
        model, state = new_state()
        figures = Figures(state.pages.page_bytes, state.recurrent.n_bytes)
        disk = ParkingDisk(folder, 1 << 30, own, figures) if on_disk else None
        return Machine(model, state, chunk, Parking(ParkingRules(0 if on_disk else 1 << 30), lambda: ROOM, disk))

    return start


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["odd-q8_0", "tiny-iq3_s"])
def test_on_the_host_a_conversation_continued_in_any_way_is_that_of_a_cold_read(pack_of, tmp_path, name, way):
    model = Model(pack_of(name), HostDevice("cpu", 1), 512)

    def new_state() -> tuple[Model, StatePool]:
        return model, model.new_state(1 + SLOTS, n_checkpoints=CHECKPOINTS)

    take_turns(starting(new_state, pack_of(name), tmp_path, 50, way == "file"), model, (way,) * 3, (70, 29, 6))


def test_on_a_card_a_conversation_continued_in_any_way_is_that_of_a_cold_read(any_card, pack_of, altered, tmp_path):
    spec = pack_of("odd-q8_0").spec
    few = replace(spec, layers=4, recurrent=spec.recurrent[:4], ratios=spec.ratios[:4])
    pack = altered(pack_of("odd-q8_0"), spec=few)
    host = Model(pack, HostDevice("cpu", 1), 192)

    def new_state() -> tuple[Model, StatePool]:
        device, slots = CudaDevice(driver=any_card()), 1 + SLOTS
        card = Resident(pack, device, max_context=192, n_slots=slots, n_checkpoints=CHECKPOINTS, chunks=[16])
        return card.model, card.state

    slow = any_card().name == "emulated card"
    for i, ways in enumerate([("slot", "checkpoint", "file")] if slow else [(way,) * 3 for way in WAYS]):
        start = starting(new_state, pack_of("odd-q8_0"), tmp_path / str(i), 16, "file" in ways)
        take_turns(start, host, ways, (57, 9, 3))
