"""Parked conversations through the real engine process: RAM, disk after a restart, damage; always the text of a cold
read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from strata.protocol.lines import Done, Info, Resume, Token

TURN = 900
LIMITS = ("--max-context", "1024", "--prefill", "64", "--turn-token", str(TURN), "--eos-ids", "none", "--stats")
RAM = ("--conversation-cache-mib", "64", "--conversation-cache-min-free-mib", "64")


def words(n: int, seed: int) -> list[int]:
    return [TURN, *np.random.default_rng(seed).integers(0, 890, n - 1).tolist()]


def disk(folder: Path) -> tuple[str, ...]:
    return "--conversation-cache-disk-mib", "64", "--conversation-cache-dir", str(folder)


class Talk:
    """A conversation: each turn is the whole history, and what was answered."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.tokens: list[int] = words(90, seed)

    def turn(self, engine, n: int = 5) -> tuple[int, list[int]]:
        """-> tokens that were not read, the answer. Then the next question stands at the end."""
        outputs = engine.ask(f"GEN {n} {','.join(map(str, self.tokens))}")
        (resume,) = (o.reused for o in outputs if isinstance(o, Resume))
        answer = [o.id for o in outputs if isinstance(o, Token)]
        self.seed += 100
        self.tokens = [*self.tokens, *answer, *words(40, self.seed)]
        return resume, answer


@pytest.fixture(scope="module")
def cold_answer(serve_pack):
    """What an engine that reuses nothing says."""
    engine = serve_pack(*LIMITS, "--prompt-cache", "0")

    def ask(tokens: list[int], n: int = 5) -> list[int]:
        outputs = engine.ask(f"GEN {n} {','.join(map(str, tokens))}")
        assert isinstance(outputs[0], Resume) and outputs[0].reused == 0
        return [o.id for o in outputs if isinstance(o, Token)]

    return ask


def test_two_conversations_that_take_turns_are_never_read_twice(serve_pack, cold_answer):
    engine = serve_pack(*LIMITS, *RAM, "--prompt-cache", "1")
    one, two = Talk(1), Talk(2)
    for turn in range(4):
        for talk in (one, two):
            asked = list(talk.tokens)
            reused, answer = talk.turn(engine)
            assert answer == cold_answer(asked)
            assert reused == (len(asked) - 41 if turn else 0), "all but the last token of the answer, and the question"
    engine.send("QUIT")
    assert engine.exit_code() == 0
    assert "hits 6" in engine.log.read_text()


def test_conversations_outlive_the_engine_on_disk(serve_pack, cold_answer, tmp_path):
    one, two = Talk(3), Talk(4)
    for turn in range(4):
        engine = serve_pack(*LIMITS, *disk(tmp_path / "parked"), "--batch", "2")
        for talk in (one, two):
            asked = list(talk.tokens)
            reused, answer = talk.turn(engine)
            assert answer == cold_answer(asked)
            assert reused == (len(asked) - 41 if turn else 0)
        engine.send("QUIT")
        assert engine.exit_code() == 0, engine.log.read_text()
    assert len(list((tmp_path / "parked").iterdir())) == 2, "a longer conversation takes the place of its beginning"


def test_a_client_that_drops_the_reasoning_continues_from_the_checkpoint_on_disk(serve_pack, cold_answer, tmp_path):
    engine = serve_pack(*LIMITS, *disk(tmp_path))
    prompt = [*words(90, 5), *words(30, 6)]
    engine.ask(f"GEN 9 {','.join(map(str, prompt))}")
    engine.close_input()
    assert engine.exit_code() == 0
    again = serve_pack(*LIMITS, *disk(tmp_path))
    asked = [*prompt[:90], *words(50, 7)]
    outputs = again.ask(f"GEN 5 {','.join(map(str, asked))}")
    assert outputs[0] == Resume(90)
    assert [o.id for o in outputs if isinstance(o, Token)] == cold_answer(asked)


def test_info_counts_what_was_parked_and_continued(serve_pack, tmp_path):
    engine = serve_pack(*LIMITS, *RAM, *disk(tmp_path))
    told = {name: n for name, n in engine.info.values.items() if name.startswith("conversation_cache_")}
    assert told["conversation_cache_hits"] == told["conversation_cache_parked"] == 0
    one, two = Talk(10), Talk(11)
    for talk in (one, two, one):
        outputs = engine.ask(f"GEN 5 {','.join(map(str, talk.tokens))}")
        told |= next((o.values for o in outputs if isinstance(o, Info)), {})  # of the request before
        talk.tokens += [o.id for o in outputs if isinstance(o, Token)] + words(20, 12)
    told |= engine.next().values
    assert told["conversation_cache_captured"] == 2 and told["conversation_cache_hits"] == 1
    assert told["conversation_cache_parked"] == 2 and told["conversation_cache_damaged"] == 0
    engine.send("QUIT")
    assert engine.rest() == [] and engine.exit_code() == 0


def test_an_engine_that_parks_nothing_tells_no_counters(serve_pack):
    engine = serve_pack(*LIMITS, "--batch", "2")
    assert "conversation_cache_hits" not in engine.info.values
    engine.send("BGEN 0 4 5,6,7", "GEN 3 6,7,8", "GEN 3 9", "QUIT")
    assert not any(isinstance(output, Info) for output in engine.until(Done) + engine.rest())


@pytest.mark.parametrize("where", [0.02, 0.5, 0.999])
def test_a_flipped_byte_in_a_file_costs_a_read_and_no_more(serve_pack, cold_answer, tmp_path, where):
    talk = Talk(8)
    engine = serve_pack(*LIMITS, *disk(tmp_path))
    talk.turn(engine)
    engine.send("QUIT")
    assert engine.exit_code() == 0
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= 4
    path.write_bytes(data)
    again = serve_pack(*LIMITS, *disk(tmp_path))
    asked = list(talk.tokens)
    assert talk.turn(again) == (0, cold_answer(asked))
    assert path.read_bytes() == data


def test_what_another_model_parked_is_left_alone(serve_pack, tmp_path):
    talk = Talk(9)
    engine = serve_pack(*LIMITS, *disk(tmp_path), pack="odd-q2_0")
    talk.turn(engine)
    engine.send("QUIT")
    assert engine.exit_code() == 0
    (foreign,) = tmp_path.iterdir()
    again = serve_pack(*LIMITS, *disk(tmp_path))
    assert talk.turn(again)[0] == 0
    assert foreign.exists() and "1 files left alone" in again.log.read_text()


def test_a_folder_that_cannot_be_used_is_refused_by_name(start_engine, packs, tmp_path):
    (tmp_path / "file").write_text("")
    engine = start_engine("--serve", "--pack", str(packs["odd-q8_0"]), *disk(tmp_path / "file"))
    (output,) = engine.rest()
    assert output.text.startswith("--conversation-cache-dir: parked conversations cannot lie in")
    assert engine.exit_code() == 2
