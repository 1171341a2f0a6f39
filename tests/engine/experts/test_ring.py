"""Products never read a buffer of the ring that is being overwritten, and never one whose bytes have not come."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.engine.experts.ring import BUFFERS, FEW, Ring, Round, pieces, ring_bytes

SIZE = 256
"""Bytes of an expert."""

LAYERS = st.lists(st.integers(0, 7), min_size=1, max_size=5)
"""Missing experts of each layer."""


def ring_of(driver, layers: list[int], experts: int) -> tuple[Ring, list[range], list[np.ndarray]]:
    """A ring, the rounds of each layer, and what RAM holds of it."""
    ring = Ring(driver, driver.allocate(ring_bytes(experts, SIZE)))
    numbers, ram = [], []
    for layer, n in enumerate(layers):
        ram.append(np.repeat(np.arange(n, dtype=np.uint8) + 16 * layer + 1, SIZE))
        rounds, first = [], 0
        for part in pieces(range(n), SIZE, ring.room):
            source = ram[-1][first * SIZE : (first + len(part)) * SIZE]
            rounds.append(Round(source, ("gate", "up", tuple(part))))  # what stands in for banks says which experts
            first += len(part)
        numbers.append(ring.add(rounds))
    return ring, numbers, ram


def read_layer(driver, ring: Ring, numbers: range, seen: list) -> None:
    """Queue two products a round that look at the buffer."""
    for number, banks in zip(numbers, ring.take(numbers), strict=True):
        buffer, n = ring.buffer_of(number), len(banks[2]) * SIZE
        for _ in range(2):
            driver.add(lambda b=buffer, n=n, number=number: seen.append((number, bytes(b[:n]))))


@settings(deadline=None, max_examples=200)
@given(
    layers=LAYERS,
    experts=st.integers(1, 9),
    passes=st.lists(st.booleans(), min_size=1, max_size=3),
    eager=st.booleans(),
    waits=st.booleans(),
)
def test_products_see_the_bytes_of_their_round_however_late_or_early_copies_run(
    new_driver, layers, experts, passes, eager, waits
):
    """passes: whether each says that another follows."""
    driver = new_driver(eager)
    ring, numbers, ram = ring_of(driver, layers, experts)
    seen: list[tuple[int, bytes]] = []
    for ring.goes_on in passes:
        for each in numbers:
            read_layer(driver, ring, each, seen)
            if waits:
                driver.synchronize()
    driver.synchronize()
    wanted = [bytes(ring._rounds[number].source) for each in numbers for number in each for _ in range(2)]
    assert [content for _, content in seen] == wanted * len(passes)
    assert b"".join(wanted[::2]) == b"".join(map(bytes, ram)), "every missing expert comes once"


@pytest.mark.parametrize("eager", [False, True])
def test_bytes_that_came_before_ram_was_filled_are_copied_again(new_driver, eager):
    driver = new_driver(eager)
    ring, numbers, ram = ring_of(driver, [1], 2)
    seen: list[tuple[int, bytes]] = []
    read_layer(driver, ring, numbers[0], seen)
    driver.synchronize()
    ram[0][:] = 77
    ring.forget()
    read_layer(driver, ring, numbers[0], seen)
    driver.synchronize()
    assert seen[-1][1] == bytes([77]) * SIZE


@pytest.mark.parametrize("eager", [False, True])
def test_copies_come_behind_the_swap_that_was_queued_before_them(new_driver, eager):
    driver = new_driver(eager)
    ring, numbers, ram = ring_of(driver, [1, 1], 2)
    seen: list[tuple[int, bytes]] = []
    for each in numbers:
        read_layer(driver, ring, each, seen)
    driver.synchronize()
    for each in ram:
        driver.add(lambda each=each: each.fill(77))
    ring.forget()
    for each in numbers:
        read_layer(driver, ring, each, seen)
    driver.synchronize()
    assert {content for _, content in seen[4:]} == {bytes([77]) * SIZE}


def test_rounds_that_are_still_there_are_not_copied_again(new_driver):
    driver = new_driver(True)
    ring, numbers, ram = ring_of(driver, [1, 1], 2)
    seen: list[tuple[int, bytes]] = []
    for _ in range(2):
        for each in numbers:
            read_layer(driver, ring, each, seen)
        driver.synchronize()
        for each in ram:
            each[:] = 99  # would be seen if it were copied
    assert 99 not in {content[0] for _, content in seen}


@settings(deadline=None, max_examples=100)
@given(layers=LAYERS, experts=st.integers(1, 9), passes=st.lists(st.booleans(), max_size=3), eager=st.booleans())
def test_no_copy_for_a_pass_that_never_came_lands_in_what_has_the_memory_next(
    new_driver, layers, experts, passes, eager
):
    driver = new_driver(eager)
    ring, numbers, _ = ring_of(driver, layers, experts)
    seen: list[tuple[int, bytes]] = []
    for ring.goes_on in [*passes, True]:
        for each in numbers:
            read_layer(driver, ring, each, seen)
        ring.forget()
        for buffer in ring.buffers:
            driver.add(lambda buffer=buffer: buffer.fill(0xAB))
        driver.synchronize()
        ring._copies.finish()
        assert all((buffer == 0xAB).all() for buffer in ring.buffers)
        ring.forget()
    wanted = [bytes(ring._rounds[number].source) for each in numbers for number in each for _ in range(2)]
    assert [content for _, content in seen] == wanted * (len(passes) + 1)


@pytest.mark.parametrize("goes_on", [False, True])
def test_the_first_rounds_of_a_pass_come_behind_the_last_ones_only_where_it_follows(new_driver, goes_on):
    driver = new_driver(True)
    ring, numbers, _ = ring_of(driver, [3, 3], 2)
    ring.goes_on = goes_on
    seen: list[tuple[int, bytes]] = []
    for each in numbers:
        read_layer(driver, ring, each, seen)
    driver.synchronize()
    assert ring.sent == (6 + BUFFERS * goes_on) * SIZE
    ring.goes_on = False
    for each in numbers:
        read_layer(driver, ring, each, seen)
    assert ring.sent == 12 * SIZE, "nothing comes twice, and nothing behind the last pass"


@given(n=st.integers(0, 99), room=st.integers(1, 30))
def test_rounds_are_as_large_as_a_buffer_and_name_every_expert_once(n, room):
    found = pieces(range(n), SIZE, room * SIZE + SIZE // 2)
    assert [expert for part in found for expert in part] == list(range(n))
    assert len(found) == -(-n // room) and all(len(part) == room for part in found[:-2])
    if len(found) > 1:
        before, last = map(len, found[-2:])
        assert before == room or 0 <= before - last <= 1, "as large, or they share what is left"
        assert FEW * last >= room


def test_a_ring_of_one_expert_still_has_two_buffers():
    assert ring_bytes(1, SIZE) == BUFFERS * SIZE
    assert ring_bytes(64, SIZE) == 64 * SIZE
