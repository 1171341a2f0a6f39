"""stdin lines -> commands, events -> stdout lines. The only place that writes the protocol.

Loop     one unit of work at a time; lines are looked at between units. While a request is worked on only BSTOP and
         BYIELD are taken, and only from the head of the queue; while slots decode, whatever is there, behind a window
         that was started ahead; else the next line is waited for. A STOP acts between two units, wherever it stands
Ends     QUIT, or a signal while nothing runs: 0. End of input: 0, when the request and the slots are done. A failure,
         or a signal while something runs: a last line `ERR fatal: ...` and 1. A reader that went away (EPIPE): 1
Source   docs/protocol.md
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from strata.engine.facts import request_line
from strata.engine.inbox import End, Entry, Inbox, Leave, Line, TooLong
from strata.engine.log import log
from strata.engine.requests import gen_refusal, request_of, slot_refusal
from strata.engine.schedule.live import Path
from strata.protocol.lines import (
    MAX_LINE_BYTES,
    Admitted,
    BGen,
    BGenI,
    BStop,
    BYield,
    Command,
    Done,
    Err,
    Gen,
    GenI,
    Info,
    InfoValue,
    Output,
    ProtocolError,
    Quit,
    Ready,
    Restore,
    Save,
    SessionError,
    SlotDone,
    Stop,
    VramCommand,
    decode_command,
    encode,
)


class Leaving(Exception):
    """A signal asked the process to leave while something was running."""


class Writer:
    """Protocol lines to a file descriptor, each out at once. Raises BrokenPipeError when nobody reads any more."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __call__(self, events: Iterable[Output]) -> None:
        data = "".join(f"{encode(event)}\n" for event in events).encode()
        while data:
            data = data[os.write(self._fd, data) :]


@dataclass(slots=True)
class Totals:
    """What `--stats` reports at the end. Times in milliseconds; those of slots overlap and are not counted."""

    requests: int = 0
    refused: int = 0
    prompt_read: int = 0
    prompt_ms: float = 0.0
    generated: int = 0
    decode_ms: float = 0.0
    in_slots: int = 0

    def add(self, event: Done | SlotDone) -> None:
        if isinstance(event, SlotDone):
            self.in_slots += event.generated - 1  # DONE has counted the first one
            return
        self.requests += 1
        self.prompt_read += event.prompt_read
        self.prompt_ms += event.prompt_ms
        self.generated += event.generated
        self.decode_ms += event.decode_ms

    def __str__(self) -> str:
        return (
            f"{self.requests} requests, {self.refused} refused lines; {self.prompt_read} prompt tokens read in "
            f"{self.prompt_ms:.0f} ms, {self.generated} tokens generated in {self.decode_ms:.0f} ms, "
            f"{self.in_slots} more in slots"
        )


