"""The model of an engine with slots: right transcripts pass, and every kind of wrong line is noticed.

A transcript is written as in the protocol's page: `> command`, `< line`. Ids of a prompt may be `n*id`.
"""

from __future__ import annotations

import re

import pytest

from strata.bench.slot_model import Limits, ProtocolBroken, Request, SlotModel
from strata.protocol.lines import BGen, BStop, BYield, Err, Gen, Stop, decode_command, decode_output

LIMITS = Limits(context=64, vocab=100, slots=2, chunk=4, end_ids={9})


def done(generated: int, prompt: int, finish: str, reused: int, read: int) -> str:
    return f"< DONE {generated} {prompt} 1.0 1.0 {finish} 0 0 {reused} 0 0 0 0 0.0 {read} 0"


def play(transcript: str, limits: Limits = LIMITS) -> SlotModel:
    model = SlotModel(limits)
    for row in filter(str.strip, transcript.splitlines()):
        text = re.sub(r"(\d+)\*(\d+)", lambda m: ",".join([m[2]] * int(m[1])), row.strip()[2:])
        if row.strip().startswith("<"):
            line = decode_output(text)
            assert line is not None
            model.received(line)
            continue
        command = decode_command(text) if not text.startswith("?") else None
        match command:
            case Gen():
                model.send(Request(tuple(command.ids), command.max_new, command.keys, None))
            case BGen():
                model.send(Request(tuple(command.ids), command.max_new, command.keys, command.slot))
            case Stop():
                model.stop()
            case BStop():
                model.slot_stop(command.slot)
            case BYield():
                model.give_way(command.slot)
            case _:
                model.send_other(Err)
    return model


SOLO = f"""
> GEN 3 6*5
< RESUME 0
< PP 4 6 1.0 1.0
< PP 6 6 1.0 1.0
< REUSED 0
< T 7
< T 8
< T 7
{done(3, 6, "length", 0, 6)}
"""
ADMIT = f"""
> BGEN 0 4 3*5
< RESUME 0
< PP 3 3 1.0 1.0
< REUSED 0
< T 7
{done(1, 3, "length", 0, 3)}
< BADM 0 1
"""
TWO = f"""
{ADMIT}
> BGEN 1 2 2*6
< RESUME 0
< BT 0 8
< PP 2 2 1.0 1.0
< BT 0 8
< REUSED 0
< T 4
{done(1, 2, "length", 0, 2)}
< BT 0 8
< BADM 1 1
< BDONE 0 4 length 3.0
< BT 1 5
< BDONE 1 2 length 3.0
"""
PROMOTED = f"""
> GEN 5 2*5
< RESUME 0
< PP 2 2 1.0 1.0
< REUSED 0
< T 7
> STOP
< T 8
{done(2, 2, "cancel", 0, 2)}
> BGEN 1 3 5,5,7,8
< RESUME 3
< PP 4 4 1.0 1.0
< REUSED 3
< T 6
{done(1, 4, "length", 3, 1)}
< BADM 1 1
> BSTOP 1
< BT 1 6
< BDONE 1 2 cancel 1.0
> GEN 1 5,5,7,8,6,6
< RESUME 5
< PP 6 6 1.0 1.0
< REUSED 5
< T 9
{done(1, 6, "stop", 5, 1)}
"""
GIVES_WAY = f"""
> BGEN 0 4 14*5
< RESUME 0
< PP 4 14 1.0 1.0
> BYIELD 0
< PP 8 14 1.0 1.0
< YIELDED 0 8
{done(0, 14, "cancel", 0, 8)}
< BADM 0 0
> BGEN 0 4 14*5
< RESUME 8
< PP 12 14 1.0 1.0
< PP 14 14 1.0 1.0
< REUSED 8
< T 9
{done(1, 14, "stop", 8, 6)}
< BADM 0 0
"""
REFUSED = """
> GEN 60 5
< ERR prompt (1 tokens) + max_new (60) exceeds the context (64)
> ? nonsense
> GEN 1 100
< ERR expected: ..
< ERR a token id is outside the vocabulary
> BGEN 2 2 5
< ERR BGEN: no such free slot (--batch 2) or a bad max_new
"""
CANCELLED_READ = f"""
> GEN 3 6*5
< RESUME 0
> STOP
< PP 4 6 1.0 1.0
{done(0, 6, "cancel", 0, 4)}
"""
ONE_TOKEN = f"""
> BGEN 1 1 5
< RESUME 0
< PP 1 1 1.0 1.0
< REUSED 0
< T 7
{done(1, 1, "length", 0, 1)}
< BADM 1 0
"""
TOLD = TWO.replace("BADM 0 1\n", "BADM 0 1\n< INFO hits=1\n") + "< INFO hits=2 parked=1\n" + SOLO + "< INFO hits=3\n"
RIGHT = {
    "counters behind ends": TOLD,
    "solo": SOLO,
    "two slots": TWO,
    "promoted and back": PROMOTED,
    "gives way": GIVES_WAY,
    "refusals in order": REFUSED,
    "cancelled read": CANCELLED_READ,
    "one token": ONE_TOKEN,
}


