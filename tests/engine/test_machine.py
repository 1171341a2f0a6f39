"""Random conversations with the real engine process: slots, reads that give way, stops, malformed lines, endings.

A hypothesis state machine sends commands at random and takes lines at random; `SlotModel` checks every line against the
protocol. Every request must end, and its tokens must be those of an engine without slots and without any cache. The
engine runs with --verify-accounts, so its books are checked after each unit of work. One process serves many runs.

Nothing that hypothesis draws may depend on what the engine did (its timing is its own), so rules have no preconditions:
one that has nothing to do does nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from strata.bench.checks import TURN_TOKEN, Prompts
from strata.bench.engine_process import EngineProcess, engine_command
from strata.bench.slot_engine import SlotEngine
from strata.bench.slot_model import Request
from strata.protocol.lines import (
    Err,
    Info,
    ProtocolError,
    Quit,
    Restore,
    SamplingKeys,
    Save,
    SessionError,
    decode_command,
)

SLOTS, CHUNK, CONTEXT, VOCAB = 3, 8, 192, 1024
END_IDS = tuple(range(5, VOCAB, 24))
"""Many of them, so that answers often end by themselves."""
MOST_NEW, MOST_QUEUED, LONGEST = 20, 3, 120
OPTIONS = ("--max-context", str(CONTEXT), "--eos-ids", ",".join(map(str, END_IDS)), "--threads", "1")
CACHES = ("--prompt-cache", "4", "--prompt-cache-root", "16", "--prompt-cache-every", "32", "--short-read", "0")
PARKING = ("--conversation-cache-mib", "8", "--conversation-cache-slots", "3", "--conversation-cache-min-free-mib", "0")
KEYS = (
    SamplingKeys(),
    SamplingKeys(),
    SamplingKeys(temperature=1.2, top_k=40, seed=11),
    SamplingKeys(temperature=0.9, top_p=0.9, min_p=0.01, seed=5, penalty_last_n=24, penalty_repeat=1.3),
    SamplingKeys(ckpt=False),
    SamplingKeys(pin=12),
)
LINES = (
    b"HELLO",
    b"GEN 0 5",
    b"GEN 3 5,x",
    b"GEN 3 temperature=warm 5",
    b"BGEN 0 0 5",
    b"BGEN 0 5",
    b"BSTOP",
    b"BYIELD -1",
    b"VRAM",
    b"VRAM 700",
    b"GENI 4 file 5,6",
    b"BGENI 0 4 file 5,6",
    b"SAVE /nowhere/at all",
    b"RESTORE /nowhere",
    b"STOP now",
    b"\xff\xfe\xff",
    b" ",
    b"",
)
MANY = Prompts(VOCAB, seed=3)


def base_prompts() -> list[tuple[int, ...]]:
    """Of all lengths around the chunk's, some with turns in them, some with a common beginning."""
    plain = [MANY.plain(n, n) for n in (1, 2, 7, 8, 9, 17, 40)]
    common = MANY.plain(24, 100)
    turns = [common + MANY.turn(n, n) for n in (2, 6, 11)]
    return plain + turns + [turns[0] + MANY.turn(9, 50)]


def answers_to(line: bytes) -> tuple[type, ...]:
    """What answers a line that is no request."""
    try:
        command = decode_command(line)
    except ProtocolError:
        return (Err,)
    if command is None:
        return ()
    return (SessionError,) if isinstance(command, (Save, Restore)) else (Err,)


