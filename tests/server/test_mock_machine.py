"""The scripted engine keeps to the protocol, so that what the server learns from it holds with the real one."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
from strata_test_scheduling import END_ID, Numbers, answer, replies

from strata.protocol.lines import (
    Admitted,
    BGen,
    BStop,
    BYield,
    Command,
    Done,
    Err,
    Gen,
    Progress,
    Resume,
    Reused,
    SlotDone,
    SlotToken,
    Stop,
    Token,
    Yielded,
    decode_output,
    encode,
)
from strata.server.mock_machine import Machine
from strata.server.mock_script import Reply, Script, Step

CHUNK = 32


class Engine:
    def __init__(self, n_slots: int = 2, lengths: dict[int, int] | None = None, **script: object) -> None:
        self.now = 0.0
        self.lines: list[object] = []
        script = {"replies": replies(lengths or {1: 5, 2: 60, 3: 60}), **script}
        self.machine = Machine(
            Script(chunk=CHUNK, slots=n_slots, **script), Numbers(), self._say, lambda: self.now
        )  # fmt: skip
        list(self.machine.start())
        self.started, self.lines = self.lines, []

    def _say(self, line: str) -> None:
        self.lines.append(decode_output(line))

    def send(self, *commands: Command | str) -> None:
        for command in commands:
            self.machine.take(command if isinstance(command, str) else encode(command))

    def until(self, kind: type | Callable[[object], bool], most: int = 10_000) -> list[object]:
        """The lines up to one of `kind`, which are taken."""
        for _ in range(most):
            for i, line in enumerate(self.lines):
                if isinstance(line, kind) if isinstance(kind, type) else kind(line):
                    taken, self.lines = self.lines[: i + 1], self.lines[i + 1 :]
                    return taken
            self.machine.step()
            self.now += 0.001
        raise AssertionError(f"no {kind}: {self.lines}")

    def rest(self) -> list[object]:
        """Everything until nothing is to be done."""
        for _ in range(10_000):
            self.now += 0.001
            if not self.machine.step() and self.machine.wants_input:
                break
        taken, self.lines = self.lines, []
        return taken


def prompt(k: int, n: int) -> array[int]:
    return array("i", [k] * n)


def kinds(lines: list[object]) -> list[str]:
    return [line.word for line in lines]


def test_a_solo_request_has_the_lines_in_their_order():
    engine = Engine()
    engine.send(Gen(100, prompt(1, 70)))
    lines = engine.until(Done)
    assert kinds(lines) == ["RESUME", "PP", "PP", "PP", "REUSED", "T", "T", "T", "T", "T", "T", "DONE"]
    assert [line.position for line in lines if isinstance(line, Progress)] == [32, 64, 70]
    assert (lines[-1].generated, lines[-1].finish, lines[-1].prompt_read) == (6, "stop", 70)


def test_slots_are_said_at_the_start_and_only_when_there_are_two():
    assert Engine(4).started[0].whole("batch_slots") == 4 and Engine(4).started[0].whole("slot_cache") == 1
    assert "batch_slots" not in Engine(1).started[0].values and "batch_slots" not in Engine(0).started[0].values


def test_an_admission_is_a_request_for_one_token_and_a_badm():
    engine = Engine()
    engine.send(BGen(1, 100, prompt(2, 40)))
    lines = engine.until(Admitted)
    assert kinds(lines) == ["RESUME", "PP", "PP", "REUSED", "T", "DONE", "BADM"]
    assert lines[-2].generated == 1 and lines[-2].finish == "length" and lines[-1] == Admitted(1, True)
    slot = engine.until(SlotDone)
    assert [line.id for line in slot[:-1]] == [*answer(2, 60)[1:], END_ID]
    assert (slot[-1].generated, slot[-1].finish) == (61, "stop")


@pytest.mark.parametrize("max_new, reply, finish", [(1, {}, "length"), (100, {"steps": []}, "stop")])
def test_an_admission_that_is_over_with_its_first_token_does_not_go_on(max_new, reply, finish):
    engine = Engine(replies=(Reply(**reply),)) if reply else Engine()
    engine.send(BGen(0, max_new, prompt(2, 3)))
    lines = engine.until(Admitted)
    assert lines[-1] == Admitted(0, False) and lines[-2].finish == finish


def test_slots_decode_between_the_chunks_of_a_read_and_not_beside_a_solo_request():
    engine = Engine(3)
    engine.send(BGen(0, 100, prompt(2, 3)))
    engine.until(Admitted)
    engine.send(BGen(1, 100, prompt(3, 100)))
    lines = engine.until(Admitted)
    read = [line for line in lines if not isinstance(line, SlotToken)]
    assert kinds(read) == ["RESUME", "PP", "PP", "PP", "PP", "REUSED", "T", "DONE", "BADM"]
    between = kinds(lines)[kinds(lines).index("PP") : kinds(lines).index("REUSED")]
    assert between.count("BT") >= 3


def test_a_request_that_moves_reads_one_token_and_goes_on_where_it_was():
    engine = Engine()
    engine.send(Gen(100, prompt(2, 40)))
    engine.until(lambda line: line == Token(2001))
    engine.send(Stop())
    lines = engine.until(Done)
    said = [2000, 2001, *(line.id for line in lines[:-1])]
    assert lines[-1].finish == "cancel" and lines[-1].generated == len(said)
    engine.send(BGen(0, 100 - len(said), prompt(2, 40) + array("i", said)))
    lines = engine.until(Admitted)
    assert lines[0] == Resume(39 + len(said)) and Token(2000 + len(said)) in lines and lines[-1].goes_on
    engine.until(lambda line: line == SlotToken(0, 2010))
    engine.send(BStop(0))
    *tokens, end = engine.until(SlotDone)
    said += [*range(2000 + len(said), 2011), *(line.id for line in tokens)]
    assert end.finish == "cancel"
    engine.send(Gen(50, prompt(2, 40) + array("i", said)))
    lines = engine.until(Done)
    assert lines[0] == Resume(39 + len(said))
    assert [line.id for line in lines if isinstance(line, Token)] == [*answer(2, 60), END_ID][len(said) :][:50]


def test_a_read_gives_way_into_its_slot_and_continues_there():
    engine = Engine()
    engine.send(BGen(0, 200, prompt(2, 300)))
    engine.until(Progress)
    engine.send(BYield(0))
    lines = engine.until(Admitted)
    assert kinds(lines)[-3:] == ["YIELDED", "DONE", "BADM"] and lines[-1] == Admitted(0, False)
    q = lines[-3].tokens
    assert (
        lines[-3].slot == 0
        and q % CHUNK == 0
        and lines[-2] == Done(0, 300, lines[-2].prompt_ms, 0.0, "cancel", prompt_read=q)
    )
    engine.send(BGen(1, 80, prompt(1, 20)))
    engine.until(Admitted)
    engine.send(BGen(0, 200, prompt(2, 300)))
    lines = engine.until(Admitted)
    assert lines[0] == Resume(q) and Token(2000) in lines
    assert next(line for line in lines if isinstance(line, Progress)).position == q + CHUNK


def test_a_solo_read_gives_way_without_a_badm():
    engine = Engine()
    engine.send(Gen(200, prompt(2, 300)))
    engine.until(Progress)
    engine.send(BYield(1))
    lines = engine.rest()
    assert kinds(lines)[-2:] == ["YIELDED", "DONE"] and lines[-2].slot == 1


def not_taken(engine: Engine, n: int, slot: int) -> bool:
    engine.send(BGen(0, 50, prompt(3, n)))
    engine.until(Resume)
    engine.send(BYield(slot))
    return not any(isinstance(line, Yielded) for line in engine.until(Admitted))


def test_a_byield_is_refused_by_each_condition():
    assert not not_taken(Engine(), 300, 0)
    assert not_taken(Engine(), 300, 1), "not the admission's own slot"
    assert not_taken(Engine(), 300, 7), "no such slot"
    assert not_taken(Engine(), 2 * CHUNK, 0), "one chunk is left"
    engine = Engine()
    engine.send(BGen(1, 100, prompt(2, 3)))
    engine.until(Admitted)
    assert not_taken(engine, 300, 1), "a slot that decodes"


def test_a_byield_without_a_read_is_dropped_and_never_kept():
    engine = Engine()
    engine.send(BYield(0))
    assert engine.rest() == []
    engine.send(BGen(0, 50, prompt(1, 20)), BYield(0), BGen(1, 50, prompt(2, 300)))
    engine.until(Admitted)
    assert not any(isinstance(line, Yielded) for line in engine.until(Admitted))


def test_a_bstop_ends_its_slot_alone_and_one_for_an_idle_slot_says_nothing():
    engine = Engine()
    for slot, k in ((0, 2), (1, 3)):
        engine.send(BGen(slot, 100, prompt(k, 3)))
        engine.until(Admitted)
    engine.send(BStop(1))
    assert engine.until(SlotDone)[-1].finish == "cancel"
    other = engine.until(SlotDone)[-1]
    assert (other.slot, other.generated, other.finish) == (0, 61, "stop")
    engine.send(BStop(0), BStop(9))
    assert engine.rest() == []


def test_a_bstop_is_taken_between_the_chunks_of_a_read():
    engine = Engine()
    engine.send(BGen(0, 100, prompt(2, 3)))
    engine.until(Admitted)
    engine.send(BGen(1, 100, prompt(3, 300)))
    engine.until(Progress)
    engine.send(BStop(0))
    lines = engine.until(Admitted)
    ends = [i for i, line in enumerate(lines) if isinstance(line, SlotDone)]
    assert ends and Reused(0) in lines[ends[0] :]


def test_a_stop_during_an_admission_ends_it_without_its_slot():
    engine = Engine()
    engine.send(BGen(0, 100, prompt(2, 300)))
    engine.until(Progress)
    engine.send(Stop())
    lines = engine.until(Admitted)
    assert lines[-2].finish == "cancel" and lines[-1] == Admitted(0, False)


def test_a_stop_that_came_when_nothing_ran_stops_nothing():
    engine = Engine()
    engine.send(Stop(), Gen(100, prompt(1, 3)))
    assert engine.until(Done)[-1].finish == "stop"


@pytest.mark.parametrize(
    "command, text",
    [
        (BGen(2, 5, prompt(1, 3)), "BGEN: no such free slot (--batch 2) or a bad max_new"),
        ("BGEN 0 0 5,6", "BGEN: no such free slot (--batch 2) or a bad max_new"),
        (BGen(0, 4090, prompt(1, 3)), "prompt (3 tokens) + max_new (4090) exceeds the context (4096)"),
        ("GEN 10 5,x", "bad request: ids"),
        ("HELLO", "expected: "),
    ],
)
def test_a_refusal_is_an_err_without_done_and_badm(command, text):
    engine = Engine()
    engine.send(command)
    (line,) = engine.rest()
    assert isinstance(line, Err) and line.text.startswith(text)


def test_a_slot_that_decodes_takes_no_second_request():
    engine = Engine()
    engine.send(BGen(0, 100, prompt(2, 3)))
    engine.until(Admitted)
    engine.send(BGen(0, 100, prompt(3, 3)))
    assert engine.until(Err)[-1].text.startswith("BGEN: no such free slot")


def test_an_error_in_a_slot_is_no_err_line_which_would_be_the_readers():
    engine = Engine(replies=(Reply(steps=[Step(tokens=[5, 6]), Step(err="it broke")]),))
    engine.send(BGen(0, 100, prompt(2, 3)))
    engine.until(Admitted)
    assert kinds(engine.until(SlotDone)) == ["BT", "BDONE"]


def test_the_next_turn_reuses_what_its_slot_holds():
    engine = Engine()
    engine.send(BGen(1, 100, prompt(1, 20)))
    engine.until(SlotDone)
    said = [*answer(1, 5), END_ID]
    engine.send(BGen(0, 50, prompt(2, 3)), BGen(1, 100, prompt(1, 20) + array("i", said) + prompt(1, 4)))
    engine.until(Admitted)
    assert engine.until(Resume)[-1] == Resume(25)


@pytest.mark.parametrize("busy", [False, True])
def test_the_end_of_input_lets_what_runs_come_to_its_end(busy):
    engine = Engine()
    if busy:
        engine.send(BGen(0, 100, prompt(2, 300)))
    engine.machine.end_of_input()
    for _ in range(10_000):
        if engine.machine.has_left:
            break
        engine.machine.step()
    assert engine.machine.has_left and any(isinstance(line, SlotDone) for line in engine.lines) is busy


def test_a_chunk_takes_its_time():
    engine = Engine(chunk_ms=50)
    engine.send(Gen(5, prompt(1, 96)))
    engine.until(Done)
    assert 0.15 <= engine.now < 0.3
