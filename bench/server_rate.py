"""`strata-bench server-rate`: what the server costs per token, with an engine that is a clock (`paced_engine`).

Streams decode at a rate that the engine's clock sets; their texts say when each token was ready, so every token's way
to the client's socket is timed. Clock, server and client share this machine.

  delivered       tokens per second while all streams decode, as a share of what the clock gives
  under way       from the end of a window on the device to its text in the client's hands
  CPU             microseconds of processor time per token, of server, engine and client
  first byte      one request alone: until its first text, without the time of the read
  together        requests that arrive at once: until each has said something, without the time of the reads
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from rich.console import Console

from strata.bench.checks import Findings
from strata.bench.engine_process import EngineFailed
from strata.bench.http_client import EXACT, user
from strata.bench.paced_engine import STAMPS, STEP_US, stamp_at, stamps
from strata.bench.report import Record, Report, finish, percentile
from strata.bench.server_process import Running, started
from strata.server.chat.vocabulary import Vocabulary

TOOL = "server-rate"
CHUNK_US: Final = 2000.0
TOKEN_US: Final = 20.0
WAIT_S: Final = 120.0
"""Beside the time that the streams take by the clock."""
LEAST_WINDOWS: Final = 10
"""Of a stream: fewer say nothing about a rate."""
_PIECE = re.compile(rb'"content":"([^"]+)"')
_USAGE = re.compile(rb'"prompt_tokens":(\d+)')
_TICKS = os.sysconf("SC_CLK_TCK")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--pack", type=Path, required=True, help="a GGUF file, for its vocabulary and template")
    add("--streams", type=int, nargs="+", default=[1, 8], help="streams at a time (1 8)")
    add("--window-us", type=float, nargs="+", default=[8000.0, 1600.0], help="time of a window (8000 1600)")
    add("--seconds", type=float, default=4.0, help="how long each decodes (4)")
    add("--repeat", type=int, default=3, help="runs of each (3)")
    add("--json", type=Path, metavar="FILE", help="write the figures there too")


def run(args: argparse.Namespace, console: Console) -> int:
    if min(*args.streams, *args.window_us, args.seconds, args.repeat) <= 0:
        console.print("--streams, --window-us, --seconds and --repeat: above 0")
        return 2
    if args.seconds * 1e6 < LEAST_WINDOWS * max(args.window_us):
        console.print(f"--seconds: at least {LEAST_WINDOWS} windows, {LEAST_WINDOWS * max(args.window_us) * 1e-6:g}")
        return 2
    findings = Findings()
    vocabulary = Vocabulary.load(args.pack)
    try:
        texts = {vocabulary.token_bytes(token): stamp for stamp, token in enumerate(stamps(vocabulary))}
    except ValueError as error:
        console.print(f"--pack: {error}")
        return 2
    for window_us in args.window_us:
        with _server(args.pack, max(*args.streams, 2), window_us) as running:
            for n in args.streams:
                console.print(f"{n} streams, a window every {window_us:g} us ..")
                n_tokens = int(args.seconds * 1e6 / window_us)
                runs = [asyncio.run(measure(running, texts, n, n_tokens, window_us)) for _ in range(1 + args.repeat)]
                note(findings, n, window_us, runs[1:])  # the first one warms up
    flags = {name: getattr(args, name) for name in ("streams", "window_us", "seconds", "repeat")}
    report = Report(tool=f"strata-bench {TOOL}", records=findings.records, checks=findings.checks, flags=flags)
    return finish(report, args.json, console)


@contextmanager
def _server(pack: Path, slots: int, window_us: float) -> Iterator[Running]:
    """A server of our own in front of the clock."""
    pace = {"--vocab-of": pack.absolute(), "--window-us": window_us, "--chunk-us": CHUNK_US, "--token-us": TOKEN_US}
    args = ["-m", "strata.bench.paced_engine", *(str(word) for pair in pace.items() for word in pair)]
    keys = {"exe": sys.executable, "args": args, "parallel": slots, "tokenizer": str(pack.absolute())}
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as folder:
        config = Path(folder) / "strata-paced.json"
        config.write_text(json.dumps(keys))
        with started(config, None, Path(folder) / "server.log") as running:
            yield running


@dataclass
class Stream:
    """What a client has received. `under_way`: seconds of each token; `times`: of its arrival."""

    texts: dict[bytes, int]
    sent_s: float = 0.0
    times: list[float] = field(default_factory=list)
    under_way: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    _rest: bytes = b""

    def take(self, data: bytes) -> None:
        """Bytes from the socket. Raises EngineFailed for a text that is no stamp."""
        now = time.monotonic()
        data = self._rest + data
        end = data.rfind(b"\n") + 1
        whole, self._rest = data[:end], data[end:]
        for piece in _PIECE.findall(whole):
            if piece not in self.texts:
                raise EngineFailed(f"the server sent {piece!r}, which the engine has not said")
            steps = (stamp_at(now) - self.texts[piece]) % STAMPS
            self.times.append(now)
            self.under_way.append(steps * STEP_US * 1e-6)
        if found := _USAGE.search(whole):
            self.prompt_tokens = int(found[1])


@dataclass(frozen=True)
class Run:
    """Streams that were asked for at once, and the processor seconds of server, engine and client meanwhile."""

    streams: Sequence[Stream]
    cpu: tuple[float, float, float]

    @property
    def n_tokens(self) -> int:
        return sum(len(s.times) for s in self.streams)

    @property
    def rate(self) -> float:
        """Tokens per second while all streams decode."""
        begin, end = max(s.times[0] for s in self.streams), min(s.times[-1] for s in self.streams)
        return sum(begin < t <= end for s in self.streams for t in s.times) / (end - begin)

    @property
    def first_s(self) -> float:
        """Until all have said something, without the time of the reads."""
        reads = sum(CHUNK_US + TOKEN_US * s.prompt_tokens for s in self.streams) * 1e-6
        return max(s.times[0] for s in self.streams) - min(s.sent_s for s in self.streams) - reads


async def measure(running: Running, texts: dict[bytes, int], n: int, n_tokens: int, window_us: float) -> Run:
    """n streams of so many tokens. Raises EngineFailed when some do not come."""
    assert running.pid is not None and running.engine_pid is not None
    pids = (running.pid, running.engine_pid)
    before = (*map(cpu_s, pids), time.process_time())
    streams = [Stream(texts) for _ in range(n)]
    try:
        async with asyncio.timeout(WAIT_S + n_tokens * window_us * 1e-6):
            await asyncio.gather(*(_ask(running.url, i, n_tokens, stream) for i, stream in enumerate(streams)))
    except TimeoutError:
        raise EngineFailed(f"{n} streams of {n_tokens} tokens have not ended in time") from None
    after = (*map(cpu_s, pids), time.process_time())
    if missing := n * n_tokens - sum(len(s.times) for s in streams):
        raise EngineFailed(f"{missing} of {n * n_tokens} tokens have not come")
    server, engine, client = (b - a for a, b in zip(before, after, strict=True))
    return Run(streams, (server, engine, client))


async def _ask(url: str, number: int, n_tokens: int, stream: Stream) -> None:
    """A request by hand, so that the client costs little beside the server."""
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    fields = {"messages": user(f"Stream number {number}."), "max_tokens": n_tokens, "stream": True, **EXACT}
    body = json.dumps({**fields, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
    stream.sent_s = time.monotonic()
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    while data := await reader.read(1 << 16):
        stream.take(data)
    writer.close()


def cpu_s(pid: int) -> float:
    """Processor seconds of a process so far. Raises OSError when it is gone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def note(findings: Findings, n: int, window_us: float, runs: Sequence[Run]) -> None:
    """The figures of runs that are alike."""
    name = f"{n} streams, a window every {window_us:g} us: "
    most = n * 1e6 / window_us

    def add(work: str, unit: str, values: Sequence[float]) -> None:
        findings.records.append(Record.of(name + work, unit, values))

    add("delivered", "tok/s", [run.rate for run in runs])
    add("delivered, of what the clock gives", "ratio", [run.rate / most for run in runs])
    for share in (0.5, 0.99):
        ways = [percentile([way for s in run.streams for way in s.under_way], share) * 1e6 for run in runs]
        add(f"under way, p{share * 100:.0f}", "us", ways)
    for i, who in enumerate(("server", "engine", "client")):
        add(f"CPU of the {who} per token", "us", [run.cpu[i] / run.n_tokens * 1e6 for run in runs])
    add("first byte" if n == 1 else "together", "ms", [run.first_s * 1e3 for run in runs])
