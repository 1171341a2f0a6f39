"""strata-engine: flags -> Options -> Pack -> ModelRunner or CudaRunner -> Conversations, Path -> Server.

Exit codes   0 left as told, 1 died (the last line says why), 2 refused to start; with --serve the reason is also an
             `ERR` line. No traceback goes to stdout or stderr; with STRATA_DEBUG=1 the log has it
Streams      file descriptor 1 becomes the log's before anything else runs, the protocol writes to a private copy of it;
             so no library can put a word between two protocol lines
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from strata.engine import environment
from strata.engine.flags import help_text
from strata.engine.log import configure, log, log_traceback
from strata.engine.options import REFUSED_EXIT, Options, Refused, fitted, notes, parse
from strata.protocol.lines import Err, encode
from strata.protocol.version import VERSION

if TYPE_CHECKING:
    from strata.engine.cuda_runner import CudaRunner
    from strata.engine.inbox import Inbox
    from strata.engine.pack import Pack
    from strata.engine.runner import ModelRunner
    from strata.engine.schedule.live import Path
    from strata.engine.state.conversations import Conversations

_STDIN, _STDOUT, _STDERR = 0, 1, 2
DIED_EXIT = 1
INTERRUPTED_EXIT = 130


def main() -> int:
    argv = sys.argv[1:]
    if {"--help", "-h"} & set(argv):
        return _say(help_text())
    if "--version" in argv:
        return _say(f"strata-engine {VERSION}")
    _open_standard_streams()
    configure()
    serving = "--serve" in argv and "--plan" not in argv
    out = os.dup(_STDOUT)
    if serving:
        os.dup2(_STDERR, _STDOUT)
    try:
        return _run(argv, out)
    except Refused as error:
        return _end(out if serving else None, str(error), REFUSED_EXIT)
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT
    except BrokenPipeError:
        log("nobody reads standard output any more")
        return DIED_EXIT
    except Exception as error:  # noqa: BLE001 - whatever it was, the last line must say it
        if environment.is_on(os.environ.get(environment.DEBUG)):
            log_traceback(error)
        return _end(out if serving else None, f"fatal: {type(error).__name__}: {error}", DIED_EXIT)


def _run(argv: Sequence[str], out: int) -> int:
    options = parse(argv)
    if environment.is_on(os.environ.get(environment.BATCH_MTP)):
        options = msgspec.structs.replace(options, batch_mtp=True)
    for note in (*notes(argv), *(() if options.plan else environment.notes(os.environ, options.device == "cuda"))):
        log(note)
    # Imported here: a refused command line and --help need neither NumPy nor the kernels.
    from strata.engine.memory.alias import require_alias
    from strata.engine.memory.sizes import HEAD
    from strata.engine.pack import PackError, open_pack

    try:
        pack = open_pack(options.pack)
    except PackError as error:
        raise Refused(str(error)) from None
    options = fitted(options, pack.spec)
    if options.plan:
        from strata.engine.memory.command import plan_text

        return _say(plan_text(pack, options, os.environ))
    require_alias(options, HEAD in pack)
    if not options.serve:
        from strata.engine.facts import describe

        return _say(describe(pack, options))
    return _serve(pack, options, out)


def _serve(pack: Pack, options: Options, out: int) -> int:
    # Idle kernel threads sleep instead of spinning. With other programs on the cores a spinning pair lost a factor of
    # 5 to 8 (tiny pack, 2 threads, load 7 on 2 cores: 40 against 200 to 310 ms a token). Read when OpenMP is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from strata.engine.facts import cache_info, engine_info
    from strata.engine.inbox import Inbox
    from strata.engine.serve import Server, Writer

    begun = time.perf_counter()
    _tell_of_lost_files(pack, out)
    log(f"{pack.path.name}: {pack.n_bytes / 2**20:.0f} MiB, loading; a first start also compiles the kernels")
    runner = _runner(pack, options)
    runner.warm()
    gc.collect()
    gc.freeze()  # what the start has made stays: no request waits while it is searched for garbage
    inbox = Inbox(_STDIN)
    conversations = _conversations(runner, pack, options)
    path = _path(runner, conversations, pack, options)
    server = Server(
        path,
        inbox,
        Writer(out),
        vocab=pack.spec.vocab,
        figures=lambda: {**cache_info(conversations.parking_counts()), **runner.figures()},
        before=runner.request_begins,
        behind=lambda: runner.request_over(path.busy),
    )
    _leave_on_signals(inbox)
    inbox.start()
    log(f"{pack.path.name}: ready on {runner.where} after {time.perf_counter() - begun:.2f} s")
    server.greet(engine_info(options, pack.spec.vocab, runner.n_slots, runner.info()))
    try:
        server.run()
        conversations.close()
        runner.close()
    finally:
        if options.stats:
            log(f"stats: {server.totals}")
            log(f"stats: {runner.costs}")
            log(f"stats: {', '.join(f'{name} {n}' for name, n in conversations.counts().items())}")
    return 0


def _conversations(runner: ModelRunner | CudaRunner, pack: Pack, options: Options) -> Conversations:
    """The books of who holds which tokens, on the runner's state."""
    from strata.engine.capacity import cache_rules, parking_for
    from strata.engine.state.conversations import Conversations

    parking = parking_for(options, pack, runner.state)
    return Conversations(
        runner.state,
        runner.n_slots,
        cache_rules(options),
        parking,
        options.turn_token,
        verify=options.verify_accounts,
        log_states=options.log_states,
    )


