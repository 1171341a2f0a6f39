"""A server of our own for the tools that load one, or the one that is running already.

A server of our own listens on a free port of this machine; its memory and its engine's can be looked at (Linux).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.bench.engine_process import CLOSE_S, EngineFailed, engine_command

READY_S = 900.0
POLL_S = 0.1
LOG_TAIL_BYTES = 4000


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--url", help="a server that is running")
    source.add_argument("--config", type=Path, help="strata-<model>.json: a server of its own is started with it")
    source.add_argument("--pack", type=Path, help="a server of its own is started for this GGUF file")
    parser.add_argument("--slots", type=int, default=8, help="slots of a server started for --pack (8)")
    parser.add_argument("--device", default="host", help="of a server started for --pack (host)")
    parser.add_argument(
        "--extra",
        type=shlex.split,
        default=[],
        metavar="OPTIONS",
        help='engine options of a server started for --pack, in one word: --extra="--max-context 4096"',
    )
    parser.add_argument("--api-key", default=os.environ.get("STRATA_KEY"), help="bearer token (STRATA_KEY)")
    parser.add_argument("--model", default="strata", help="model name of the requests (strata)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds before a request counts as failed (900)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures and checks there too")


@dataclass(frozen=True)
class Running:
    """A server. `pid` None: it is not ours, its memory is not looked at."""

    url: str
    pid: int | None = None
    api_key: str | None = None

    def status(self) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        request = urllib.request.Request(f"{self.url}/v1/status", headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    @property
    def engine_pid(self) -> int | None:
        return self.status()["engine"]["pid"]

    def memory_mib(self) -> tuple[float, float] | None:
        """Resident memory of server and engine."""
        engine = self.engine_pid if self.pid is not None else None
        return None if self.pid is None or engine is None else (resident_mib(self.pid), resident_mib(engine))


def resident_mib(pid: int) -> float:
    """Raises OSError when the process is gone."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    if found is None:
        raise ProcessLookupError(f"process {pid} has no memory any more")
    return int(found[1]) / 1024


def engine_argv(args: argparse.Namespace) -> list[str]:
    """The engine of a server that is started for --pack, without --serve and slots. Answers run to their length: there
    are no end tokens, and the server lets them repeat themselves."""
    pack = ("--pack", str(args.pack.absolute()), "--device", args.device, "--eos-ids", "none")
    return [*engine_command(None), *pack, *args.extra]


@contextmanager
def server_of(args: argparse.Namespace) -> Iterator[Running]:
    """The server that the arguments name; one of our own is ended with the context. Raises EngineFailed."""
    if args.url:
        yield Running(args.url.rstrip("/"), api_key=args.api_key)
        return
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as folder:
        config = args.config
        if config is None:
            exe, *options = engine_argv(args)
            config = Path(folder) / f"strata-{args.model}.json"
            keys = {
                "exe": exe,
                "args": options,
                "parallel": args.slots,
                "model_name": args.model,
                "repeat_stop_tokens": 0,
            }
            config.write_text(json.dumps(keys))
        with started(config, args.api_key, Path(folder) / "server.log") as running:
            yield running


@contextmanager
def started(config: Path, api_key: str | None, log: Path) -> Iterator[Running]:
    """A server with this config, which has loaded its engine. Raises EngineFailed."""
    port = _free_port()
    argv = [sys.executable, "-m", "strata.server", "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--api-key", api_key] if api_key else []
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        running = Running(f"http://127.0.0.1:{port}", process.pid, api_key)
        _wait_until_ready(running, process, log)
        yield running
    finally:
        process.terminate()
        try:
            process.wait(CLOSE_S * 2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(running: Running, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EngineFailed(f"the server ended with code {process.returncode}; its log ends: {_tail(log)}")
        try:
            with urllib.request.urlopen(f"{running.url}/health", timeout=10) as answer:
                if json.load(answer)["loaded"]:
                    return
        except (OSError, urllib.error.URLError):
            pass  # it does not listen yet, or says 503 while it loads
        time.sleep(POLL_S)
    raise EngineFailed(f"the server was not ready within {READY_S:.0f} s; its log ends: {_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
