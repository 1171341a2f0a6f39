"""The real strata-engine with slots on a real pack: the transcripts and the conformance list of the protocol.

Every text is compared with what the same prompt says alone, read from its start, on an engine without slots.
"""

from __future__ import annotations

import re

import pytest

from strata.protocol.lines import (
    Admitted,
    Done,
    Err,
    Output,
    Progress,
    Resume,
    Reused,
    SlotDone,
    SlotToken,
    Token,
    Yielded,
)

ARGS = ("--max-context", "1024", "--prefill", "16", "--eos-ids", "none", "--short-read", "0")
DRAWN = "temperature=1.1 top_k=40 top_p=0.95 seed=17 penalty_last_n=16 penalty_repeat=1.3"
A, B, C = ([(7 * i + k) % 900 + 5 for i in range(n)] for k, n in ((1, 50), (2, 37), (3, 90)))
LONG = [(11 * i) % 900 + 5 for i in range(400)]


def ids(tokens: list[int]) -> str:
    return ",".join(map(str, tokens))


def text(outputs: list[Output]) -> list[int]:
    """Tokens of the request being worked on."""
    return [output.id for output in outputs if isinstance(output, Token)]


def said(outputs: list[Output], slot: int) -> list[int]:
    """Tokens of a slot behind its admission."""
    return [output.id for output in outputs if isinstance(output, SlotToken) and output.slot == slot]


def ends(outputs: list[Output], slot: int) -> list[SlotDone]:
    return [output for output in outputs if isinstance(output, SlotDone) and output.slot == slot]


@pytest.fixture(scope="module")
def alone(serve_pack):
    """alone(tokens, max_new, keys) -> the text of a cold prompt on an engine without slots."""
    engine = serve_pack(*ARGS, "--prompt-cache", "0")
    known: dict[tuple, list[int]] = {}

    def ask(tokens: list[int], max_new: int, keys: str = "") -> list[int]:
        key = (tuple(tokens), max_new, keys)
        if key not in known:
            known[key] = text(engine.ask(f"GEN {max_new} {keys} {ids(tokens)}"))
        return known[key]

    return ask


@pytest.fixture(scope="module")
def shared(serve_pack):
    """An engine with three slots, for tests that leave them free."""
    return serve_pack(*ARGS, "--batch", "3", env={"STRATA_TRACE": "1"})


@pytest.fixture(scope="module")
def plain(serve_pack):
    """An engine with three slots, which tests use that ask for prompts of their own and leave them free."""
    return serve_pack(*ARGS, "--batch", "3")


@pytest.fixture
def own(request) -> tuple[list[int], ...]:
    """A, B, C and LONG with other words at their beginnings: nobody has asked for them."""
    name = [*request.node.name.encode()]
    words = [5 + sum(name) % 900, 5 + sum(i * c for i, c in enumerate(name)) % 900]
    return tuple([*words, *tokens[2:]] for tokens in (A, B, C, LONG))


def admit(engine, slot: int, max_new: int, tokens: list[int], keys: str = "") -> list[Output]:
    engine.send(f"BGEN {slot} {max_new} {keys} {ids(tokens)}")
    return engine.until(Admitted, Err)


def until_done(engine, *slots: int) -> list[Output]:
    """Until each of the slots has ended."""
    outputs: list[Output] = []
    while not all(ends(outputs, slot) for slot in slots):
        outputs += engine.until(SlotDone)
    return outputs


def test_info_says_how_many_slots_run_and_that_they_are_caches(plain, serve_pack):
    assert [plain.info.values.get(key) for key in ("batch_slots", "slot_cache", "batch_groups")] == [3, 1, 1]
    assert plain.info.whole("window_rows") == 8
    many = serve_pack(*ARGS, "--batch", "9", "--prompt-cache", "0")
    assert (many.info.whole("batch_slots"), many.info.whole("slot_cache", 7)) == (8, 0)
    assert "9 slots asked" in many.log.read_text()
    for args in ((), ("--batch", "1"), ("--batch", "0")):
        engine = serve_pack(*ARGS, *args)
        assert "batch_slots" not in engine.info.values
        assert isinstance(engine.ask("BGEN 0 5 6")[-1], Err)


@pytest.mark.parametrize("keys", ["", DRAWN], ids=["greedy", "drawn"])
def test_slots_that_come_and_go_say_what_they_say_alone(plain, alone, own, keys):
    slots, (a, b, c, long) = plain, own
    first = admit(slots, 0, 60, a, keys)
    second = admit(slots, 1, 25, b, keys)
    third = admit(slots, 2, 40, c, keys)
    outputs = first + second + third
    slots.send("BSTOP 0")
    outputs += until_done(slots, 0)
    outputs += admit(slots, 0, 30, long[:100], keys)
    for slot in range(3):
        outputs += until_done(slots, slot) if len(ends(outputs, slot)) < 1 + (slot == 0) else []
    said_by_0 = said(outputs, 0)
    cancelled, finished = ends(outputs, 0)
    n = cancelled.generated - 1
    assert cancelled.finish == "cancel" and finished.finish == "length"
    assert text(first) + said_by_0[:n] == alone(a, 60, keys)[: n + 1]
    assert text(outputs)[3:] + said_by_0[n:] == alone(long[:100], 30, keys)
    assert text(second) + said(outputs, 1) == alone(b, 25, keys)
    assert text(third) + said(outputs, 2) == alone(c, 40, keys)


