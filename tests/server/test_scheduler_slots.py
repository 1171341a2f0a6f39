"""The scheduler with an engine that has slots: each test is named after the failure it prevents."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
from strata_test_scheduling import World, both_in_slots, done, left_alone, two

from strata.protocol.lines import (
    Admitted,
    BGen,
    BGenI,
    BStop,
    BYield,
    Done,
    Err,
    Gen,
    GenI,
    Info,
    Progress,
    Ready,
    Resume,
    Reused,
    SlotDone,
    SlotToken,
    Stop,
    Token,
    Yielded,
)
from strata.server.effects import Failed
from strata.server.job import Job, Phase, State
from strata.server.scheduler import Facts
from strata.server.slots import Use
from strata.server.turns import Rules

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scheduling.md"


# --- alone, and with company


def test_a_request_alone_is_one_gen():
    world = two()
    job = world.arrive(1, 3)
    world.read(3, 7, 8)
    world.line(done(2))
    assert world.sent == [Gen(100, array("i", [1] * 3))] and world.tokens(job) == [7, 8]


def test_a_request_for_one_token_does_not_take_the_solo_path():
    world = two()
    job = world.arrive(max_new=1)
    assert world.take_sent() == [BGen(0, 1, job.prompt)]
    world.read(3, 7)
    world.line(done(1, "length"), Admitted(0, False))
    assert world.ends[job] == [done(1, "length")] and world.scheduler.is_idle


def test_requests_that_arrive_together_do_not_begin_alone_only_to_be_moved():
    world = two()
    world.scheduler.n_coming = 1  # the second one's prompt is being prepared
    a = world.arrive(1, 30, 100)
    assert world.take_sent() == [BGen(0, 100, a.prompt)]
    world.scheduler.n_coming = 0
    b = world.arrive(2, 25, 50)
    world.admitted(0, 30, 7)
    assert world.take_sent() == [BGen(1, 50, b.prompt)]


def test_a_request_whose_company_did_not_come_goes_back_to_the_solo_path_and_not_before():
    world = two()
    world.scheduler.n_coming = 1
    a = world.arrive(1, 30, 100)
    world.admitted(0, 30, 7)
    world.line(SlotToken(0, 8))
    assert world.take_sent() == [BGen(0, 100, a.prompt)]
    world.scheduler.n_coming = 0  # it was refused
    world.line(SlotToken(0, 9))
    assert world.take_sent() == [BStop(0)]


def test_company_moves_a_request_to_a_slot_with_all_its_tokens_and_what_is_left():
    world = two()
    a = world.arrive(1, 30, 100)
    world.read(30, 100)
    b = world.arrive(2, 25, 50)
    assert world.take_sent() == [Gen(100, a.prompt), Stop()]
    world.line(Token(101))  # of the window in flight
    assert world.tokens(a) == [100, 101]
    world.line(done(2, "cancel", 30))
    assert world.take_sent() == [BGen(0, 98, a.prompt + array("i", [100, 101]))]
    world.read(32, 102, reused=31)
    world.line(done(1, "length", 32, reused=31), Admitted(0, True))
    assert world.take_sent() == [BGen(1, 50, b.prompt)]
    world.line(SlotToken(0, 103))
    assert world.tokens(a) == [100, 101, 102, 103]


def test_a_request_is_not_stopped_while_it_reads_but_after_its_first_token():
    world = two()
    world.arrive(1, 30)
    world.line(Resume(0), Progress(20, 30, 1.0, 1.0))
    world.arrive(2, 29)
    world.line(Progress(30, 30, 1.0, 1.0), Reused(0))
    assert Stop() not in world.sent
    world.line(Token(100))
    world.line(Token(101))
    assert world.sent.count(Stop()) == 1


def test_a_request_that_ends_by_itself_as_it_is_told_to_move_is_over():
    world = two()
    a = world.arrive(1, 30)
    world.read(30, 100)
    b = world.arrive(2, 25)
    world.line(Token(9), done(2, "stop", 30))
    assert world.ends[a] == [done(2, "stop", 30)]
    assert world.scheduler.holder is b and isinstance(world.sent[-1], Gen)


def test_a_request_goes_on_alone_when_its_company_left_while_it_was_stopped():
    world = two()
    a = world.arrive(1, 30)
    world.read(30, 100)
    world.leave(world.arrive(2, 25))
    world.line(done(1, "cancel", 30))
    assert world.sent[-1] == Gen(99, a.prompt + array("i", [100])) and a.state is State.SOLO
    world.read(31, 101, reused=30)
    assert world.tokens(a) == [100, 101]


def test_a_request_with_nothing_left_is_not_stopped_on_its_last_token():
    world = two()
    world.arrive(1, 30, max_new=2)
    world.read(30, 100)
    world.line(Token(101))
    world.arrive(2, 25)
    assert Stop() not in world.sent


def test_a_cancel_after_the_last_token_is_the_end_and_no_request_for_nothing():
    world = two()
    a = world.arrive(1, 30, max_new=3)
    world.read(30, 100)
    world.arrive(2, 25)
    world.line(Token(101), Token(102), done(3, "cancel", 30))
    assert a.state is State.ENDED and world.ends[a] == [done(3, "cancel", 30)]


def test_an_engine_without_stop_finishes_the_first_request_before_the_second():
    world = two(can_stop=False)
    a = world.arrive(1, 30)
    world.read(30, 100)
    b = world.arrive(2, 25)
    assert Stop() not in world.sent
    world.line(done(1, "stop", 30))
    assert a.state is State.ENDED and b.state is State.SOLO


def test_the_second_of_two_that_came_at_once_waits_for_nothing_but_the_lines():
    world = World()
    a, b = world.arrive(1, 3), world.arrive(2, 3)
    world.up(2)
    assert world.take_sent() == [BGen(0, 100, a.prompt)]
    world.admitted(0, 3, 100)
    assert world.take_sent() == [BGen(1, 100, b.prompt)]


def test_a_batch_of_one_slot_is_no_batch():
    assert Facts.of(*info(batch_slots=1)).n_slots == Facts.of(*info()).n_slots == 0
    facts = Facts.of(*info(batch_slots=4, batch_groups=2, slot_cache=1))
    assert (facts.n_slots, facts.n_groups, facts.keeps_slots) == (4, 2, True)


def info(**values: int) -> tuple[Info, Ready]:
    return Info(values), Ready(4096, ("stop",))


# --- more requests than slots


def test_the_lines_are_free_while_somebody_waits_for_a_slot():
    world = two()
    a, b = both_in_slots(world)
    c = world.arrive(3, 25)
    assert world.scheduler.holder is None and c.state is State.WAITING and world.take_sent() == []
    world.line(SlotToken(1, 9), SlotDone(1, 3, "stop", 1.0))
    assert world.take_sent() == [BGen(1, 100, c.prompt)] and b.state is State.ENDED and a.state is State.SLOT


def test_long_long_short_over_two_slots_finishes():
    world = two()
    long1 = world.arrive(1, 400)
    world.line(Resume(0))
    long2, short = world.arrive(2, 400), world.arrive(3, 50)
    assert world.take_sent() == [Gen(100, long1.prompt), BYield(0)]
    world.line(Progress(64, 400, 1.0, 1.0), Yielded(0, 64), done(0, "cancel", 400, prompt_read=64))
    assert world.take_sent() == [BGen(1, 100, short.prompt)]  # not the long one that came before it
    world.admitted(1, 50, 300)
    assert world.take_sent() == [BGen(0, 100, long1.prompt)]
    world.line(Resume(64))
    assert world.take_sent() == []  # nobody is asked for a request that has no slot to go to
    world.line(SlotDone(1, 1, "stop", 1.0), Progress(400, 400, 1.0, 1.0), Reused(64), Token(100))
    world.line(done(1, "length", 400, reused=64, prompt_read=336), Admitted(0, True))
    assert world.take_sent() == [BGen(1, 100, long2.prompt)]
    world.admitted(1, 400, 200)
    world.line(SlotDone(0, 1, "stop", 1.0), SlotDone(1, 1, "stop", 1.0))
    assert world.scheduler.is_idle and all(len(world.ends[job]) == 1 for job in (long1, long2, short))


def test_short_prompts_first_only_when_it_is_asked_for():
    for rules, order in ((Rules(), [500, 80, 90]), (Rules(short_first=100), [80, 90, 500])):
        world = World(rules)
        for i, n in enumerate((500, 80, 90)):
            world.arrive(i + 1, n)
        world.up(4)
        for slot in range(3):
            read = world.sent[-1]
            world.admitted(slot, len(read.ids), 100)
        assert [len(command.ids) for command in world.sent if isinstance(command, BGen)] == order


def test_an_engine_without_slots_keeps_the_order_of_arrival():
    world = World(Rules(short_first=100))
    for i, n in enumerate((500, 80)):
        world.arrive(i + 1, n)
    world.up()
    assert len(world.sent[-1].ids) == 500


# --- a long read gives way


def reading_long(world: World, n: int = 400) -> Job:
    """A long request that is being read in slot 0 while another decodes in slot 1."""
    other = world.arrive(8, 10)
    world.read(10, 800)
    job = world.arrive(1, n)
    world.line(done(1, "cancel", 10))
    world.admitted(0, 11, 801, reused=10)
    assert other.slot == 0
    world.take_sent()
    world.line(Resume(0), Progress(64, n, 1.0, 1.0))
    return job


def test_an_admission_is_asked_for_its_own_slot_and_continues_there():
    world = two(3)
    long = reading_long(world)
    short = world.arrive(2, 200)
    assert world.take_sent() == [BYield(1)] and long.slot == 1
    world.line(Yielded(1, 128), done(0, "cancel", 400, prompt_read=128), Admitted(1, False))
    assert world.take_sent() == [BGen(2, 100, short.prompt)] and long.state is State.WAITING
    assert world.scheduler.slots.slots[1].held == long.prompt[:128]
    world.admitted(2, 200, 200)
    assert world.take_sent() == [BGen(1, 100, long.prompt)]


def test_equal_and_nearly_equal_lengths_never_give_way():
    world = two(4)
    reading_long(world, 400)
    world.arrive(2, 400)
    world.arrive(3, 201)
    assert not world.sent
    world.arrive(4, 200)
    assert world.sent == [BYield(1)]


def test_a_read_is_asked_once_whatever_comes_after():
    world = two(4)
    reading_long(world)
    for i in range(3):
        world.arrive(i + 2, 20)
        world.line(Progress(128 + 64 * i, 400, 1.0, 1.0))
    assert world.sent == [BYield(1)]


def test_a_read_is_not_asked_for_somebody_who_has_no_slot_to_go_to():
    world = two(2)
    reading_long(world)
    world.arrive(2, 20)
    world.line(Progress(128, 400, 1.0, 1.0))
    assert not world.sent
    world.line(SlotDone(0, 5, "stop", 1.0), Progress(192, 400, 1.0, 1.0))
    assert world.sent == [BYield(1)]


def test_a_read_of_one_token_is_not_asked():
    world = two(3)
    long = world.arrive(1, 400)
    world.line(Resume(399))
    world.arrive(2, 20)
    assert not any(isinstance(command, BYield) for command in world.sent) and long.slot is None


def test_the_slot_kept_for_a_read_that_did_not_give_way_is_free_when_the_read_ends():
    world = two()
    long = world.arrive(1, 400)
    world.line(Resume(0))
    world.arrive(2, 20)
    assert world.scheduler.slots.slots[0].use is Use.RESERVED
    world.line(Progress(400, 400, 1.0, 1.0), Reused(0))
    assert world.scheduler.slots.n_free == 2 and long.slot is None
    world.line(Token(100))
    assert world.sent[-1] == Stop()


def test_a_read_that_gave_way_goes_on_at_once_when_who_it_made_room_for_is_gone():
    world = two(3)
    long = world.arrive(1, 400)
    world.line(Resume(0))
    same, short = world.arrive(2, 400), world.arrive(3, 20)
    world.line(Progress(64, 400, 1.0, 1.0))
    world.leave(short)
    world.line(Yielded(0, 64), done(0, "cancel", 400, prompt_read=64))
    assert world.sent[-1] == BGen(0, 100, long.prompt) and same.state is State.WAITING


def test_a_read_that_gave_way_and_is_alone_again_goes_on_solo_and_frees_its_slot():
    world = two()
    long = world.arrive(1, 400)
    world.line(Resume(0))
    short = world.arrive(2, 20)
    world.line(Yielded(0, 64))
    world.leave(short)
    world.line(done(0, "cancel", 400, prompt_read=64))
    assert world.sent[-1] == Gen(100, long.prompt) and world.scheduler.slots.n_free == 2


def test_nobody_gives_way_a_third_time():
    world = two(4)
    long = reading_long(world)
    for i in range(2):
        world.arrive(i + 2, 20)
        assert world.take_sent()[-1] == BYield(1)
        world.line(Yielded(1, 128), done(0, "cancel", 400, prompt_read=64), Admitted(1, False))
        slot = world.take_sent()[-1].slot
        world.admitted(slot, 20, 200)
        world.line(SlotDone(slot, 1, "stop", 1.0))
        world.line(Resume(128), Progress(192, 400, 1.0, 1.0))
    world.take_sent()
    world.arrive(5, 20)
    world.line(Progress(256, 400, 1.0, 1.0))
    assert not world.sent and long.n_yields == 2


def test_a_yielded_line_that_nobody_asked_for_loses_no_request():
    world = two()
    job = world.arrive(1, 400)
    world.line(Resume(0), Yielded(0, 64), done(0, "cancel", 400))
    assert world.ends[job] == [done(0, "cancel", 400)] and world.scheduler.is_idle


def test_a_request_with_pictures_sends_its_file_every_time_and_is_never_asked_nor_taken_back():
    world = two(3)
    job = world.arrive(1, 400, pictures="/tmp/pictures")
    world.line(Resume(0), Progress(64, 400, 1.0, 1.0))
    other = world.arrive(2, 20, max_new=3)
    world.line(Progress(400, 400, 1.0, 1.0), Reused(0), Token(100), done(1, "cancel", 400))
    world.admitted(0, 401, 101)
    world.admitted(1, 20, 200)
    world.line(SlotDone(1, 1, "stop", 1.0), SlotToken(0, 102), SlotToken(0, 103))
    kinds = [type(command) for command in world.sent]
    assert kinds == [GenI, Stop, BGenI, BGen] and {c.embfile for c in world.sent if hasattr(c, "embfile")} == {
        "/tmp/pictures"
    }
    assert job.state is State.SLOT and other.state is State.ENDED


# --- back to the solo path


def test_a_request_left_alone_goes_back_with_prompt_and_output():
    world = two()
    a = left_alone(world)
    world.line(SlotToken(0, 103))
    assert world.take_sent() == [BStop(0)] and world.scheduler.holder is a
    world.line(SlotToken(0, 104), SlotDone(0, 3, "cancel", 1.0))
    assert world.take_sent() == [Gen(89, a.prompt + array("i", [100, 101, 102, 103, 104]))] and a.state is State.SOLO
    world.read(35, 105, reused=34)
    assert world.tokens(a) == [100, 101, 102, 103, 104, 105] and world.scheduler.slots.n_free == 2


@pytest.mark.parametrize("n_left, goes_back", [(32, True), (31, False)])
def test_going_back_for_a_few_tokens_is_not_worth_it(n_left, goes_back):
    world = two()
    left_alone(world, n_left)
    world.line(SlotToken(0, 103))
    assert (world.take_sent() == [BStop(0)]) is goes_back


def test_nobody_goes_back_when_it_is_switched_off_or_the_engine_cannot():
    for world in (World(Rules(returns_to_solo=False)).up(2), two(keeps_slots=False)):
        left_alone(world)
        world.line(SlotToken(0, 103), SlotToken(0, 104))
        assert not world.sent


def test_nobody_goes_back_while_another_waits_reads_decodes_or_is_being_stopped():
    world = two(3)
    a, b = both_in_slots(world)
    world.line(SlotToken(0, 103))
    assert not world.sent
    world.leave(b)
    world.line(SlotToken(0, 104))
    assert world.take_sent() == [BStop(1)]  # its slot is busy until BDONE
    c = world.arrive(3, 10)
    world.line(SlotDone(1, 2, "cancel", 1.0), SlotToken(0, 105))
    assert world.take_sent() == [BGen(2, 100, c.prompt)] and a.state is State.SLOT


def test_nobody_goes_back_a_third_time():
    world = two()
    a = left_alone(world)
    for turn in range(2):
        world.line(SlotToken(0, 110))
        assert world.take_sent() == [BStop(0)]
        world.line(SlotDone(0, 2, "cancel", 1.0))
        world.read(a.length, 111)
        b = world.arrive(50 + turn, 20)
        world.line(done(1, "cancel"))
        world.admitted(0, a.length, 112)
        world.leave(b)
        world.line(done(0, "cancel"), Admitted(b.slot, False))
        world.take_sent()
    world.line(SlotToken(0, 113), SlotToken(0, 114))
    assert not world.sent and a.n_returns == 2


def test_a_request_that_ends_in_its_slot_as_it_is_taken_back_is_over():
    world = two()
    a = left_alone(world)
    world.line(SlotToken(0, 103), SlotToken(0, 9), SlotDone(0, 3, "stop", 1.0))
    assert world.ends[a][0].finish == "stop" and world.scheduler.is_idle


def test_company_that_comes_while_a_request_goes_back_keeps_it_in_its_slot():
    world = two()
    a = left_alone(world)
    world.line(SlotToken(0, 103))
    b = world.arrive(3, 20)
    assert world.take_sent() == [BStop(0)]
    world.line(SlotDone(0, 2, "cancel", 1.0))
    assert world.take_sent() == [BGen(0, 90, a.prompt + array("i", [100, 101, 102, 103]))]
    world.admitted(0, 34, 104, reused=33)
    assert world.take_sent() == [BGen(1, 100, b.prompt)]


# --- one request to its client


def test_the_figures_of_all_legs_are_one_requests():
    world = two()
    a = world.arrive(1, 30, 100)
    world.read(30, 100, 101)
    world.arrive(2, 25)
    world.line(Done(2, 30, 10.0, 20.0, "cancel", 3, 4, 5, 6, 7, 8, 9, 1.5, 25, 10))
    world.read(32, 102, reused=31)
    world.line(Done(1, 32, 1.0, 2.0, "length", 1, 1, 31, 1, 1, 1, 1, 0.5, 1, 1), Admitted(0, True))
    world.admitted(1, 25, 200)
    world.line(SlotToken(0, 103), SlotToken(0, 9), SlotDone(0, 3, "stop", 30.0, 2, 3))
    assert world.ends[a] == [
        Done(5, 30, 11.0, 52.0, "stop", 6, 8, reused=5, hits=7, lookups=8, ram_blobs=9, file_blobs=10, file_mb=2.0,
             prompt_read=26, offloaded=11)
    ]  # fmt: skip
    assert world.heard[a][-1] == world.ends[a][0]


def test_later_reads_are_no_new_prompt_to_the_client():
    world = two()
    a = world.arrive(1, 30)
    world.read(30, 100)
    world.arrive(2, 25)
    world.line(done(1, "cancel", 30))
    heard = len(world.heard[a])
    world.read(31, reused=30)
    assert len(world.heard[a]) == heard
    world.line(Token(101))
    assert world.tokens(a) == [100, 101]


def test_the_progress_of_a_read_that_gave_way_goes_on_and_never_back():
    world = two(3)
    long = world.arrive(1, 400)
    world.line(Resume(10), Progress(64, 400, 5.0, 1.0))
    world.arrive(2, 20)
    world.line(
        Progress(128, 400, 9.0, 1.0), Yielded(0, 128), Done(0, 400, 9.0, 0.0, "cancel", prompt_read=118, reused=10)
    )
    world.admitted(1, 20, 200)
    world.line(Resume(0), Progress(64, 400, 1.0, 1.0), Progress(192, 400, 3.0, 1.0))  # the engine had lost its part
    shown = [(event.position, event.ms) for event in world.heard[long] if isinstance(event, Progress)]
    assert shown == [(64, 5.0), (128, 9.0), (192, 12.0)]
    assert [event for event in world.heard[long] if isinstance(event, Resume)] == [Resume(10)]
    world.line(Progress(400, 400, 9.0, 1.0), Reused(0), Token(100))
    world.line(Done(1, 400, 9.0, 1.0, "stop", prompt_read=400), Admitted(0, False))
    assert world.ends[long] == [Done(1, 400, 18.0, 1.0, "stop", reused=10, prompt_read=518)]


def test_a_person_sees_decoding_while_a_request_moves():
    world = two()
    a = world.arrive(1, 30)
    assert a.phase is Phase.READING
    world.read(30, 100)
    world.arrive(2, 25)
    world.line(done(1, "cancel", 30), Resume(0))
    assert a.phase is Phase.DECODING and a.is_reading and a.n_read == 30


# --- errors


def test_a_refused_admission_fails_alone_and_frees_its_slot():
    world = two(3)
    a, b = both_in_slots(world)
    c, d = world.arrive(3, 10), world.arrive(4, 10)
    world.line(Err("a token id is outside the vocabulary"))
    assert world.ends[c][0].status == 400 and world.take_sent() == [BGen(2, 100, c.prompt), BGen(2, 100, d.prompt)]
    world.line(SlotToken(0, 103), SlotToken(1, 201))
    assert world.tokens(a)[-1] == 103 and world.tokens(b)[-1] == 201


def test_an_error_while_only_slots_run_holds_back_the_next_request():
    world = two(3)
    both_in_slots(world)
    world.line(Err("verify batch: a CUDA error"))
    c = world.arrive(3, 10)
    assert c.state is State.WAITING and not world.sent and world.settles == 1
    world.apply(world.scheduler.settled())
    assert world.sent == [BGen(2, 100, c.prompt)]


def test_an_error_is_not_taken_for_the_answer_to_a_bstop():
    world = two()
    a = left_alone(world)
    world.line(SlotToken(0, 103), Err("the disk is full"))
    assert a.state is State.RETURNING


def test_a_slot_that_ends_with_an_error_fails_its_request_and_is_not_continued():
    world = two()
    a, b = both_in_slots(world)
    world.line(SlotDone(0, 3, "error", 1.0))
    assert isinstance(world.ends[a][0], Failed) and world.ends[a][0].status == 503 and b.state is State.SLOT
    assert not world.scheduler.slots.slots[0].held


def test_an_admission_that_cannot_go_on_is_an_error_and_no_short_answer():
    world = two()
    both_in_slots(world)
    world.line(SlotDone(1, 1, "stop", 1.0))
    c = world.arrive(3, 10)
    world.read(10, 300)
    world.line(done(1, "length", 10), Admitted(c.slot, False))
    assert isinstance(world.ends[c][0], Failed)


def test_lines_of_slots_that_nobody_has_are_ignored():
    world = two()
    a, _ = both_in_slots(world)
    world.line(SlotToken(5, 1), SlotDone(7, 1, "stop", 1.0), Admitted(1, True), SlotDone(1, 1, "stop", 1.0))
    world.line(SlotToken(1, 5), SlotDone(1, 1, "stop", 1.0))
    assert a.state is State.SLOT


def test_requests_that_continue_do_not_fill_the_queue():
    world = World(Rules(max_queue=1)).up(3)
    world.arrive(1, 400)
    world.line(Resume(0))
    world.arrive(2, 20)
    world.line(Yielded(0, 64), done(0, "cancel", 400))
    assert [job.has_run for job in world.scheduler.waiting] == [True]
    world.arrive(3, 20)
    with pytest.raises(Exception, match="max_queue is 1"):
        world.arrive(4, 20)


def test_every_state_is_on_the_page():
    page = PAGE.read_text()
    assert all(page.count(state.name) > 2 for state in State) and all(f"| {use.value} |" in page for use in Use)
