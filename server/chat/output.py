"""The output parser: token ids of one answer in, typed events out.

    parser = OutputParser(vocabulary, tools=prompt.tools, starts_in_reasoning=prompt.starts_in_reasoning,
                          forced_prefix=prompt.forced_prefix, stop=["END"])
    for each id:   events = parser.push(token)
    at the end:    events = parser.finish("stop"); parser.finished

Order      ids -> text -> reasoning | answer -> content | tool calls. Stop strings are looked for in content only, each
           stretch between tool calls for itself; tool calls only when the request has tools
Invariant  the joined events do not depend on how the text is cut into tokens
After      Stopped or Looped nothing more is delivered; the caller stops the engine and may go on pushing
Cost       constant per character on average
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from strata.server.chat.events import Content, EngineReason, Event, Finish, Looped, Reasoning, Stopped, ToolArgs
from strata.server.chat.reasoning import ReasoningSplit
from strata.server.chat.schema_types import ToolTypes
from strata.server.chat.stream import Detokenizer, Finder, stop_strings
from strata.server.chat.tools import CALL, SPACE, ToolBlock
from strata.server.chat.vocabulary import Vocabulary

REPEAT_STOP_TOKENS = 256


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class RepeatDetector:
    """push(token) -> whether the last `limit` tokens are one cycle, written at least four times.

    Four times, so that a passage that is rightly written twice does not count: cycles have at most limit / 4 tokens.
    limit 0 turns it off. Remembers limit / 4 tokens; a token costs a step for each time it stands among them.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._longest = max(limit // 4, 1)
        self._n = 0
        self._last: deque[int] = deque()  # newest last
        self._places: dict[int, deque[int]] = {}  # token -> where it stands among them, counted from the first push
        self._runs: dict[int, int] = {}  # cycle length -> how many tokens in a row equalled the one a cycle before

    def push(self, token: int) -> bool:
        if self._limit <= 0:
            return False
        self._n = now = self._n + 1
        places = self._places.setdefault(token, deque())
        runs = self._runs
        self._runs = {now - place: runs.get(now - place, 0) + 1 for place in places}
        places.append(now)
        self._last.append(token)
        if len(self._last) > self._longest:
            self._forget(self._last.popleft())
        return any(n + run >= self._limit for n, run in self._runs.items())

    def _forget(self, oldest: int) -> None:
        places = self._places[oldest]
        places.popleft()
        if not places:
            del self._places[oldest]


class ContentParser:
    """The answer after the reasoning: content, tool calls, stop strings. `events` is for the owner to empty."""

    def __init__(
        self,
        *,
        tools: Sequence[Mapping[str, Any]],
        stop: Sequence[str],
        forced_prefix: str,
        new_id: Callable[[], str],
    ) -> None:
        self.events: list[Event] = []
        self.stopped: str | None = None
        self.n_started = 0
        self.n_ended = 0
        self._stop = stop
        self._types = ToolTypes(tools)
        self._new_id = new_id
        self._finder = Finder([*stop, CALL] if tools else stop)
        self._block: ToolBlock | None = None
        self._skips_space = False
        self._forced_prefix = forced_prefix
        if forced_prefix:
            self.push(forced_prefix)

    def push(self, text: str) -> None:
        while text and self.stopped is None:
            if self._block is not None:
                text = self._in_block(self._block, text)
            elif self._skips_space:
                text = text.lstrip(SPACE)
                self._skips_space = not text
            else:
                text = self._in_content(text)

    def finish(self) -> None:
        """No more text comes. What is given back may hold further words, hence the loop."""
        while self.stopped is None:
            if self._block is not None:
                block, self._block = self._block, None
                self._close(block)
                self.push(self._given_back(block, block.finish()))
                continue
            found = self._finder.finish()
            self._say(found.before)
            if found.word is None:
                return
            self._word(found.word)
            self.push(found.rest)

    def _in_content(self, text: str) -> str:
        found = self._finder.push(text)
        self._say(found.before)
        if found.word is not None:
            self._word(found.word)
        return found.rest

    def _word(self, word: str) -> None:
        if word in self._stop:
            self.stopped = word
            self.events.append(Stopped(word))
        else:
            self._block = ToolBlock(self._types, self.n_started, self._new_id)

    def _in_block(self, block: ToolBlock, text: str) -> str:
        rest = block.push(text)
        self.events += block.events
        block.events.clear()
        if rest is None:
            return ""
        self._block = None
        self._close(block)
        return self._given_back(block, rest)

    def _close(self, block: ToolBlock) -> None:
        self.n_started += block.n_started
        self.n_ended += block.n_ended
        self._skips_space = block.n_started > 0

    def _given_back(self, block: ToolBlock, rest: str) -> str:
        """The text to go on with. <tool_call> itself is content where no call followed, unless the server wrote it."""
        prefix, self._forced_prefix = self._forced_prefix, ""
        if not block.rejected:
            return rest
        if prefix:
            return (CALL + rest).removeprefix(prefix)
        self._say(CALL)
        return rest

    def _say(self, text: str) -> None:
        if text:
            self.events.append(Content(text))


class OutputParser:
    """Events of one answer.

    tools: those of the prompt; without any, tool calls are content. starts_in_reasoning, forced_prefix: of the prompt.
    stop: OpenAI's `stop`, Anthropic's `stop_sequences`. end_ids: tokens without text, by default the pack's.
    Raises RequestError for stop strings beyond the limits.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        starts_in_reasoning: bool = False,
        forced_prefix: str = "",
        stop: str | Sequence[str] | None = None,
        end_ids: frozenset[int] | None = None,
        repeat_stop_tokens: int = REPEAT_STOP_TOKENS,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self.finished: Finish | None = None
        self.n_reasoning_tokens = 0
        self._tokens = Detokenizer(vocabulary, end_ids)
        self._split = ReasoningSplit(starts_in_reasoning=starts_in_reasoning, may_open=not forced_prefix)
        self._answer = ContentParser(tools=tools, stop=stop_strings(stop), forced_prefix=forced_prefix, new_id=new_id)
        self._repeats = RepeatDetector(repeat_stop_tokens)
        self._repeat_limit = repeat_stop_tokens
        self._looped = False

    @property
    def in_reasoning(self) -> bool:
        return self._split.in_reasoning

    @property
    def ended(self) -> bool:
        """Whether the answer is complete whatever the engine still sends: a stop string or a loop was found."""
        return self._looped or self._answer.stopped is not None

    def push(self, token: int) -> list[Event]:
        if self.ended:
            return []
        self.n_reasoning_tokens += self._split.in_reasoning
        events = self._text(self._tokens.push(token))
        if not self.ended and self._repeats.push(token):
            self._looped = True
            events.append(Looped(self._repeat_limit))
        return events

    def finish(self, engine: EngineReason) -> list[Event]:
        """The engine has sent its last token, for this reason. Sets `finished`."""
        events: list[Event] = []
        if self._answer.stopped is None:
            events = self._text(self._tokens.finish())
            reasoning, answer = self._split.finish()
            events += self._events(reasoning, answer)
            self._answer.finish()
            events += self._taken()
        self.finished = self._finish(engine)
        return joined(events)

    def _finish(self, engine: EngineReason) -> Finish:
        answer = self._answer
        if answer.stopped is not None:
            return Finish("stop_string", answer.stopped)
        if self._looped:
            return Finish("length")
        if engine == "stop" and 0 < answer.n_started == answer.n_ended:
            return Finish("tool_calls")
        return Finish(engine)

    def _text(self, text: str) -> list[Event]:
        return self._events(*self._split.push(text))

    def _events(self, reasoning: str, answer: str) -> list[Event]:
        events: list[Event] = [Reasoning(reasoning)] if reasoning else []
        self._answer.push(answer)
        return events + self._taken()

    def _taken(self) -> list[Event]:
        events = joined(self._answer.events)
        self._answer.events = []
        return events


def joined(events: Sequence[Event]) -> list[Event]:
    """The events with neighbouring pieces of the same text made one."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + event.text)
        elif isinstance(event, ToolArgs) and isinstance(last, ToolArgs) and last.index == event.index:
            result[-1] = ToolArgs(event.index, last.piece + event.piece)
        else:
            result.append(event)
    return result
