"""The lines of an engine's stdout, however they are cut on their way."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.server import process as process_module
from strata.server.process import EngineError, EngineProcess


def reading(*pieces: bytes) -> EngineProcess:
    """A process whose stdout says these pieces and ends; only its stdout is looked at."""
    stdout = asyncio.StreamReader()
    for piece in pieces:
        stdout.feed_data(piece)
    stdout.feed_eof()
    return EngineProcess(SimpleNamespace(stdin=SimpleNamespace(), stdout=stdout), 0, 0)


async def lines_of(process: EngineProcess) -> list[bytes]:
    got: list[bytes] = []
    while (lines := await process.read_lines()) is not None:
        assert lines
        got += lines
    return got


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200) | st.text("ab\n", max_size=80).map(str.encode), st.integers(1, 50), st.booleans())
def test_lines_differ_by_how_they_are_cut(text: bytes, size: int, one_first: bool) -> None:
    async def read() -> list[bytes]:
        process = reading(text)
        first = await process.read_line() if one_first else None
        return [*([] if first is None else [first]), *await lines_of(process)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_module, "_READ_BYTES", size)
        *whole, torn = text.split(b"\n")
        assert asyncio.run(read()) == [*whole, *([torn] if torn else [])]


async def test_what_came_with_the_ready_line_is_lost():
    process = reading(b"INFO\nREADY 4096\nT 1\nT 2\n")
    assert [await process.read_line() for _ in range(2)] == [b"INFO", b"READY 4096"]
    assert await process.read_lines() == [b"T 1", b"T 2"]
    assert await process.read_lines() is None and await process.read_line() is None


async def test_a_line_without_an_end_grows_beyond_its_limit(monkeypatch):
    monkeypatch.setattr(process_module, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(process_module, "_READ_BYTES", 100)
    process = reading(b"T 1\n" + b"x" * 5000)
    assert await process.read_lines() == [b"T 1"]
    with pytest.raises(EngineError, match="longer than 1000 bytes"):
        await process.read_lines()
    assert len(process._torn) < 1200
