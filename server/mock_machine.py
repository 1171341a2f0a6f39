"""The scripted engine as a machine: commands in, lines out, one unit of work a step. No process, no threads.

Loop     docs/protocol.md: one read at a time; the slots decode between the chunks of a read, and while a script makes
         it wait; a BSTOP is taken at the next window or chunk boundary, a BYIELD at a chunk boundary of a read
State    the tokens that the solo path and each slot hold; with slots, a read starts at the longest of them that begins
         the prompt
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

from strata.protocol.lines import (
    Admitted,
    BGen,
    BGenI,
    BStop,
    BYield,
    Command,
    Done,
    Err,
    Finish,
    Gen,
    GenI,
    Info,
    Output,
    Progress,
    ProtocolError,
    Quit,
    Ready,
    Resume,
    Reused,
    SlotDone,
    SlotFinish,
    SlotToken,
    Token,
    Yielded,
    decode_command,
    encode,
    rate,
)

from .mock_script import Cast, EndOfRequest, Play, Script, Stage, Step, Words

CONTEXT_MARGIN = 8
DECODE_SHARE = 0.5  # of a chunk's time, in which slots decode before the next one

_WORKED, _WAITS, _WAITS_ALONE = True, False, None
Unit = bool | None
"""What a request reports after each unit of work: whether it worked or waits, and then whether slots may decode."""


@dataclass(slots=True)
class Decoding:
    """A request in a slot. `ids` is its prompt; `output` begins with the token of its admission."""

    ids: array[int]
    output: array[int]
    max_new: int
    play: Play
    since: float
    is_stopped: bool = False


@dataclass(slots=True)
class MockSlot:
    held: array[int] = field(default_factory=lambda: array("i"))
    request: Decoding | None = None


class Machine:
    """`stop` may be set from another thread, as a STOP overtakes everything."""

    def __init__(self, script: Script, words: Words | None, say: Callable[[str], None], clock: Callable[[], float]):
        self.stop = threading.Event()
        self.slots = [MockSlot() for _ in range(script.slots if script.slots > 1 else 0)]
        self.has_left = False
        self._script = script
        self._write = say
        self._clock = clock
        self._end_ids = words.end_ids if words is not None else frozenset[int]()
        self._stage = Stage(words, say, clock)
        self._cast = Cast(script, self._stage, words)
        self._lines: deque[Command | Err] = deque()
        self._live: array[int] = array("i")
        self._current: Iterator[Unit] | None = None
        self._input_ended = False

    @property
    def wants_input(self) -> bool:
        """Nothing is to be done before a line comes."""
        return self._current is None and not self._lines and not self._is_decoding and not self._input_ended

    @property
    def _is_decoding(self) -> bool:
        return any(slot.request is not None for slot in self.slots)

    def start(self) -> Iterator[None]:
        """To the READY line; yields while the script makes it wait."""
        yield from self._stage.perform(self._script.start)
        facts: dict[str, int | float | str] = {"context": self._script.context, "kv": "fp16"}
        if self.slots:
            facts |= {"batch_slots": len(self.slots), "slot_cache": 1, "batch_groups": 1}
        self._say(Info({**facts, **self._script.info, "engine": "mock"}))
        self._say(Ready(self._script.context, self._script.capabilities))

    def take(self, line: str) -> None:
        """A line of input."""
        if line.strip() == "STOP":
            self.stop.set()
            return
        try:
            command = decode_command(line)
        except ProtocolError as error:
            self._lines.append(Err(str(error)))
        else:
            if command is not None:
                self._lines.append(command)

    def end_of_input(self) -> None:
        self._input_ended = True

    def step(self) -> bool:
        """One unit of work. False: there was nothing to do now."""
        if self._current is not None:
            for unit in self._current:
                return unit is _WORKED or (unit is _WAITS and self._window())
            self._current = None
            return True
        if self._lines:
            self._handle(self._lines.popleft())
            return True
        if self._is_decoding:
            return self._window()
        self.has_left = self.has_left or self._input_ended
        return False

    def _handle(self, command: Command | Err) -> None:
        match command:
            case Err():
                self._say(command)
            case Quit():
                self.has_left = True
            case BStop(slot=index):
                self._mark(index)
            case BYield():
                return
            case Gen() | BGen():
                refusal = self._refusal(command)
                if refusal is not None:
                    self._say(Err(refusal))
                    return
                self.stop.clear()
                self._current = self._request(command)
            case GenI() | BGenI():
                self._say(Err("this engine was started without --vision"))
            case _:
                self._say(Err("expected: GEN <max_new> <ids>, BGEN, BSTOP, BYIELD, STOP or QUIT"))

    def _refusal(self, command: Gen | BGen) -> str | None:
        n, context = len(command.ids), self._script.context
        if isinstance(command, BGen):
            is_free = command.slot < len(self.slots) and self.slots[command.slot].request is None
            if not is_free or command.max_new < 1:
                return f"BGEN: no such free slot (--batch {len(self.slots)}) or a bad max_new"
        if n + command.max_new + CONTEXT_MARGIN > context:
            return f"prompt ({n} tokens) + max_new ({command.max_new}) exceeds the context ({context})"
        return None

    # --- a request on the solo path, or an admission

    def _request(self, command: Gen | BGen) -> Iterator[Unit]:
        index = command.slot if isinstance(command, BGen) else None
        play = self._cast.play(command.ids)
        try:
            yield from self._run(command, index, play)
        except EndOfRequest as error:
            self._live = array("i")
            self._say(Err(str(error)))
        self._lines = deque(line for line in self._lines if not isinstance(line, BYield))

    def _run(self, command: Gen | BGen, index: int | None, play: Play) -> Iterator[Unit]:
        ids, n, script = command.ids, len(command.ids), self._script
        yield from self._until_stop(play.reply.before)
        began = self._clock()
        reused = position = self._reused(ids, play)
        self._say(Resume(reused))
        gave_way = None
        while position < n and not self.stop.is_set() and gave_way is None:
            for _ in self._stage.wait(script.chunk_ms):
                yield _WAITS_ALONE
            position = min(position + script.chunk, n)
            ms = (self._clock() - began) * 1000
            self._say(Progress(position, n, ms, rate(position - reused, ms)))
            yield from self._until_stop(play.reply.reading)
            if position < n:
                gave_way = self._boundary(index, n - position)
                yield _WORKED
                if gave_way is None and self._is_decoding:
                    self._window()
                    for _ in self._stage.wait(script.chunk_ms * DECODE_SHARE):
                        yield _WAITS
        read_at = self._clock()
        output: array[int] = array("i")
        finish: Finish = "cancel"
        if gave_way is not None:
            self.slots[gave_way].held = ids[:position]
            self._cast.leave(ids, play)
            self._say(Yielded(gave_way, position))
        elif not self.stop.is_set():
            self._say(Reused(reused))
            output, finish = yield from self._decode(command, index, play)
        self._live = (ids + output)[:-1] if output else array("i")
        now = self._clock()
        read_ms, decode_ms = (read_at - began) * 1000, (now - read_at) * 1000
        if finish == "cancel" and output:
            self._cast.leave(ids + output, play)
        self._say(Done(len(output), n, read_ms, decode_ms, finish, reused=reused, prompt_read=position - reused))
        if index is None:
            return
        goes_on = finish == "length" and len(output) == 1 and command.max_new > 1
        if goes_on:
            self.slots[index].request = Decoding(ids, output, command.max_new, play, now)
        self._say(Admitted(index, goes_on))

    def _until_stop(self, steps: Sequence[Step]) -> Iterator[Unit]:
        for _ in self._stage.perform(steps):
            if self.stop.is_set():
                return
            yield _WAITS

    def _decode(
        self, command: Gen | BGen, index: int | None, play: Play
    ) -> Generator[Unit, None, tuple[array[int], Finish]]:
        """The tokens of a solo request, or the one of an admission, and how they ended."""
        limit = command.max_new if index is None else 1
        output = array("i")
        while True:
            token = play.token()
            if token is None:
                if play.is_over or self.stop.is_set():
                    return output, play.reply.finish if play.is_over else "cancel"
                yield _WAITS_ALONE if index is None else _WAITS
                continue
            self._say(Token(token))
            output.append(token)
            if token in self._end_ids:
                return output, "stop"
            if len(output) >= limit:
                return output, "length"
            if self.stop.is_set():
                return output, "cancel"
            yield _WORKED

    def _reused(self, ids: array[int], play: Play) -> int:
        """Leading tokens of the prompt that need not be read; at least one is."""
        n = len(ids)
        if play.reply.reused or not self.slots:
            return min(play.reply.reused, n - 1)
        held = [self._live, *(slot.held for slot in self.slots if slot.request is None)]
        return max(len(one) if len(one) < n and ids[: len(one)] == one else 0 for one in held)

    def _boundary(self, index: int | None, remaining: int) -> int | None:
        """Between two chunks: takes one BYIELD. The slot that the read gives way to, or None."""
        asked = next((line for line in self._lines if isinstance(line, BYield)), None)
        if asked is not None:
            self._lines.remove(asked)
        if asked is None or remaining <= self._script.chunk or not 0 <= asked.slot < len(self.slots):
            return None
        is_free = self.slots[asked.slot].request is None
        return asked.slot if is_free and index in (None, asked.slot) else None

    # --- slots

    def _mark(self, index: int) -> None:
        request = self.slots[index].request if 0 <= index < len(self.slots) else None
        if request is not None:
            request.is_stopped = True

    def _window(self) -> bool:
        """One token of each slot that has one. Whether anything was said."""
        for line in [line for line in self._lines if isinstance(line, BStop)]:
            self._lines.remove(line)
            self._mark(line.slot)
        ready = [self._advance(index, slot) for index, slot in enumerate(self.slots) if slot.request is not None]
        return any(ready)

    def _advance(self, index: int, slot: MockSlot) -> bool:
        request = slot.request
        assert request is not None
        try:
            token = request.play.token()
        except EndOfRequest:
            self._end(index, slot, request, "error")
            return True
        if token is None:
            if request.play.is_over or request.is_stopped:
                self._end(index, slot, request, request.play.reply.finish if request.play.is_over else "cancel")
                return True
            return False
        self._say(SlotToken(index, token))
        request.output.append(token)
        if token in self._end_ids:
            self._end(index, slot, request, "stop")
        elif request.is_stopped:
            self._end(index, slot, request, "cancel")
        elif len(request.output) >= request.max_new:
            self._end(index, slot, request, "length")
        return True

    def _end(self, index: int, slot: MockSlot, request: Decoding, finish: SlotFinish) -> None:
        slot.request, slot.held = None, (request.ids + request.output)[:-1]
        if finish == "cancel":
            self._cast.leave(request.ids + request.output, request.play)
        self._say(SlotDone(index, len(request.output), finish, (self._clock() - request.since) * 1000))

    def _say(self, output: Output) -> None:
        self._write(encode(output))
