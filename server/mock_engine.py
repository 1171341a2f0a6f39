"""A scripted engine: speaks the engine's protocol without a model, for tests and for trying a client.

    python -m strata.server.mock_engine --script FILE [--tokenizer PACK]

Script   a JSON object (see Script): facts of the engine, and for each request the first answer whose `match` is found
         in the prompt's text. A list `lives` gives a script for each start after the other; the last one repeats.
         Texts need the tokenizer; ids do not
Behaves  as the engine does: reads STOP on a thread of its own, checks the context, reads in chunks with a PP each, ends
         with DONE; `--serve` and other engine options are accepted and ignored
Extras   steps that make trouble on purpose: silence, ERR, death, raw lines, waiting for a file (a gate for tests)
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import signal
import sys
import threading
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from strata.protocol.lines import (
    Done,
    Err,
    Finish,
    Gen,
    Info,
    Output,
    Progress,
    ProtocolError,
    Quit,
    Ready,
    Resume,
    Reused,
    Token,
    decode_command,
    encode,
    rate,
)

if TYPE_CHECKING:
    from .chat.vocabulary import Vocabulary

CONTEXT_MARGIN = 8
_POLL_S = 0.005


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing to do; exactly one field is set."""

    text: str | None = None  # tokens of this text; \\1 .. \\9 are the groups of `match`
    tokens: list[int] | None = None
    delay_ms: float | None = None
    gate: str | None = None  # go on when this file exists
    raw: str | None = None  # a line as it is
    log: str | None = None  # a line for stderr
    err: str | None = None  # ERR, which ends the request
    exit: int | None = None  # ERR or not, the process ends with this code
    kill: bool | None = None  # the process ends by SIGKILL
    silent: bool | None = None  # never says anything again


class Reply(msgspec.Struct, frozen=True):
    """What to do with a request whose prompt text contains `match` (a regular expression; the last find counts)."""

    match: str = ""
    before: list[Step] = []  # before RESUME
    reading: list[Step] = []  # after each chunk
    steps: list[Step] = []  # the answer
    reused: int = 0
    finish: Finish = "stop"
    token_ms: float = 0.0
    repeat: bool = False  # the steps again and again, until max_new or STOP
    times: int | None = None  # used for so many requests, then passed over


class Script(msgspec.Struct, frozen=True):
    context: int = 4096
    chunk: int = 32  # prompt tokens per PP
    capabilities: tuple[str, ...] = ("stop",)
    info: dict[str, int | float | str] = {}
    start: list[Step] = []  # before READY
    replies: tuple[Reply, ...] = (Reply(steps=[Step(text="This is the scripted engine; no model is loaded.")]),)
    transcript: str | None = None  # file that gets START and every command received
    lives: list[Script] = []


