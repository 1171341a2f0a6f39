"""strata-bench: measure an engine, a server, and the peers beside them; and the tests that drive a whole engine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from types import ModuleType

from rich.console import Console

from strata.bench import (
    batch_test,
    draft_test,
    draft_vocab,
    early_close_test,
    engine,
    interleave_test,
    parking_test,
    peers,
    performance_page,
    quality,
    read_join,
    score,
    serve,
    server_rate,
    synthetic,
    tiers,
)
from strata.bench.engine_process import EngineFailed
from strata.bench.http_client import ServerRefused
from strata.bench.slot_model import ProtocolBroken
from strata.engine.pack import PackError
from strata.server.chat.errors import VocabularyError

COMMANDS: dict[str, tuple[ModuleType, str]] = {
    "engine": (engine, "prompt and decode rates of an engine over stdin"),
    "serve": (serve, "load on a running server: time to first token, latency, throughput"),
    "server-rate": (server_rate, "what the server costs per token, in front of an engine that is a clock"),
    "peers": (peers, "this engine and llama.cpp's llama-bench on the same file, in turns"),
    "batch-test": (batch_test, "the same prompts alone and in the slots: equal tokens, and the rate of all slots"),
    "interleave-test": (interleave_test, "long prompts beside decoding slots, giving way, next turns: equal tokens"),
    "parking-test": (parking_test, "a conversation kept in a slot, a checkpoint, RAM, on disk: equal to a cold read"),
    "early-close-test": (early_close_test, "clients that go away in mid-answer leave nothing to the next one"),
    "read-join": (read_join, "long prompts joining a busy server; next turns; what the server costs; a soak"),
    "draft-test": (draft_test, "the same prompts with drafts and without: equal texts, drafts kept, speed"),
    "draft-vocab": (draft_vocab, "the tokens of a corpus that come most often, for the draft layer to propose"),
    "tiers": (tiers, "decode rate by the share of experts in VRAM; equal tokens wherever they lie"),
    "synth": (synthetic, "write a pack of the full geometry with random blocks, to measure with"),
    "score": (score, "held-out problems with exact answers: how many a pack gets right, task by task"),
    "quality": (quality, "what K/V formats and budgets of sparse attention cost: perplexity and scores"),
    "page": (performance_page, "write docs/performance.md and docs/quality.md from the figures in bench/results"),
}


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="strata-bench", description=__doc__)
    commands = out.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, what) in COMMANDS.items():
        sub = commands.add_parser(
            name, help=what, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return out


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: measured, and all is as it must be; 1: the measured thing failed; 2: the arguments are wrong."""
    args = parser().parse_args(argv)
    run: Callable[[argparse.Namespace, Console], int] = args.run
    try:
        return run(args, Console())
    except (EngineFailed, PackError, ProtocolBroken, ServerRefused, VocabularyError, OSError) as e:
        print(f"strata-bench: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("strata-bench: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
