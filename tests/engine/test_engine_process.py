"""The real strata-engine process on a real pack: start, transcripts, exactness of reuse and chunks, ways to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strata.protocol.lines import Done, Err, Output, Progress, Ready, Resume, Reused, Token

ENGINE = Path(sys.executable).with_name("strata-engine")
PROMPT = [5, 9, 200, 17, 998, 33, 41, 7, 512, 77, 300, 301, 4, 88, 640, 11, 12, 13, 900, 21]
ALWAYS = """
context kv kv_resident expert_slots expert_cache_mib expert_slots_primary expert_cache_primary_mib spec
mtp_max lookup vram_free_mib cvec arena_mib pool_workers pcie_frac spec_min_p conversation_cache_mib
conversation_cache_slots conversation_cache_min_free_mib conversation_cache_disk_mib
conversation_cache_similarity conversation_cache_n_min tail_role_token vram_elastic engine
"""


def ids(tokens: list[int]) -> str:
    return ",".join(map(str, tokens))


def gen(max_new: int, tokens: list[int], keys: str = "") -> str:
    return f"GEN {max_new} {keys + ' ' if keys else ''}{ids(tokens)}"


def text(outputs: list[Output]) -> list[int]:
    return [output.id for output in outputs if isinstance(output, Token)]


def kinds(outputs: list[Output]) -> list[type]:
    return [type(output) for output in outputs]


@pytest.fixture(scope="module")
def shared(serve_pack):
    """One engine for the tests that leave it as they found it: idle."""
    return serve_pack("--max-context", "1024", "--prefill", "8")


def test_info_has_every_key_that_is_always_written_and_engine_comes_last(shared):
    assert [key for key in ALWAYS.split() if key not in shared.info.values] == []
    assert list(shared.info.values)[-1] == "engine"
    assert shared.info.values["kv"] == "fp32"
    assert (shared.info.whole("context"), shared.info.whole("prefill_chunk")) == (1024, 8)
    assert shared.ready == Ready(1024, ("stop",))


def test_the_lines_of_a_cold_a_continued_and_a_cancelled_request_come_in_order(shared):
    cold = shared.ask(gen(3, PROMPT))
    assert kinds(cold) == [Resume, Progress, Progress, Progress, Reused, Token, Token, Token, Done]
    assert cold[0] == Resume(0)
    done = cold[-1]
    assert (done.generated, done.prompt, done.finish, done.reused, done.prompt_read) == (3, 20, "length", 0, 20)
    assert done.lookups == done.ram_blobs == 2 * 6 * 3  # two windows, six layers, three experts each
    assert (done.hits, done.offloaded, done.file_blobs) == (0, 0, 0)
    continued = shared.ask(gen(2, PROMPT + text(cold) + [44]))
    assert (continued[0], continued[-1].prompt_read) == (Resume(22), 2)
    shared.send(gen(900, [*range(100, 140)], "temperature=1 seed=3"))
    started = shared.until(Token)
    shared.send("STOP")
    rest = shared.until(Done)
    assert rest[-1].finish == "cancel"
    assert rest[-1].generated == len(text(started + rest)) < 900


def test_a_stop_during_a_long_read_ends_it_without_a_token(shared):
    shared.send(gen(4, [7] * 900))
    shared.until(Progress)
    shared.send("STOP")
    rest = shared.until(Done)
    assert set(kinds(rest)) <= {Progress, Done}
    assert (rest[-1].finish, rest[-1].generated) == ("cancel", 0)
    assert 0 < rest[-1].prompt_read < 900
    assert shared.ask(gen(1, [7] * 20))[0] == Resume(0)


def test_a_stale_stop_does_not_cancel_the_next_request(shared):
    shared.send("STOP", "STOP")
    assert shared.ask(gen(2, PROMPT))[-1].finish == "length"


def test_an_err_never_comes_with_a_done_and_the_next_command_works(shared):
    lines = ["HELLO", "GEN 0 5", "GEN 5 1024", "GEN 1021 5,6,7", "BGEN 0 5 6", "VRAM", "GENI 5 f 6", "GEN 2 seed=-1 5"]
    for line in lines:
        assert kinds(shared.ask(line)) == [Err], line
    assert kinds(shared.ask(gen(1, PROMPT)))[-2:] == [Token, Done]


def test_the_context_rule_holds_to_the_token(shared):
    n = 1024 - 8 - 1
    shared.send(gen(1, [7] * (n + 1)))
    assert kinds(shared.until(Err, Resume)) == [Err]
    shared.send(gen(1, [7] * n))
    assert kinds(shared.until(Err, Resume)) == [Resume]
    shared.send("STOP")
    shared.until(Done)


def test_chunks_reuse_and_restarts_do_not_change_a_text(serve_pack):
    drawn = "temperature=1.2 top_k=40 top_p=0.95 min_p=0.01 seed=17 penalty_last_n=32 penalty_repeat=1.3"
    second = [610, 12, 13]
    answers = []
    for args in (("--prefill", "1"), ("--prefill", "7"), ("--prefill", "64"), ("--prompt-cache", "0")):
        engine, said = serve_pack(*args), []
        for prompt, keys in ((PROMPT, ""), (PROMPT[::-1], drawn)):
            first = engine.ask(gen(6, prompt, keys))
            assert first[0] == Resume(0)
            follow = engine.ask(gen(6, prompt + text(first) + second, keys))
            assert follow[-1].reused == (0 if "--prompt-cache" in args else len(prompt) + len(text(first)) - 1)
            said.append((text(first), text(follow)))
        answers.append(said)
        engine.send("QUIT")
        assert engine.exit_code() == 0
    assert answers.count(answers[0]) == len(answers)


def test_a_cancelled_answer_goes_on_as_if_it_had_not_been_interrupted(shared):
    engine = shared
    whole = text(engine.ask(gen(24, PROMPT)))
    engine.send(gen(24, PROMPT + [3]))
    engine.until(Done)
    engine.send(gen(24, PROMPT))
    outputs = engine.until(Token)
    engine.send("STOP")
    outputs += engine.until(Done)
    part = text(outputs)
    rest = engine.ask(gen(24 - len(part), PROMPT + part)) if len(part) < 24 else []
    assert part + text(rest) == whole
    assert not rest or rest[0] == Resume(len(PROMPT) + len(part) - 1)


def test_end_tokens_stop_an_answer_and_are_written(serve_pack, shared):
    said = text(shared.ask(gen(6, PROMPT)))
    at = next(i for i, token in enumerate(said) if token not in said[:i] and i >= 2)
    engine = serve_pack("--eos-ids", f"{said[at]},1")
    outputs = engine.ask(gen(6, PROMPT))
    assert text(outputs) == said[: at + 1]
    assert outputs[-1].finish == "stop"


@pytest.mark.parametrize("state", ["idle", "reading", "decoding"])
def test_end_of_input_ends_the_process_with_code_0_after_the_request(serve_pack, state):
    engine = serve_pack("--max-context", "512", "--prefill", "16")
    if state != "idle":
        engine.send(gen(20, [7] * 64))
        engine.until(Progress if state == "reading" else Token)
    engine.close_input()
    rest = engine.rest()
    assert (kinds(rest)[-1] is Done) if state != "idle" else rest == []
    assert engine.exit_code() == 0


def test_quit_ends_the_process_with_code_0_and_stats_are_logged(serve_pack):
    engine = serve_pack("--stats")
    engine.ask(gen(2, PROMPT))
    engine.send("QUIT")
    assert engine.rest() == []
    assert engine.exit_code() == 0
    said = engine.log.read_text()
    assert "stats: 1 requests, 0 refused lines; 20 prompt tokens read" in said
    assert "request: 20 prompt tokens = 0 reused + 20 read in " in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_idle_is_a_clean_end(serve_pack, number):
    engine = serve_pack()
    engine.process.send_signal(number)
    assert engine.rest() == []
    assert engine.exit_code() == 0
    assert "Traceback" not in engine.log.read_text()


def test_a_signal_during_a_request_says_why_on_the_last_line(serve_pack):
    engine = serve_pack("--max-context", "2048")
    engine.send(gen(2000, [5, 6, 7], "temperature=1 seed=5"))
    engine.until(Token)
    engine.process.send_signal(signal.SIGTERM)
    last = engine.rest()[-1]
    assert isinstance(last, Err) and last.is_fatal and "SIGTERM" in last.text
    assert engine.exit_code() == 1
    assert "Traceback" not in engine.log.read_text()


def test_a_reader_that_went_away_ends_the_engine_with_code_1(packs, tmp_path):
    read_fd, write_fd = os.pipe()
    log = tmp_path / "log"
    command = [str(ENGINE), "--serve", "--pack", str(packs["odd-q8_0"])]
    with log.open("wb") as stderr:
        engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=write_fd, stderr=stderr)
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as output:
        while not output.readline().startswith(b"READY"):
            assert engine.poll() is None
    engine.communicate(gen(4, PROMPT).encode() + b"\n", timeout=60)
    assert engine.returncode == 1
    assert "nobody reads standard output" in log.read_text()
    assert "Traceback" not in log.read_text()


def test_a_context_longer_than_the_models_is_refused_with_both_numbers(start_engine, packs):
    engine = start_engine("--serve", "--pack", str(packs["odd-q8_0"]), "--max-context", "100000")
    assert engine.rest() == [Err("--max-context 100000: the model's context is 4096; ask for at most that")]
    assert engine.exit_code() == 2


def test_end_tokens_outside_the_vocabulary_are_refused(start_engine, packs):
    engine = start_engine("--serve", "--pack", str(packs["odd-q8_0"]), "--eos-ids", "1000,1024")
    assert engine.rest() == [Err("--eos-ids: 1024 is outside the vocabulary; the model has 1024 tokens")]
    assert engine.exit_code() == 2


def test_a_broken_pack_is_refused_within_a_second_and_by_name(start_engine, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + os.urandom(60))
    begun = time.monotonic()
    engine = start_engine("--serve", "--pack", str(broken))
    (err,) = engine.rest()
    assert err.text.startswith(f"{broken}: ")
    assert engine.exit_code() == 2
    assert time.monotonic() - begun < 5
    assert "Traceback" not in engine.log.read_text()


def test_a_pack_is_described_without_serve(start_engine, packs):
    engine = start_engine("--pack", str(packs["odd-q8_0"]))
    lines = b"".join(iter(lambda: engine._lines.get(timeout=60) or b"", b"")).decode()
    assert "experts     24 a layer, 3 used by a token" in lines
    assert "vocabulary  1024; end tokens 1000, 998" in lines
    assert engine.exit_code() == 0


def test_variables_without_an_effect_are_said_in_the_log(serve_pack):
    engine = serve_pack(env={"STRATA_QSA_SLOTS": "1", "STRATA_DEBUG": "maybe"})
    log = engine.log.read_text()
    assert "STRATA_QSA_SLOTS asks for what is done here anyway" in log
    assert "STRATA_DEBUG is a switch" in log


def test_a_failure_is_a_last_line_and_its_traceback_is_in_the_log_only_when_asked_for(start_engine, packs, tmp_path):
    """The failure is a NumPy that cannot be imported, found before the real one."""
    blocker = tmp_path / "numpy.py"
    blocker.write_text("raise RuntimeError('no numpy today')\n")
    for debug in ("0", "1"):
        env = {"PYTHONPATH": str(tmp_path), "STRATA_DEBUG": debug}
        engine = start_engine("--serve", "--pack", str(packs["odd-q8_0"]), env=env)
        (err,) = engine.rest()
        assert err == Err("fatal: RuntimeError: no numpy today")
        assert err.is_fatal
        assert engine.exit_code() == 1
        assert ("Traceback" in engine.log.read_text()) is (debug == "1")


@pytest.mark.parametrize("prompt", ["len1", "len17", "eos", "len130"])
def test_a_greedy_answer_is_the_one_that_another_implementation_recorded(float_engine, golden, prompt):
    recorded = golden("odd-hf")
    wanted = recorded[f"{prompt}.decode_ids"].tolist()
    outputs = float_engine.ask(gen(len(wanted), recorded[f"{prompt}.ids"].tolist()))
    said = text(outputs)
    assert said == wanted[: len(said)]
    assert len(said) == len(wanted) or outputs[-1].finish == "stop"


@pytest.fixture(scope="module")
def float_engine(serve_pack):
    return serve_pack(pack="odd-f32")
