"""A scripted engine: speaks the engine's protocol without a model, for tests and for trying a client.

    python -m strata.server.mock_engine --script FILE [--tokenizer PACK] [--batch N]

Script   mock_script.py; texts need the tokenizer, ids do not
Behaves  as the engine does (mock_machine.py): reads STOP on a thread of its own, checks the context, reads in chunks
         with a PP each, keeps slots that decode together; `--serve` and other engine options are accepted and ignored
Extras   steps that make trouble on purpose: silence, ERR, death, raw lines, waiting for a file (a gate for tests)
"""

from __future__ import annotations

import argparse
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from .mock_machine import Machine
from .mock_script import Script

if TYPE_CHECKING:
    from .chat.vocabulary import Vocabulary

_POLL_S = 0.002


def run(script: Script, vocabulary: Vocabulary | None) -> int:
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    machine = Machine(script, vocabulary, _write, time.monotonic)

    def read_stdin() -> None:
        for line in sys.stdin:
            _note(script, line.rstrip("\n"))
            if line.strip() == "STOP":
                machine.take(line)
            else:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read_stdin, daemon=True).start()
    for _ in machine.start():
        time.sleep(_POLL_S)
    while not machine.has_left:
        _fetch(lines, machine)
        if not machine.step():
            time.sleep(_POLL_S)
    return 0


def _fetch(lines: queue.SimpleQueue[str | None], machine: Machine) -> None:
    """Every line that has come; waits for one when there is nothing else to do."""
    while True:
        try:
            line = lines.get(block=machine.wants_input)
        except queue.Empty:
            return
        if line is None:
            machine.end_of_input()
            return
        machine.take(line)


def _note(script: Script, line: str) -> None:
    if script.transcript is not None:
        with open(script.transcript, "a") as file:
            file.write(line + "\n")


def _write(line: str) -> None:
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
    parser.add_argument("--batch", "--slots", type=int, default=0, help="slots, unless the script has some")
    options, _ = parser.parse_known_args(argv)
    script = script_of_this_life(options.script)
    script = msgspec.structs.replace(script, slots=script.slots or options.batch)
    return run(script, _vocabulary(options.tokenizer))


if __name__ == "__main__":
    sys.exit(main())
