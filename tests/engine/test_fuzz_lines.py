"""Random lines against the serve loop and the real process: no crash, no hang, no traceback, every line answered.

Each line's answer is known from decoding it here, so the outputs are checked one by one and not only survived.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from strata.engine.requests import gen_refusal
from strata.protocol.lines import (
    MAX_LINE_BYTES,
    BStop,
    BYield,
    Done,
    Err,
    Gen,
    Output,
    Progress,
    ProtocolError,
    Quit,
    Restore,
    Resume,
    Reused,
    Save,
    SessionError,
    Stop,
    Token,
    decode_command,
    decode_output,
)

MAX_CONTEXT, VOCAB = 64, 64


def words(text: str) -> list[str]:
    return text.split()


WORDS = words("GEN GENI BGEN BGENI STOP BSTOP BYIELD VRAM SAVE RESTORE QUIT gen Gen GENX READY INFO T DONE ERR")
KEYS = words(
    "temperature top_k top_p min_p penalty_last_n penalty_repeat penalty_freq penalty_present seed cvec ckpt pin "
    "pcie_frac spec_min_p unknown"
)
VALUES = words(
    "0 1 -1 0.5 1e9 1e-9 1e308 -1e308 1e-308 nan inf 64 4096 99999999999999999999 18446744073709551615 x 0x1 ,"
)
NOISE = bytes(range(256)).replace(b"\n", b"")


def number(rng: random.Random) -> str:
    return rng.choice(
        (str(rng.randrange(70)), str(rng.randrange(70)), str(rng.randrange(2**40)), "-3", "007", "1.5", "٣")
    )


def well_formed(rng: random.Random, most_new: int) -> str:
    ids = ",".join(str(rng.randrange(VOCAB)) for _ in range(rng.randrange(1, 12)))
    keys = "".join(f"{rng.choice(KEYS)}={rng.choice(VALUES)} " for _ in range(rng.randrange(4)))
    if rng.random() < 0.3:
        keys += "temperature=1 penalty_last_n=64 "
    return f"GEN {rng.randrange(1, most_new + 1)} {keys}{ids}"


def some_words(rng: random.Random) -> str:
    parts = [rng.choice(WORDS)]
    for _ in range(rng.randrange(5)):
        parts.append(rng.choice((number(rng), f"{rng.choice(KEYS)}={rng.choice(VALUES)}", "5,6", "file.bin", "=", ",")))
    return rng.choice((" ", "  ", "\t")).join(parts)


def mutated(rng: random.Random, line: bytes) -> bytes:
    data = bytearray(line)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data) + 1)
        action = rng.randrange(3)
        if action == 0:
            data[at:at] = bytes([rng.choice(NOISE)])
        elif action == 1:
            del data[at : at + rng.randrange(1, 4)]
        else:
            data[at : at + 1] = bytes([rng.choice(NOISE)])
    return bytes(data)


def random_lines(seed: int, n: int, most_new: int = 5) -> Iterator[bytes]:
    """n lines without LF; none of them is QUIT. Most requests ask for at most `most_new` tokens."""
    rng = random.Random(seed)
    while n:
        kind = rng.randrange(5)
        line = (well_formed(rng, most_new) if kind < 2 else some_words(rng)).encode()
        if kind == 1 or (kind == 2 and rng.random() < 0.5):
            line = mutated(rng, line)
        elif kind == 4:
            line = bytes(rng.choice(NOISE) for _ in range(rng.randrange(40)))
        if not isinstance(command_of(line), Quit):
            yield line
            n -= 1


def command_of(line: bytes) -> object:
    """The command of a line, or the text of its ERR."""
    try:
        return decode_command(line)
    except ProtocolError as error:
        return str(error)


def check_answers(lines: Iterable[bytes], outputs: Iterator[Output], vocab: int) -> int:
    """Every line's answer is the next one in `outputs`. -> how many requests were served."""
    served = 0
    for line in lines:
        command = command_of(line)
        if command is None or isinstance(command, (Stop, BStop, BYield)):
            continue
        if isinstance(command, str):
            assert next(outputs) == decode_output(Err(command).line()), line
        elif isinstance(command, Gen) and gen_refusal(command, MAX_CONTEXT, vocab) is None:
            check_request(command, outputs, line)
            served += 1
        elif isinstance(command, (Save, Restore)):
            assert isinstance(next(outputs), SessionError), line
        else:
            assert isinstance(next(outputs), Err), line
    return served


def check_request(gen: Gen, outputs: Iterator[Output], line: bytes) -> None:
    got = [next(outputs)]
    while not isinstance(got[-1], Done):
        got.append(next(outputs))
    letters = "".join({Resume: "R", Progress: "P", Reused: "U", Token: "T", Done: "D"}.get(type(o), "?") for o in got)
    assert re.fullmatch(r"RP*(UT+)?D", letters), (letters, line)
    done = got[-1]
    assert (done.prompt, done.generated) == (len(gen.ids), letters.count("T")), line
    assert done.generated <= gen.max_new


def outputs_of(engine: object) -> Iterator[Output]:
    return iter(engine.next, None)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("n", [20_000, pytest.param(400_000, marks=pytest.mark.soak)])
def test_random_lines_are_answered_one_by_one(loop, scripted, n):
    """The first of the lines; the soak sends twenty times as many."""
    engine = loop(scripted(VOCAB), chunk=4, max_context=MAX_CONTEXT)
    sender = threading.Thread(target=send_all, args=(engine, 1, n))
    sender.start()
    served = check_answers(random_lines(1, n), outputs_of(engine), VOCAB)
    sender.join()
    assert served > n // 10
    assert isinstance(engine.ask("GEN 2 5,6,7")[-1], Done)
    engine.close_input()
    assert engine.rest() == []
    engine.join()
    assert engine.error is None


def send_all(engine: object, seed: int, n: int) -> None:
    batch: list[bytes] = []
    for line in random_lines(seed, n):
        batch.append(line)
        if len(batch) == 500:
            engine.send_bytes(b"".join(line + b"\n" for line in batch))
            batch.clear()
    engine.send_bytes(b"".join(line + b"\n" for line in batch))


def peak_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024


def test_random_and_oversized_lines_leave_the_real_process_well_and_small(serve_pack):
    n = 2_000
    engine = serve_pack("--max-context", str(MAX_CONTEXT))
    engine.ask("GEN 2 5,6,7")
    before = peak_mib(engine.process.pid)
    sender = threading.Thread(target=send_mixed, args=(engine, 2, n))
    sender.start()
    outputs = outputs_of(engine)
    check_answers(random_lines(2, n // 2, 1), outputs, 1024)
    for _ in range(3):
        assert next(outputs) == Err(f"bad request: the line is longer than {MAX_LINE_BYTES} bytes")
    check_answers(random_lines(3, n // 2, 1), outputs, 1024)
    sender.join()
    assert isinstance(engine.ask("GEN 2 5,6,7")[-1], Done)
    assert peak_mib(engine.process.pid) - before < 160
    engine.send("QUIT")
    assert engine.rest() == []
    assert engine.exit_code() == 0
    assert "Traceback" not in engine.log.read_text()


def send_mixed(engine: object, seed: int, n: int) -> None:
    engine.send(*random_lines(seed, n // 2, 1))
    for _ in range(3):
        engine.send(b"GEN 1 " + b"5," * (MAX_LINE_BYTES // 2))
    engine.send(*random_lines(seed + 1, n // 2, 1))
