"""The engine as tests drive it: the real process, and the real serve loop over a small scripted model."""

from __future__ import annotations

import gc
import os
import queue
import select
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from strata.engine.inbox import Inbox
from strata.engine.pack import Pack, open_draft, open_pack
from strata.engine.schedule.live import Path as Schedule
from strata.engine.schedule.live import now_ms
from strata.engine.schedule.ports import Row, Rules
from strata.engine.serve import Server, Writer
from strata.engine.state.checkpoints import CacheRules
from strata.engine.state.conversations import Conversations
from strata.engine.state.pages import OutOfPages
from strata.kernels.formats import Weight
from strata.kernels.reference import sample
from strata.protocol.lines import Done, Err, Info, Output, Token, decode_output

WAIT_S = 60
FIRST_START_S = 300  # the first start on a machine compiles the kernels
KERNELS = "cpu"
ENGINE = Path(sys.executable).with_name("strata-engine")


class EngineProcess:
    """A running strata-engine. Lines go in with `send`; outputs come from `next` and `until`."""

    def __init__(self, args: Sequence[str], log: Path, env: dict[str, str], program: str = str(ENGINE)) -> None:
        self.log = log
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [program, *args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **env},
            )
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def send(self, *lines: str | bytes) -> None:
        data = b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines)
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def next(self, wait_s: float = WAIT_S) -> Output | None:
        """The next output, None at the end of stdout."""
        line = self._lines.get(timeout=wait_s)
        return None if line is None else decode_output(line)

    def until(self, *kinds: type) -> list[Output]:
        """Outputs up to and with the first of one of these kinds. Fails when stdout ends before."""
        got: list[Output] = []
        while True:
            output = self.next()
            assert output is not None, f"stdout ended after {got[-5:]}; log: {self.log.read_text()}"
            got.append(output)
            if isinstance(output, kinds):
                return got

    def ask(self, line: str) -> list[Output]:
        """One request to its DONE, or its ERR."""
        self.send(line)
        return self.until(Done, Err)

    def close_input(self) -> None:
        self.process.stdin.close()

    def rest(self) -> list[Output]:
        """All outputs until stdout ends."""
        return list(iter(self.next, None))

    def exit_code(self) -> int:
        return self.process.wait(timeout=WAIT_S)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=WAIT_S)
        self._reader.join(timeout=WAIT_S)
        self.process.stdout.close()
        if not self.process.stdin.closed:
            self.process.stdin.close()


Start = Callable[..., EngineProcess]


@pytest.fixture(scope="session")
def start_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """start_engine("--serve", ..., env={}, program=ENGINE) -> EngineProcess; all are ended with the tests."""
    started: list[EngineProcess] = []
    folder = tmp_path_factory.mktemp("engine")

    def start(*args: str, env: dict[str, str] | None = None, program: str = str(ENGINE)) -> EngineProcess:
        started.append(EngineProcess(args, folder / f"{len(started)}.log", env or {}, program))
        return started[-1]

    yield start
    for engine in started:
        engine.kill()


@pytest.fixture(scope="session")
def serve_pack(start_engine: Start, packs: object) -> Callable[..., EngineProcess]:
    """serve_pack("--prefill", "64") -> a real engine on a small pack that has said READY, with its INFO as `.info`."""

    def serve(*args: str, pack: str = "odd-q8_0", env: dict[str, str] | None = None) -> EngineProcess:
        engine = start_engine(
            "--serve",
            "--pack",
            str(packs[pack]),
            "--threads",
            "1",
            "--kernels",
            KERNELS,
            "--verify-accounts",
            *args,
            env=env,
        )
        info, ready = engine.next(FIRST_START_S), engine.next()
        assert isinstance(info, Info), f"{info}; log: {engine.log.read_text()}"
        engine.info, engine.ready = info, ready
        return engine

    return serve


