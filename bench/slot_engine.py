"""An engine with slots, driven from one thread: requests go in, lines are taken one by one and checked as they come.

    with SlotEngine(argv) as engine:
        a = engine.admit(0, ids, 64)            # BGEN; the lines of other requests go on
        engine.until(lambda: len(a.tokens) == 8)
        engine.finish(a)

Units    seconds on the monotonic clock, of the arrival of each line
Errors   EngineFailed (refused, silent or dead); ProtocolBroken for a line that is out of place
"""

from __future__ import annotations

import re
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Self

from strata.bench.engine_process import EngineFailed, EngineProcess
from strata.bench.slot_model import Limits, ProtocolBroken, Request, SlotModel
from strata.protocol.lines import BGen, BStop, BYield, Command, Gen, Output, SamplingKeys, Stop, encode

KEPT_LINES = 40
"""Lines of the conversation that an error shows."""
SHOWN_CHARACTERS = 100
STATE_LINE = re.compile(r"state: pool slot \d+, \d+ tokens, digest ([0-9a-f]+)")


def limits_of(
    process: EngineProcess, end_ids: Collection[int] | None, *, keeps: bool | None = None, short_read: int = 0
) -> Limits:
    """What INFO says. `keeps`: for an engine without slots, which does not say it."""
    info = process.info
    return Limits(
        context=process.max_context,
        vocab=int(info.get("vocab", 1 << 31)),
        slots=int(info.get("batch_slots", 0)),
        chunk=int(info.get("prefill_chunk", process.max_context)),
        keeps=bool(info.get("slot_cache", 0)) if keeps is None else keeps,
        short_read=short_read,
        end_ids=end_ids,
    )


class SlotEngine:
    """A running engine and the model of it. Leaving the context ends the engine.

    wants_slots   EngineFailed when the engine runs fewer
    end_ids       None: not known
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        wants_slots: int = 0,
        end_ids: Collection[int] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        silence_s: float = 300.0,
    ) -> None:
        self.process = EngineProcess(argv, silence_s=silence_s, env=env, cwd=cwd)
        self.model = SlotModel(limits_of(self.process, end_ids))
        self.failed = False
        """A line was out of place, or none came: the engine cannot be used any more."""
        self._last: deque[str] = deque(maxlen=KEPT_LINES)
        if self.limits.slots < wants_slots:
            self.process.close()
            raise EngineFailed(f"{wants_slots} slots were asked for, the engine runs {self.limits.slots}")

    @property
    def limits(self) -> Limits:
        return self.model.limits

    # commands

    def solo(self, ids: Sequence[int], max_new: int, keys: SamplingKeys | None = None) -> Request:
        """GEN."""
        return self._request(None, ids, max_new, keys)

    def admit(self, slot: int, ids: Sequence[int], max_new: int, keys: SamplingKeys | None = None) -> Request:
        """BGEN."""
        return self._request(slot, ids, max_new, keys)

    def stop(self) -> None:
        self._send(Stop())
        self.model.stop()

    def slot_stop(self, slot: int) -> None:
        self._send(BStop(slot))
        self.model.slot_stop(slot)

    def give_way(self, slot: int) -> None:
        self._send(BYield(slot))
        self.model.give_way(slot)

    def other(self, line: bytes, *answers: type) -> None:
        """A line that is no request; one line of these kinds answers it, none without any."""
        self._note(">", repr(line)[2:-1])
        self.process.send(line)
        if answers:
            self.model.send_other(*answers)

    def _request(self, slot: int | None, ids: Sequence[int], max_new: int, keys: SamplingKeys | None) -> Request:
        keys = keys or SamplingKeys()
        line = array("i", ids)
        request = Request(tuple(ids), max_new, keys, slot, sent_s=time.monotonic())
        self._send(Gen(max_new, line, keys) if slot is None else BGen(slot, max_new, line, keys))
        return self.model.send(request)

    def _send(self, command: Command) -> None:
        self._note(">", encode(command))
        self.process.send(command)

    # lines

    def take(self, silence_s: float | None = None) -> Output:
        """The next line, when it has come."""
        self.failed = True
        try:
            arrival, line = self.process.receive(silence_s)
            self._note("<", encode(line))
            self.model.received(line, arrival)
        except (EngineFailed, ProtocolBroken) as error:
            raise type(error)(f"{error}\nthe last lines:\n" + "\n".join(self._last)) from None
        self.failed = False
        return line

    def until(self, reached: Callable[[], bool]) -> None:
        """Takes lines until it is reached. EngineFailed when everything is over before."""
        while not reached():
            if self.model.at_rest:
                raise EngineFailed("every request is over, and what was waited for has not come")
            self.take()

    def finish(self, *requests: Request) -> None:
        """Until these are over (all that are open, without any). EngineFailed when one was refused."""
        waited = requests or self.model.open
        self.until(lambda: all(r.state == "over" for r in waited))
        if refused := next((r.refused for r in waited if r.refused), ""):
            raise EngineFailed(f"the engine refused a request: {refused}")

    def alone(self, ids: Sequence[int], max_new: int, keys: SamplingKeys | None = None) -> Request:
        """A solo request from its line to its DONE."""
        request = self.solo(ids, max_new, keys)
        self.finish(request)
        return request

    def in_slot(self, slot: int, ids: Sequence[int], max_new: int, keys: SamplingKeys | None = None) -> Request:
        """An admission from its line to its BDONE."""
        request = self.admit(slot, ids, max_new, keys)
        self.finish(request)
        return request

    def until_tokens(self, request: Request, n: int) -> None:
        """Until it has n tokens, or is over."""
        self.until(lambda: len(request.tokens) >= n or request.state == "over")

    def until_admitted(self, request: Request) -> None:
        """Until it decodes in its slot, or is over."""
        self.until(lambda: request.state == "over" or request in self.model.slots)

    def state_digest(self) -> str:
        """Digest of the state that the last request to end has left, from the log (--log-states); "" without one."""
        found = STATE_LINE.findall(self.process.log_text())
        return found[-1] if found else ""

    def _note(self, direction: str, text: str) -> None:
        short = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}.. ({len(text)} characters)"
        self._last.append(f"{direction} {short}")

    def close(self) -> None:
        self.process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