def test_the_transcript_of_two_requests_in_two_slots(plain, alone, own):
    """Protocol 14.2: a solo request moves into a slot, another joins it, the first goes back to the solo path."""
    slots, (a, b, *_) = plain, own
    whole = alone(a, 240)
    slots.send(f"GEN 240 {ids(a)}")
    outputs = slots.until(Token)
    slots.send("STOP")
    outputs += slots.until(Done)
    assert outputs[-1].finish == "cancel"
    out = text(outputs)
    assert out == whole[: len(out)]
    outputs = admit(slots, 0, 240 - len(out), a + out)
    assert outputs[0] == Resume(len(a) + len(out) - 1)
    assert outputs[-1] == Admitted(0, True)
    outputs += admit(slots, 1, 20, b) + until_done(slots, 1)
    assert (ends(outputs, 1)[0].finish, ends(outputs, 1)[0].generated) == ("length", 20)
    assert text(outputs)[1:] + said(outputs, 1) == alone(b, 20)
    slots.send("BSTOP 0")
    outputs += until_done(slots, 0)
    out += text(outputs)[:1] + said(outputs, 0)
    assert out == whole[: len(out)] and ends(outputs, 0)[0].finish == "cancel"
    outputs = slots.ask(f"GEN {240 - len(out)} {ids(a + out)}")
    assert outputs[0] == Resume(len(a) + len(out) - 1)
    assert out + text(outputs) == whole


@pytest.mark.parametrize("solo", [False, True], ids=["admission", "solo"])
def test_the_transcript_of_a_long_read_that_gives_way(plain, alone, own, solo):
    """Protocol 14.3."""
    slots, (_, b, _, long) = plain, own
    line = f"80 {ids(long)}"
    slots.send(f"GEN {line}" if solo else f"BGEN 0 {line}")
    outputs = slots.until(Progress)
    slots.send("BYIELD 0")
    outputs += slots.until(Done)
    yielded, done = outputs[-2:]
    assert isinstance(yielded, Yielded) and yielded.slot == 0 and 0 < yielded.tokens < 400 and not yielded.tokens % 16
    assert (done.finish, done.generated, done.prompt_read) == ("cancel", 0, yielded.tokens)
    if not solo:
        assert slots.next() == Admitted(0, False)
    short = admit(slots, 1, 20, b)
    rest = admit(slots, 0, 80, long)
    assert next(output for output in rest if isinstance(output, Resume)) == Resume(yielded.tokens)
    outputs = short + rest
    for slot in (0, 1):
        outputs += until_done(slots, slot) if not ends(outputs, slot) else []
    assert text(short) + said(outputs, 1) == alone(b, 20)
    assert text(rest) + said(outputs, 0) == alone(long, 80)


def test_a_byield_that_is_refused_changes_nothing(shared, alone):
    """Y1 to Y6 from outside; Y5 needs an engine of its own, Y4 pictures."""
    shared.send("BYIELD 0")
    outputs = admit(shared, 2, 900, A)
    shared.send(f"BGEN 0 20 {ids(LONG)}")
    outputs += shared.until(Progress)
    shared.send("BYIELD 2", "BYIELD 1", "BYIELD 3")
    outputs += shared.until(Admitted)
    assert not [output for output in outputs if isinstance(output, Yielded)]
    assert outputs[-1] == Admitted(0, True)
    log = shared.log.read_text()
    for why in ("no prompt is being read", "slot 2 decodes", "the prompt is read for slot 0", "there are 3 slots"):
        assert f"not taken: {why}" in log
    shared.send(f"BYIELD 0\nBSTOP 2\nBGEN 1 2 {ids(B[:17])}\nBYIELD 1")  # one token is left behind its first chunk
    outputs += until_done(shared, 0, 1)
    assert not [output for output in outputs if isinstance(output, Yielded)]
    assert text(outputs)[1:2] + said(outputs, 0) == alone(LONG, 20)
    assert re.search(r"admission to slot 0: 400 tokens, \d+ reused; read [\d.]+ ms in \d+ chunks", log)


def test_without_a_prompt_cache_a_read_does_not_give_way_and_nothing_is_continued(serve_pack, alone):
    engine = serve_pack(*ARGS, "--batch", "2", "--prompt-cache", "0")
    engine.send(f"BGEN 0 10 {ids(LONG)}")
    outputs = engine.until(Progress)
    engine.send("BYIELD 0")
    outputs += engine.until(Admitted) + until_done(engine, 0)
    assert text(outputs) + said(outputs, 0) == alone(LONG, 10)
    assert "not taken: --prompt-cache is 0" in engine.log.read_text()
    assert admit(engine, 0, 1, LONG + alone(LONG, 10))[0] == Resume(0)


