"""Profiles of hot experts: a file that lies must not place an expert that does not exist."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.engine.memory.profile import Profile, ProfileError, decode, encode, read_profile

GOOD = Profile(4, 8, 10, ((3, 7), (0, 0), (2, 5)))


def test_the_format_is_the_published_one():
    head = b"STRP" + struct.pack("<5I", 1, 4, 8, 10, 3)
    assert encode(GOOD) == head + struct.pack("<6H", 3, 7, 0, 0, 2, 5)


@given(st.data())
def test_a_profile_comes_back_as_it_was(data):
    pairs = data.draw(st.lists(st.tuples(st.integers(0, 47), st.integers(0, 511)), unique=True, max_size=60))
    profile = Profile(48, 512, data.draw(st.integers(0, 2**32 - 1)), tuple(pairs))
    assert decode(encode(profile), 48, 512) == profile


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "is no expert profile"),
        (b"GGUF" + bytes(20), "is no expert profile"),
        (encode(GOOD)[:20], "is no expert profile"),
        (encode(GOOD)[:-1], "names 3 pairs in 11 bytes"),
        (encode(GOOD) + b"x", "names 3 pairs in 13 bytes"),
        (b"STRP" + struct.pack("<5I", 2, 4, 8, 10, 0), "is of version 2; 1 is read"),
        (encode(Profile(5, 8, 1, ())), "is for 5 layers of 8 experts, the model has 4 of 8"),
        (encode(Profile(4, 8, 1, ((4, 0),))), "names a pair that the model does not have"),
        (encode(Profile(4, 8, 1, ((0, 8),))), "names a pair that the model does not have"),
        (encode(Profile(4, 8, 1, ((1, 1), (1, 1)))), "names a pair twice"),
        (b"STRP" + struct.pack("<5I", 1, 4, 8, 10, 2**32 - 1), "names 4294967295 pairs in 0 bytes"),
    ],
)
def test_a_broken_profile_is_refused_with_what_is_wrong(raw, reason, tmp_path):
    with pytest.raises(ProfileError) as refused:
        decode(raw, 4, 8)
    assert str(refused.value) == reason
    path = tmp_path / "hot.strp"
    path.write_bytes(raw)
    with pytest.raises(ProfileError, match=r"hot\.strp"):
        read_profile(path, 4, 8)


def test_a_profile_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ProfileError, match=r"none\.strp: No such file"):
        read_profile(tmp_path / "none.strp", 4, 8)


@given(st.binary(max_size=80))
def test_no_bytes_break_the_reader(raw):
    try:
        assert decode(b"STRP" + raw, 4, 8).layers == 4
    except ProfileError as error:
        assert "\n" not in str(error)