@pytest.mark.parametrize("transcript", RIGHT.values(), ids=RIGHT)
def test_what_the_protocol_allows_passes_and_leaves_nothing_open(transcript):
    assert play(transcript).at_rest


WRONG = {
    "a token before the prompt is read": (SOLO, "< PP 6 6 1.0 1.0\n", "< T 7\n"),
    "a prompt that is not read to its end": (SOLO, "< PP 6 6 1.0 1.0\n", ""),
    "a chunk that is too long": (SOLO, "< PP 4 6 1.0 1.0\n", ""),
    "progress that stands still": (SOLO, "< PP 6 6", "< PP 4 6"),
    "a reuse of the whole prompt": (SOLO, "< RESUME 0", "< RESUME 6"),
    "two different reuses": (SOLO, "< REUSED 0", "< REUSED 1"),
    "a token too few": (SOLO, "< T 8\n", ""),
    "a token too many": (SOLO, "< T 8\n", "< T 8\n< T 8\n"),
    "a token after the end token": (SOLO, "< T 8", "< T 9"),
    "a stop without an end token": (SOLO, "length", "stop"),
    "a cancel that nobody asked for": (SOLO, "length", "cancel"),
    "a wrong count of read tokens": (SOLO, "0.0 6 0", "0.0 5 0"),
    "a slot's token on the solo path": (SOLO, "< T 8", "< BT 0 8"),
    "no DONE before BADM": (ADMIT, done(1, 3, "length", 0, 3), "< PP 3 3 1.0 1.0"),
    "an admission of another slot": (ADMIT, "< BADM 0 1", "< BADM 1 1"),
    "an admission that ends although it may go on": (ADMIT, "< BADM 0 1", "< BADM 0 0"),
    "a token before the admission": (TWO, "< BADM 1 1\n", "< BT 1 5\n< BADM 1 1\n"),
    "a token after BDONE": (TWO, "< BDONE 0 4 length 3.0", "< BDONE 0 4 length 3.0\n< BT 0 8"),
    "a slot's token too many": (TWO, "< BDONE 0 4 length", "< BT 0 8\n< BDONE 0 5 length"),
    "a slot's count without the admission's token": (TWO, "< BDONE 1 2", "< BDONE 1 1"),
    "a slot's cancel that nobody asked for": (TWO, "< BDONE 0 4 length", "< BDONE 0 4 cancel"),
    "a slot out of range": (TWO, "< BT 1 5", "< BT 2 5"),
    "nothing held after a cancel": (PROMOTED, "< RESUME 3", "< RESUME 2"),
    "nothing held after a slot": (PROMOTED, "< RESUME 5", "< RESUME 0"),
    "no way given": (GIVES_WAY, "> BYIELD 0\n", ""),
    "way given to another slot": (GIVES_WAY, "< YIELDED 0 8", "< YIELDED 1 8"),
    "way given with a wrong count": (GIVES_WAY, "< YIELDED 0 8", "< YIELDED 0 4"),
    "way given near the end": (GIVES_WAY, "< YIELDED 0 8", "< PP 12 14 1.0 1.0\n< YIELDED 0 12"),
    "a line between YIELDED and DONE": (GIVES_WAY, "< YIELDED 0 8\n", "< YIELDED 0 8\n< PP 10 14 1.0 1.0\n"),
    "a part read again": (GIVES_WAY, "< RESUME 8", "< RESUME 4"),
    "a request served that must be refused": (REFUSED, "< ERR a token id is outside the vocabulary", "< RESUME 0"),
    "a good request refused": (SOLO, "< RESUME 0", "< ERR bad request: ids"),
    "an answer out of order": (REFUSED, "< ERR expected: ..\n", "< RESUME 0\n"),
    "an ERR that nobody asked for": (SOLO, "< T 8", "< ERR expected: .."),
    "a fatal ERR": (REFUSED, "< ERR expected: ..", "< ERR fatal: out of memory"),
    "a token read after a cancel that was not sent": (CANCELLED_READ, "> STOP\n", ""),
    "counters inside a request": (SOLO, "< T 8", "< INFO hits=1\n< T 8"),
    "counters between DONE and BADM": (ADMIT, "< BADM 0 1", "< INFO hits=1\n< BADM 0 1"),
    "counters between YIELDED and DONE": (GIVES_WAY, "< YIELDED 0 8\n", "< YIELDED 0 8\n< INFO hits=1\n"),
    "counters told twice": (TOLD, "< INFO hits=1\n", "< INFO hits=1\n< INFO hits=2\n"),
    "one token goes on": (ONE_TOKEN, "< BADM 1 0", "< BADM 1 1"),
}