class Lab:
    """The engine under test on a device, started when needed, and one without slots or caches, on the host, that says
    what is right."""

    def __init__(self, pack: str, device: str) -> None:
        self._device = device
        self._argv = [*engine_command(None), "--serve", "--pack", pack, *OPTIONS]
        self._engine: SlotEngine | None = None
        self._cold = EngineProcess([*self._argv, "--prompt-cache", "0"])
        self._answers: dict[tuple[tuple[int, ...], SamplingKeys], list[int]] = {}
        self.failure: Exception | None = None
        self.steps = 0
        self.finishes: Counter[str] = Counter()
        self.refused = self.resumed = self.in_slots = self.given_way = 0

    def engine(self) -> SlotEngine:
        if self._engine is None:
            argv = [*self._argv, "--batch", str(SLOTS), "--prefill", str(CHUNK), *CACHES, *PARKING]
            argv += ["--turn-token", str(TURN_TOKEN), "--verify-accounts", "--device", self._device]
            self._engine = SlotEngine(argv, wants_slots=SLOTS, end_ids=END_IDS, silence_s=60.0)
        return self._engine

    @contextmanager
    def noting_failures(self) -> Iterator[None]:
        """Keeps the first one: hypothesis runs a failure again, and says something else when it does not repeat."""
        try:
            yield
        except Exception as failure:
            self.failure = self.failure or failure
            raise

    def forget(self) -> None:
        """The next run gets a new engine."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def known(self, ids: tuple[int, ...], keys: SamplingKeys, max_new: int) -> list[int] | None:
        """The whole answer, when it has been asked for before."""
        answer = self._answers.get((ids, keys))
        if answer is None or (len(answer) < max_new and answer[-1] not in END_IDS):
            return None
        return answer[:max_new]

    def answer(self, ids: tuple[int, ...], keys: SamplingKeys, max_new: int) -> list[int]:
        """The whole answer, asked for when it is not known."""
        known = self.known(ids, keys, max_new)
        if known is None:
            room = CONTEXT - 8 - len(ids)
            self._answers[ids, keys] = self._cold.generate(ids, min(max(max_new, MOST_NEW), room), keys).tokens
            known = self._answers[ids, keys][:max_new]
        return known

    @property
    def seen_too_little(self) -> bool:
        """Whether some end of a request, or something that may become of one, is still rare."""
        ends = min(self.finishes[finish] for finish in ("stop", "length", "cancel"))
        return ends <= 20 or min(self.refused, self.resumed, self.in_slots) <= 30 or self.given_way <= 8

    def close(self) -> None:
        self.forget()
        self._cold.close()


def step(**strategies: st.SearchStrategy) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A rule that is counted."""

    def counted(action: Callable[..., None]) -> Callable[..., None]:
        @wraps(action)
        def run(self: Conversations, **drawn: object) -> None:
            self.lab.steps += 1
            with self.lab.noting_failures():
                action(self, **drawn)

        return rule(**strategies)(run)

    return counted