def _path(runner: ModelRunner | CudaRunner, conversations: Conversations, pack: Pack, options: Options) -> Path:
    """What schedules on the runner."""
    from strata.engine.drafts import draft_rules
    from strata.engine.schedule.live import Path
    from strata.engine.schedule.ports import Rules

    drafts, said = draft_rules(options, runner.n_slots)
    for line in said:
        log(line)
    rules = Rules(
        drafts=drafts,
        chunk=runner.chunk,
        beside=runner.beside,
        max_context=options.max_context,
        end_ids=frozenset(options.eos_ids or ()),
        n_slots=runner.n_slots,
        share=environment.decode_share(os.environ.get(environment.DECODE_SHARE)),
        short_read=options.short_read,
        short=runner.short,
        prompt_cache=options.prompt_cache > 0,
        routed=pack.spec.layers * pack.spec.experts_used,
        in_vram=options.device == "cuda",
        hits=runner.solo_hits,
        ahead=options.device == "cuda",
        verify=options.verify_accounts,
        trace=environment.is_on(os.environ.get(environment.TRACE)),
    )
    return Path(runner, conversations, rules)


def _runner(pack: Pack, options: Options) -> ModelRunner | CudaRunner:
    """The model on the device that was chosen. CuPy is imported only for a card."""
    from strata.engine.drafts import draft_pack

    draft = draft_pack(options, pack)
    if options.device == "cuda":
        from strata.engine.cuda_runner import CudaRunner

        return CudaRunner(pack, options, draft)
    from strata.engine.runner import ModelRunner

    return ModelRunner(pack, options, draft)


def _tell_of_lost_files(pack: Pack, out: int) -> None:
    """A file that is cut while it is mapped ends the engine with a last line."""
    from strata.kernels.lost import tell_of_lost_files

    why = "a mapped file cannot be read any more; it was cut while in use, or its disk fails"
    reason = f"fatal: {pack.path.name}: {why}"
    said = (_STDERR, f"engine: {reason}\n".encode()), (out, f"{encode(Err(reason))}\n".encode())
    tell_of_lost_files(said, DIED_EXIT)


def _say(text: str) -> int:
    """Print for a person, who may have seen enough (`| head`)."""
    with contextlib.suppress(BrokenPipeError):
        data = f"{text}\n".encode("utf-8", "backslashreplace")
        while data:
            data = data[os.write(_STDOUT, data) :]
    return 0


def _leave_on_signals(inbox: Inbox) -> None:
    """The first SIGINT or SIGTERM ends the loop between two units of work, the second one the process at once."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        if inbox.leaving:
            os._exit(DIED_EXIT)
        inbox.leave(signal.Signals(number).name)

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)


def _open_standard_streams() -> None:
    """A closed standard stream gets /dev/null, so that no file opened later takes its number."""
    for fd in (_STDIN, _STDOUT, _STDERR):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is fd


def _end(out: int | None, reason: str, code: int) -> int:
    """The last words: to the log, and to the protocol when that is spoken."""
    log(reason)
    if out is not None:
        with contextlib.suppress(OSError):
            os.write(out, f"{encode(Err(reason))}\n".encode())
    return code


if __name__ == "__main__":
    sys.exit(main())
