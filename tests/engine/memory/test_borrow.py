"""Buffers in borrowed slots hold every read that they are for, and short reads take what they need."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.engine.memory.borrow import SHORT, Buffers, own_bytes
from strata.engine.memory.price import MIXER_ROWS, Price, prompt_shape
from strata.engine.memory.prompt import GRID
from strata.engine.pack import open_pack

RING, STREAM_MIN, MORE = 142 << 20, 1024, 30 << 20


@pytest.fixture(scope="module", params=[4096, 262_144])
def price(request, full_pack):
    pack = open_pack(full_pack)
    types = {name: tensor.type for name, tensor in pack.items()}
    return Price(prompt_shape(pack.spec, types, request.param), MIXER_ROWS)


@pytest.fixture(scope="module")
def buffers(price):
    return Buffers(price, 8192, RING, STREAM_MIN, MORE)


@settings(max_examples=300)
@given(rows=st.integers(1, 8192))
def test_a_read_of_any_length_fits_the_parts_of_its_step(price, buffers, rows):
    whole, work = price.parts(rows)
    parts = buffers.parts(rows)
    assert whole + MORE <= parts.whole and work <= parts.work
    assert parts.ring == (RING if parts == buffers.parts(STREAM_MIN) or rows > STREAM_MIN else 0)
    assert buffers(rows) == parts.n_bytes and parts.n_bytes % 256 == 0


@given(one=st.integers(1, 8192), other=st.integers(1, 8192))
def test_a_shorter_read_borrows_no_more(buffers, one, other):
    assert (buffers(one) <= buffers(other)) or one > other


def test_a_read_of_few_rows_borrows_far_less_than_a_whole_step(buffers):
    steps = [buffers(rows) for rows in (*SHORT, GRID, 2 * GRID)]
    assert steps == sorted(set(steps)), "every step takes more than the one before"
    assert buffers(SHORT[0]) < buffers(GRID) // 2


def test_rows_beyond_the_longest_chunk_have_what_that_has(price):
    short = Buffers(price, 1000, RING, STREAM_MIN)
    assert short(1000) == short(8192) and short.parts(1000).ring == 0


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_windows_and_short_reads_fit_memory_of_their_own(price, rows):
    n_bytes = own_bytes(price, rows, MORE)
    assert n_bytes >= price(rows) and n_bytes >= sum(price.parts(rows)) + MORE
    assert n_bytes < price.windows + MORE + (64 << 20)