class Conversations(RuleBasedStateMachine):
    """One run. `past`: its requests that are over, from which the next turns are made."""

    lab: Lab
    bases = base_prompts()

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []
        self.ending = "rest"
        self.engine = self.lab.engine()
        self.model = self.engine.model

    @initialize(ending=st.sampled_from(["rest"] * 38 + ["close", "quit"]))
    def how_it_ends(self, ending: str) -> None:
        self.ending = ending

    # what is asked

    def prompt(self, kind: int, which: int, extra: int) -> tuple[int, ...]:
        """A first turn, or something made of a request that is over."""
        past = [r for r in self.requests if r.state == "over" and not r.refused]
        ids = self.bases[which % len(self.bases)]
        if past and kind:
            r = past[-1 - which % len(past)]
            said, new = (*r.ids, *r.tokens), MANY.turn(1 + extra, extra)
            if kind == 1:  # its next turn
                ids = said + new
            elif kind == 2:  # it goes on
                ids = said
            elif kind == 3:  # its next turn without what was thought
                at = max((i for i, token in enumerate(r.ids) if token == TURN_TOKEN), default=len(r.ids))
                ids = r.ids[:at] + new
            else:
                ids = r.ids
        return ids if len(ids) <= LONGEST else ids[:LONGEST]

    def ask(self, slot: int | None, ids: tuple[int, ...], max_new: int, keys: SamplingKeys) -> None:
        if len(self.model.queue) >= MOST_QUEUED:
            return
        r = self.engine.solo(ids, max_new, keys) if slot is None else self.engine.admit(slot, ids, max_new, keys)
        if not self.model.refusal(r):
            r.wanted = self.lab.known(ids, keys, max_new)
        self.requests.append(r)

    def free_slots(self) -> list[int]:
        taken = {r.slot for r in self.model.open}
        return [slot for slot in range(SLOTS) if slot not in taken]

    PROMPT = st.tuples(st.sampled_from([0, 0, 0, 1, 1, 2, 3, 4]), st.integers(0, 30), st.integers(0, 9))
    NEW = st.integers(1, MOST_NEW)
    WHICH = st.integers(0, len(KEYS) - 1)

    @step(prompt=PROMPT, max_new=NEW, keys=WHICH)
    def gen(self, prompt: tuple[int, int, int], max_new: int, keys: int) -> None:
        self.ask(None, self.prompt(*prompt), max_new, KEYS[keys])

    @step(slot=st.integers(0, SLOTS - 1), prompt=PROMPT, max_new=NEW, keys=WHICH)
    def bgen(self, slot: int, prompt: tuple[int, int, int], max_new: int, keys: int) -> None:
        self.ask(slot, self.prompt(*prompt), max_new, KEYS[keys])

    @step(prompt=PROMPT, max_new=NEW, keys=WHICH)
    def bgen_free(self, prompt: tuple[int, int, int], max_new: int, keys: int) -> None:
        """Into a slot that nobody has, as a server does."""
        if free := self.free_slots():
            self.ask(free[-1], self.prompt(*prompt), max_new, KEYS[keys])

    @step(slot=st.sampled_from([None, 0, SLOTS, 99]), which=st.integers(0, 3))
    def refused(self, slot: int | None, which: int) -> None:
        """Outside of the vocabulary, one token too long, or no such slot."""
        ids = self.bases[which]
        if which % 2:
            self.ask(slot, (*ids, VOCAB), 2, KEYS[0])
        else:
            self.ask(slot, ids, CONTEXT - 8 - len(ids) + (slot in (None, 0)), KEYS[0])

    @step(line=st.sampled_from(LINES))
    def malformed(self, line: bytes) -> None:
        if len(self.model.queue) >= MOST_QUEUED:
            return
        self.engine.other(line, *answers_to(line))

    @step()
    def stop(self) -> None:
        self.engine.stop()

    @step(slot=st.integers(0, SLOTS))
    def bstop(self, slot: int) -> None:
        self.engine.slot_stop(slot)

    @step(slot=st.integers(0, SLOTS))
    def byield(self, slot: int) -> None:
        self.engine.give_way(slot)

    @step(after=st.integers(0, 3))
    def byield_well(self, after: int) -> None:
        """To the slot that the read may give way to, some lines later."""
        self.take(after)
        reading = self.model.reading
        free = [slot for slot, r in enumerate(self.model.slots) if r is None]
        if reading is not None and free:
            self.engine.give_way(free[0] if reading.slot is None else reading.slot)

    @step(solo=st.booleans(), length=st.integers(40, LONGEST), after=st.integers(1, 4), keys=WHICH)
    def long_read_is_asked_to_give_way(self, solo: bool, length: int, after: int, keys: int) -> None:
        """As a server does it: to a slot that nobody has, while the prompt is read."""
        free = self.free_slots()
        if free and self.model.reading is None and not self.model.queue:
            self.ask(None if solo else free[0], MANY.plain(length, length), 3, KEYS[keys])
            self.take(after)
            self.engine.give_way(free[0])

    # what is heard

    @step(n=st.integers(1, 12))
    def lines(self, n: int) -> None:
        self.take(n)

    def take(self, n: int) -> None:
        for _ in range(n):
            if self.model.at_rest:
                return
            self.engine.take()

    @step()
    def whatever_has_come(self) -> None:
        while not self.engine.process.waits():
            self.engine.take()

    @step(which=st.integers(0, 5))
    def until_one_is_over(self, which: int) -> None:
        if waiting := self.model.open:
            r = waiting[which % len(waiting)]
            self.engine.until(lambda: r.state == "over")

    def teardown(self) -> None:
        if self.engine.failed:
            self.lab.forget()
            return
        try:
            with self.lab.noting_failures():
                {"rest": self.come_to_rest, "close": self.end_of_input, "quit": self.quit}[self.ending]()
                self.compare()
        finally:
            self.count()
            if self.ending != "rest" or self.engine.failed:
                self.lab.forget()

    def come_to_rest(self) -> None:
        """Everything ends, and after it the engine says nothing but counters and the answer to one more line."""
        if not self.model.at_rest:
            self.engine.until(lambda: self.model.at_rest)
        self.engine.other(b"ANYTHING ELSE?", Err)
        self.engine.until(lambda: self.model.at_rest)

    def end_of_input(self) -> None:
        """What was asked runs to its end, then the process leaves."""
        self.engine.process.close_input()
        if not self.model.at_rest:
            self.engine.until(lambda: self.model.at_rest)
        assert self.engine.process.exit_code() == 0
        for _, line in self.engine.process.rest():
            assert isinstance(line, Info)
            self.model.received(line)

    def quit(self) -> None:
        """What was asked before is answered; slots are dropped."""
        self.engine.process.send(Quit())
        for arrival, line in self.engine.process.rest():
            self.model.received(line, arrival)
        assert self.engine.process.exit_code() == 0
        assert not self.model.queue and self.model.reading is None

    def compare(self) -> None:
        """Every answer with that of the engine without slots and caches."""
        for r in self.requests:
            if r.refused:
                continue
            assert r.state == "over" or self.ending == "quit"
            wanted = self.lab.answer(r.ids, r.keys, r.max_new)
            assert r.tokens == wanted[: len(r.tokens)], r
            if r.finish in ("stop", "length"):
                assert len(r.tokens) == len(wanted), r

    def count(self) -> None:
        lab = self.lab
        lab.finishes.update(r.finish for r in self.requests if r.finish)
        lab.refused += sum(r.refused != "" for r in self.requests)
        lab.resumed += sum(r.reused > 0 for r in self.requests)
        lab.in_slots += sum(r.slot_done is not None for r in self.requests)
        lab.given_way += sum(r.gave_way is not None for r in self.requests)


