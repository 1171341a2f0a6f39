"""How long an engine may say nothing while a request is open.

Pure: told when a request is sent and when a line comes, it says at which time the engine counts as silent.

Units    seconds of the caller's clock, tokens
Rules    before the first PP the limit grows by the prompt's length; between PPs it is at least three chunks at the
         measured rate; SWAIT lengthens the one wait it announces. A limit of 0 means for ever
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.protocol.lines import Done, Err, Output, Progress, Resume, Reused, SessionWait, Token

# The slowest read that is still believed to be one: 50 tokens a second, over at most 32,768 tokens of a first chunk.
_SLOWEST_TOK_S = 50
_LONGEST_FIRST_READ = 32_768
_CHUNKS_ALLOWED = 3


@dataclass(slots=True)
class SilenceClock:
    limit_s: float
    since: float | None = None  # the last sign of life while a request is open; None when none is
    allowance_s: float = 0.0
    _position: int = 0

    def sent(self, n_prompt: int, now: float) -> None:
        self.since = now
        self.allowance_s = self.limit_s + min(n_prompt, _LONGEST_FIRST_READ) / _SLOWEST_TOK_S
        self._position = 0

    def heard(self, output: Output, now: float) -> None:
        if self.since is None:
            return
        self.since = now
        match output:
            case Resume(reused=reused):
                self._position = reused
            case Progress(position=position, tok_s=tok_s):
                chunk = max(position - self._position, 0)
                self._position = position
                self.allowance_s = max(self.limit_s, _CHUNKS_ALLOWED * chunk / tok_s if tok_s > 0 else 0.0)
            case Reused() | Token():
                self.allowance_s = self.limit_s
            case SessionWait(seconds=seconds):
                self.allowance_s = self.limit_s + seconds
            case Done() | Err():
                self.since = None
            case _:
                return

    @property
    def deadline(self) -> float | None:
        if self.since is None or self.limit_s == 0:
            return None
        return self.since + self.allowance_s