def test_the_next_turn_continues_its_slot_with_and_without_the_reply_in_the_history(serve_pack, alone):
    turn = 3
    engine = serve_pack(*ARGS, "--batch", "2", "--turn-token", str(turn), "--prompt-cache-root", "0")
    prompt = [*A, turn, *B[:9]]
    outputs = admit(engine, 1, 20, prompt) + until_done(engine, 1)
    reply = text(outputs) + said(outputs, 1)
    other = admit(engine, 0, 5, C) + until_done(engine, 0)  # the live session is another one now
    assert text(other) + said(other, 0) == alone(C, 5)
    following = [*prompt, *reply, turn, 44, 45]
    outputs = admit(engine, 1, 10, following)
    assert outputs[0] == Resume(len(prompt) + len(reply) - 1)
    outputs += until_done(engine, 1)
    assert text(outputs) + said(outputs, 1) == alone(following, 10)
    shortened = [*A, turn, *B[:5], 99, turn, 46]
    outputs = admit(engine, 0, 10, shortened)
    assert outputs[0] == Resume(len(A))
    outputs += until_done(engine, 0)
    assert text(outputs) + said(outputs, 0) == alone(shortened, 10)


def test_the_transcripts_of_cancelled_requests(shared):
    """Protocol 14.4."""
    shared.send(f"GEN 100 {ids(LONG[5:])}")
    shared.until(Progress)
    shared.send("STOP")
    done = shared.until(Done)[-1]
    assert (done.finish, done.generated) == ("cancel", 0) and 0 < done.prompt_read < 395
    outputs = admit(shared, 0, 900, A) + admit(shared, 1, 900, B)
    shared.send("BSTOP 1")
    outputs += shared.until(SlotDone)
    assert (outputs[-1].slot, outputs[-1].finish) == (1, "cancel")
    assert outputs[-1].generated == 1 + len(said(outputs, 1))
    shared.send(f"BGEN 2 5 {ids(LONG[7:])}")
    outputs = shared.until(Progress)
    shared.send("STOP")
    outputs += shared.until(Admitted)
    assert [type(output) for output in outputs if not isinstance(output, SlotToken)][-2:] == [Done, Admitted]
    assert outputs[-1] == Admitted(2, False)
    assert admit(shared, 1, 5, C)[-1] == Admitted(1, True)
    shared.send("STOP", "BSTOP 0")
    outputs = until_done(shared, 0)
    outputs += until_done(shared, 1) if not ends(outputs, 1) else []
    assert ends(outputs, 1)[0].finish == "length"


def test_a_solo_request_beside_slots_is_read_between_their_windows_and_then_they_stand_still(shared, alone):
    outputs = admit(shared, 0, 600, A)
    solo = shared.ask(f"GEN 30 {ids(LONG[9:])}")
    kinds = [type(output) for output in solo]
    read = kinds.index(Reused)
    assert SlotToken in kinds[kinds.index(Progress) : read]
    assert SlotToken not in kinds[read:]
    assert text(solo) == alone(LONG[9:], 30)
    shared.send("BSTOP 0")
    rest = until_done(shared, 0)
    got = text(outputs) + said(outputs + solo + rest, 0)
    assert got == alone(A, len(got))


def test_the_context_rule_holds_for_admissions_to_the_token(shared):
    n = 1024 - 8 - len(A)
    assert isinstance(admit(shared, 0, n + 1, A)[-1], Err)
    assert admit(shared, 0, n, A)[-1] == Admitted(0, True)
    shared.send("BSTOP 0")
    until_done(shared, 0)


def test_an_err_comes_without_a_done_or_badm_and_the_next_command_works(shared):
    for line in ("BGEN 3 5 6", "BGEN 0 0 5", "BGEN 0 5 1024", "BGEN 0 1020 5,6", "BGEN 0 5", "BGENI 0 5 f 6"):
        shared.send(line)
        assert isinstance(shared.next(), Err), line
    outputs = admit(shared, 0, 2, B)
    assert outputs[-1] == Admitted(0, True)
    until_done(shared, 0)


@pytest.mark.parametrize("state", ["reading", "decoding"])
def test_end_of_input_ends_the_process_when_read_and_slots_are_done(serve_pack, state):
    engine = serve_pack(*ARGS, "--batch", "2")
    outputs = admit(engine, 0, 120, A)
    if state == "reading":
        engine.send(f"BGEN 1 20 {ids(LONG)}")
        outputs += engine.until(Progress)
    engine.close_input()
    outputs += engine.rest()
    assert ends(outputs, 0)[0].generated == 120
    assert state == "decoding" or ends(outputs, 1)[0].generated == 20
    assert engine.exit_code() == 0


def test_quit_drops_running_slots(serve_pack):
    slots = serve_pack(*ARGS, "--batch", "3")
    admit(slots, 0, 900, A)
    slots.send("QUIT")
    assert not ends(slots.rest(), 0)
    assert slots.exit_code() == 0