@pytest.fixture(scope="module")
def lab(packs) -> Iterator[Lab]:
    lab = Lab(str(packs["odd-q8_0"]), "host")
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def card_lab(packs) -> Iterator[Lab]:
    lab = Lab(str(packs["odd-q8_0"]), "cuda")
    yield lab
    lab.close()


def run(lab: Lab, runs: int, steps: int) -> None:
    """So many runs of so many steps. A failure is shown as it was found: the engine's timing does not repeat."""
    machine = type("Machine", (Conversations,), {"lab": lab})
    plan = settings(
        max_examples=runs,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    lab.failure = None
    try:
        run_state_machine_as_test(machine, settings=plan)
    except Exception as told:
        raise lab.failure or told from told


def test_two_thousand_random_steps_with_the_real_engine(lab):
    """And more of them until everything has happened some times. The soak has some hundred thousand."""
    while lab.steps < 2_000 or (lab.seen_too_little and lab.steps < 10_000):
        run(lab, runs=25, steps=50)
    assert not lab.seen_too_little


@pytest.mark.gpu
def test_random_steps_with_the_real_engine_on_a_card(card_lab):
    while card_lab.steps < 3_000:
        run(card_lab, runs=50, steps=50)


@pytest.mark.soak
def test_twenty_minutes_of_random_steps_with_the_real_engine(lab):
    end = time.monotonic() + 20 * 60
    while time.monotonic() < end:
        run(lab, runs=200, steps=50)