@pytest.mark.parametrize(("transcript", "old", "new"), WRONG.values(), ids=WRONG)
def test_a_line_out_of_place_is_noticed(transcript, old, new):
    assert old in transcript
    with pytest.raises(ProtocolBroken):
        play(transcript.replace(old, new, 1))


def test_a_wrong_token_is_noticed_when_it_comes():
    model = SlotModel(LIMITS)
    model.send(Request((5,), 3, decode_command("GEN 1 5").keys, None, wanted=[7, 8, 7]))
    for line in ("RESUME 0", "PP 1 1 1.0 1.0", "REUSED 0", "T 7"):
        model.received(decode_output(line))
    with pytest.raises(ProtocolBroken, match="token 1"):
        model.received(decode_output("T 7"))


def test_slots_stand_still_while_a_solo_request_decodes_but_may_be_stopped():
    rows = f"{ADMIT}> GEN 2 6\n< RESUME 0\n< BT 0 8\n< PP 1 1 1.0 1.0\n< REUSED 0\n"
    play(rows + "> BSTOP 0\n< BDONE 0 2 cancel 1.0\n")
    with pytest.raises(ProtocolBroken, match="stand still"):
        play(rows + "< BT 0 8\n")


def test_a_slot_that_was_free_only_later_may_be_refused_and_may_be_served():
    sent = f"{ADMIT}> BGEN 0 2 6\n"
    play(sent + "< ERR BGEN: no such free slot (--batch 2) or a bad max_new\n")
    play(sent + "< BT 0 8\n< BT 0 8\n< BT 0 8\n< BDONE 0 4 length 1.0\n< RESUME 0\n")
    with pytest.raises(ProtocolBroken, match="slot 0 decodes"):
        play(sent + "< RESUME 0\n")


def test_without_a_cache_nothing_has_to_be_held_and_no_read_gives_way():
    cold = Limits(context=64, vocab=100, slots=2, chunk=4, keeps=False)
    play(PROMOTED.replace("< RESUME 3", "< RESUME 2").split("< PP 4 4")[0], cold)
    with pytest.raises(ProtocolBroken, match="give way"):
        play(GIVES_WAY, cold)