class ScriptedState:
    """What `Conversations` asks of a state, for sequences that are lists of tokens. `pages`: itself."""

    def __init__(self, n_slots: int, n_checkpoints: int) -> None:
        self.n_slots, self.n_checkpoints = n_slots, n_checkpoints
        self.tokens: list[list[int]] = [[] for _ in range(n_slots + n_checkpoints)]
        self.relieve: Callable[[], bool] = lambda: False
        self.refused: set[int] = set()
        """Slots that nothing can be copied to: their pages have run out."""

    @property
    def pages(self) -> ScriptedState:
        return self

    def held(self, slot: int) -> int:
        return -(-len(self.tokens[slot]) // 64)

    def length(self, slot: int) -> int:
        return len(self.tokens[slot])

    def reset(self, slot: int) -> None:
        self.tokens[slot] = []

    drop = reset

    def copy(self, source: int, target: int) -> None:
        if target in self.refused:
            raise OutOfPages("1 more page is needed, 0 are free")
        self.tokens[target] = list(self.tokens[source])

    def check(self) -> None:
        """Lists are always right."""


class ScriptedModel:
    """A runner without weights: the logits are a function of all tokens so far, so a wrong state changes the text.

    Asserts that tokens come in order, and remembers every call: (slot, first position, tokens), of windows too.
    """

    def __init__(self, vocab: int = 64, n_slots: int = 0, n_checkpoints: int = 0) -> None:
        self.vocab = vocab
        self.n_slots = n_slots
        self.state = ScriptedState(1 + n_slots, n_checkpoints)
        self.calls: list[tuple[int, int, int]] = []
        self.windows: list[list[int]] = []
        self.before_feed: Callable[[], None] = lambda: None

    def feed(self, slot: int, begin: int, tokens: np.ndarray, want_logits: bool) -> np.ndarray | None:
        self.before_feed()
        held = self.state.tokens[slot]
        assert begin == len(held), f"tokens for {begin} of slot {slot}, the state holds {len(held)}"
        assert len(tokens) > 0
        held += tokens.tolist()
        self.calls.append((slot, begin, len(tokens)))
        return self.logits(slot) if want_logits else None

    def logits(self, slot: int) -> np.ndarray:
        seed = hash(tuple(self.state.tokens[slot])) % 2**32
        return np.random.default_rng(seed).normal(size=self.vocab).astype(np.float32)

    def sample(self, logits: np.ndarray, recent: np.ndarray, how: object, position: int) -> int:
        return sample(logits, recent, how, position)

    def rounds(self, row: Row) -> int:
        return 0

    def window(self, rows: Sequence[Row], again: bool, rounds: int = 0) -> list[int]:
        assert 0 < len(rows) <= 8 and len({row.slot for row in rows}) == len(rows)
        self.windows.append([row.slot for row in rows])
        ids = []
        for row in rows:
            logits = self.feed(row.slot, row.position, row.tokens[-1:], True)
            ids.append(self.sample(logits, row.recent, row.how, row.position + 1))
        return ids

    def check(self, lengths: Sequence[tuple[int, int]]) -> None:
        for slot, n in lengths:
            assert n == len(self.state.tokens[slot])


def scripted_path(
    model: ScriptedModel,
    *,
    reuse: bool = True,
    turn_token: int = 63,
    clock: Callable[[], float] = now_ms,
    **rules: object,
) -> Schedule:
    """The real schedule over a scripted model, with the real books."""
    cache = CacheRules(model.state.n_checkpoints or 1, every=0, root=0) if reuse else CacheRules(0)
    sessions = Conversations(model.state, model.n_slots, cache, None, turn_token, verify=True)
    given = {"chunk": 4, "max_context": 64, "end_ids": {3}, "routed": 5, "verify": True, **rules}
    return Schedule(model, sessions, Rules(n_slots=model.n_slots, prompt_cache=reuse, **given), clock)


class Loop:
    """The real serve loop in a thread, over pipes and a scripted model."""

    def __init__(
        self,
        model: ScriptedModel,
        figures: Callable[[], dict[str, int]] = dict,
        before: Callable[[], None] = lambda: None,
        **settings: object,
    ) -> None:
        self.model = model
        commands, self._commands = os.pipe()
        self._outcome, self._outputs = os.pipe()
        self.inbox = Inbox(commands)
        path = scripted_path(model, **settings)
        writer = Writer(self._outputs)
        self.server = Server(path, self.inbox, writer, vocab=model.vocab, figures=figures, before=before)
        self.error: BaseException | None = None
        self._fds = [commands, self._outcome]
        self._lines: deque[bytes] = deque()
        self._rest = b""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.inbox.start()
        self._thread.start()

    def _run(self) -> None:
        try:
            self.server.run()
        except Exception as error:  # noqa: BLE001 - tests look at it, whatever it is
            self.error = error
        os.close(self._outputs)

    def send(self, *lines: str) -> None:
        self.send_bytes("".join(f"{line}\n" for line in lines).encode())

    def send_bytes(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._commands, data) :]

    def next(self) -> Output | None:
        """The next output, None at the end. Fails when the loop says nothing for a minute."""
        while not self._lines:
            assert select.select([self._outcome], [], [], WAIT_S)[0], "the serve loop says nothing"
            data = os.read(self._outcome, 1 << 16)
            if not data:
                return None
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._lines.extend(lines)
        return decode_output(self._lines.popleft())

    def until(self, *kinds: type) -> list[Output]:
        got: list[Output] = []
        while not got or not isinstance(got[-1], kinds):
            output = self.next()
            assert output is not None, f"the loop ended after {got[-5:]}: {self.error!r}"
            got.append(output)
        return got

    def ask(self, line: str) -> list[Output]:
        self.send(line)
        return self.until(Done, Err)

    def close_input(self) -> None:
        if self._commands >= 0:
            os.close(self._commands)
            self._commands = -1

    def rest(self) -> list[Output]:
        return list(iter(self.next, None))

    def join(self) -> None:
        self._thread.join(timeout=WAIT_S)
        assert not self._thread.is_alive(), "the serve loop hangs"

    def close(self) -> None:
        self.close_input()
        self.rest()
        self.join()
        self.inbox._thread.join(timeout=WAIT_S)  # else it may read from the next pipe with this number
        assert not self.inbox._thread.is_alive()
        for fd in self._fds:
            os.close(fd)