class Server:
    """Answers the lines of an inbox until it is time to leave.

    vocab    token ids are below it
    figures  values of INFO that change; behind the line that ends a request INFO tells the new ones
    before   called when a request that is not refused begins
    behind   called when the line that ends a request is out
    """

    def __init__(
        self,
        path: Path,
        inbox: Inbox,
        write: Writer,
        *,
        vocab: int,
        figures: Callable[[], Mapping[str, InfoValue]] = dict,
        before: Callable[[], None] = lambda: None,
        behind: Callable[[], None] = lambda: None,
    ) -> None:
        self.totals = Totals()
        self._path = path
        self._inbox = inbox
        self._write = write
        self._vocab = vocab
        self._figures = figures
        self._before = before
        self._behind = behind
        self._told: dict[str, InfoValue] = {}  # the figures that INFO has said
        self._ended = False  # the input is over

    @property
    def _max_context(self) -> int:
        return self._path.rules.max_context

    def greet(self, info: Info) -> None:
        self._told = dict(self._figures())
        self._write([Info({**info.values, **self._told}), Ready(self._max_context, ("stop",))])

    def run(self) -> None:
        """Until it is time to leave. Raises Leaving, BrokenPipeError, and whatever the model raises."""
        while True:
            if self._path.busy:
                self._unit(self._inbox.stop_asked())
                self._obey()
            elif self._path.decoding:
                if not self._between_windows():
                    return
            elif self._ended or not self._take(self._inbox.take()):
                return

    # ---------------------------------------------------------------------------------------------------------- units

    def _between_windows(self) -> bool:
        """A window of the slots, or a line that waits. A window that was started ahead goes first: the device is busy
        with it anyway, and its tokens count. False: it is time to leave."""
        waits = not self._ended and self._inbox.waits
        if not waits or self._path.ahead:
            self._unit(False, waits)
            return True
        return self._take(self._inbox.take())

    def _unit(self, stop: bool, waits: bool = False) -> None:
        """One unit of work, and what came of it. waits: a line does, so nothing is started ahead."""
        if self._inbox.leaving:
            raise Leaving(f"the engine was told to leave ({self._inbox.leaving}) while a request ran")
        self._say(self._path.step(stop, waits))

    def _obey(self) -> None:
        """Commands about slots that have come while a request is worked on."""
        while self._path.busy and (command := self._inbox.take_slot_command()) is not None:
            self._slot_command(command)

    def _slot_command(self, command: BStop | BYield) -> None:
        if isinstance(command, BStop):
            self._say(self._path.stop_slot(command.slot))
        else:
            self._say(self._path.give_way(command.slot))

    def _say(self, events: list[Output]) -> None:
        ended = 0
        for n, event in enumerate(events, 1):
            if isinstance(event, (Done, SlotDone)):
                self.totals.add(event)
            if isinstance(event, Done):
                log(request_line(event))
                self._inbox.end()  # before DONE is out: a STOP that answers it is for the next request
            if isinstance(event, (Done, Admitted, SlotDone)):
                ended = n
        self._write([*events[:ended], *self._news(), *events[ended:]] if ended else events)
        if ended:
            self._behind()

    def _news(self) -> list[Output]:
        """The figures that have changed since they were told, in one INFO."""
        changed = {name: value for name, value in self._figures().items() if self._told.get(name) != value}
        self._told |= changed
        return [Info(changed)] if changed else []

    # ---------------------------------------------------------------------------------------------------------- lines

    def _take(self, entry: Entry) -> bool:
        """Answer a line while no request is worked on. False: it is time to leave."""
        if isinstance(entry, Leave):
            if self._path.decoding:
                raise Leaving(f"the engine was told to leave ({entry.signal}) while slots decoded")
            log(f"leaving: {entry.signal}")
            return False
        if isinstance(entry, End):
            if entry.error:
                log(entry.error)
            self._ended = True
        elif isinstance(entry, TooLong):
            self._refuse(f"bad request: the line is longer than {MAX_LINE_BYTES} bytes")
        else:
            return self._answer(entry)
        return True

    def _answer(self, line: Line) -> bool:
        try:
            command = decode_command(line.text)
        except ProtocolError as error:
            self._refuse(str(error))
            return True
        if isinstance(command, Quit):
            return False
        if isinstance(command, (Gen, BGen)):
            self._begin(line.number, command)
        elif isinstance(command, (BStop, BYield)):
            self._slot_command(command)
        elif command is not None:
            self._side(command)
        return True

    def _begin(self, number: int, gen: Gen | BGen) -> None:
        """Take up a request, or refuse it."""
        reason = None
        if isinstance(gen, BGen):
            reason = slot_refusal(gen, self._path.slots.n, self._path.slots.is_free(gen.slot))
        reason = reason or gen_refusal(gen, self._max_context, self._vocab)
        if reason is not None:
            self._refuse(reason)
            return
        self._inbox.begin(number)
        self._before()
        request = request_of(gen)
        self._say(self._path.admit(gen.slot, request) if isinstance(gen, BGen) else self._path.start(request))

    def _side(self, command: Command) -> None:
        """The commands of parts that this engine does not have, and a STOP that stands alone."""
        if isinstance(command, (GenI, BGenI)):
            self._refuse("this engine was started without --vision")
        elif isinstance(command, VramCommand):
            self._refuse("VRAM needs --vram-elastic, which this engine does not have")
        elif isinstance(command, (Save, Restore)):
            self._write([SessionError("invalid", False, f"{command.word}: this engine has no session files")])
        elif not isinstance(command, Stop):
            raise TypeError(f"{type(command).__name__} has no answer")

    def _refuse(self, reason: str) -> None:
        self.totals.refused += 1
        self._write([Err(reason)])
