"""The head alias: when it is refused, and that the head comes back."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.engine.device.arena import MIB
from strata.engine.memory.alias import AliasConditions, refusal, refused, require_alias
from strata.engine.memory.published import exchanges, trial_shrink
from strata.engine.options import Options, Refused

GOOD = AliasConditions(serve=True, short_read=0, mtp=True)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"serve": False}, "needs --serve: head and prompt buffers change places between a request's read"),
        ({"cards": 2}, "works on one card"),
        ({"stages": 2}, "works on one card"),
        ({"helpers": True}, "works on one card"),
        ({"batch": 2}, "excludes --batch 2: slots decode while a prompt is read and need the head"),
        ({"pipeline_windows": 1}, "excludes --pipeline-windows 1: windows in flight hold the head"),
        ({"short_read": 64}, "excludes --short-read 64: short reads run through decode windows"),
        ({"expert_cache": 2}, "excludes --expert-cache 2: the plan sizes the cache itself"),
        ({"mtp": False}, "needs --mtp: the draft layer keeps a copy"),
        ({"head": False}, "needs a native output head"),
    ],
)
def test_a_plan_that_would_lose_the_head_is_refused_with_its_reason_and_a_remedy(changed, reason):
    text = refusal(replace(GOOD, **changed))
    assert text is not None and text.startswith(f"--prefill-head-alias: {reason}")
    assert "; " in text and "\n" not in text and len(text) < 200


@pytest.mark.parametrize("changed", [{}, {"expert_cache": 0}, {"expert_cache": 1}, {"batch": 1}, {"batch": 0}])
def test_what_the_table_allows_is_not_refused(changed):
    assert refusal(replace(GOOD, **changed)) is None


ASKED = Options(pack="m", serve=True, short_read=0, mtp="", prefill_head_alias=True)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"serve": False}, "needs --serve"),
        ({"batch": 2}, "excludes --batch 2"),
        ({"short_read": 64}, "excludes --short-read 64"),
        ({"expert_cache": 2}, "excludes --expert-cache 2"),
        ({"mtp": None}, "needs --mtp"),
    ],
)
def test_an_engine_that_would_lose_the_head_does_not_start(changed, reason):
    asked = msgspec.structs.replace(ASKED, **changed)
    with pytest.raises(Refused, match=f"^--prefill-head-alias: {reason}"):
        require_alias(asked, head=True)
    require_alias(msgspec.structs.replace(asked, prefill_head_alias=False), head=True)


def test_a_head_alone_is_lent_so_neither_a_profile_nor_slots_to_borrow_are_asked_for():
    for no_prefill_borrow in (False, True):
        assert refused(msgspec.structs.replace(ASKED, no_prefill_borrow=no_prefill_borrow), head=True, mtp=True) is None
    require_alias(ASKED, head=True)
    with pytest.raises(Refused, match="needs a native output head"):
        require_alias(ASKED, head=False)


def test_the_default_of_short_reads_is_among_the_refusals():
    assert "--short-read 64" in str(refusal(AliasConditions(serve=True, mtp=True)))


def test_the_first_reason_of_the_table_is_the_one_that_is_said():
    assert "--serve" in str(refusal(AliasConditions(cards=2, batch=4)))
    assert "--batch 4" in str(refusal(AliasConditions(serve=True, batch=4, short_read=64)))


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(1, 5000))
def test_the_head_fits_after_the_trial_has_shrunk_the_cache(head, free, blob_kib):
    blob = blob_kib * 1024
    n = trial_shrink(head * MIB, free * MIB, blob)
    assert free * MIB + n * blob >= head * MIB
    assert n == 0 or free * MIB + (n - 1) * blob < head * MIB


def test_a_head_that_the_reserve_cannot_take_back_stays_where_it_is():
    assert exchanges(417 * MIB, 590 * MIB)
    assert exchanges(417 * MIB, 417 * MIB)
    assert not exchanges(417 * MIB, 416 * MIB)
