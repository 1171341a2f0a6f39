"""A request's seat: events in order, and a wait that ends in time without a timer for every event."""

from __future__ import annotations

import asyncio
import time
from array import array

import pytest

from strata.protocol.lines import SamplingKeys, Token
from strata.server.job import Job
from strata.server.service import Ticket


@pytest.fixture
def ticket() -> Ticket:
    return Ticket(Job(array("i", [1]), 10, SamplingKeys()))


async def test_events_are_lost_or_change_places(ticket):
    waiting = asyncio.create_task(ticket.next(20))
    await asyncio.sleep(0)
    for token in range(5):
        ticket.put(Token(token))
    assert await waiting == Token(0)
    assert [await ticket.next(20), ticket.take()] == [Token(1), Token(2)]
    assert ticket.has_more and [await ticket.next(0), await ticket.next(0)] == [Token(3), Token(4)]
    assert not ticket.has_more and await ticket.next(0) is None


async def test_a_wait_ends_too_early_or_never_after_a_longer_or_shorter_one(ticket):
    for before_s, within_s in ((20, 0.05), (0.02, 0.1), (0.05, 0.05)):
        first = asyncio.create_task(ticket.next(before_s))
        await asyncio.sleep(0)
        ticket.put(Token(1))
        assert await first == Token(1)
        begun = time.monotonic()
        assert await asyncio.wait_for(ticket.next(within_s), 10) is None
        assert time.monotonic() - begun >= within_s * 0.99


async def test_every_token_sets_a_timer(ticket, monkeypatch):
    loop, timers = asyncio.get_running_loop(), []
    call_at = loop.call_at
    monkeypatch.setattr(loop, "call_at", lambda *args, **more: timers.append(args) or call_at(*args, **more))
    for token in range(50):
        waiting = asyncio.create_task(ticket.next(20))
        await asyncio.sleep(0)
        ticket.put(Token(token))
        assert await waiting == Token(token)
    assert len(timers) == 1


async def test_a_waiter_that_was_cancelled_takes_an_event_with_it(ticket):
    waiting = asyncio.create_task(ticket.next(20))
    await asyncio.sleep(0)
    ticket.put(Token(1))
    waiting.cancel()
    await asyncio.wait([waiting])
    assert await ticket.next(20) == Token(1)


async def test_a_closed_ticket_rings_no_more(ticket):
    waiting = asyncio.create_task(ticket.next(0.02))
    await asyncio.sleep(0)
    waiting.cancel()
    ticket.close()
    assert ticket._timer is None
