"""The reader thread: lines in order, STOP at once, bounded memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.engine.inbox import MAX_QUEUED, End, Entry, Inbox, Leave, Line, TooLong
from strata.protocol.lines import MAX_LINE_BYTES, BStop, BYield


class Pipe:
    """An inbox on a pipe."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        self.inbox = Inbox(self.read_fd)
        self.inbox.start()

    def write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self.write_fd, data) :]

    def end(self) -> None:
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def rest(self) -> list[Entry]:
        self.end()
        entries = [self.inbox.take()]
        while not isinstance(entries[-1], End):
            entries.append(self.inbox.take())
        return entries


@pytest.fixture
def pipe() -> Iterator[Callable[[], Pipe]]:
    pipes: list[Pipe] = []

    def make() -> Pipe:
        pipes.append(Pipe())
        return pipes[-1]

    yield make
    for each in pipes:
        each.end()
        each.inbox._thread.join(timeout=60)
        os.close(each.read_fd)


def texts(entries: list[Entry]) -> list[bytes]:
    return [entry.text for entry in entries if isinstance(entry, Line)]


def test_a_cr_an_empty_line_and_a_last_line_without_lf_are_read_as_the_protocol_says(pipe):
    p = pipe()
    p.write(b"GEN 1 5\r\n\n  \t\n\r\nQUIT")
    assert texts(p.rest()) == [b"GEN 1 5", b"QUIT"]


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.binary(min_size=1, max_size=40).filter(lambda b: b"\n" not in b), max_size=12),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_how_the_bytes_are_cut_does_not_change_the_lines(lines, cuts):
    p = Pipe()
    data = b"\n".join(lines)
    at = 0
    for cut in sorted(cuts):
        p.write(data[at:cut])
        at = max(at, cut)
    p.write(data[at:])
    wanted = [line.removesuffix(b"\r") for line in lines]
    wanted = [line for line in wanted if line.strip(b" \t") and line.strip(b" \t") != b"STOP"]
    got = texts(p.rest())
    os.close(p.read_fd)
    assert got == wanted


def test_the_longest_line_is_taken_and_one_byte_more_is_refused_once(pipe):
    p = pipe()
    p.write(b"x" * MAX_LINE_BYTES + b"\r\n")
    p.write(b"y" * (MAX_LINE_BYTES + 1) + b"\nz\n")
    longest, too_long, after, _ = p.rest()
    assert isinstance(longest, Line) and len(longest.text) == MAX_LINE_BYTES
    assert isinstance(too_long, TooLong)
    assert isinstance(after, Line) and after.text == b"z"


def test_an_endless_line_is_skipped_without_being_held(pipe):
    p = pipe()
    for _ in range(3 * MAX_LINE_BYTES // (1 << 20)):
        p.write(b"a" * (1 << 20))
    first, end = p.rest()
    assert isinstance(first, TooLong) and isinstance(end, End)


def test_a_flood_of_lines_waits_in_the_pipe_and_not_in_memory(pipe):
    p = pipe()
    os.set_blocking(p.write_fd, False)
    sent = 0
    with pytest.raises(BlockingIOError):
        while sent < 5_000_000:
            sent += os.write(p.write_fd, b"GEN 1 5\n" * 500)
            p.inbox._thread.join(timeout=0.001)  # lets the reader run; it never ends here
    os.set_blocking(p.write_fd, True)
    assert p.inbox._n_queued <= MAX_QUEUED
    p.end()
    assert len(texts(p.rest())) == sent // 8


def test_a_stop_overtakes_the_lines_in_front_of_it(pipe):
    p = pipe()
    p.write(b"GEN 9 1\nGEN 9 2\nSTOP\nHELLO\n")
    entries = p.rest()
    assert texts(entries) == [b"GEN 9 1", b"GEN 9 2", b"HELLO"]
    p.inbox.begin(entries[0].number)
    assert p.inbox.stop_asked()


def test_a_stop_is_for_one_request_only(pipe):
    p = pipe()
    p.write(b"GEN 9 1\nGEN 9 2\nSTOP\n")
    first, second, _ = p.rest()
    p.inbox.begin(first.number)
    assert p.inbox.stop_asked()
    p.inbox.end()
    p.inbox.begin(second.number)
    assert not p.inbox.stop_asked()


def test_a_stop_before_a_request_is_stale_and_one_right_behind_it_is_not(pipe):
    p = pipe()
    p.write(b"STOP\nGEN 9 1\n")
    first = p.inbox.take()
    p.inbox.begin(first.number)
    assert not p.inbox.stop_asked()
    p.inbox.end()
    p.write(b"GEN 9 2\nSTOP\n")
    second, _ = p.rest()
    p.inbox.begin(second.number)
    assert p.inbox.stop_asked()


def test_a_stop_with_words_behind_it_is_no_stop(pipe):
    p = pipe()
    p.write(b"STOP now please\n \tSTOP\n")
    assert texts(p.rest()) == [b"STOP now please"]


def test_a_signal_is_seen_between_units_and_while_waiting(pipe):
    p = pipe()
    p.inbox.leave("SIGTERM")
    assert p.inbox.leaving == "SIGTERM"
    assert p.inbox.take() == Leave("SIGTERM")


def test_a_stdin_that_cannot_be_read_ends_the_engine_with_a_reason():
    read_fd, write_fd = os.pipe()
    inbox = Inbox(write_fd)  # which is not open for reading
    inbox.start()
    entry = inbox.take()
    os.close(write_fd)
    os.close(read_fd)
    assert isinstance(entry, End) and entry.error.startswith("standard input cannot be read: ")


def test_a_command_about_slots_is_taken_from_the_head_of_the_queue_only(pipe):
    p = pipe()
    p.write(b"BSTOP 1\n BYIELD 2\nGEN 9 1\nBSTOP 3\nBSTOP x\n")
    while p.inbox._number < 5:
        p.inbox._thread.join(timeout=0.001)
    assert p.inbox.take_slot_command() == BStop(1)
    assert p.inbox.take_slot_command() == BYield(2)
    assert p.inbox.take_slot_command() is None
    assert p.inbox.take() == Line(3, b"GEN 9 1")
    assert p.inbox.take_slot_command() == BStop(3)
    assert p.inbox.take_slot_command() is None, "a line that cannot be read waits for its ERR"
    assert p.inbox.poll() == Line(5, b"BSTOP x")
    assert p.inbox.poll() is None
    assert (p.inbox._n_queued, p.inbox._queued_bytes) == (0, 0)
    p.end()
    assert p.inbox.take() == End()
