"""The engine's ear: a thread that reads command lines, acts on STOP at once and queues everything else in order.

Lines    ended by LF; the last one may lack it. A line above MAX_LINE_BYTES is skipped to its end, queued as TooLong
Stop     every line has a number. A STOP cancels the request being worked on, or one whose line came before it and has
         not begun; a STOP with no such request is stale and forgotten (`begin` and `end` draw that border)
Bounds   the queue holds at most MAX_QUEUED lines and MAX_QUEUED_BYTES beside one line; when full, the reader waits,
         so that a sender that never waits for answers fills its own pipe and not this process's memory
Threads  one reader; `leave` may run in a signal handler (a SimpleQueue's `put` is reentrant, and no lock is taken
         there); all else belongs to the main thread
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from strata.protocol.lines import MAX_LINE_BYTES, BStop, BYield, Command, ProtocolError, Stop, decode_command

MAX_QUEUED = 1024
MAX_QUEUED_BYTES = 64 * 1024 * 1024
_READ_BYTES = 1 << 18
_SHORT_LINE_BYTES = 64  # a longer line is no STOP, BSTOP or BYIELD, and is not looked at before its turn


@dataclass(frozen=True, slots=True)
class Line:
    """A command line without its LF, undecoded."""

    number: int
    text: bytes


@dataclass(frozen=True, slots=True)
class TooLong:
    """A line above the limit came and was skipped."""

    number: int


@dataclass(frozen=True, slots=True)
class End:
    """Nothing more will come: end of input, or the reader failed (`error`)."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class Leave:
    """The process was told to leave by a signal."""

    signal: str


Entry = Line | TooLong | End | Leave


class Inbox:
    """Command lines from a file descriptor, in order."""

    def __init__(self, fd: int) -> None:
        self.leaving = ""
        """Name of the signal that asked the process to leave."""
        self._fd = fd
        self._entries: SimpleQueue[Entry] = SimpleQueue()
        self._head: Entry | None = None  # the next entry, once somebody has looked at it
        self._room = threading.Condition()
        self._n_queued = 0
        self._queued_bytes = 0
        self._number = 0  # of the last line read; written by the reader only
        self._stop_number = 0  # of the last STOP; written by the reader only
        self._spent = 0  # a STOP up to this number is over; written by the main thread only
        self._thread = threading.Thread(target=self._run, name="inbox", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self) -> Entry:
        """The next entry; waits for one."""
        head, self._head = self._head, None
        return self._taken(self._entries.get() if head is None else head)

    @property
    def waits(self) -> bool:
        """Whether there is an entry."""
        return self._peek() is not None

    def poll(self) -> Entry | None:
        """The next entry, None when there is none."""
        entry, self._head = self._peek(), None
        return None if entry is None else self._taken(entry)

    def take_slot_command(self) -> BStop | BYield | None:
        """The next entry if it is a BSTOP or a BYIELD, which is then taken; else None."""
        entry = self._peek()
        command = _short_command(entry.text) if isinstance(entry, Line) else None
        if entry is None or not isinstance(command, (BStop, BYield)):
            return None
        self._head = None
        self._taken(entry)
        return command

    def _peek(self) -> Entry | None:
        if self._head is None:
            try:
                self._head = self._entries.get_nowait()
            except Empty:
                return None
        return self._head

    def _taken(self, entry: Entry) -> Entry:
        """Make room for another line."""
        if isinstance(entry, (Line, TooLong)):
            with self._room:
                self._n_queued -= 1
                self._queued_bytes -= len(entry.text) if isinstance(entry, Line) else 0
                self._room.notify()
        return entry

    def begin(self, number: int) -> None:
        """The request of line `number` is taken up: a STOP that came before its line is stale."""
        self._spent = max(self._spent, number)

    def stop_asked(self) -> bool:
        """Whether a STOP came for the request that has begun."""
        return self._stop_number > self._spent

    def end(self) -> None:
        """The request is over. A STOP that came until now was for it. Call before its last line is written."""
        self._spent = self._number

    def leave(self, signal: str) -> None:
        self.leaving = signal
        self._entries.put(Leave(signal))

    def _run(self) -> None:
        try:
            self._read_lines()
        except (OSError, MemoryError) as error:
            self._entries.put(End(f"standard input cannot be read: {error or type(error).__name__}"))
        else:
            self._entries.put(End())

    def _read_lines(self) -> None:
        line = bytearray()
        skipping = False
        while data := os.read(self._fd, _READ_BYTES):
            start = 0
            while start < len(data):
                end = data.find(b"\n", start)
                piece = data[start : end if end >= 0 else len(data)]
                skipping = skipping or len(line) + len(piece) > MAX_LINE_BYTES + 1  # one more: a CR may come last
                if skipping:
                    line.clear()
                else:
                    line += piece
                start += len(piece) + 1
                if end >= 0:
                    self._finish(line, skipping)
                    line, skipping = bytearray(), False
        if line or skipping:
            self._finish(line, skipping)

    def _finish(self, line: bytearray, skipped: bool) -> None:
        text = bytes(line.removesuffix(b"\r"))
        too_long = skipped or len(text) > MAX_LINE_BYTES
        if not too_long and not text.strip(b" \t"):
            return
        self._number += 1
        if not too_long and isinstance(_short_command(text), Stop):
            self._stop_number = self._number
            return
        with self._room:
            self._room.wait_for(
                lambda: self._n_queued < MAX_QUEUED and (self._queued_bytes < MAX_QUEUED_BYTES or not self._n_queued)
            )
            self._n_queued += 1
            self._queued_bytes += 0 if too_long else len(text)
        self._entries.put(TooLong(self._number) if too_long else Line(self._number, text))


def _short_command(text: bytes) -> Command | None:
    """The command of a line that may be a STOP, BSTOP or BYIELD; None for one that is too long or cannot be read."""
    if len(text) > _SHORT_LINE_BYTES:
        return None
    try:
        return decode_command(text)
    except ProtocolError:
        return None