class Mock:
    def __init__(self, script: Script, vocabulary: Vocabulary | None) -> None:
        self._script = script
        self._vocabulary = vocabulary
        self._stop = threading.Event()
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._used: dict[int, int] = {}

    def run(self) -> int:
        threading.Thread(target=self._read_stdin, daemon=True).start()
        for step in self._script.start:
            self._do(step)
        self._say(Info({"context": self._script.context, "kv": "fp16", **self._script.info, "engine": "mock"}))
        self._say(Ready(self._script.context, self._script.capabilities))
        while (line := self._lines.get()) is not None:
            try:
                command = decode_command(line)
            except ProtocolError as error:
                self._say(Err(str(error)))
                continue
            if isinstance(command, Quit):
                return 0
            if isinstance(command, Gen):
                self._stop.clear()
                self._request(command)
            elif command is not None:
                self._say(Err("expected: GEN <max_new> <ids>, STOP or QUIT"))
        return 0

    def _read_stdin(self) -> None:
        for line in sys.stdin:
            self._note(line.rstrip("\n"))
            if line.strip() == "STOP":
                self._stop.set()
            else:
                self._lines.put(line)
        self._lines.put(None)

    def _request(self, command: Gen) -> None:
        n, context = len(command.ids), self._script.context
        if n + command.max_new + CONTEXT_MARGIN > context:
            self._say(Err(f"prompt ({n} tokens) + max_new ({command.max_new}) exceeds the context ({context})"))
            return
        reply, match = self._reply(command.ids)
        if not all(self._do(step) for step in reply.before):
            return
        began = time.monotonic()
        reused = min(reply.reused, n - 1)
        self._say(Resume(reused))
        position = reused
        while position < n and not self._stop.is_set():
            position = min(position + self._script.chunk, n)
            ms = (time.monotonic() - began) * 1000
            self._say(Progress(position, n, ms, rate(position - reused, ms)))
            if not all(self._do(step) for step in reply.reading):
                return
        read = time.monotonic()
        generated, finish = 0, reply.finish
        if position < n or self._stop.is_set():
            finish = "cancel"
        else:
            self._say(Reused(reused))
            outcome = self._answer(command, reply, match)
            if outcome is None:
                return
            generated, finish = outcome
        now = time.monotonic()
        read_ms, decode_ms = (read - began) * 1000, (now - read) * 1000
        done = Done(generated, n, read_ms, decode_ms, finish, reused=reused, prompt_read=position - reused)
        self._say(done)

    def _answer(self, command: Gen, reply: Reply, match: re.Match[str] | None) -> tuple[int, Finish] | None:
        """Tokens written and how they ended; None when the request ended with an ERR."""
        generated = 0
        while True:
            for step in reply.steps:
                if not self._do(step):
                    return None
                for token in self._ids(step, match):
                    self._say(Token(token))
                    generated += 1
                    if generated >= command.max_new:
                        return generated, "length"
                    if self._stop.is_set() or (reply.token_ms and self._stop.wait(reply.token_ms / 1000)):
                        return generated, "cancel"
                if self._stop.is_set():
                    return generated, "cancel"
            if not reply.repeat:
                break
        if reply.finish == "stop" and self._vocabulary is not None:
            self._say(Token(min(self._vocabulary.end_ids)))
            generated += 1
        return generated, reply.finish

    def _do(self, step: Step) -> bool:
        """Everything but tokens. False: the request is over."""
        if step.delay_ms is not None:
            self._stop.wait(step.delay_ms / 1000)
        if step.gate is not None:
            while not (os.path.exists(step.gate) or self._stop.is_set()):
                time.sleep(_POLL_S)
        if step.raw is not None:
            self._write(step.raw)
        if step.log is not None:
            sys.stderr.write(f"{step.log}\n")
            sys.stderr.flush()
        if step.err is not None:
            self._say(Err(step.err))
        if step.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if step.exit is not None:
            sys.stderr.flush()
            os._exit(step.exit)
        if step.silent:
            threading.Event().wait()
        return step.err is None

    def _ids(self, step: Step, match: re.Match[str] | None) -> list[int]:
        if step.tokens is not None:
            return step.tokens
        if step.text is None:
            return []
        if self._vocabulary is None:
            raise SystemExit("mock engine: a text in the script needs --tokenizer")
        text = step.text if match is None else re.sub(r"\\([0-9])", lambda group: match[int(group[1])] or "", step.text)
        return self._vocabulary.encode(text)

    def _reply(self, ids: array[int]) -> tuple[Reply, re.Match[str] | None]:
        text = "" if self._vocabulary is None else self._vocabulary.decode(ids)
        for i, reply in enumerate(self._script.replies):
            found = list(re.finditer(reply.match, text)) if reply.match else []
            usable = reply.times is None or self._used.get(i, 0) < reply.times
            if usable and (found or not reply.match):
                self._used[i] = self._used.get(i, 0) + 1
                return reply, found[-1] if found else None
        return Reply(), None

    def _note(self, line: str) -> None:
        if self._script.transcript is not None:
            with open(self._script.transcript, "a") as file:
                file.write(line + "\n")

    def _say(self, output: Output) -> None:
        self._write(encode(output))

    def _write(self, line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def script_of_this_life(path: Path | None) -> Script:
    """The script, or the one among its `lives` whose turn it is: the transcript counts the starts."""
    script = msgspec.json.decode(path.read_bytes(), type=Script) if path is not None else Script()
    if script.transcript is None:
        return script
    transcript = Path(script.transcript)
    lines = transcript.read_text().splitlines() if transcript.exists() else []
    life = sum(line.startswith("START") for line in lines)
    with transcript.open("a") as file:
        file.write(f"START {os.getpid()}\n")
    if not script.lives:
        return script
    chosen = script.lives[min(life, len(script.lives) - 1)]
    return msgspec.structs.replace(chosen, transcript=script.transcript)


def _vocabulary(pack: Path | None) -> Vocabulary | None:
    if pack is None:
        return None
    from .chat.vocabulary import Vocabulary  # only here: it doubles the time to start

    return Vocabulary.load(pack)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mock_engine", description="A scripted engine without a model.")
    parser.add_argument("--script", type=Path, help="JSON file with the answers")
    parser.add_argument("--tokenizer", type=Path, help="GGUF pack whose tokens the texts of the script become")
    options, _ = parser.parse_known_args(argv)
    return Mock(script_of_this_life(options.script), _vocabulary(options.tokenizer)).run()


if __name__ == "__main__":
    sys.exit(main())