@pytest.fixture
def loop() -> Iterator[Callable[..., Loop]]:
    """loop(chunk=4, reuse=True) -> Loop on a fresh scripted model."""
    loops: list[Loop] = []

    def make(model: ScriptedModel | None = None, **settings: object) -> Loop:
        loops.append(Loop(model or ScriptedModel(), **settings))
        return loops[-1]

    yield make
    for each in loops:
        each.close()


@pytest.fixture(scope="session")
def scripted() -> type[ScriptedModel]:
    return ScriptedModel


@pytest.fixture(scope="session")
def schedule() -> Callable[..., Schedule]:
    """schedule(model, chunk=4, reuse=True, ..) -> the real schedule over a scripted model."""
    return scripted_path


@pytest.fixture(scope="session")
def answer() -> Callable[..., list[int]]:
    """answer(runner, request, max_context) -> the tokens of a request that a runner reads and answers by itself."""

    def answered(runner: object, request: object, max_context: int) -> list[int]:
        sessions = Conversations(runner.state, runner.n_slots, CacheRules(0), None, turn_token=10**6, verify=True)
        path = Schedule(runner, sessions, Rules(chunk=runner.chunk, max_context=max_context, end_ids=(), verify=True))
        events = path.start(request)
        while path.busy:
            events += path.step()
        return [event.id for event in events if isinstance(event, Token)]

    return answered


SHARED_CARD = 4 << 30


@pytest.fixture(scope="module")
def new_card() -> Iterator[Callable[[], object]]:
    """new_card(): a driver of the real card, of which it says that no more than SHARED_CARD is free, so that several
    processes of tests find room. Afterwards CuPy is as it was."""
    import cupy

    from strata.engine.device.driver import CupyDriver

    class Shared(CupyDriver):
        def memory(self) -> tuple[int, int]:
            free, total = super().memory()
            return min(free, SHARED_CARD), total

    yield Shared
    gc.collect()  # arenas of this module's engines
    cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)
    cupy.cuda.Stream.null.use()


@pytest.fixture(scope="module", params=["emulated", pytest.param("card", marks=pytest.mark.gpu)])
def any_card(request: pytest.FixtureRequest) -> Iterator[Callable[..., object]]:
    """any_card(): a driver. Every test that asks for it runs on the emulated card, and on a real one if asked to.

    REHEARSES = False in a module, or any_card(rehearses=False): engines start without the kernels of rehearsals, which
    take the emulated card most of a start; those of other modules start with them: test_cuda_growth.py (slots, drafts),
    experts/, borrowing. A real card rehearses always.
    """
    if request.param == "emulated":
        with request.getfixturevalue("emulated_card").plugged_in() as card:

            def driver(rehearses: bool = True) -> object:
                return card.driver(rehearses=rehearses and getattr(request.module, "REHEARSES", True))

            yield driver
    else:
        new_card = request.getfixturevalue("new_card")
        yield lambda rehearses=True: new_card()


@pytest.fixture(scope="module")
def trunk(packs) -> Pack:
    """A pack of three of its layers: a block of every kind is left."""
    whole = open_pack(packs["tiny-q8_0"])

    class Short(Pack):
        def __init__(self) -> None:
            self.__dict__ |= whole.__dict__
            kinds = (True, True, False)
            self.spec = replace(whole.spec, layers=len(kinds), recurrent=kinds, ratios=(0, 0, 4), index_budget=32)

        def weight(self, name: str) -> Weight:
            return super().weight(name.replace("blk.2.", "blk.3."))

        def array(self, name: str) -> np.ndarray:
            return super().array(name.replace("blk.2.", "blk.3."))

    return Short()


@pytest.fixture(scope="module")
def draft(packs, trunk):
    found = open_draft(open_pack(packs["tiny-q8_0"]), packs["mtp-tiny-q8_0"])
    found.pack.spec = trunk.spec
    return replace(found, names=np.flatnonzero(np.arange(trunk.spec.vocab) % 7).astype(np.int32))
