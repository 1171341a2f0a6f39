"""Mutated headers: each opens or is refused in one line; none takes long, takes memory, or raises anything else."""

from __future__ import annotations

import random
import re
import resource
import struct
import time

import pytest

from strata.engine.pack import PackError, open_pack

NUMBERS = [0, 1, 2, 3, 4, 7, 8, 9, 10, 12, 13, 31, 32, 42, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1,
           1 << 32, 1 << 40, 1 << 61, (1 << 63) - 1, 1 << 63, (1 << 64) - 32, (1 << 64) - 1]  # fmt: skip
MEMORY_MIB = 64


def mutate(raw: bytearray, rng: random.Random) -> bytearray:
    """One to four changes, most of them of numbers and of bytes that may belong to a count, a length or a type."""
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.randrange(4, len(raw)) if rng.random() < 0.98 else rng.randrange(4)
        match rng.randrange(7):
            case 0:
                raw[at] = rng.randrange(256)
            case 1:
                raw[at] ^= 1 << rng.randrange(8)
            case 2:
                raw[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))
            case 3:
                raw[at : at + 4] = struct.pack("<I", rng.choice(NUMBERS) & 0xFFFFFFFF)
            case 4:
                del raw[at : at + rng.choice([1, 4, 8, 40])]
            case 5:
                raw[at:at] = raw[at : at + rng.choice([1, 4, 8, 40])]
            case 6:
                other = rng.randrange(4, len(raw))
                raw[at : at + 8] = raw[other : other + 8]
    return raw


@pytest.fixture
def small_header(header):
    """The real header with a vocabulary of four, so that the mutations fall on numbers and not on token texts."""
    header.set("tokenizer.ggml.tokens", "array", ("string", ["a", "b", "<|im_end|>", ""]))
    header.set("tokenizer.ggml.token_type", "array", ("i32", [1, 1, 3, 4]))
    header.set("tokenizer.ggml.merges", "array", ("string", ["a b"]))
    header.metadata.pop("tokenizer.chat_template")
    return header


def test_two_thousand_mutated_headers_open_or_are_refused_in_one_line(small_header, tmp_path):
    path = small_header.write(tmp_path / "fuzz.gguf")
    size, sound = path.stat().st_size, small_header.encode()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    opened, reasons, slowest = 0, set(), 0.0
    for seed in range(2_000):
        rng = random.Random(seed)
        raw = mutate(bytearray(sound), rng)
        with path.open("wb") as f:
            f.write(raw)
            f.truncate(size if rng.random() < 0.95 else rng.randrange(size))
        began = time.perf_counter()
        try:
            pack = open_pack(path)
        except PackError as error:
            line = str(error)
            assert line.startswith(f"{path}: ") and line.isprintable() and len(line) < 1200, (seed, line)
            reasons.add(re.sub(r"\d+", "N", error.reason)[:16])
        else:
            opened += 1
            assert pack.spec.layers >= 1
        slowest = max(slowest, time.perf_counter() - began)
    assert slowest < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < MEMORY_MIB * 1024
    assert opened > 10 and len(reasons) > 20, (opened, sorted(reasons))
