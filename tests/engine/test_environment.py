"""STRATA_* variables: the switch rule, and that nothing one sets is passed over in silence."""

from __future__ import annotations

import pytest

from strata.engine.environment import (
    ELSEWHERE,
    HERE,
    NO_EFFECT_SWITCHES,
    NO_EFFECT_VALUES,
    OF_CARD,
    SO_ANYWAY,
    decode_share,
    is_on,
    notes,
)
from strata.engine.flags import MAX_CHUNK

SEEDS = """
ADMIT_SHORT_FIRST ADMIT_MAX_WAIT_S ADMIT_MERGE_FIRST ARENA_PIN_GIB ARENA_REGISTER BATCH_ATTN_ROWS BATCH_GDN_GROUPS
BATCH_DECODE_SHARE BATCH_YIELD_CHUNKS BATCH_GROUPS_NV_SERIAL DEFAULTS BATCH_MTP BATCH_MTP_SERIAL BATCH_SELF_COMMIT
CKPT_POOL CKPT_THREADS DBG_GDN FOUR_CARD_PROFILE FS_SLOTS HANDOFF_PIPE IO_PREFETCH IQ_MT_MIN KEY MMQ_DIRECT
MMQ_GROUP_SORT PARALLEL_SOLO PIPED_READ_PIECE PIPED_DECODE_MAX_MS PIPED_DECODE_MIN_MS PIPED_CONCURRENT
PIPED_CONCURRENT_PRIO PIPE_ADAPT_EVERY PIPE_BYIELD_NODRAIN PIPED_MTP PREFILL_HELP PREFILL_OWN_AUTO SPLIT_MTP_BATCH
QSA_SLOTS RESIDENT_HEADROOM_GIB SLOT_COPY_DIRECT SLOT_COPY_BATCHSYNC SLOT_CKPT_MOVE STAGE_TRIM TEST_BELL_SLEEP_US TRACE
"""


def test_all_variables_of_the_specification_are_known():
    seeds = SEEDS.split()
    assert len(seeds) == 45
    known = {*HERE, *SO_ANYWAY, *NO_EFFECT_SWITCHES, *NO_EFFECT_VALUES, *ELSEWHERE}
    assert [name for name in seeds if f"STRATA_{name}" not in known] == []


def test_no_variable_is_in_two_lists():
    lists = [set(HERE), set(SO_ANYWAY), set(NO_EFFECT_SWITCHES), set(NO_EFFECT_VALUES), set(ELSEWHERE)]
    assert sum(map(len, lists)) == len(set().union(*lists))


@pytest.mark.parametrize(
    ("text", "on"),
    [(None, False), ("", False), ("0", False), ("00", False), ("1", True), ("7", True), ("-1", True), ("yes", False)],
)
def test_a_switch_is_on_with_any_other_whole_number_only(text, on):
    assert is_on(text) is on


def test_a_variable_without_a_counterpart_is_said_once_and_not_refused():
    assert notes({"STRATA_IO_PREFETCH": "1", "STRATA_QSA_SLOTS": "1", "STRATA_WATCHDOG_S": "30"}) == [
        "STRATA_IO_PREFETCH has no effect here",
        "STRATA_QSA_SLOTS asks for what is done here anyway",
        "STRATA_WATCHDOG_S has no effect here",
    ]


def test_a_ceiling_that_is_none_here_says_why():
    (line,) = notes({"STRATA_PREFILL_AUTO_MAX": "16384"})
    assert line.startswith("STRATA_PREFILL_AUTO_MAX has no effect here: no prompt chunk is longer than 8192")
    assert MAX_CHUNK == 8192


def test_what_only_a_card_obeys_is_said_where_there_is_none():
    assert set(HERE) > OF_CARD
    given = {"STRATA_PREFILL_RING": "64", "STRATA_CARD_FORMS": "0", "STRATA_TRACE": "1"}
    assert notes(given) == []
    assert notes(given, card=False) == [
        "STRATA_CARD_FORMS has no effect without --device cuda",
        "STRATA_PREFILL_RING has no effect without --device cuda",
    ]


def test_a_switch_with_text_is_taken_as_off_and_said():
    assert notes({"STRATA_DEBUG": "on"}) == ["STRATA_DEBUG is a switch and its value is no whole number: taken as off"]


def test_a_misspelled_variable_is_said():
    assert notes({"STRATA_DEBUGG": "1"}) == ["STRATA_DEBUGG is no variable that this engine knows"]


def test_variables_of_the_server_and_empty_ones_are_no_news():
    assert (
        notes(
            {"STRATA_API_KEY": "x", "STRATA_TRACE": "1", "STRATA_IO_PREFETCH": "", "PATH": "/bin", "STRATA_DEBUG": "1"}
        )
        == []
    )


@pytest.mark.parametrize(
    ("text", "share"),
    [(None, 0.5), ("", 0.5), ("0", 0.0), ("0.25", 0.25), ("2", 2.0), ("-1", 0.5), ("much", 0.5), ("101", 0.5)],
)
def test_a_share_that_is_no_number_of_its_range_is_the_default_and_said(text, share):
    assert decode_share(text) == share
    said = notes({"STRATA_BATCH_DECODE_SHARE": text or ""})
    assert bool(said) == (text in ("-1", "much", "101"))


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("PREFILL_LEND_PCT", {"1": False, "90": False, "0": True, "101": True, "most": True}),
        ("EXPERT_CACHE_HEADROOM", {"0": False, "0.05": False, "1": True, "-0.1": True}),
        ("PREFILL_RING", {"2": False, "96": False, "1": True, "4097": True}),
        ("PREFILL_STREAM_MIN", {"33": False, "1024": False, "32": True, "long": True}),
        ("RESIDENT_HEADROOM_GIB", {"0": False, "4.75": False, "-1": True, "1e99": True, "4 GiB": True}),
        ("ARENA_PIN_GIB", {"0": False, "20": False, "auto": False, " auto ": False, "-3": True, "all": True}),
    ],
)
def test_a_number_outside_of_its_range_is_said_and_no_other(name, texts):
    for text, said in texts.items():
        lines = notes({f"STRATA_{name}": text})
        assert bool(lines) == said, text
        assert not said or lines[0].startswith(f"STRATA_{name} is no number from ")
