"""strata-bench: measure an engine, a server, and the peers beside them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from types import ModuleType

from rich.console import Console

from strata.bench import engine, peers, performance_page, serve
from strata.bench.engine_process import EngineFailed

COMMANDS: dict[str, tuple[ModuleType, str]] = {
    "engine": (engine, "prompt and decode rates of an engine over stdin"),
    "serve": (serve, "load on a running server: time to first token, latency, throughput"),
    "peers": (peers, "this engine and llama.cpp's llama-bench on the same file, in turns"),
    "page": (performance_page, "write docs/performance.md from the figures in bench/results"),
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
    """Exit code 0: measured; 1: the measured thing failed; 2: the arguments are wrong."""
    args = parser().parse_args(argv)
    run: Callable[[argparse.Namespace, Console], int] = args.run
    try:
        return run(args, Console())
    except (EngineFailed, OSError) as e:
        print(f"strata-bench: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("strata-bench: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
