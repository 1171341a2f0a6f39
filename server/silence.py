"""How long an engine may say nothing while a request is open.

Pure: told when a command is sent and when a line comes, it says at which time the engine counts as silent.

Units    seconds of the caller's clock, tokens
Open     the request being read or decoded alone, and every slot from its BADM to its BDONE
Rules    before the first PP of a read the limit grows by the prompt's length; between PPs it is at least three chunks
         at the measured rate, also while slots decode between the chunks; SWAIT lengthens the one wait it announces.
         A limit of 0 means for ever
Slots    one that has not ended so long after its BSTOP will not: the engine counts as silent, whatever else it says
"""

from __future__ import annotations

from dataclasses import dataclass, field

from strata.protocol.lines import (
    Admitted,
    BGen,
    BGenI,
    BStop,
    Command,
    Done,
    Err,
    Gen,
    GenI,
    Output,
    Progress,
    Resume,
    Reused,
    SessionWait,
    SlotDone,
    Token,
)

# The slowest read that is still believed to be one: 50 tokens a second, over at most 32,768 tokens of a first chunk.
_SLOWEST_TOK_S = 50
_LONGEST_FIRST_READ = 32_768
_CHUNKS_ALLOWED = 3


@dataclass(slots=True)
class SilenceClock:
    limit_s: float
    since: float | None = None  # the last sign of life while a request is open; None when none is
    slot_stop_s: float = 600.0
    _read_s: float | None = None  # allowance of the open read or solo request; None when there is none
    _extra_s: float = 0.0
    _position: int = 0
    _slots: set[int] = field(default_factory=set)
    _stops: dict[int, float] = field(default_factory=dict)  # slot -> time of its BSTOP

    def sent(self, command: Command, now: float) -> None:
        match command:
            case Gen(ids=ids) | GenI(ids=ids) | BGen(ids=ids) | BGenI(ids=ids):
                self.since = now
                self._read_s = self.limit_s + min(len(ids), _LONGEST_FIRST_READ) / _SLOWEST_TOK_S
                self._position = 0
            case BStop(slot=slot) if slot in self._slots:
                self._stops.setdefault(slot, now)

    def heard(self, output: Output, now: float) -> None:
        if isinstance(output, Admitted) and output.goes_on:
            self._slots.add(output.slot)
        elif self.since is None:
            return
        self.since, self._extra_s = now, 0.0
        match output:
            case Resume(reused=reused):
                self._position = reused
            case Progress(position=position, tok_s=tok_s):
                chunk = max(position - self._position, 0)
                self._position = position
                self._read_s = max(self.limit_s, _CHUNKS_ALLOWED * chunk / tok_s if tok_s > 0 else 0.0)
            case Reused() | Token():
                self._read_s = self.limit_s
            case SessionWait(seconds=seconds):
                self._extra_s = float(seconds)
            case Done() | Err():
                self._read_s = None
            case SlotDone(slot=slot):
                self._slots.discard(slot)
                self._stops.pop(slot, None)
        if self._read_s is None and not self._slots:
            self.since = None

    @property
    def allowance_s(self) -> float:
        """Seconds of silence that are allowed now."""
        return (self.limit_s if self._read_s is None else self._read_s) + self._extra_s

    @property
    def deadline(self) -> float | None:
        if self.since is None or self.limit_s == 0:
            return None
        return self.since + self.allowance_s

    def complaint(self, now: float) -> str | None:
        """Why the engine cannot be waited for any longer, or None."""
        if self.deadline is not None and now > self.deadline:
            return f"the engine said nothing for {self.allowance_s:.0f} s"
        for slot, at in self._stops.items():
            if now - at > self.slot_stop_s:
                return f"slot {slot} did not end within {self.slot_stop_s:.0f} s of its BSTOP, the engine"
        return None
